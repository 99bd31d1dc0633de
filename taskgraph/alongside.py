"""Work that goes on alongside a block, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, overload

__all__ = ["alongside", "any_done"]

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
    """Begins all of it; what is not done at the end of the block is cancelled, and awaited: nothing outlives the block.

    The block asks those for what came of them that it waited for (`any_done`). What others raise is dropped, also where
    they failed in the same moment. A future that is not the block's to cancel, such as a task that goes on, is waited
    for there, and not given here.
    """
    tasks = tuple(asyncio.ensure_future(each) for each in work)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def any_done(*work: Future[Any]) -> None:
    """Returns when one of them is done, or several are. Where whoever waits is cancelled, they go on."""
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
