"""Work that goes on alongside a block: whatever ends the block, none of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from taskgraph.system.alongside import alongside, any_done

WORK = ("slow", "slower")


class Work:
    """Goes on until it is cancelled, and then takes two turns of the loop to end, whoever cancels it once more."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, name: str) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            for _ in range(2):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            self.ended.append(name)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
async def told() -> list[str]:
    """What nobody took, as the event loop tells it."""
    found: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(str(context["message"])))
    return found


async def number(value: int) -> int:
    return value


async def failing() -> int:
    raise ArithmeticError("a test")


async def test_the_first_that_is_done_has_its_result_and_the_others_have_ended(work: Work) -> None:
    async with alongside(number(7), work("slow"), work("slower")) as (quick, slow, _):
        await any_done(quick, slow)
        assert quick.result() == 7 and not slow.done()
    assert sorted(work.ended) == list(WORK)
    assert slow.cancelled()


async def test_one_that_is_not_waited_for_goes_on_until_the_block_ends(work: Work) -> None:
    async with alongside(work("slow")):
        await work.begun.wait()
        assert not work.ended
    assert work.ended


async def test_who_asks_the_first_one_hears_what_it_raised(work: Work) -> None:
    with pytest.raises(ArithmeticError, match="a test"):
        async with alongside(failing(), work("slow")) as (failed, slow):
            await any_done(failed, slow)
            failed.result()
    assert work.ended


async def test_of_two_that_are_done_at_once_both_have_what_came_of_them() -> None:
    async with alongside(number(1), number(2)) as (one, two):
        await any_done(one, two)
    assert (one.result(), two.result()) == (1, 2)


async def test_one_that_fails_beside_the_one_that_is_asked_is_dropped_in_silence(told: list[str]) -> None:
    async with alongside(number(1), failing()) as (one, failed):
        await any_done(one, failed)
        assert failed.done() and one.result() == 1
    del failed
    gc.collect()
    assert not told


async def test_what_the_block_raises_is_raised_once_all_has_ended(work: Work) -> None:
    with pytest.raises(LookupError):
        async with alongside(*map(work, WORK)):
            await work.begun.wait()
            raise LookupError
    assert sorted(work.ended) == list(WORK)


async def test_what_fails_while_it_is_cancelled_takes_nothing_from_the_block() -> None:
    async def fails_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ArithmeticError

    with pytest.raises(LookupError):
        async with alongside(fails_late()):
            await asyncio.sleep(0)
            raise LookupError


@pytest.mark.parametrize("wait", [any_done, asyncio.gather], ids=["for the first", "for all"])
async def test_who_is_cancelled_meanwhile_ends_all_of_it(work: Work, wait: Callable[..., Awaitable[object]]) -> None:
    async def waits() -> None:
        async with alongside(work("slow"), work("slower")) as tasks:
            await wait(*tasks)

    waiting = asyncio.ensure_future(waits())
    await work.begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(work.ended) == list(WORK)


async def test_who_is_cancelled_once_more_while_it_ends_waits_all_the_same(work: Work) -> None:
    async def waits() -> None:
        async with alongside(*map(work, WORK)) as tasks:
            await any_done(*tasks)

    waiting = asyncio.ensure_future(waits())
    await work.begun.wait()
    waiting.cancel()
    await work.cancelled.wait()
    assert not work.ended
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(work.ended) == list(WORK)


async def test_a_future_that_is_given_is_the_blocks_and_one_that_is_waited_for_there_is_not(work: Work) -> None:
    goes_on = asyncio.ensure_future(number(3))
    given = asyncio.ensure_future(work("slow"))
    async with alongside(given) as (same,):
        assert same is given
        await any_done(given, goes_on)
    assert given.cancelled() and await goes_on == 3


async def test_what_it_cancelled_holds_nothing_that_it_had(work: Work) -> None:
    """From Python 3.14 on it stayed until a garbage collection: the frame of `asyncio.wait` has the task that waits."""

    class Had:
        pass

    had: list[weakref.ref[Had]] = []

    async def waits() -> None:
        mine = Had()
        had.append(weakref.ref(mine))
        me = asyncio.current_task()  # as that frame has
        await any_done(begun)
        raise AssertionError((mine, me))

    begun = asyncio.ensure_future(work("slow"))
    gc.disable()
    try:
        async with alongside(waits()):
            await work.begun.wait()
        assert had[0]() is None
    finally:
        gc.enable()
        begun.cancel()
