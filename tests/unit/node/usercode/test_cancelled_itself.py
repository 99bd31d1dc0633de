"""Coroutines of user code that cancel the asyncio task they run in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from taskgraph.node.usercode.actor import Actor
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import PooledThreads


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    threads = PooledThreads("t", limit=1)
    yield Actor(threads, task=3, cancel_s=5.0)
    threads.close()


def cancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def returns() -> int:
    cancel()
    return 7


async def raises() -> None:
    cancel()
    raise ValueError("x")


async def awaits() -> None:
    cancel()
    await asyncio.sleep(5)


async def later() -> None:
    await asyncio.sleep(0)
    cancel()
    await asyncio.sleep(5)


async def twice() -> None:
    await asyncio.sleep(0)
    cancel()
    cancel()


async def cleans_up() -> None:
    try:
        await awaits()
    finally:
        await asyncio.sleep(0.01)


async def goes_on() -> None:
    try:
        await later()
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("code", [returns, raises, awaits, later, twice, cleans_up, goes_on])
async def test_self_cancellation_is_a_user_error(actor: Actor, code: object) -> None:
    with pytest.raises(UserCodeError, match=r"task 3, 'hook': code of the job cancelled the asyncio task it runs in"):
        await actor.call("hook", code)
    caller = asyncio.current_task()
    assert caller is not None
    assert caller.cancelling() == 0
    await asyncio.sleep(0.01)
    assert not actor.running


async def test_uncancel_is_no_error(actor: Actor) -> None:
    async def own() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(5)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(raises_soon())
                await asyncio.sleep(5)
        except* ValueError:
            pass
        with pytest.raises(asyncio.CancelledError):
            await awaits()
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return 7

    async def raises_soon() -> None:
        await asyncio.sleep(0)
        raise ValueError("x")

    assert await actor.call("hook", own) == 7


async def test_framework_cancellation_stays(actor: Actor) -> None:
    async def again() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            cancel()

    call = asyncio.ensure_future(actor.call("hook", again))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
