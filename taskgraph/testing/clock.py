"""An event loop whose clock jumps to the next timer while no code runs.

A job in one process mostly waits for its own timers: a message that a shuffled schedule delays, a retry. On this loop
such a wait ends at once, so a test takes as long as its computing. A run depends on the order of timers, not on the
load of the machine: the same seed gives the same run.
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
"""Limits the loop's clock to this many seconds per real second of waiting, so that the framework's timeouts do not all
pass while user code waits for a real socket or process."""

_MIN_WAIT_S = 0.001
"""The shortest real wait, since epoll rounds up to it. Shorter waits are summed until they reach it."""


class Turn:
    """Tracks which thread has the turn, and for how long: either the loop's thread or one of its workers runs."""

    def __init__(self) -> None:
        self._now: list[int] | None = None  # a new list for each turn: its identity tells one from the next
        self._seen: list[int] | None = None
        self._seen_s = 0.0

    def give_to(self, thread: int | None) -> None:
        """Gives the turn to a thread; None if all threads wait."""
        self._now = None if thread is None else [thread]

    def stuck_thread(self, limit_s: float, since_last_s: float) -> int | None:
        """Returns the thread that has had the turn for longer than `limit_s`; None if there is none.

        Call this regularly, with the time since the last call. Leave out time in which the whole process stood still
        (garbage collection, a machine that sleeps), which is not the thread's fault.
        """
        now = self._now  # one read: it changes meanwhile
        self._seen_s = self._seen_s + since_last_s if now is not None and now is self._seen else 0.0
        self._seen = now
        return now[0] if now is not None and self._seen_s > limit_s else None

    @property
    def innermost_frame(self) -> FrameType | None:
        """The innermost frame of the thread with the turn; None if all threads wait."""
        now = self._now
        return frame_of(now[0]) if now is not None else None


_frame_lock = threading.Lock()


def frame_of(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread.

    Up to Python 3.11.8 this call hangs if garbage is collected during it while another thread starts or ends
    (gh-106883), so garbage collection is off meanwhile.
    """
    with _frame_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


class _JumpingSelector(selectors.DefaultSelector):
    """Keeps the loop's clock, `now_s`, and advances it in place of waiting for a timeout."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn
        self.now_s = 1.0
        self._owed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turn.give_to(None)
        try:
            return self._select(timeout)
        finally:
            self._turn.give_to(threading.get_ident())

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns files that are ready. If none is after a short real wait, advances the clock by the timeout."""
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:
            return super().select(None)
        self._owed_s += timeout / SPEED
        if self._owed_s >= _MIN_WAIT_S:
            found = super().select(self._owed_s)
            self._owed_s = 0.0
        if not found:
            self.now_s += timeout
        return found


class FastForwardLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` stands still while code runs, and jumps to the next timer when no code does."""

    def __init__(self, turn: Turn | None = None) -> None:
        self._clock = _JumpingSelector(turn or Turn())
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Logs an error that no code handled, unless it only ended code whose attempt was over (`is_expected_end`)."""
        if not is_expected_end(context.get("exception")):
            super().default_exception_handler(context)

    def stand_still(self, for_s: float) -> None:
        """Advances the clock by `for_s` at once, as if the process had been frozen: timers due by then fire late."""
        self._clock.now_s += for_s
