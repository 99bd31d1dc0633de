"""An event loop whose clock runs ahead while there is nothing to do.

A job in one process mostly waits for timers of its own: a message that a shuffled schedule delays, a try that comes
again. Here such a wait ends at once, so that a test takes as long as its work. What a run does then depends on the
order of timers and not on how busy the machine is: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
from types import FrameType
from typing import Any

from taskgraph.node.usercode.ended import as_expected

__all__ = ["SPEED", "FastForwardLoop", "Turn", "frame_of"]

SPEED = 1000
"""Seconds of the loop's clock per real second of waiting, at most: user code that waits for a real socket or process
does not find every timeout of the framework passed."""

_LEAST_S = 0.001
"""The shortest real wait; epoll rounds up to it. Shorter ones are saved up."""


class Turn:
    """Which thread runs just now, and for how long: of the loop and its threads in lock-step one does."""

    def __init__(self) -> None:
        self._now: list[int] | None = None  # a new list for each turn: its identity tells one from the next
        self._seen: list[int] | None = None
        self._seen_s = 0.0

    def take(self, thread: int | None) -> None:
        """That thread begins to run; None: all wait."""
        self._now = None if thread is None else [thread]

    def stuck(self, limit_s: float, since_last_s: float) -> int | None:
        """The thread that was seen to run in one go for longer than `limit_s`.

        To be asked regularly, with the time since then. Time in which nobody could ask is not to be counted in full: a
        collection of garbage, or a machine that sleeps, stops the whole process and is no fault of whose turn it is.
        """
        now = self._now  # one read: it changes meanwhile
        self._seen_s = self._seen_s + since_last_s if now is not None and now is self._seen else 0.0
        self._seen = now
        return now[0] if now is not None and self._seen_s > limit_s else None

    @property
    def frame(self) -> FrameType | None:
        """What runs just now, the innermost; None where all wait."""
        now = self._now
        return frame_of(now[0]) if now is not None else None


_looking = threading.Lock()


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread.

    Python 3.11, up to 3.11.8, stands still for ever where garbage is collected within that and another thread begins
    or ends meanwhile (gh-106883).
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


class _Selector(selectors.DefaultSelector):
    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn
        self.now_s = 1.0
        self._owed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turn.take(None)
        try:
            return self._select(timeout)
        finally:
            self._turn.take(threading.get_ident())

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:
            return super().select(None)
        self._owed_s += timeout / SPEED
        if self._owed_s >= _LEAST_S:
            found = super().select(self._owed_s)
            self._owed_s = 0.0
        if not found:
            self.now_s += timeout
        return found


class FastForwardLoop(asyncio.SelectorEventLoop):
    """`loop.time()` stands still while something runs, and leaps to the next timer when nothing does."""

    def __init__(self, turn: Turn | None = None) -> None:
        self._clock = _Selector(turn or Turn())
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Tells what nobody took notice of, unless it is as it should be: as a node's own loop."""
        if not as_expected(context.get("exception")):
            super().default_exception_handler(context)

    def stand_still(self, for_s: float) -> None:
        """As where everything was frozen for so long: what was due meanwhile is due now, late."""
        self._clock.now_s += for_s
