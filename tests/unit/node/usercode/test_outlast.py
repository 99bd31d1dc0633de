"""A cancelled call of a plain function: the task is held until the function returns, or is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from taskgraph.node.usercode.actor import Actor, StuckError
from taskgraph.node.usercode.threads import PooledThreads


class Held:
    """A call under way, of a function that returns when it may."""

    def __init__(self, cancel_s: float) -> None:
        self.threads = PooledThreads("t", limit=4)
        self.actor = Actor(self.threads, task=3, cancel_s=cancel_s)
        self.may_return = threading.Event()
        self.call = asyncio.ensure_future(self.actor.call("send", self.may_return.wait, 5))

    async def cancel(self) -> None:
        self.call.cancel()
        await asyncio.sleep(0.01)


@pytest.fixture
async def held(request: pytest.FixtureRequest) -> AsyncIterator[Held]:
    made = Held(getattr(request, "param", 5.0))
    while not made.actor.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    yield made
    made.may_return.set()
    await asyncio.gather(made.call, return_exceptions=True)
    made.threads.close()


async def test_it_is_held_however_often_it_is_cancelled(held: Held) -> None:
    after = asyncio.ensure_future(held.actor.call("teardown", lambda: 7))
    for _ in range(3):
        await held.cancel()
        assert not held.call.done()
        assert not after.done()
    held.may_return.set()
    assert await after == 7
    assert held.call.cancelled()
    assert not held.actor.abandoned


async def test_it_is_left_behind_when_its_threads_are_abandoned(held: Held) -> None:
    await held.cancel()
    held.threads.abandon()
    with pytest.raises(asyncio.CancelledError):
        await held.call
    assert held.actor.abandoned


@pytest.mark.parametrize("held", [0.05], indirect=True)
async def test_it_is_stuck_after_its_time(held: Held) -> None:
    await held.cancel()
    with pytest.raises(StuckError, match=r"send did not return within 0.05 s"):
        await held.call
    assert held.actor.abandoned
