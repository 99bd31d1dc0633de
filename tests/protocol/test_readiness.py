"""When a node is ready: what a supervisor waits for between two nodes that it takes away."""

from __future__ import annotations

import pytest
from protocol_kit import World, node_record

from taskgraph.protocol.placement import Wish
from taskgraph.protocol.readiness import are_tasks_in_sync, is_registered, is_worker_in_sync
from taskgraph.protocol.records import WorkersRecord

WISHES = {0: Wish("a", ("b",)), 1: Wish("b", ("a",))}


@pytest.fixture
def world() -> World:
    """Task 0 is led by a and backed by b, task 1 the other way round; c has nothing."""
    world = World("a", "b", "c")
    for task, (primary, backup) in enumerate(("ab", "ba")):
        world.first(task, primary)
        assert world.admit(task, primary, backup).succeeded
    return world


def ready(world: World, wishes: dict[int, Wish]) -> str:
    return "".join(node for node in "abc" if are_tasks_in_sync(world.view(), node, wishes))


def test_all_wanted_replicas_are_in_sync(world: World) -> None:
    assert ready(world, WISHES) == "abc", "nothing is wanted of c"


def test_node_that_copies_a_state_is_not_ready(world: World) -> None:
    """c is to replace b as the backup of task 0: until then a has one in sync, and is not as safe as it will be."""
    wishes = {**WISHES, 0: Wish("a", ("c",))}
    assert ready(world, wishes) == ""
    assert world.admit(0, "a", "c").succeeded
    assert ready(world, wishes) == "abc"


def test_node_of_another_task_stays_ready(world: World) -> None:
    assert ready(world, {**WISHES, 2: Wish("c", ())}) == "ab"


def test_lost_backup(world: World) -> None:
    assert world.evict(0, "a", "b").succeeded
    assert ready(world, WISHES) == "c"
    assert ready(world, {0: Wish("a", ()), 1: Wish("b", ("a",))}) == "abc", "no more are possible"


def test_job_that_has_not_begun() -> None:
    assert ready(World("a", "b"), WISHES) == "abc"


def test_leaving_nodes_are_not_registered(world: World) -> None:
    assert is_registered(world.view(), "a") and not is_registered(world.view(), "d")
    world.put(world.keys.node("a"), node_record("a", draining=True).to_bytes())
    world.die("b")
    assert [node for node in "abc" if is_registered(world.view(), node)] == ["c"]


def test_worker_is_in_the_view(world: World) -> None:
    assert is_worker_in_sync(world.view(), "c"), "the job has not begun"
    record = WorkersRecord(number=1, lineage=0, workers=(("a", 1), ("b", 1)))
    world.put(world.keys.workers, record.to_bytes())
    assert [node for node in "abc" if is_worker_in_sync(world.view(), node)] == ["a", "b"]
