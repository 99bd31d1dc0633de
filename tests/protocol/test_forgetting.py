"""Of which nodes that are gone nobody has to know that any more."""

from __future__ import annotations

import pytest
from protocol_kit import World

from taskgraph.protocol import transactions
from taskgraph.protocol.fatal import fatal
from taskgraph.protocol.forgetting import forgettable
from taskgraph.protocol.records import EpochRecord, ForgottenRecord, GoneRecord, RanCode


@pytest.fixture
def world() -> World:
    """Task 0 is led by a and backed by b; its epoch 3 is at work."""
    world = World("a", "b")
    world.first(0, "a")
    assert world.admit(0, "a", "b").succeeded
    at(world, 3)
    return world


def at(world: World, epoch: int) -> None:
    world.put(world.keys.epoch, EpochRecord(epoch=epoch, attempt=1).to_bytes())


def end(world: World, node: str, record: GoneRecord | None = None) -> None:
    world.delete(world.keys.node(node))
    record = record or GoneRecord(reason="it left")
    assert world.run(transactions.declare_gone(world.view(), node, record)).succeeded


def forget(world: World, *nodes: str) -> bool:
    view = world.view()
    revision = view.primaries[0].mod_revision
    return world.run(transactions.forget_gone(view, nodes, primary_revision=revision, writer="a:1")).succeeded


def test_oldest_records_are_forgotten(world: World) -> None:
    for node in ("z", "x", "y", "w"):
        end(world, node)
    assert forgettable(world.view(), 0) == ["z", "x", "y", "w"]
    assert forgettable(world.view(), 3) == ["z"]
    assert forgettable(world.view(), 4) == forgettable(world.view(), 5) == []


def test_named_node_is_not_forgotten(world: World) -> None:
    """A named node may still be waited for."""
    end(world, "a")
    end(world, "b")
    end(world, "x")
    assert forgettable(world.view(), 0) == ["x"]


def test_registered_node_is_not_forgotten(world: World) -> None:
    """Its key stays until its launcher revokes the lease."""
    assert world.run(transactions.declare_gone(world.view(), "b", GoneRecord(reason="killed"))).succeeded
    world.delete(world.keys.member(0, "b"))
    assert forgettable(world.view(), 0) == []
    world.delete(world.keys.node("b"))
    assert forgettable(world.view(), 0) == ["b"]


@pytest.mark.parametrize(
    "record",
    [
        GoneRecord(reason="exited with code 11", ran=(RanCode("send", 0, 3),)),
        GoneRecord(reason="exited with code 11", ran=(RanCode("send", 0, 1), RanCode("send", 1, 4))),
        GoneRecord(reason="ended its process", task=0, epoch=3),
    ],
)
def test_counted_death_is_kept_until_the_commit(world: World, record: GoneRecord) -> None:
    end(world, "x", record)
    assert forgettable(world.view(), 0) == []
    at(world, 5)
    assert forgettable(world.view(), 0) == ["x"]


def test_setup_death_is_kept_until_an_admission(world: World) -> None:
    end(world, "x", GoneRecord(reason="exited with code 11", ran=(RanCode("setup", 0, -1),)))
    assert fatal(world.view(), 1) is not None and forgettable(world.view(), 0) == []
    world.register("c")
    assert world.admit(0, "a", "c").succeeded
    assert fatal(world.view(), 1) is None and forgettable(world.view(), 0) == ["x"]


def test_intended_death_may_be_forgotten(world: World) -> None:
    end(
        world,
        "x",
        GoneRecord(reason="killed by SIGKILL", ran=(RanCode("send", 0, 3), RanCode("setup", 1, -1)), intended=True),
    )
    assert forgettable(world.view(), 0) == ["x"]


def test_forgotten_revision_only_grows(world: World) -> None:
    end(world, "x")
    end(world, "y")
    known = {node: gone.mod_revision for node, gone in world.view().gone.items()}
    assert forget(world, "y")
    view = world.view()
    assert view.forgotten is not None and view.forgotten.record == ForgottenRecord(revision=known["y"], writer="a:1")
    assert forget(world, "x")
    view = world.view()
    assert not view.gone
    assert view.forgotten is not None and view.forgotten.record.revision == known["y"]
