"""Who tries to take over from whom, and when nobody may."""

from __future__ import annotations

import pytest
from protocol_kit import World

from taskgraph.protocol.records import CheckpointRecord
from taskgraph.protocol.takeover import Succession, TakeoverMove, find_stranded_task, sole_copies, succession
from taskgraph.protocol.view import JobView

NOTHING = Succession(TakeoverMove.NOTHING)


def decide(
    view: JobView,
    me: str,
    *,
    suspects: str = "",
    gone: str = "",
    wished: bool = False,
    stateful: bool = True,
    dropped: bool = False,
) -> Succession:
    return succession(
        view, 0, me, suspects=set(suspects), gone=set(gone), wished=wished, stateful=stateful, dropped=dropped
    )


@pytest.fixture
def world() -> World:
    """Task 0 on "a", with "c" and then "b" admitted; "d" holds nothing."""
    world = World("a", "b", "c", "d")
    world.first(0, "a")
    world.admit(0, "a", "c")
    world.admit(0, "a", "b")
    return world


def test_unsuspected_primary_stays(world: World) -> None:
    for me in "abcd":
        assert decide(world.view(), me, wished=True) == NOTHING
        assert decide(world.view(), me, suspects="b") == NOTHING


def test_members_take_over_in_order_of_admission(world: World) -> None:
    assert decide(world.view(), "c", suspects="a") == Succession(TakeoverMove.TAKE_OVER, 0)
    assert decide(world.view(), "b", suspects="a") == Succession(TakeoverMove.TAKE_OVER, 1)
    assert decide(world.view(), "b", suspects="ac") == Succession(TakeoverMove.TAKE_OVER, 0)


def test_other_nodes_leave_takeovers_to_members(world: World) -> None:
    assert decide(world.view(), "d", suspects="a", wished=True) == NOTHING


def test_primary_does_not_succeed_itself(world: World) -> None:
    assert decide(world.view(), "a", suspects="a") == NOTHING


def test_primary_whose_work_was_dropped_succeeds_itself(world: World) -> None:
    """Else nobody would: it lives, so nobody else suspects it."""
    assert decide(world.view(), "a", dropped=True) == Succession(TakeoverMove.TAKE_OVER, 0)
    for other in "bcd":
        assert decide(world.view(), other, wished=True, dropped=True) == NOTHING
    world.take_over(0, "a")
    view = world.view()
    assert view.is_primary(0, "a", 2) and view.in_sync(0) == ["a", "c", "b"]


def test_evicted_heir_keeps_the_state(world: World) -> None:
    world.evict(0, "a", "b")
    world.take_over(0, "b")
    world.evict(0, "b", "a")
    world.evict(0, "b", "c")
    world.commit()
    assert world.view().in_sync(0) == ["b"]
    assert decide(world.view(), "d", suspects="b", wished=True) == NOTHING


def test_suspicion_of_all_members_is_not_enough_to_start_without_them(world: World) -> None:
    world.commit()
    assert decide(world.view(), "d", suspects="abc", gone="ab", wished=True) == NOTHING
    # Declared gone, but a node key is still there: the transaction would refuse.
    assert decide(world.view(), "d", suspects="abc", gone="abc", wished=True) == NOTHING


def test_state_without_members_is_lost(world: World) -> None:
    world.commit()
    for node in "abc":
        world.die(node)
    assert decide(world.view(), "d", suspects="abc", gone="abc", wished=True).move is TakeoverMove.LOST
    assert decide(world.view(), "d", suspects="abc", gone="abc", wished=False) == NOTHING


@pytest.mark.parametrize(
    ("epoch", "move"), [(1, TakeoverMove.ROLL_BACK), (2, TakeoverMove.ROLL_BACK), (3, TakeoverMove.LOST)]
)
def test_roll_back_needs_a_committed_checkpoint(world: World, epoch: int, move: TakeoverMove) -> None:
    """That of the last committed boundary is one: nothing is computed again then."""
    world.commit()
    world.commit()
    world.put(world.keys.checkpoint, CheckpointRecord(epoch=epoch, attempt=1, name="x").to_bytes())
    for node in "abc":
        world.die(node)
    assert decide(world.view(), "d", suspects="abc", gone="abc", wished=True).move is move


def test_task_without_state_starts_anew(world: World) -> None:
    world.commit()
    for node in "abc":
        world.die(node)
    view = world.view()
    assert decide(view, "d", suspects="abc", gone="abc", wished=True, stateful=False).move is TakeoverMove.FROM_NOTHING


def test_in_epoch_0_nothing_is_lost(world: World) -> None:
    for node in "abc":
        world.die(node)
    assert decide(world.view(), "d", suspects="abc", gone="abc", wished=True).move is TakeoverMove.FROM_NOTHING


def test_fresh_task_is_started_by_whoever_is_wished() -> None:
    world = World("a", "b")
    assert decide(world.view(), "a", wished=True).move is TakeoverMove.FROM_NOTHING
    assert decide(world.view(), "b", wished=False) == NOTHING


def test_evicted_member_may_take_over_as_long_as_it_holds_the_committed_boundary(world: World) -> None:
    world.evict(0, "a", "c")
    assert decide(world.view(), "c", suspects="a") == Succession(TakeoverMove.TAKE_OVER, 0)
    world.commit()
    assert decide(world.view(), "c", suspects="a") == NOTHING
    assert decide(world.view(), "b", suspects="a") == Succession(TakeoverMove.TAKE_OVER, 0)


def test_job_that_was_not_submitted_has_no_successors() -> None:
    assert decide(JobView("none"), "a", wished=True) == NOTHING


def test_lost_state_is_reported_without_an_heir(world: World) -> None:
    """No seat is left (no CUDA device, all nodes leaving): the first node by name says what became of it."""
    for node in "abc":
        world.die(node)
    view = world.view()

    def unseated(me: str, *, stateful: bool = True) -> Succession:
        return succession(
            view, 0, me, suspects=set("abc"), gone=set("abc"), wished=False, stateful=stateful, unseated=me == "d"
        )

    assert unseated("d") == NOTHING, "epoch 0: a node that may hold it makes it anew"
    world.commit()
    view = world.view()
    assert unseated("d").move is TakeoverMove.LOST
    assert unseated("e") == NOTHING
    assert unseated("d", stateful=False) == NOTHING, "nothing is lost: it waits for a node that may hold it"


def test_gone_member_counts_for_nothing(world: World) -> None:
    """Its key of a member stays in a job that has finished: no commit follows that ends what it holds."""
    assert sole_copies(world.view(), 1, "a") == []
    for left in "bc":
        world.evict(0, "a", left)
        assert sole_copies(world.view(), 1, "a") == []
        world.die(left)
    assert sole_copies(world.view(), 1, "a") == [0]
    assert sole_copies(world.view(), 1, "b") == []


def test_stranded_task_is_found(world: World) -> None:
    world.evict(0, "a", "c")
    assert find_stranded_task(world.view()) is None, "its primary lives"
    world.die("a")
    assert find_stranded_task(world.view()) is None, "another member stays in sync"
    world.die("b")
    assert find_stranded_task(world.view()) == 0, "who can was evicted until the committed boundary"
    world.take_over(0, "c")
    assert find_stranded_task(world.view()) is None


def test_task_without_heirs_is_not_stranded(world: World) -> None:
    """It is lost, which another transaction decides: no commit waits for who cannot come."""
    for node in "abc":
        world.die(node)
    assert find_stranded_task(world.view()) is None
