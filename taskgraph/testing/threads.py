"""Worker threads in lock-step with the event loop: one worker runs at a time, and the loop waits for it.

So the order in which user code runs depends on the order of events on the loop, and not on the operating system's
scheduler: the same seed gives the same run. Threads that users start themselves are not ordered: the loop runs while
one of them waits for a reply.
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
from taskgraph.node.usercode.threads import FutureCall
from taskgraph.testing.clock import Turn

__all__ = ["LockStepThreads"]

R = TypeVar("R")

_THREADS = 1000
"""Worker threads of a node. Only handlers that wait for each other without an end need more, and a real node could not
start more threads either. Thousands take long to start and to end."""

_POLL_S = 0.01
"""How often a waiting user thread checks whether the loop waits for a worker, which may wait for the user thread."""


class _WorkerThread:
    """A reusable thread of a pool: runs one function at a time, in turns with the loop.

    Two locks, locked from the beginning, pass the turn. That takes a few microseconds; starting a thread and waiting
    for an event took most of a small job's time.
    """

    def __init__(self, local: threading.local, closed: Callable[[], bool]) -> None:
        self._local = local
        self._closed = closed
        self._thread_turn = threading.Lock()
        self._loop_turn = threading.Lock()
        self._thread_turn.acquire()
        self._loop_turn.acquire()
        self._turn_lock = threading.Lock()
        self._awaited = False  # the loop waits for this thread
        self._finished = False  # the loop got the turn because the function ended
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
            self._thread_turn.acquire()
            if self._function is None:
                return
            try:
                self.result = self._function()
            except BaseException as error:
                self.error = error
            self._function = None
            if not self.pass_turn_to_loop(finished=True):
                with contextlib.suppress(RuntimeError):  # the loop was closed, so no code waits for the result
                    self.finish()
                if self._closed():
                    return  # a closed loop calls neither `finish` nor `end`

    def assign(self, function: Callable[[], Any]) -> None:
        """Sets the function that `step` will run. Called on the loop."""
        self._function, self.result, self.error = function, None, None

    def step(self, turn: Turn) -> bool:
        """Runs the thread until it waits or its function ends. Called on the loop. Returns True if the function ended.

        Returns False earlier if another thread calls `pass_turn_to_loop`. Then `finish` reports the function's end.
        """
        turn.give_to(self._thread.ident)
        self._awaited = True
        self._thread_turn.release()
        self._loop_turn.acquire()
        turn.give_to(threading.get_ident())
        return self._finished

    def pass_turn_to_loop(self, *, finished: bool = False) -> bool:
        """Passes the turn to the loop if `step` waits for this worker; else returns False. Called in any thread."""
        with self._turn_lock:
            awaited, self._awaited = self._awaited, False
        if awaited:
            self._finished = finished
            self._loop_turn.release()
        return awaited

    def park(self) -> None:
        """Passes the turn to the loop, and waits for the next `step`. Called in the worker thread."""
        self.pass_turn_to_loop()
        self._thread_turn.acquire()

    def end(self) -> None:
        """Ends the idle thread. Called on the loop."""
        self._thread_turn.release()

    def join(self) -> None:
        """Waits until the thread has ended, after `end`."""
        self._thread.join()


def _once(function: Callable[[], object]) -> Callable[[], None]:
    """Wraps `function` so that only the first call runs it. The loop and its threads take turns: no lock is needed."""
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return call


class LockStepThreads:
    """Implements `taskgraph.node.usercode.threads.Threads` with a deterministic order of functions."""

    in_step = True

    def __init__(self, turn: Turn | None = None) -> None:
        self.context = copy_context()
        self._turn = turn or Turn()
        self._loop = asyncio.get_running_loop()
        self._local = threading.local()
        self._idle: list[_WorkerThread] = []
        self._stepping: _WorkerThread | None = None  # the worker that the loop waits for
        self._closed = False
        self._futures: dict[asyncio.Future[Any], None] = {}

    def clock(self) -> float:
        return time.perf_counter()

    def start(self, function: Callable[[], R], *, brief: bool) -> FutureCall[R]:
        return FutureCall(self.run(function))

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = self._loop
        future: asyncio.Future[R] = loop.create_future()
        if not self._idle and len(self._futures) >= _THREADS:
            future.set_exception(
                JobError(
                    f"it cannot run: {_THREADS} functions (`def`) wait for replies at one node, in a thread each, and "
                    f"a test makes no more; does a handler ask for ever, itself or in a circle? If not, make handlers "
                    f"that wait `async def`, and `await` the reply there in place of reply.wait()"
                )
            )
            return future
        worker = self._idle.pop() if self._idle else _WorkerThread(self._local, lambda: self._closed)
        worker.assign(function)

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
        worker: _WorkerThread | None = getattr(self._local, "worker", None)
        if worker is None:
            return self._block_user_thread(future, timeout_s)
        if not future.done():
            resume = _once(worker.resume)
            future.add_done_callback(lambda _: resume())
            if timeout_s is not None:
                worker.call_later(timeout_s, resume)
            worker.park()
        return future.result(0)

    def _block_user_thread(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """Waits for a result in a thread that user code started.

        Lets the loop run meanwhile, although a worker has the turn: the worker may wait for this thread.
        """
        over, too_late = threading.Event(), False

        def on_timeout() -> None:
            """Notes if the result is late by the loop's clock: the waiting thread may wake up long afterwards."""
            nonlocal too_late
            too_late = not future.done()
            over.set()

        future.add_done_callback(lambda _: over.set())
        if timeout_s is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, timeout_s, on_timeout)
        while not over.is_set():
            stepping = self._stepping
            if stepping is not None:
                stepping.pass_turn_to_loop()
            over.wait(_POLL_S)
        if too_late and not future.cancelled():
            raise TimeoutError
        return future.result(0)

    def cancel_futures(self) -> None:
        for future in tuple(self._futures):
            future.cancel()

    def close(self) -> None:
        """Ends idle threads now, and busy threads when their functions return."""
        self._closed = True
        ending, self._idle = self._idle, []
        for worker in ending:
            worker.end()
        self._turn.give_to(None)  # no user code runs meanwhile: ending thousands of threads may take long
        for worker in ending:
            worker.join()
        self._turn.give_to(threading.get_ident())
