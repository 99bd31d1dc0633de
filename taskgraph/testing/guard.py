"""Runs a job of a test in a thread of its own, so that code of it that never returns can be told, and left.

While user code runs, nothing else does: the loop's clock stands still, so that no timeout of simulated time passes,
and a Ctrl-C would wait for it. So the test's own thread waits beside, and looks at a real clock.
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
"""A whole run may take that many times what one piece of code may."""

_LOOK_S = 0.25
"""How often the real clock is looked at."""

_UNWIND_S = 1.0
"""What the nodes have to end after a Ctrl-C, before they are left behind."""


class Stuck(Exception):
    """A thread ran for too long without giving back its turn. `frame` is where it was then, the innermost."""

    def __init__(self, frame: FrameType | None) -> None:
        super().__init__("a thread does not give back its turn")
        self.frame = frame


class Idle:
    """For how long a job waits in one go, by the real clock: one that hangs is worked on, too, timer by timer, so that
    its own clock leaps less than it might.

    Args:
        limit_s: how long it may.
        progress: changes where the job comes on.
        over: called on the loop once that was too long.
    """

    def __init__(self, limit_s: float, progress: Callable[[], int], over: Callable[[], None]) -> None:
        self.over = over
        self._limit_s = limit_s
        self._progress = progress
        self._seen: tuple[int, float] = (-1, 0.0)
        self._waited_s = 0.0

    def too_long(self, loop: asyncio.AbstractEventLoop, runs: FrameType | None, since_last_s: float) -> bool:
        """To be asked regularly, with the time since then, and what runs just now."""
        (before, then), (at, now) = self._seen, (self._progress(), loop.time())
        self._seen = at, now
        # Where its clock leaps less than a real one would go on, it works rather than waits: on messages, say.
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
        turn: is told by the loop and by its threads who of them runs.
        limit_s: how long one may without a break; `WHOLE` times that, and `takes_too_long` is called on the loop with
            how long it was.
        takes_too_long: ends the coroutine, if it can.
        idle: does that, too, where all of it waits.

    Raises:
        Stuck: a thread ran for longer than `limit_s`. It is left behind, as a daemon.
        KeyboardInterrupt: soon. What has not ended by then is left behind.
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

    # The job runs in the test's context: what is set there holds for it as well.
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
    with contextlib.suppress(RuntimeError):  # the loop was closed just now: it is over
        task.get_loop().call_soon_threadsafe(call, *args)
