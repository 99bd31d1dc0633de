"""Worker threads for plain `def` hooks, computes and handlers."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["PooledThreads", "Threads"]

R = TypeVar("R")


class Threads(Protocol):
    """Runs functions outside the event loop. `taskgraph.testing` has one that runs them in lock-step with it."""

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Starts `function` in a thread; the future belongs to the running loop. Cancelling it stops nothing."""

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """In a worker thread: waits for `future`. Every wait of a worker thread goes through here."""

    def close(self) -> None:
        """No more work is accepted; idle threads end."""


class PooledThreads:
    """Threads that are made when needed and reused; idle ones are preferred, so one task mostly keeps one thread."""

    def __init__(self, name: str, limit: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(limit, thread_name_prefix=name)

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function)

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        return future.result(timeout_s)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
