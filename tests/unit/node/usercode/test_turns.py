"""Two pieces of user code of one task never run at the same time; a coroutine that does not wait needs no queue."""

from __future__ import annotations

import asyncio
import decimal
import functools
import inspect
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trace_kit import spans_of

from taskgraph.epoch import AttemptEnded
from taskgraph.node.usercode import actor as actor_module
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode import threads as threads_module
from taskgraph.node.usercode.actor import Actor, call_under_way
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import PooledThreads
from taskgraph.observe.trace import Tracing
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import Ran


@pytest.fixture
async def threads() -> AsyncIterator[PooledThreads]:
    pool = PooledThreads("turns", limit=4)
    yield pool
    pool.close()


class Held:
    """A plain function that holds its task until it is told to return."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.go.wait(30)


async def begun(held: Held) -> None:
    assert await asyncio.to_thread(held.began.wait, 30)


async def test_what_a_function_sets_for_its_thread_holds_for_no_other() -> None:
    """Else the digits of one task's result would depend on which thread another one's code happened to run in."""
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


async def test_a_coroutine_that_does_not_wait_runs_at_once(threads: PooledThreads) -> None:
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


async def test_a_coroutine_waits_for_a_function_that_holds_the_task(threads: PooledThreads) -> None:
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


async def test_what_a_coroutine_awaited_comes_to_it_at_its_turn(threads: PooledThreads) -> None:
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


async def test_a_cancelled_coroutine_hears_of_it_at_its_turn(threads: PooledThreads) -> None:
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
async def test_what_a_decorator_marked_as_a_coroutine_function_is_one(threads: PooledThreads) -> None:
    actor = Actor(threads, task=3, cancel_s=1)

    async def compute() -> int:
        return threading.get_ident()

    def wrapper() -> object:
        return compute()

    with pytest.raises(UserCodeError, match="is a plain function and returned a coroutine"):
        await actor.call("compute", wrapper)
    inspect.markcoroutinefunction(wrapper)  # type: ignore[attr-defined,unused-ignore]
    assert await actor.call("compute", wrapper) == threading.get_ident()


async def test_what_is_ours_waits_for_a_function_that_holds_the_task(threads: PooledThreads) -> None:
    """Also where another function gave up waiting for its turn meanwhile."""
    actor, held = Actor(threads, task=3, cancel_s=1), Held()
    order: list[str] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(actor.call("held", held))
        await begun(held)
        queued = group.create_task(actor.call("queued", lambda: order.append("queued")))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait([queued])
        ours = group.create_task(actor.here("ours", lambda: order.append("ours")))
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("function returns")
        held.go.set()
        await ours
    assert order == ["function returns", "ours"] and actor.in_threads == 0
    with pytest.raises(UserCodeError):
        await actor.call("fails", lambda: 1 / 0)
    assert actor.in_threads == 0


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
async def test_what_it_raises_is_told_from_where_user_code_begins(threads: PooledThreads, waits: bool) -> None:
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
async def test_what_user_code_cancelled_itself_is_its_mistake(threads: PooledThreads, threaded: bool) -> None:
    """Nobody cancelled the call: taken for the end of the attempt, it would end nothing, and be told to nobody."""
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


@pytest.mark.parametrize("waits", [False, True])
async def test_a_stack_tells_which_code_it_runs(threads: PooledThreads, waits: bool) -> None:
    actor = Actor(threads, task=3, cancel_s=1)

    async def compute() -> tuple[int, str, str] | None:
        if waits:
            await asyncio.sleep(0)
        return call_under_way(sys._getframe())

    found = await actor.call("compute", compute)
    assert found is not None
    assert found[:2] == (3, "compute")
    assert "in compute" in found[2]


async def test_last_words_name_a_coroutine_wherever_it_is(
    threads: PooledThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lastwords, "here", lastwords.LastWords(tmp_path))
    actor = Actor(threads, task=3, cancel_s=1)
    actor.stamp = Stamp(0, 7)
    seen: list[lastwords.Left | None] = []
    go = asyncio.Event()

    async def compute() -> None:
        seen.append(lastwords.read(tmp_path))
        await go.wait()
        seen.append(lastwords.read(tmp_path))

    async def quick() -> None:
        seen.append(lastwords.read(tmp_path))

    def look() -> None:
        seen.append(lastwords.read(tmp_path))

    waiting = asyncio.ensure_future(actor.call("compute", compute, after=look))
    await asyncio.sleep(0)
    seen.append(lastwords.read(tmp_path))
    await actor.call("quick", quick)
    go.set()
    await waiting
    one, other = Ran("compute", 3, 7), Ran("quick", 3, 7)
    expected = [(one,), (one,), (one, other), (one,), (one,)]
    assert seen == [lastwords.Left(ran, False) for ran in expected]
    assert lastwords.read(tmp_path) == lastwords.Left((), False)


async def test_last_words_tell_a_function_that_the_loop_waits_for_from_a_coroutine(
    threads: PooledThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that keeps the interpreter's lock was taken for a coroutine that never awaits."""
    monkeypatch.setattr(lastwords, "here", lastwords.LastWords(tmp_path))
    monkeypatch.setattr(actor_module, "_BRIEF_S", 60.0)
    monkeypatch.setattr(threads_module, "_GIVES_WAY_S", 60.0)
    actor = Actor(threads, task=3, cancel_s=1)
    actor.stamp = Stamp(0, 7)
    seen: list[lastwords.Call | None] = []

    def function() -> None:
        seen.append(lastwords.on_loop(tmp_path))

    async def coroutine() -> None:
        function()

    for code in (function, function, coroutine):
        await actor.call("compute", code)
    first, brief, on_loop = seen
    assert first is None, "how long it takes is not known yet: the loop goes on"
    assert brief is not None and brief[1:] == (Ran("compute", 3, 7), True)
    assert on_loop is not None and on_loop[1:] == (Ran("compute", 3, 7), False)


