"""Epochs in flight come to a point in their order: `node.turns.Turns`."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from taskgraph.node.epochs.turns import Turns


class Passing:
    """Epochs that wait for their turn, each in a task of its own."""

    def __init__(self, at: int) -> None:
        self.turns = Turns(at)
        self.came: list[int] = []

    async def come(self, epoch: int) -> None:
        await self.turns.wait(epoch)
        self.came.append(epoch)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whose_turn_it_is_does_not_wait() -> None:
    turns = Turns(7)
    for epoch in (5, 7):  # one that has passed, too
        with pytest.raises(StopIteration):
            turns.wait(epoch).send(None)  # not one step of the event loop
    turns.passed(7)
    with pytest.raises(StopIteration):
        turns.wait(8).send(None)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3, 6))])
async def test_they_come_one_by_one_in_whatever_order_they_began_to_wait(order: tuple[int, ...]) -> None:
    passing = Passing(2)
    async with asyncio.TaskGroup() as group:
        for epoch in order:
            group.create_task(passing.come(epoch))
        for epoch in range(2, 6):
            await settled()
            assert passing.came == list(range(3, epoch + 1)), f"at the turn of {epoch}"
            passing.turns.passed(epoch)
    assert passing.came == [3, 4, 5]


async def test_all_that_wait_for_one_turn_come() -> None:
    """The processors of an epoch that run in parallel, say."""
    passing = Passing(0)
    async with asyncio.TaskGroup() as group:
        for epoch in (1, 2, 1, 1, 2):
            group.create_task(passing.come(epoch))
        await settled()
        passing.turns.passed(0)
        await settled()
        assert passing.came == [1, 1, 1]
        passing.turns.passed(1)
    assert passing.came == [1, 1, 1, 2, 2]


async def test_who_left_does_not_hold_up_the_others() -> None:
    passing = Passing(0)
    async with asyncio.TaskGroup() as group:
        gone, stays, later = (group.create_task(passing.come(epoch)) for epoch in (1, 1, 2))
        await settled()
        gone.cancel()
        await settled()
        assert gone.cancelled()
        passing.turns.passed(0)
        await stays
        assert not later.done()
        passing.turns.passed(1)
    assert passing.came == [1, 2]


async def test_one_passes_at_its_turn_alone() -> None:
    """A mistake of ours, told where it is made: an epoch behind it would change a state that is not its own."""
    turns = Turns(4)
    for epoch in (3, 5):
        with pytest.raises(AssertionError, match=f"epoch {epoch} passed at the turn of 4"):
            turns.passed(epoch)
    turns.passed(4)
    with pytest.raises(AssertionError, match="epoch 4 passed at the turn of 5"):
        turns.passed(4)
    assert turns.at == 5
