"""Worker threads in lock-step with the event loop: one of them runs at a time, and the loop waits for it.

So the order in which user code runs depends on the order of events on the loop alone, and not on the operating
system's scheduler: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["LockStepThreads"]

R = TypeVar("R")


class _Worker:
    """One function in one thread, which hands the turn to the loop and back."""

    def __init__(self, function: Callable[[], Any], local: threading.local) -> None:
        self._function = function
        self._local = local
        self._mine = threading.Event()
        self._loops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock-step", daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False

    def _run(self) -> None:
        self._local.worker = self
        self._mine.wait()
        self._mine.clear()
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.finished = True
        self._loops.set()

    def step(self) -> None:
        """On the loop: lets the thread run until it waits or ends."""
        if not self._thread.ident:
            self._thread.start()
        self._mine.set()
        self._loops.wait()
        self._loops.clear()
        if self.finished:
            self._thread.join()

    def park(self) -> None:
        """In the thread: lets the loop run until its next `step`."""
        self._loops.set()
        self._mine.wait()
        self._mine.clear()


class LockStepThreads:
    """`taskgraph.node.threads.Threads`, deterministic."""

    def __init__(self) -> None:
        self._local = threading.local()

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        worker = _Worker(function, self._local)

        def step() -> None:
            worker.step()
            if worker.finished and not future.done():
                if worker.error is not None:
                    future.set_exception(worker.error)
                else:
                    future.set_result(worker.result)

        worker.resume = lambda: loop.call_soon_threadsafe(step)  # type: ignore[attr-defined]
        loop.call_soon(step)
        return future

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        worker: Any = self._local.worker
        if not future.done():
            future.add_done_callback(lambda _: worker.resume())
            worker.park()
        return future.result(0)

    def close(self) -> None:
        """Nothing to end: a thread ends with its function."""