async def test_last_words_name_what_a_thread_runs_however_many_coroutines_wait(
    threads: PooledThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of several epochs in flight, of several tasks."""
    monkeypatch.setattr(lastwords, "here", lastwords.LastWords(tmp_path))
    held, go = Held(), asyncio.Event()

    async def wait() -> None:
        await go.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(Actor(threads, task=0, cancel_s=1).call("held", held))
        await begun(held)
        for task in range(1, 6):
            actor = Actor(threads, task=task, cancel_s=1)
            for epoch in range(4):
                actor.stamp = Stamp(1, epoch)
                group.create_task(actor.call("wait", wait))
                await asyncio.sleep(0)
        left = lastwords.read(tmp_path)
        assert left is not None and left.ran[0] == Ran("held", 0, -1)
        assert left.ran[-16:] == tuple(Ran("wait", task, epoch) for task in range(2, 6) for epoch in range(4))
        held.go.set()
        go.set()
    assert lastwords.read(tmp_path) == lastwords.Left((), False)


async def test_a_span_names_the_epoch_it_was_begun_for(threads: PooledThreads) -> None:
    """Though another epoch of the task goes on while it waits for its turn."""
    tracing = Tracing()
    actor, held = Actor(threads, task=3, cancel_s=1, tracing=tracing), Held()
    tracing.start()
    async with asyncio.TaskGroup() as group:
        actor.stamp = Stamp(1, 7)
        group.create_task(actor.call("held", held))
        await begun(held)
        actor.stamp = Stamp(1, 8)
        snapshot = group.create_task(actor.here("snapshot", lambda: None))
        await asyncio.sleep(0)
        actor.stamp = Stamp(1, 9)
        held.go.set()
        await snapshot
    epochs = {span[1]: span[6] for span in spans_of(tracing)}
    assert epochs == {"held": 7, "snapshot": 8}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no function long, and no wait for a brief one too short."""
    monkeypatch.setattr(threads_module, "_GIVES_WAY_S", 10.0)
    monkeypatch.setattr(actor_module, "_BRIEF_S", 10.0)


@pytest.mark.usefixtures("brief")
async def test_a_function_that_was_brief_runs_at_once_the_next_time(threads: PooledThreads) -> None:
    """In its thread, and without a step of the event loop."""
    actor = Actor(threads, task=3, cancel_s=1)
    ran: list[object] = []

    def compute(what: str) -> str:
        ran.append(threading.get_ident() == here)
        return what

    here = threading.get_ident()
    assert await actor.call("compute", compute, "x") == "x"
    call = actor.call("compute", compute, "y", after=lambda: ran.append("after"))
    with pytest.raises(StopIteration) as returned:
        call.send(None)
    assert returned.value.value == "y"
    assert ran == [False, False, "after"]
    assert actor.running == ()
    assert not actor._turn.locked()


async def test_the_loop_waits_for_no_function_that_takes_long(
    threads: PooledThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor(threads, task=3, cancel_s=1)
    waited: list[bool] = []
    start = threads.start
    monkeypatch.setattr(threads, "start", lambda function, brief: waited.append(brief) or start(function, brief=brief))
    took_s = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]  # it is taken at its word three times
    monkeypatch.setattr(threads_module.time, "perf_counter", iter([t for s in took_s for t in (0.0, s)]).__next__)
    for _ in took_s:
        await actor.call("compute", lambda: None)
    assert waited == [False, True, True, True, False, True, True, True]


@pytest.mark.usefixtures("brief")
async def test_functions_with_ever_new_names_are_not_all_remembered(
    threads: PooledThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "_BRIEF_NAMES", 5)
    actor = Actor(threads, task=3, cancel_s=1)
    for epoch in range(23):
        await actor.call(f"compute {epoch}", lambda: None)
        assert len(actor._brief) <= 5


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_brief_function_that_takes_long_for_once_holds_its_task(
    threads: PooledThreads, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "_BRIEF_S", 10.0)
    actor, held = Actor(threads, task=3, cancel_s=10), Held()
    order: list[str] = []
    held.go.set()
    await actor.call("held", held)
    held.go.clear()
    held.began.clear()
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(actor.call("held", held))
        await begun(held)
        assert [running.where for running in actor.running] == ["held"]
        first = group.create_task(actor.call("first", lambda: order.append("first")))
        await asyncio.sleep(0)
        second = group.create_task(actor.call("second", lambda: order.append("second")))
        if cancelled:
            holding.cancel()
        await asyncio.sleep(0.01)
        assert order == []
        assert not holding.done()
        order.append("returns")
        held.go.set()
        await asyncio.gather(first, second)
    assert order == ["returns", "first", "second"]
    assert holding.cancelled() == cancelled
    assert actor.running == ()


OVER = SimpleNamespace(cancelled=True)
"""An attempt that has ended."""


@pytest.mark.usefixtures("brief")
async def test_a_brief_function_raises_as_any_other(threads: PooledThreads) -> None:
    actor = Actor(threads, task=3, cancel_s=1)
    errors: list[BaseException] = [ValueError("no"), AttemptEnded(), asyncio.CancelledError(), StopIteration()]
    expected = [UserCodeError, AttemptEnded, UserCodeError, UserCodeError]

    def compute(error: BaseException | None) -> None:
        if error is not None:
            raise error

    await actor.call("compute", compute, None)
    for error, told in zip(errors, expected, strict=True):
        call = actor.call("compute", compute, error, attempt=OVER)
        with pytest.raises(told) as raised:
            call.send(None)
        if isinstance(raised.value, UserCodeError):
            assert raised.value.where == "compute"
            assert "in compute" in raised.value.traceback_text
    assert not actor._turn.locked()


@pytest.mark.usefixtures("brief")
async def test_last_words_name_a_function_that_is_brief(
    threads: PooledThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = lastwords.LastWords(tmp_path)
    monkeypatch.setattr(lastwords, "here", words)
    actor = Actor(threads, task=3, cancel_s=1)
    actor.stamp = Stamp(0, 7)
    looks = functools.partial(lastwords.read, tmp_path)
    compute = lastwords.Left((Ran("compute", 3, 7),), False)
    assert await actor.call("compute", looks) == compute
    assert await actor.call("compute", looks) == compute
    monkeypatch.setattr(threads_module, "_GIVES_WAY_S", 0.0)
    held = Held()
    calling = asyncio.ensure_future(actor.call("compute", held))
    await begun(held)
    assert looks() == compute
    assert len(words._threads.taken) == 1, "it is no coroutine that waits"
    held.go.set()
    await calling
    assert looks() == lastwords.Left((), False)
