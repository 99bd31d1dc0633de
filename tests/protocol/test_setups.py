"""Where a backup cannot be set up: whether the job goes on without that node, which ends then."""

from __future__ import annotations

import pytest
from protocol_kit import World, node_record

from taskgraph.protocol.records import EpochRecord, JobStatus, StatusRecord
from taskgraph.protocol.setups import can_job_continue


@pytest.fixture
def world() -> World:
    """Task 0 is led by a and backed by b, task 1 the other way round; c is in sync of task 0. They work on epoch 3."""
    world = World("a", "b", "c")
    for task, (primary, *backups) in enumerate((("a", "b", "c"), ("b", "a"))):
        world.first(task, primary)
        for backup in backups:
            assert world.admit(task, primary, backup).succeeded
    world.put(world.keys.epoch, EpochRecord(epoch=3, attempt=1).to_bytes())
    return world


def goes_on(world: World, me: str = "c", *, suspects: str = "", min_in_sync: int = 1) -> bool:
    return can_job_continue(world.view(), me, 1, suspects=frozenset(suspects), min_in_sync=min_in_sync)


def test_job_continues_without_an_unneeded_node(world: World) -> None:
    assert goes_on(world)
    assert goes_on(world, min_in_sync=2)


@pytest.mark.parametrize("suspects", ["b", "a", "ab"], ids=["the task's primary", "another's", "both"])
def test_possible_heir_is_needed(world: World, suspects: str) -> None:
    assert not goes_on(world, suspects=suspects)


def test_node_is_needed_if_a_primary_is_gone(world: World) -> None:
    world.die("a")
    assert not goes_on(world)


def test_node_is_needed_if_others_leave(world: World) -> None:
    """Of a job whose only other node was leaving it was said that it goes on; ten seconds later it had no node."""
    for node in "ab":
        world.put(world.keys.node(node), node_record(node, draining=True).to_bytes())
    assert not goes_on(world)
    world.put(world.keys.node("a"), node_record("a").to_bytes())
    assert goes_on(world), "a stays, and takes over from b"


def test_primary_is_needed(world: World) -> None:
    assert not goes_on(world, "a")


def test_member_below_min_in_sync_is_needed(world: World) -> None:
    assert not goes_on(world, min_in_sync=3)


def test_failure_before_the_first_commit(world: World) -> None:
    world.put(world.keys.epoch, EpochRecord(epoch=0, attempt=1).to_bytes())
    assert not goes_on(world)
    world.put(world.keys.epoch, EpochRecord(epoch=3, attempt=1).to_bytes())
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    assert not goes_on(world)
