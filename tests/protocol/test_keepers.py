"""Shared state: who keeps it, what counts as state then, and that an epoch commits only if it is equal."""

from __future__ import annotations

import pytest
from protocol_kit import World, report

from taskgraph.protocol import transactions
from taskgraph.protocol.checkpointing import files_needed
from taskgraph.protocol.commit import Commit, Leader, Restart, UnequalSharedState
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.shared import holds_state, keeper_of

S = Stamp(1, 0)
THETA = ("theta",)
ONE, OTHER = b"1" * 16, b"2" * 16


def begin(world: World, task: int, node: str, *, shared: tuple[str, ...] = (), stateful: bool = False) -> None:
    txn = transactions.take_over_from_nothing(
        world.view(), task, node, world.revisions[node], stateful=stateful, shared=shared, writer=world.writer()
    )
    assert world.run(txn).succeeded


@pytest.fixture
def world() -> World:
    """Task 0 shares nothing; 1 and 3 share one attribute, 2 shares two."""
    world = World("a", "b")
    for task, shared in enumerate(((), THETA, ("bias", "theta"), THETA)):
        begin(world, task, "a", shared=shared, stateful=task == 0)
    return world


def test_lowest_task_with_the_same_names_keeps(world: World) -> None:
    assert [keeper_of(world.view(), task) for task in range(4)] == [0, 1, 2, 1]


def test_keeper_is_not_known_before_all_lower_tasks_began() -> None:
    world = World("a")
    begin(world, 2, "a", shared=THETA)
    assert keeper_of(world.view(), 2) is None
    begin(world, 1, "a", shared=THETA)
    assert keeper_of(world.view(), 2) is None, "task 0 may share it, too"
    begin(world, 0, "a")
    assert keeper_of(world.view(), 2) == 1


def test_takeovers_keep_the_names(world: World) -> None:
    world.admit(3, "a", "b")
    world.take_over(3, "b")
    record = world.view().primaries[3].record
    assert (record.node, record.shared) == ("b", THETA)
    assert keeper_of(world.view(), 3) == 1


def test_only_the_keeper_holds_state_that_is_all_shared(world: World) -> None:
    assert [holds_state(world.view(), task) for task in range(4)] == [True, True, True, False]
    assert files_needed(world.view(), 4) == {0, 1, 2}
    assert not holds_state(world.view(), 4), "it has no primary"


def test_a_task_without_state_of_its_own_begins_from_nothing_in_any_epoch(world: World) -> None:
    world.commit()
    world.die("a")
    for task in (0, 1, 2):
        with pytest.raises(LookupError, match="no members left"):
            begin(world, task, "b", shared=world.view().primaries[task].record.shared, stateful=task == 0)
    begin(world, 3, "b", shared=THETA)


def led(world: World, *shared: bytes, terms: dict[int, int] | None = None, ahead: int = 0) -> Leader:
    leader = Leader(4, 10, ahead=ahead)
    stamp = world.view().stamp
    assert stamp is not None
    leader.begin(stamp)
    for task, digest in enumerate(shared):
        leader.receive_reports(report(task, stamp, shared=digest, term=(terms or {}).get(task, 1)))
    return leader


def test_equal_digests_commit_and_groups_may_differ(world: World) -> None:
    assert led(world, b"", ONE, OTHER, ONE).decide(world.view()) == Commit(finished=False)


def test_unequal_digests_fail_the_job(world: World) -> None:
    assert led(world, b"", ONE, ONE, OTHER).decide(world.view()) == UnequalSharedState((1, 3))


def test_unequal_digests_after_a_takeover_restart_the_epoch(world: World) -> None:
    world.commit()
    world.admit(3, "a", "b")
    world.take_over(3, "b")
    leader = led(world, b"", ONE, ONE, OTHER, terms={3: 2})
    assert isinstance(leader.decide(world.view()), Restart)


def test_an_epoch_ahead_with_unequal_digests_waits_for_its_turn(world: World) -> None:
    leader = led(world, b"", ONE, OTHER, ONE, ahead=4)
    for task, digest in enumerate((b"", ONE, ONE, OTHER)):
        leader.receive_reports(report(task, Stamp(1, 1), shared=digest))
    assert leader.decide(world.view()) == Commit(finished=False, epochs=1)
    world.commit()
    at = world.view().stamp
    assert at is not None
    leader.begin(at)
    assert leader.decide(world.view()) == UnequalSharedState((1, 3))
