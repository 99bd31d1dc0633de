"""Two pieces of user code of one task never run at the same time; a coroutine that does not wait needs no queue."""

from __future__ import annotations

import asyncio
import decimal
import inspect
import sys
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from taskgraph.node.usercode.actor import Actor
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import PooledThreads


@pytest.fixture
async def threads() -> AsyncIterator[PooledThreads]:
    pool = PooledThreads("turns", limit=4)
    yield pool
    pool.close()


class Held:
    """A plain function that holds the turn until `go` is set."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.go.wait(30)


async def begun(held: Held) -> None:
    assert await asyncio.to_thread(held.began.wait, 30)


async def test_context_of_a_call_ends_with_it() -> None:
    threads = PooledThreads("t", limit=1)
    one, other = Actor(threads, task=3, cancel_s=1), Actor(threads, task=4, cancel_s=1)

    def sets() -> tuple[int, str]:
        decimal.getcontext().prec = 6
        np.seterr(divide="raise")
        return seen()

    def seen() -> tuple[int, str]:
        return decimal.getcontext().prec, np.geterr()["divide"]

    before = await one.call("seen", seen)
    assert await one.call("sets", sets) == (6, "raise") != before
    assert await one.call("seen", seen) == before == await other.call("seen", seen)
    threads.close()


async def test_coroutine_without_await_runs_at_once(threads: PooledThreads) -> None:
    actor = Actor(threads, task=3, cancel_s=1)
    ran: list[str] = []

    async def compute(what: str) -> str:
        ran.append(what)
        return what

    call = actor.call("compute", compute, "x", after=lambda: ran.append("after"))
    with pytest.raises(StopIteration) as returned:
        call.send(None)  # not one step of the event loop
    assert returned.value.value == "x"
    assert ran == ["x", "after"]
    assert actor.running == ()


async def test_coroutine_waits_for_a_function(threads: PooledThreads) -> None:
    actor, held = Actor(threads, task=3, cancel_s=1), Held()
    order: list[str] = []

    async def compute() -> None:
        order.append("coroutine")

    async with asyncio.TaskGroup() as group:
        group.create_task(actor.call("held", held))
        await begun(held)
        waiting = group.create_task(actor.call("compute", compute))
        alongside = group.create_task(actor.call("beside", compute, alone=False))
        await alongside  # it declared that it shares nothing
        assert order == ["coroutine"]
        assert [running.where for running in actor.running] == ["held"]
        order.append("function returns")
        held.go.set()
        await waiting
    assert order == ["coroutine", "function returns", "coroutine"]


async def test_coroutine_resumes_at_its_turn(threads: PooledThreads) -> None:
    actor, held = Actor(threads, task=3, cancel_s=1), Held()
    order: list[str] = []
    awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def compute() -> int:
        number = await awaited
        order.append("coroutine goes on")
        return number

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(actor.call("compute", compute))
        await asyncio.sleep(0)
        assert [running.where for running in actor.running] == ["compute"]
        group.create_task(actor.call("held", held))  # it awaits, so others may run
        await begun(held)
        awaited.set_result(7)
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("function returns")
        held.go.set()
        assert await waiting == 7
    assert order == ["function returns", "coroutine goes on"]
    assert actor.running == ()


async def test_cancellation_is_raised_at_its_turn(threads: PooledThreads) -> None:
    actor, held = Actor(threads, task=3, cancel_s=1), Held()
    order: list[str] = []
    awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def compute() -> None:
        try:
            await awaited
        except asyncio.CancelledError:
            order.append("coroutine unwinds")
            raise

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(actor.call("compute", compute))
        await asyncio.sleep(0)
        group.create_task(actor.call("held", held))
        await begun(held)
        awaited.set_result(7)
        await asyncio.sleep(0)  # it waits for its turn by now
        waiting.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("function returns")
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert order == ["function returns", "coroutine unwinds"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="only Python 3.12 has such marks")
async def test_marked_coroutine_function_is_async(threads: PooledThreads) -> None:
    actor = Actor(threads, task=3, cancel_s=1)

    async def compute() -> int:
        return threading.get_ident()

    def wrapper() -> object:
        return compute()

    with pytest.raises(UserCodeError, match="is a plain function and returned a coroutine"):
        await actor.call("compute", wrapper)
    inspect.markcoroutinefunction(wrapper)  # type: ignore[attr-defined,unused-ignore]
    assert await actor.call("compute", wrapper) == threading.get_ident()


async def test_one_cancelled_before_it_began_never_begins(threads: PooledThreads) -> None:
    actor, held = Actor(threads, task=3, cancel_s=1), Held()

    async def compute() -> None:
        raise AssertionError("it began")

    async with asyncio.TaskGroup() as group:
        group.create_task(actor.call("held", held))
        await begun(held)
        waiting = group.create_task(actor.call("compute", compute))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.go.set()


@pytest.mark.parametrize("waits", [False, True])
async def test_traceback_begins_in_user_code(threads: PooledThreads, waits: bool) -> None:
    actor = Actor(threads, task=3, cancel_s=1)

    async def compute() -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(UserCodeError) as told:
        await actor.call("compute", compute)
    assert told.value.where == "compute"
    assert told.value.traceback_text.startswith("Traceback (most recent call last):\n  File")
    assert "actor.py" not in told.value.traceback_text
    assert actor.running == ()


@pytest.mark.parametrize("threaded", [False, True])
async def test_awaiting_a_cancelled_future_is_a_user_error(threads: PooledThreads, threaded: bool) -> None:
    actor = Actor(threads, task=3, cancel_s=1)

    async def compute() -> None:
        given_up = asyncio.get_running_loop().create_future()
        given_up.cancel()
        await given_up

    def plain() -> None:
        raise asyncio.CancelledError

    with pytest.raises(UserCodeError, match="CancelledError") as told:
        await actor.call("compute", plain if threaded else compute)
    assert "in plain" in told.value.traceback_text or "await given_up" in told.value.traceback_text
    assert actor.running == ()
