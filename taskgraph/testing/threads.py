"""Worker threads in lock-step with the event loop: one of them runs at a time, and the loop waits for it.

So the order in which user code runs depends on the order of events on the loop, and not on the operating system's
scheduler: the same seed gives the same run. Threads that users start themselves are not ordered: while one of them
waits for a reply, the loop goes on beside the others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from taskgraph.errors import JobError
from taskgraph.node.usercode.threads import FutureWork
from taskgraph.testing.clock import Turn

__all__ = ["LockStepThreads"]

R = TypeVar("R")

_MOST = 1000
"""Threads of a node at a time. More are needed only if handlers wait for each other without an end, and a real node
could not start more threads either. Thousands take long to start and to end."""

_LOOKS_AGAIN_S = 0.01
"""How often a waiting thread of the user's own checks whether the loop waits for a worker, perhaps for this thread."""


class _Worker:
    """A thread that runs one function after another, and hands the turn to the loop and back.

    Two locks that are held from the beginning pass the turn: a few microseconds, where starting a thread and waiting
    for an event took most of a small job's time.
    """

    def __init__(self, local: threading.local, closed: Callable[[], bool]) -> None:
        self._local = local
        self._closed = closed
        self._mine = threading.Lock()
        self._loops = threading.Lock()
        self._mine.acquire()
        self._loops.acquire()
        self._passing = threading.Lock()
        self._awaited = False  # the loop waits for it
        self._finished = False  # what the loop waited for was the end of its function
        self._function: Callable[[], Any] | None = None
        self._thread = threading.Thread(target=self._run, name="taskgraph-lock-step", daemon=True)
        self._thread.start()
        self.resume: Callable[[], object] = lambda: None
        self.finish: Callable[[], object] = lambda: None
        self.call_later: Callable[[float, Callable[[], object]], object] = lambda *_: None
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        self._local.worker = self
        while True:
            self._mine.acquire()
            if self._function is None:
                return
            try:
                self.result = self._function()
            except BaseException as error:
                self.error = error
            self._function = None
            if not self.let_loop_go_on(finished=True):
                with contextlib.suppress(RuntimeError):  # the loop was closed, so no code waits for the result
                    self.finish()
                if self._closed():
                    return  # the loop may neither run `finish` nor call `end`

    def give(self, function: Callable[[], Any]) -> None:
        """Sets the function that `step` will run. Called on the loop."""
        self._function, self.result, self.error = function, None, None

    def step(self, turn: Turn) -> bool:
        """Lets the thread run until it waits or its function ends. Called on the loop. Returns whether it ended.

        It returns earlier if `let_loop_go_on` is called for the thread. Then `finish` reports the end.
        """
        turn.take(self._thread.ident)
        self._awaited = True
        self._mine.release()
        self._loops.acquire()
        turn.take(threading.get_ident())
        return self._finished

    def let_loop_go_on(self, *, finished: bool = False) -> bool:
        """Lets the loop go on if it waits for this thread. Called in any thread. Returns whether the loop waited."""
        with self._passing:
            awaited, self._awaited = self._awaited, False
        if awaited:
            self._finished = finished
            self._loops.release()
        return awaited

    def park(self) -> None:
        """Lets the loop run until its next `step`. Called in the thread."""
        self.let_loop_go_on()
        self._mine.acquire()

    def end(self) -> None:
        """Ends the thread. Called on the loop, between two functions."""
        self._mine.release()

    def join(self) -> None:
        self._thread.join()


def _once(function: Callable[[], object]) -> Callable[[], None]:
    """Calls `function` at the first of several occasions. The loop and its threads take turns: no lock is needed."""
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return call


class LockStepThreads:
    """`taskgraph.node.usercode.threads.Threads`, deterministic."""

    in_step = True

    def __init__(self, turn: Turn | None = None) -> None:
        self.context = copy_context()
        self._turn = turn or Turn()
        self._loop = asyncio.get_running_loop()
        self._local = threading.local()
        self._idle: list[_Worker] = []
        self._stepping: _Worker | None = None  # the loop waits for it
        self._closed = False
        self._futures: dict[asyncio.Future[Any], None] = {}

    def clock(self) -> float:
        return time.perf_counter()

    def start(self, function: Callable[[], R], *, brief: bool) -> FutureWork[R]:
        return FutureWork(self.run(function))

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = self._loop
        future: asyncio.Future[R] = loop.create_future()
        if not self._idle and len(self._futures) >= _MOST:
            future.set_exception(
                JobError(
                    f"it cannot run: {_MOST} functions (`def`) wait for replies at one node, in a thread each, and a "
                    f"test makes no more; does a handler ask for ever, itself or in a circle? If not, make handlers "
                    f"that wait `async def`, and `await` the reply there in place of reply.wait()"
                )
            )
            return future
        worker = self._idle.pop() if self._idle else _Worker(self._local, lambda: self._closed)
        worker.give(function)

        def step() -> None:
            self._stepping = worker
            finished = worker.step(self._turn)
            self._stepping = None
            if finished:
                finish()

        def finish() -> None:
            if not future.done():
                if worker.error is not None:
                    future.set_exception(worker.error)
                else:
                    future.set_result(worker.result)
            worker.result = worker.error = None
            if self._closed:
                worker.end()
                worker.join()
            else:
                self._idle.append(worker)

        worker.resume = lambda: loop.call_soon_threadsafe(step)
        worker.finish = lambda: loop.call_soon_threadsafe(finish)
        worker.call_later = lambda delay_s, call: loop.call_soon_threadsafe(loop.call_later, delay_s, call)
        loop.call_soon(step)
        self._futures[future] = None
        future.add_done_callback(lambda done: self._futures.pop(done, None))
        return future

    def post(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            return self._block_beside(future, timeout_s)
        if not future.done():
            resume = _once(worker.resume)
            future.add_done_callback(lambda _: resume())
            if timeout_s is not None:
                worker.call_later(timeout_s, resume)
            worker.park()
        return future.result(0)

    def _block_beside(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """Blocks a thread of the user's own: the worker that the loop waits for may wait for this thread."""
        over, too_late = threading.Event(), False

        def time_is_up() -> None:
            """Decides on the loop if the time is up: its clock may leap past the result before this thread looks."""
            nonlocal too_late
            too_late = not future.done()
            over.set()

        future.add_done_callback(lambda _: over.set())
        if timeout_s is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, timeout_s, time_is_up)
        while not over.is_set():
            stepping = self._stepping
            if stepping is not None:
                stepping.let_loop_go_on()
            over.wait(_LOOKS_AGAIN_S)
        if too_late and not future.cancelled():
            raise TimeoutError
        return future.result(0)

    def abandon(self) -> None:
        for future in tuple(self._futures):
            future.cancel()

    def close(self) -> None:
        """Ends idle threads now, and one that still unwinds when its function returns."""
        self._closed = True
        ending, self._idle = self._idle, []
        for worker in ending:
            worker.end()
        self._turn.take(None)  # no user code runs meanwhile: ending thousands of threads may take long
        for worker in ending:
            worker.join()
        self._turn.take(threading.get_ident())
