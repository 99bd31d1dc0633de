"""Work that goes on alongside a block, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, overload

__all__ = ["alongside", "any_done", "ended"]

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
        await ended(*tasks)


async def ended(*work: Future[Any]) -> None:
    """Cancels what is not done, and waits for all of it; what comes of it is dropped.

    A cancelled task keeps what cancelled it, with the frames that this went through. Since Python 3.14 the frame of
    `asyncio.wait` has the task that waits: in a cycle all that those frames hold would stay, connections, too, until a
    garbage collection finds it. So the task is asked for it, after which it keeps it no more.
    """
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for each in work:
        if each.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                each.result()


async def any_done(*work: Future[Any]) -> None:
    """Returns when one of them is done, or several are. Where whoever waits is cancelled, they go on."""
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
