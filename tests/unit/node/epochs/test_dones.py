"""Epochs that are worked through are done one after the other, beside the work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.node.epochs.dones import Dones, Worked
from taskgraph.node.usercode.errors import StuckError
from taskgraph.protocol.messages import Stamp


def worked(number: int) -> Worked:
    return Worked(SimpleNamespace(number=number), Stamp(0, number + 1), None, {}, False, {})  # type: ignore[arg-type]


class Finishing:
    """What brings an epoch to its done: at once, or when the test says so."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.may = asyncio.Event()
        self.failed = 0
        self.error: Exception | None = None
        self.dones = Dones(self.finish, self.fail)

    async def finish(self, one: Worked) -> None:
        number: Any = one.attempt.number
        await self.may.wait()
        if self.error is not None:
            raise self.error
        self.done.append(number)

    def fail(self) -> None:
        self.failed += 1


async def test_they_are_done_in_their_order_and_nobody_waits_for_that() -> None:
    finishing = Finishing()
    for number in range(3):
        finishing.dones.add(worked(number))
    assert finishing.dones.open
    finishing.may.set()
    await finishing.dones.all()
    assert finishing.done == [0, 1, 2]
    assert not finishing.dones.open
    finishing.dones.add(worked(3))
    await finishing.dones.all()
    assert finishing.done == [0, 1, 2, 3]


async def test_when_the_attempt_ends_the_rest_is_not_done() -> None:
    finishing = Finishing()
    finishing.dones.add(worked(0))
    await asyncio.sleep(0)
    await finishing.dones.end()
    finishing.may.set()
    assert not finishing.dones.open
    finishing.dones.add(worked(5))
    await finishing.dones.all()
    assert finishing.done == [5], "what comes is of another attempt"
    assert not finishing.failed


async def test_an_error_is_kept_until_the_attempt_ends() -> None:
    finishing = Finishing()
    finishing.error = ValueError("no")
    finishing.may.set()
    finishing.dones.add(worked(0))
    finishing.dones.add(worked(1))
    await finishing.dones.all()
    assert finishing.failed == 1
    assert finishing.dones.error is finishing.error
    assert not finishing.done
    await finishing.dones.end()
    assert finishing.dones.error is None


async def test_a_thread_that_does_not_return_is_told_at_the_end() -> None:
    finishing = Finishing()
    finishing.error = StuckError("it does not return")
    finishing.may.set()
    finishing.dones.add(worked(0))
    await finishing.dones.all()
    with pytest.raises(StuckError):
        await finishing.dones.end()


@pytest.mark.parametrize("turns", range(5))
async def test_what_is_added_is_done_whenever_it_is_added(turns: int) -> None:
    """Also in the very turn of the event loop in which the one before was done, and nobody knew that yet."""
    finishing = Finishing()
    finishing.may.set()
    for number in range(6):
        finishing.dones.add(worked(number))
        for _ in range(turns):
            await asyncio.sleep(0)
    await finishing.dones.all()
    assert finishing.done == list(range(6)) and not finishing.dones.open


@pytest.mark.parametrize("turns", range(4))
async def test_the_attempt_may_end_in_any_turn(turns: int) -> None:
    finishing = Finishing()
    finishing.may.set()
    finishing.dones.add(worked(0))
    for _ in range(turns):
        await asyncio.sleep(0)
    finishing.may.clear()
    finishing.dones.add(worked(1))
    async with asyncio.timeout(5):
        await finishing.dones.end()
    finishing.may.set()
    await asyncio.sleep(0)
    assert 1 not in finishing.done and not finishing.dones.open and not finishing.failed


async def test_nothing_is_done_after_one_that_could_not_be() -> None:
    """Whoever is ahead goes on until the attempt is over, and adds to them."""
    finishing = Finishing()
    finishing.error = ValueError("no")
    finishing.may.set()
    finishing.dones.add(worked(0))
    await finishing.dones.all()
    finishing.error = None
    finishing.dones.add(worked(1))
    await finishing.dones.all()
    assert not finishing.done
    assert finishing.failed == 1
    assert isinstance(finishing.dones.error, ValueError)
