"""Worker threads for plain `def` hooks, computes and handlers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["PooledThreads", "Threads"]

R = TypeVar("R")


class Threads(Protocol):
    """Runs functions outside the event loop. `taskgraph.testing` has one that runs them in lock-step with it."""

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Starts `function` in a thread; the future belongs to the running loop. Cancelling it stops nothing."""

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """In a worker thread: waits for `future`. Every wait of a worker thread goes through here."""

    def abandon(self) -> None:
        """Cancels the futures of functions that have not ended: whoever waits for them leaves them behind."""

    def close(self) -> None:
        """No more work is accepted; idle threads end."""


class PooledThreads:
    """Threads that are made when needed and reused.

    They are daemons, unlike those of `concurrent.futures`, which the interpreter joins at its exit: a compute that
    never returns must not keep the process.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Work[Any] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0  # threads that wait for work, less the work that is on its way; below 0: work waits
        self._closed = False
        self._futures: dict[asyncio.Future[Any], None] = {}

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the node's threads are closed")
            if self._idle <= 0 and self._threads < self._limit:
                threading.Thread(target=self._serve, name=f"{self._name}_{self._threads}", daemon=True).start()
                self._threads += 1
            else:
                self._idle -= 1
            self._queue.put(_Work(loop, future, function))
        self._futures[future] = None
        future.add_done_callback(self._forget)
        return future

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._futures.pop(done, None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.do()
            del work  # an idle thread keeps nothing of what it did
            with self._lock:
                self._idle += 1

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        return future.result(timeout_s)

    def abandon(self) -> None:
        for future in tuple(self._futures):
            future.cancel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)  # after what was accepted; a thread at work takes it when its function ends


class _Work(Generic[R]):
    """A function on its way through a thread and back."""

    __slots__ = ("_function", "_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[R], function: Callable[[], R]) -> None:
        self._loop = loop
        self._future = future
        self._function = function

    def do(self) -> None:
        """In the thread."""
        if self._future.cancelled():
            return  # given up before its turn came
        try:
            result = self._function()
        except BaseException as error:
            self._tell(self._failed, error)
        else:
            self._tell(self._returned, result)

    def _tell(self, how: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            self._loop.call_soon_threadsafe(how, what)

    def _returned(self, result: R) -> None:
        if not self._future.done():
            self._future.set_result(result)

    def _failed(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)
