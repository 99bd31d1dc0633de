"""asyncio tasks that run alongside a block, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, overload

__all__ = ["alongside", "any_done", "cancel_and_wait"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@overload
def alongside(a: Awaitable[A], /) -> AbstractAsyncContextManager[tuple[Future[A]]]: ...
@overload
def alongside(a: Awaitable[A], b: Awaitable[B], /) -> AbstractAsyncContextManager[tuple[Future[A], Future[B]]]: ...
@overload
def alongside(
    a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], /
) -> AbstractAsyncContextManager[tuple[Future[A], Future[B], Future[C]]]: ...
@overload
def alongside(*work: Awaitable[Any]) -> AbstractAsyncContextManager[tuple[Future[Any], ...]]: ...


@contextlib.asynccontextmanager
async def alongside(*work: Awaitable[Any]) -> AsyncIterator[Any]:
    """Starts all awaitables as tasks. At the end of the block, tasks that are not done are cancelled and awaited.

    The block takes the results of the tasks that it waited for (`any_done`). Errors of other tasks are dropped. Do not
    pass a future that must go on after the block: wait for it inside.
    """
    tasks = tuple(asyncio.ensure_future(each) for each in work)
    try:
        yield tasks
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*work: Future[Any]) -> None:
    """Cancels and awaits futures; their results and errors are dropped.

    A cancelled task keeps its CancelledError with all frames. Since Python 3.14 the frame of `asyncio.wait` refers to
    the waiting task, so these frames, and connections in them, would stay until a garbage collection. `result()` makes
    the task forget the error.
    """
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for each in work:
        if each.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                each.result()


async def any_done(*work: Future[Any]) -> None:
    """Waits until at least one future is done. If the caller is cancelled, the futures go on."""
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
