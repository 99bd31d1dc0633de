"""A cancelled call of user code.

Of a plain function: the task is held until the function returns, or is left behind. A coroutine hears of it, and is
left behind where it goes on all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from taskgraph.node.usercode.actor import Actor
from taskgraph.node.usercode.errors import StuckError
from taskgraph.node.usercode.threads import PooledThreads


class Held:
    """A call of a function that returns when it may."""

    def __init__(self, cancel_s: float) -> None:
        self.threads = PooledThreads("t", limit=4)
        self.actor = Actor(self.threads, task=3, cancel_s=cancel_s)
        self.may_return = threading.Event()
        self.call = asyncio.ensure_future(self.actor.call("send", self.may_return.wait, 60))

    async def cancel(self) -> None:
        self.call.cancel()
        await asyncio.sleep(0.01)


@pytest.fixture
async def held(request: pytest.FixtureRequest) -> AsyncIterator[Held]:
    made = Held(getattr(request, "param", 60.0))
    while not made.actor.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    yield made
    made.may_return.set()
    await asyncio.gather(made.call, return_exceptions=True)
    made.threads.close()


async def test_turn_stays_taken_by_a_thread(held: Held) -> None:
    after = asyncio.ensure_future(held.actor.call("teardown", lambda: 7))
    for _ in range(3):
        await held.cancel()
        assert not held.call.done()
        assert not after.done()
    held.may_return.set()
    assert await after == 7
    assert held.call.cancelled()
    assert not held.actor.abandoned


@pytest.mark.parametrize("held", [0.05], indirect=True)
async def test_thread_is_stuck_after_its_time(held: Held) -> None:
    await held.cancel()
    with pytest.raises(StuckError, match=r"send did not return within 0.05 s"):
        await held.call
    assert held.actor.abandoned


class Going:
    """Coroutines that go on when they are cancelled, until the test is over."""

    def __init__(self) -> None:
        self.over = False

    async def swallows(self) -> None:
        while not self.over:
            with contextlib.suppress(BaseException):  # GeneratorExit, too
                await asyncio.sleep(0.001)

    async def spins(self) -> None:
        while not self.over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def waits_for_ever(self) -> None:
        while not self.over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    async def awaits_a_task(self) -> None:
        await asyncio.create_task(self.swallows())

    async def awaits_several(self) -> None:
        await asyncio.gather(self.swallows(), self.swallows())

    async def has_a_group(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.swallows())
            await asyncio.sleep(60)


@pytest.fixture
async def going() -> AsyncIterator[Going]:
    made = Going()
    yield made
    made.over = True
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=30)


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    """Whose code is soon given up."""
    threads = PooledThreads("t", limit=1)
    yield Actor(threads, task=3, cancel_s=0.05)
    threads.close()


@pytest.fixture
async def patient() -> AsyncIterator[Actor]:
    """Whose code has as much time as a busy machine may need for it."""
    threads = PooledThreads("t", limit=1)
    yield Actor(threads, task=3, cancel_s=60)
    threads.close()


CODE: list[Callable[[Going], Callable[[], Coroutine[Any, Any, None]]]] = [
    lambda going: going.swallows,
    lambda going: going.spins,
    lambda going: going.waits_for_ever,
    lambda going: going.awaits_a_task,
    lambda going: going.awaits_several,
    lambda going: going.has_a_group,
]


@pytest.mark.parametrize("code", CODE, ids=["swallows", "spins", "waits", "task", "gather", "group"])
@pytest.mark.parametrize("again", [False, True])
async def test_coroutine_is_stuck_after_its_time(
    actor: Actor, going: Going, code: Callable[[Going], Callable[[], Coroutine[Any, Any, None]]], again: bool
) -> None:
    call = asyncio.ensure_future(actor.call("send", code(going)))
    await asyncio.sleep(0.005)
    loop = asyncio.get_running_loop()
    began = loop.time()
    call.cancel()
    if again:
        for _ in range(3):  # it has heard of the first one, and its time is not over yet
            await asyncio.sleep(0)
        call.cancel()
    await asyncio.wait([call], timeout=30)
    going.over = True
    assert loop.time() - began > 0.049
    with pytest.raises(StuckError, match=r"send did not return within 0.05 s"):
        call.result()
    assert actor.abandoned
    assert not actor.running
    assert call.cancelling() == 1 + again


async def test_coroutine_cleans_up_in_time(patient: Actor) -> None:
    cleaned = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await asyncio.create_task(asyncio.sleep(60))
        finally:
            await asyncio.sleep(0.005)
            cleaned.set()

    call = asyncio.ensure_future(patient.call("send", cleans_up))
    await asyncio.sleep(0.005)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert cleaned.is_set()
    assert not patient.abandoned


@pytest.mark.parametrize("cancelled", [False, True])
async def test_last_call_has_a_time_limit(actor: Actor, cancelled: bool) -> None:
    may_return, loop = threading.Event(), asyncio.get_running_loop()
    began = loop.time()
    call = asyncio.ensure_future(actor.last_call("teardown", lambda: may_return.wait(60)))
    if cancelled:  # it has no time more for that
        loop.call_later(0.03, call.cancel)
    await asyncio.wait([call], timeout=30)
    may_return.set()
    assert 0.049 < loop.time() - began < 30
    with pytest.raises(StuckError, match=r"teardown did not return within 0.05 s$"):
        call.result()
    assert actor.abandoned
