"""An event loop whose clock runs ahead while there is nothing to do.

A job in one process mostly waits for its own timers: a message that a shuffled schedule delays, a retry. Here such a
wait ends at once, so a test takes as long as its computing. A run depends on the order of timers, not on how busy the
machine is: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
from types import FrameType
from typing import Any

from taskgraph.node.usercode.uncaught import is_expected_end

__all__ = ["SPEED", "FastForwardLoop", "Turn", "frame_of"]

SPEED = 1000
"""Seconds of the loop's clock per real second of waiting, at most: user code that waits for a real socket or process
does not find every timeout of the framework passed."""

_LEAST_S = 0.001
"""The shortest real wait; epoll rounds up to it. Shorter ones are saved up."""


class Turn:
    """Notes which thread runs now, and for how long. The loop and its threads take turns: one of them runs."""

    def __init__(self) -> None:
        self._now: list[int] | None = None  # a new list for each turn: its identity tells one from the next
        self._seen: list[int] | None = None
        self._seen_s = 0.0

    def take(self, thread: int | None) -> None:
        """Notes that a thread begins to run; None: all wait."""
        self._now = None if thread is None else [thread]

    def stuck(self, limit_s: float, since_last_s: float) -> int | None:
        """The thread that was seen to run in one go for longer than `limit_s`.

        Call this regularly, with the time since the last call. Do not count time in which the whole process stood
        still (garbage collection, a machine that sleeps): the thread is not to blame for that.
        """
        now = self._now  # one read: it changes meanwhile
        self._seen_s = self._seen_s + since_last_s if now is not None and now is self._seen else 0.0
        self._seen = now
        return now[0] if now is not None and self._seen_s > limit_s else None

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of the running thread; None if all threads wait."""
        now = self._now
        return frame_of(now[0]) if now is not None else None


_looking = threading.Lock()


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread.

    Up to Python 3.11.8 this call hangs if garbage is collected during it while another thread starts or ends
    (gh-106883), so garbage collection is off meanwhile.
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
        """Logs an error that no code handled, unless it is expected, as a node's own loop does."""
        if not is_expected_end(context.get("exception")):
            super().default_exception_handler(context)

    def stand_still(self, for_s: float) -> None:
        """Acts as if the process was frozen for `for_s`: timers that were due meanwhile fire now, late."""
        self._clock.now_s += for_s
