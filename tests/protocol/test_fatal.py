"""Which deaths of nodes count as the doing of one task's code, and how many are too many."""

from __future__ import annotations

import pytest
from protocol_kit import World

from taskgraph.protocol import transactions
from taskgraph.protocol.fatal import find_deadly_code
from taskgraph.protocol.records import EpochRecord, GoneRecord, RunningCode

SEND, ADD = "send", "add"


@pytest.fixture
def world() -> World:
    """Task 1 is led by a and backed by b; its epoch 3 is at work."""
    world = World("a", "b", "c", "d", "e")
    world.first(1, "a")
    assert world.admit(1, "a", "b").succeeded
    world.put(world.keys.epoch, EpochRecord(epoch=3, attempt=1).to_bytes())
    return world


def die(world: World, node: str, *ran: tuple[str, int, int], intended: bool = False) -> None:
    """A process dies while this code runs, and its launcher reports it."""
    record = GoneRecord(
        reason="exited with code 11", running_code=tuple(RunningCode(*each) for each in ran), intended=intended
    )
    world.delete(world.keys.node(node))
    assert world.run(transactions.declare_gone(world.view(), node, record)).succeeded


def test_repeated_deaths_fail_the_job(world: World) -> None:
    assert find_deadly_code(world.view(), 1) is None
    for node in ("c", "a", "b"):
        assert find_deadly_code(world.view(), 3) is None
        die(world, node, (SEND, 1, 4))
    found = find_deadly_code(world.view(), 3)
    assert found is not None and (found.task, found.epoch, list(found.deaths)) == (1, 4, ["c", "a", "b"])
    assert find_deadly_code(world.view(), 4) is None


def test_deaths_count_per_task_and_epoch(world: World) -> None:
    die(world, "a", (SEND, 1, 3))
    die(world, "b", (SEND, 1, 4))
    die(world, "c", (SEND, 2, 3))
    die(world, "d")
    assert find_deadly_code(world.view(), 2) is None
    die(world, "e", (ADD, 1, 4), (ADD, 1, 4))
    found = find_deadly_code(world.view(), 2)
    assert found is not None and (found.task, found.epoch, len(found.deaths)) == (1, 4, 2)


def test_intended_death_does_not_count(world: World) -> None:
    for node in ("a", "b", "c"):
        die(world, node, (SEND, 1, 3), intended=True)
    assert find_deadly_code(world.view(), 1) is None


def test_committed_epoch_clears_deaths(world: World) -> None:
    die(world, "a", (SEND, 1, 3))
    die(world, "b", (SEND, 1, 3))
    world.put(world.keys.epoch, EpochRecord(epoch=4, attempt=1).to_bytes())
    assert find_deadly_code(world.view(), 2) is None
    world.put(world.keys.epoch, EpochRecord(epoch=2, attempt=2, lineage=2, base=2).to_bytes())
    assert find_deadly_code(world.view(), 2) is not None, "the job rolled back, and comes there again"


def test_setup_deaths_count_until_an_admission(world: World) -> None:
    die(world, "c", ("setup", 1, -1))
    die(world, "d", ("setup", 1, -1))
    assert (found := find_deadly_code(world.view(), 2)) is not None and (found.task, found.epoch) == (1, 3)
    assert found.includes(RunningCode("setup", 1, -1)) and not found.includes(RunningCode("setup", 0, -1))
    assert world.admit(1, "a", "e").succeeded
    assert find_deadly_code(world.view(), 1) is None
    world.put(world.keys.epoch, EpochRecord(epoch=0, attempt=1).to_bytes())
    die(world, "b", ("setup", 1, 0))
    assert (found := find_deadly_code(world.view(), 3)) is not None, "a first primary is a member before it is set up"
    assert list(found.deaths) == ["c", "d", "b"]


def test_most_frequent_code_is_blamed(world: World) -> None:
    die(world, "a", (ADD, 0, 3), (SEND, 1, 3))
    die(world, "b", (SEND, 1, 3))
    die(world, "c", (ADD, 0, 3), (SEND, 1, 3))
    found = find_deadly_code(world.view(), 2)
    assert found is not None and (found.task, len(found.deaths)) == (1, 3)


def test_record_keeps_what_ran() -> None:
    record = GoneRecord(
        reason="killed by SIGKILL", running_code=(RunningCode(SEND, 1, 3), RunningCode(ADD, 0, -1)), intended=True
    )
    assert GoneRecord.from_bytes(record.to_bytes()) == record
    assert record.running == ("'send' of task 1", "'add' of task 0")


def test_code_of_several_epochs_is_named_once() -> None:
    ran = (RunningCode(SEND, 1, 3), RunningCode(ADD, 0, 3), RunningCode(SEND, 1, 4))
    assert GoneRecord(reason="killed by SIGKILL", running_code=ran).running == ("'send' of task 1", "'add' of task 0")
