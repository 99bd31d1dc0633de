"""Real threads of simulated processes, in lock-step with the simulated event loop.

User code of an elastic job waits in its thread, so it cannot run on the loop. One thread runs at a time, and the loop
waits for it: a seed replays exactly. A thread goes on in a callback of its process, so a frozen process's threads stand
still.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVar

from taskgraph.node.usercode.threads import FutureCall
from taskgraph.testing.simulate.loop import Process, SimLoop

__all__ = ["SteppedThreads", "process_name", "sleep"]

R = TypeVar("R")


_here = threading.local()  # of a thread: its `_SteppedThread`, and the `SteppedThreads` of its process


def process_name() -> str:
    """Returns the name of the simulated process to which this thread belongs."""
    threads: SteppedThreads = _here.threads
    return threads.process.name


def sleep(for_s: float) -> None:
    """Waits in a thread of user code until this much virtual time has passed."""
    threads: SteppedThreads = _here.threads
    threads.sleep(for_s)


class _ProcessEnded(BaseException):
    """Raised in user code that waits while its process ends."""


class _SteppedThread:
    """A thread that runs one function, in turns with the loop."""

    def __init__(self, function: Callable[[], Any], context: Context, threads: SteppedThreads) -> None:
        self._turn, self._loop_turn = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._loop_turn.acquire()
        self._function = function
        self._threads = threads
        self.over = False
        self.closing = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="taskgraph-simulated", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.current, _here.threads = self, self._threads
        self._turn.acquire()
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.over = True
        self._loop_turn.release()

    def step(self) -> None:
        """Runs the thread until it waits, or its function ends. Called on the loop."""
        self._turn.release()
        self._loop_turn.acquire()

    def park(self) -> None:
        """Passes the turn to the loop, and waits for the next `step`. Called in the thread."""
        self._loop_turn.release()
        self._turn.acquire()
        if self.closing:
            raise _ProcessEnded

    def join(self) -> None:
        self._thread.join()


class SteppedThreads:
    """Implements `taskgraph.node.usercode.threads.Threads` for one simulated process."""

    in_step = True

    def __init__(self, process: Process, loop: SimLoop) -> None:
        self.context = Context()
        self.process = process
        self._loop = loop
        self._threads: dict[_SteppedThread, asyncio.Future[Any]] = {}

    def clock(self) -> float:
        return self._loop.time()

    def start(self, function: Callable[[], R], *, brief: bool) -> FutureCall[R]:
        return FutureCall(self.run(function))

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        future: asyncio.Future[R] = self._loop.create_future()
        thread = _SteppedThread(function, self.process.new_context(), self)
        self._threads[thread] = future
        self._loop.call_soon(self._step, thread, context=self.process.new_context())
        return future

    def _step(self, thread: _SteppedThread) -> None:
        """Runs a thread until it waits or ends. If it has ended, completes its future."""
        if thread.over:
            return
        thread.step()
        if not thread.over:
            return
        future = self._threads.pop(thread)
        thread.join()
        if future.done():
            return
        if thread.error is not None:
            future.set_exception(thread.error)
        else:
            future.set_result(thread.result)

    def post(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon(function, *args, context=self.process.new_context())

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        thread: _SteppedThread = _here.current
        if not future.done():
            future.add_done_callback(lambda _: self.post(self._step, thread))
            thread.park()
        return future.result(0)

    def sleep(self, for_s: float) -> None:
        """Waits until this much virtual time has passed. Called in a thread of this process."""
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.post(self._loop.call_later, for_s, over.set_result, None)
        self.block(over, None)

    def cancel_futures(self) -> None:
        for future in self._threads.values():
            future.cancel()

    def close(self) -> None:
        """Ends all threads now: their waits raise `_ProcessEnded`."""
        for thread in tuple(self._threads):
            self._threads.pop(thread).cancel()
            thread.closing = True
            while not thread.over:
                thread.step()
            thread.join()
