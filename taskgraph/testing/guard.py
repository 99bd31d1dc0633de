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
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from taskgraph.testing.clock import FastForwardLoop, Turn

__all__ = ["WHOLE", "Stuck", "run_guarded"]

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


def run_guarded(
    main: Callable[[], Coroutine[Any, Any, R]],
    turn: Turn,
    limit_s: float | None,
    takes_too_long: Callable[[float], None],
) -> R:
    """Runs a coroutine on a loop whose clock runs ahead, and returns what it returns.

    Args:
        main: makes the coroutine.
        turn: is told by the loop and by its threads who of them runs.
        limit_s: how long one may without a break; `WHOLE` times that, and `takes_too_long` is called on the loop with
            how long it was.
        takes_too_long: ends the coroutine, if it can.

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
                raise Stuck(sys._current_frames().get(stuck))
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
