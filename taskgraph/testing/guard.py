"""Runs a test's job in a thread of its own, so that code that never returns can be named and left behind.

While user code runs, the loop's clock stands still, so no simulated timeout passes, and a Ctrl-C would wait for that
code. So the test's own thread waits beside the job and looks at a real clock.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import math
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from taskgraph.node.usercode.actor import in_user_code
from taskgraph.testing.clock import FastForwardLoop, Turn, frame_of

__all__ = ["WHOLE", "Idle", "Stuck", "run_guarded"]

R = TypeVar("R")

WHOLE = 10
"""A whole run may take this many times as long as one call of user code."""

_LOOK_S = 0.25
"""How often the real clock is looked at."""

_UNWIND_S = 1.0
"""How long the nodes may take to end after a Ctrl-C, before they are left behind."""


class Stuck(Exception):
    """A thread ran for too long without giving back its turn. `frame` is its innermost frame."""

    def __init__(self, frame: FrameType | None) -> None:
        super().__init__("a thread does not give back its turn")
        self.frame = frame


class Idle:
    """Measures how long a job waits without a break, by the real clock. A job that hangs still runs its timers, so its
    own clock does not say.

    Args:
        limit_s: how long it may wait.
        progress: returns a number that changes when the job makes progress.
        over: called on the loop when it waited too long.
    """

    def __init__(self, limit_s: float, progress: Callable[[], int], over: Callable[[], None]) -> None:
        self.over = over
        self._limit_s = limit_s
        self._progress = progress
        self._seen: tuple[int, float] = (-1, 0.0)
        self._waited_s = 0.0

    def too_long(self, loop: asyncio.AbstractEventLoop, runs: FrameType | None, since_last_s: float) -> bool:
        """True if the job waited too long. To be called regularly, with the running frame and the time since then."""
        (before, then), (at, now) = self._seen, (self._progress(), loop.time())
        self._seen = at, now
        # If its clock advances less than the real one, the job works, on messages for instance, and does not wait.
        waits = at == before and now - then > since_last_s and (runs is None or not in_user_code(runs))
        self._waited_s = self._waited_s + since_last_s if waits else 0.0
        return self._waited_s > self._limit_s


def run_guarded(
    main: Callable[[], Coroutine[Any, Any, R]],
    turn: Turn,
    limit_s: float | None,
    takes_too_long: Callable[[float], None],
    idle: Idle,
) -> R:
    """Runs a coroutine on a loop whose clock runs ahead, and returns what it returns.

    Args:
        main: makes the coroutine.
        turn: the loop and its threads note in it which of them runs.
        limit_s: how long one of them may run without a break. After `WHOLE` times as long, `takes_too_long` is called
            on the loop, with the time that passed.
        takes_too_long: ends the coroutine, if it can.
        idle: ends a coroutine that only waits.

    Raises:
        Stuck: a thread ran for longer than `limit_s`. It is left behind, as a daemon.
        KeyboardInterrupt: after a moment in which the nodes may end; the others are left behind.
    """
    over: concurrent.futures.Future[R] = concurrent.futures.Future()
    tasks: list[asyncio.Task[Any]] = []

    async def known() -> R:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await main()

    def in_thread() -> None:
        try:
            with asyncio.Runner(loop_factory=functools.partial(FastForwardLoop, turn)) as runner:
                result = runner.run(known())
        except BaseException as error:
            over.set_exception(error)
        else:
            over.set_result(result)

    # The job runs in the test's context, so context variables of the test hold for it, too.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(in_thread,), name="taskgraph-test", daemon=True)
    thread.start()
    began, whole_s = time.monotonic(), math.inf if limit_s is None else WHOLE * limit_s
    try:
        while not concurrent.futures.wait([over], timeout=_LOOK_S).done:
            if limit_s is not None and (stuck := turn.stuck(limit_s, _LOOK_S)) is not None:
                raise Stuck(frame_of(stuck))
            for task in tasks:
                if idle.too_long(task.get_loop(), turn.frame, _LOOK_S):
                    _soon(task, idle.over)
            if time.monotonic() - began > whole_s:
                for task in tasks:
                    _soon(task, takes_too_long, time.monotonic() - began)
                whole_s = math.inf
    except KeyboardInterrupt:
        for task in tasks:
            _soon(task, task.cancel)
        concurrent.futures.wait([over], timeout=_UNWIND_S)
        raise
    thread.join()
    return over.result()


def _soon(task: asyncio.Task[Any], call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed just now, so the job is over
        task.get_loop().call_soon_threadsafe(call, *args)
