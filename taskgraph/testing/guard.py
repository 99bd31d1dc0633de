"""Runs a test's job in a thread of its own, so that a test can report user code that never returns, and abandon it.

While user code runs, the loop's clock stands still, so no simulated timeout passes, and a Ctrl-C would wait for that
code. So the test's thread watches the job by a real clock.
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

__all__ = ["RUN_FACTOR", "IdleTimer", "Stuck", "run_guarded"]

R = TypeVar("R")

RUN_FACTOR = 10
"""The time limit of a whole run, in multiples of the limit on one call of user code."""

_POLL_S = 0.25
"""How often the job is checked by the real clock."""

_UNWIND_S = 1.0
"""How long nodes may take to end after a Ctrl-C, before they are abandoned."""


class Stuck(Exception):
    """A thread ran for too long without a wait. `frame` is its innermost frame; None if the thread has ended."""

    def __init__(self, frame: FrameType | None) -> None:
        super().__init__("a thread does not give back its turn")
        self.frame = frame


class IdleTimer:
    """Measures by the real clock how long a job waits without progress. A job that hangs still runs timers, so its own
    clock cannot show that.

    Args:
        limit_s: how long the job may wait.
        progress: returns a number that changes when the job makes progress.
        on_limit: called on the loop when the job has waited for too long.
    """

    def __init__(self, limit_s: float, progress: Callable[[], int], on_limit: Callable[[], None]) -> None:
        self.on_limit = on_limit
        self._limit_s = limit_s
        self._progress = progress
        self._seen: tuple[int, float] = (-1, 0.0)
        self._waited_s = 0.0

    def has_exceeded(self, loop: asyncio.AbstractEventLoop, runs: FrameType | None, since_last_s: float) -> bool:
        """True if the job has waited without progress for more than `limit_s`. Call it regularly.

        Args:
            loop: the job's loop, whose clock shows whether it works.
            runs: the innermost frame of the thread that runs; None if all wait. While user code runs, no job waits.
            since_last_s: real time since the last call.
        """
        (before, then), (at, now) = self._seen, (self._progress(), loop.time())
        self._seen = at, now
        # A loop clock slower than the real clock shows that the job works, on messages for instance.
        waits = at == before and now - then > since_last_s and (runs is None or not in_user_code(runs))
        self._waited_s = self._waited_s + since_last_s if waits else 0.0
        return self._waited_s > self._limit_s


def run_guarded(
    main: Callable[[], Coroutine[Any, Any, R]],
    turn: Turn,
    limit_s: float | None,
    takes_too_long: Callable[[float], None],
    idle: IdleTimer,
) -> R:
    """Runs a coroutine on a `FastForwardLoop` in a new thread, and returns its result.

    Args:
        main: creates the coroutine.
        turn: tracks which thread runs: the loop's, or one of its workers.
        limit_s: how long one thread may run without a wait; None: without a limit.
        takes_too_long: called once on the loop if the whole run takes longer than `RUN_FACTOR` times `limit_s`, with
            the seconds that passed. It should end the coroutine.
        idle: its `on_limit` is called on the loop if the coroutine only waits. It should end the coroutine.

    Raises:
        Stuck: a thread ran for longer than `limit_s`. It is abandoned, as a daemon.
        KeyboardInterrupt: Ctrl-C; raised after nodes had `_UNWIND_S` to end.
    """
    over: concurrent.futures.Future[R] = concurrent.futures.Future()
    tasks: list[asyncio.Task[Any]] = []

    async def run_main() -> R:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await main()

    def in_thread() -> None:
        try:
            with asyncio.Runner(loop_factory=functools.partial(FastForwardLoop, turn)) as runner:
                result = runner.run(run_main())
        except BaseException as error:
            over.set_exception(error)
        else:
            over.set_result(result)

    # The job runs in the test's context, so context variables of the test hold for it, too.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(in_thread,), name="taskgraph-test", daemon=True)
    thread.start()
    began, whole_s = time.monotonic(), math.inf if limit_s is None else RUN_FACTOR * limit_s
    try:
        while not concurrent.futures.wait([over], timeout=_POLL_S).done:
            if limit_s is not None and (stuck := turn.stuck_thread(limit_s, _POLL_S)) is not None:
                raise Stuck(frame_of(stuck))
            for task in tasks:
                if idle.has_exceeded(task.get_loop(), turn.innermost_frame, _POLL_S):
                    _call_on_loop(task, idle.on_limit)
            if time.monotonic() - began > whole_s:
                for task in tasks:
                    _call_on_loop(task, takes_too_long, time.monotonic() - began)
                whole_s = math.inf
    except KeyboardInterrupt:
        for task in tasks:
            _call_on_loop(task, task.cancel)
        concurrent.futures.wait([over], timeout=_UNWIND_S)
        raise
    thread.join()
    return over.result()


def _call_on_loop(task: asyncio.Task[Any], call: Callable[..., object], *args: object) -> None:
    """Calls a function soon on the loop of a task; does nothing if the loop has been closed."""
    with contextlib.suppress(RuntimeError):  # the loop was closed just now, so the job is over
        task.get_loop().call_soon_threadsafe(call, *args)
