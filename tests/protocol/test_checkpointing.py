"""Which boundaries become checkpoints, when one is complete, and how a job goes back to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol_kit import World, boundary, node_record

from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.checkpointing import CheckpointCollector, files_needed, is_due, is_open, select_sparse
from taskgraph.protocol.kv import Txn
from taskgraph.protocol.messages import Stamp, WrittenFile
from taskgraph.protocol.records import CheckpointRecord, JobStatus, MemberRecord, StatusRecord
from taskgraph.protocol.takeover import TakeoverMove, succession
from taskgraph.protocol.view import JobView


def record(epoch: int, attempt: int = 1, before: tuple[str, ...] = ()) -> CheckpointRecord:
    return CheckpointRecord(epoch=epoch, attempt=attempt, name=f"c{epoch}", before=before)


def written(epoch: int, task: int, attempt: int = 1) -> WrittenFile:
    return WrittenFile(Stamp(attempt, epoch), task, 100, "d")


@pytest.fixture
def world() -> World:
    """Tasks 0 (without state) and 1 (with state) on "a", "b" in sync; 2 on "a", 3 on "e", alone; "c" holds nothing.

    Epoch 6 is at work.
    """
    world = World("a", "b", "c", "e")
    for task in (0, 1):
        world.first(task, "a", stateful=task == 1)
        world.admit(task, "a", "b")
    world.first(2, "a")
    world.first(3, "e")
    for _ in range(6):
        world.commit()
    return world


def advance(world: World, to: CheckpointRecord, view: JobView | None = None) -> bool:
    seen = view or world.view()
    return world.run(
        transactions.advance_checkpoint(seen, to, primary_revision=seen.primaries[0].mod_revision)
    ).succeeded


def lose_everybody(world: World) -> None:
    world.die("a")
    world.die("b")


def back(world: World, to: CheckpointRecord, view: JobView | None = None, *, task: int = 1) -> Txn:
    return transactions.roll_back(
        view or world.view(), task, "c", world.revisions["c"], to=to, stateful=True, writer=world.writer()
    )


# -- what becomes a checkpoint ------------------------------------------------------------------------------------


def test_due_every_n_epochs_except_0(world: World) -> None:
    view = world.view()
    assert [e for e in range(7) if is_due(view, Stamp(1, e), 3)] == [3, 6]


def test_boundary_before_the_checkpoint_is_not_due(world: World) -> None:
    advance(world, record(3))
    assert [e for e in range(7) if is_due(world.view(), Stamp(1, e), 1)] == [4, 5, 6]


def test_tasks_with_state_and_task_0_have_files(world: World) -> None:
    assert files_needed(world.view(), 2) == {0, 1}
    assert files_needed(world.view(), 5) is None, "nobody knows whether task 4 has state"
    without = World("a")
    for task in (0, 1):
        without.first(task, "a", stateful=False)
    assert files_needed(without.view(), 2) == {0}


def test_complete_with_all_files_of_a_boundary(world: World) -> None:
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(6, 0))
    collected.note_file(written(3, 1))
    assert collected.find_complete(view) is None
    collected.note_file(written(3, 0))
    assert collected.find_complete(view) == (Stamp(1, 3), (written(3, 0), written(3, 1)))
    collected.note_file(written(6, 1))
    assert collected.find_complete(view) == (Stamp(1, 6), (written(6, 0), written(6, 1)))
    advance(world, record(6))
    assert collected.find_complete(world.view()) is None


def test_newest_complete_boundary_is_taken(world: World) -> None:
    """Boundaries come faster than checkpoints: once 768 of 2,500 epochs became one."""
    collected = CheckpointCollector(2)
    for epoch in (3, 4, 5):
        for task in (0, 1):
            collected.note_file(written(epoch, task))
    assert collected.find_complete(world.view()) == (Stamp(1, 5), (written(5, 0), written(5, 1)))
    advance(world, record(5))
    assert collected.find_complete(world.view()) is None and collected.give_up(world.view()) == {}, "nothing failed"


def test_files_of_two_attempts_make_no_checkpoint(world: World) -> None:
    collected = CheckpointCollector(2)
    collected.note_file(written(6, 0, attempt=1))
    collected.note_file(written(6, 1, attempt=2))
    assert collected.find_complete(world.view()) is None


def test_boundary_waits_until_read_as_committed(world: World) -> None:
    collected = CheckpointCollector(2)
    for task in (0, 1):
        collected.note_file(written(7, task))
    assert collected.find_complete(world.view()) is None
    world.commit()
    assert collected.find_complete(world.view()) is not None


def test_late_reports_are_bounded(world: World) -> None:
    collected = CheckpointCollector(2)
    for epoch in range(1000):
        collected.note_file(written(epoch, 0))
        collected.find_complete(world.view())
    assert len(collected._files) <= 16


def test_reports_without_complete_are_bounded(world: World) -> None:
    """The leader waits for the place, and does not call `complete`."""
    collected = CheckpointCollector(2)
    for _ in range(1000):
        world.commit()
    for epoch in range(1, 1000):
        for task in (0, 1):
            collected.note_file(written(epoch, task))
    assert len(collected._files) <= 32
    found = collected.find_complete(world.view())
    assert found is not None and found[0].epoch > 990


def test_nodes_leave_out_the_same_boundaries() -> None:
    """One task reported the newest boundaries, the other one earlier ones."""
    assert select_sparse((Stamp(1, epoch) for epoch in (7, 1, 6, 5, 3, 2)), 4) == [(1, 2), (1, 5), (1, 6), (1, 7)]
    for every in (1, 10, 12):
        for first, lag in ((1, 5), (77, 40), (1000, 1000), (3, 5000)):
            of_late = [Stamp(1, index * every) for index in range(first, first + 2 * lag)]
            both = set(select_sparse(of_late, 16)) & set(select_sparse(of_late[:lag], 16))
            assert max(both).epoch >= of_late[lag - 1].epoch - lag // 2 * every


def test_late_and_early_reports_make_a_checkpoint(world: World) -> None:
    collected = CheckpointCollector(2)
    for _ in range(100):
        world.commit()
    view = world.view()
    for epoch in range(1, 101):
        collected.note_file(written(epoch, 0))
        assert collected.find_complete(view) is None and collected.give_up(view) == {}
    for epoch in (7, 16, 31, 32, 48):
        collected.note_file(written(epoch, 1))
    assert collected.give_up(view) == {}, "none of them failed, and they go with the one that is whole"
    assert collected.find_complete(view) == (Stamp(1, 48), (written(48, 0), written(48, 1)))
    advance(world, record(48))
    collected.note_file(written(51, 1))
    assert collected.give_up(world.view()) == {}, "both wrote that, and another leader may find it whole"
    collected.note_file(unwritten(57, 1))
    assert collected.give_up(world.view()) == {Stamp(1, 56): None, Stamp(1, 57): 1}
    assert len(collected._left_out) < 100


def unwritten(epoch: int, task: int) -> WrittenFile:
    return WrittenFile(Stamp(1, epoch), task, 0, "")


def test_failed_write_gives_the_boundary_up(world: World) -> None:
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(3, 0))
    assert collected.give_up(view) == {}, "the other may still be being written"
    collected.note_file(unwritten(3, 1))
    assert collected.give_up(view) == {Stamp(1, 3): 1}
    assert collected.give_up(view) == {}
    for task in (0, 1):  # by a primary before, that is a zombie
        collected.note_file(written(3, task))
    assert collected.find_complete(view) is None
    assert collected.give_up(view) == {Stamp(1, 3): 1}, "there is something to remove again"
    for task in (0, 1):
        collected.note_file(written(6, task))
    assert collected.give_up(view) == {}
    assert collected.find_complete(view) == (Stamp(1, 6), (written(6, 0), written(6, 1)))


def test_file_of_a_successor_counts(world: World) -> None:
    collected = CheckpointCollector(2)
    collected.note_file(written(3, 0))
    collected.note_file(unwritten(3, 1))
    collected.note_file(written(3, 1))
    assert collected.give_up(world.view()) == {}
    assert collected.find_complete(world.view()) == (Stamp(1, 3), (written(3, 0), written(3, 1)))


def test_skipped_boundary_is_given_up(world: World) -> None:
    """The task had another primary then."""
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(3, 0))
    collected.note_file(written(6, 0))
    assert collected.give_up(view) == {}
    collected.note_file(written(6, 1))
    assert collected.give_up(view) == {}, "it goes with the other, which is whole"
    assert collected.find_complete(view) == (Stamp(1, 6), (written(6, 0), written(6, 1)))


def test_incomplete_boundary_is_given_up(world: World) -> None:
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(3, 0))
    collected.note_file(written(6, 1))
    assert collected.give_up(view) == {Stamp(1, 3): None}, "nothing failed"
    collected.note_file(unwritten(3, 1))
    assert collected.give_up(view) == {Stamp(1, 3): 1}


def test_boundary_of_a_later_leader_is_not_given_up(world: World) -> None:
    """An old leader removed the files of a checkpoint that its successor completed."""
    collected, after, view = CheckpointCollector(2), CheckpointCollector(2), world.view()
    collected.note_file(written(6, 0))
    collected.note_file(unwritten(6, 1))
    for task in (0, 1):
        after.note_primary(task, Stamp(1, 6))  # and their primaries wrote what these could not
        after.note_file(written(6, task))
    assert after.find_complete(view) == (Stamp(1, 6), (written(6, 0), written(6, 1)))
    assert collected.give_up(view) == {}
    world.commit()
    assert collected.give_up(world.view()) == {Stamp(1, 6): 1}
    late = CheckpointCollector(2)
    late.note_primary(0, Stamp(1, 7))
    for task in (0, 1):
        late.note_file(written(6, task))
    assert late.find_complete(world.view()) is None, "so it is nothing to leaders after it"


def test_complete_boundary_is_not_given_up(world: World) -> None:
    """The manifest may not be written yet."""
    collected, view = CheckpointCollector(2), world.view()
    for task in (0, 1):
        collected.note_file(written(3, task))
        collected.note_file(unwritten(5, task))
    collected.note_file(unwritten(3, 1))  # by another primary of the same task: the file is there
    assert collected.give_up(view) == {Stamp(1, 5): 0}
    assert collected.find_complete(view) == (Stamp(1, 3), (written(3, 0), written(3, 1)))


def test_new_primary_writes_no_earlier_boundary(world: World) -> None:
    """Its files may be removed."""
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(3, 1))
    assert collected.blocking_task(view, Stamp(1, 3)) is None and collected.give_up(view) == {}
    collected.note_primary(0, Stamp(1, 4))
    assert collected.blocking_task(view, Stamp(1, 3)) == 0
    assert collected.give_up(view) == {Stamp(1, 3): None}, "nothing failed"
    assert [collected.blocking_task(view, Stamp(1, epoch)) for epoch in (4, 5)] == [None, None], (
        "it begins with that one"
    )
    assert collected.blocking_task(view, Stamp(2, 3)) is None, "of after a roll-back"
    collected.note_file(written(3, 0))  # by the primary before, which is a zombie: its files are gone by now
    assert collected.find_complete(view) is None and collected.give_up(view) == {}


def test_report_before_a_new_primary_counts(world: World) -> None:
    collected, view = CheckpointCollector(2), world.view()
    collected.note_file(written(3, 1))
    collected.note_primary(1, Stamp(1, 6))
    assert collected.blocking_task(view, Stamp(1, 3)) is None and collected.give_up(view) == {}
    collected.note_file(written(3, 0))
    assert collected.find_complete(view) == (Stamp(1, 3), (written(3, 0), written(3, 1)))
    collected.note_file(unwritten(4, 1))
    assert collected.blocking_task(view, Stamp(1, 4)) == 1


def test_complete_boundary_survives_many_reports(world: World) -> None:
    """Its files were once removed while its manifest was written."""
    collected, view = CheckpointCollector(2), world.view()
    for task in (0, 1):
        collected.note_file(written(3, task))
    collected.note_primary(1, Stamp(1, 6))
    whole = collected.find_complete(view)
    assert whole is not None and whole[0] == Stamp(1, 3)
    for epoch in range(4, 100):
        collected.note_file(written(epoch, 0))
    assert collected.blocking_task(view, Stamp(1, 3)) is None
    assert collected.find_complete(view) is None, "that failed; it is known no more that it was whole"
    assert collected.blocking_task(view, Stamp(1, 3)) == 1


def test_undone_boundary_never_becomes_a_checkpoint(world: World) -> None:
    advance(world, record(3))
    collected = CheckpointCollector(2)
    lose_everybody(world)
    assert world.run(back(world, record(3))).succeeded
    assert collected.blocking_task(world.view(), Stamp(1, 6)) is not None
    assert collected.blocking_task(world.view(), Stamp(2, 6)) is None


def test_given_up_boundaries_are_bounded(world: World) -> None:
    collected = CheckpointCollector(2)
    for epoch in range(1, 1000):
        world.commit()
        collected.note_file(unwritten(epoch, 0))
        assert list(collected.give_up(world.view())) == [Stamp(1, epoch)]
    assert len(collected._files) + len(collected._given_up) < 40


def test_files_of_undone_epochs_do_not_count(world: World) -> None:
    advance(world, record(3))
    collected = CheckpointCollector(2)
    for task in (0, 1):
        collected.note_file(written(6, task))
    lose_everybody(world)
    assert world.run(back(world, record(3))).succeeded
    assert not is_open(world.view(), Stamp(1, 6))
    assert is_open(world.view(), Stamp(2, 6))
    assert collected.find_complete(world.view()) is None


# -- the pointer --------------------------------------------------------------------------------------------------


def test_pointer_only_advances(world: World) -> None:
    assert advance(world, record(3))
    for no_step in (record(3), record(2), record(7)):
        with pytest.raises(LookupError, match="cannot be the checkpoint"):
            advance(world, no_step)
    assert advance(world, record(6))


POINTER_FENCES: dict[str, Callable[[World], object]] = {
    "another leader": lambda w: w.take_over(0, "b"),
    "another pointer": lambda w: advance(w, record(4)),
    "a roll-back to the same checkpoint": lambda w: (lose_everybody(w), w.run(back(w, record(3)))),
}


@pytest.mark.parametrize("change", POINTER_FENCES.values(), ids=POINTER_FENCES.keys())
def test_pointer_is_fenced(world: World, change: Callable[[World], object]) -> None:
    advance(world, record(3))
    view = world.view()
    change(world)
    assert not advance(world, record(6), view)


def test_pointer_never_points_to_an_undone_boundary(world: World) -> None:
    """Also after an epoch with the same number commits again."""
    advance(world, record(3))
    lose_everybody(world)
    assert world.run(back(world, record(3))).succeeded
    for _ in range(3):
        assert world.commit().succeeded
    with pytest.raises(LookupError, match="boundary 5 of attempt 1 cannot be the checkpoint"):
        advance(world, record(5))
    assert advance(world, record(5, attempt=2))


def test_pointer_advances_despite_commits(world: World) -> None:
    view = world.view()
    world.commit()
    world.restart()
    assert advance(world, record(6), view)


# -- going back ---------------------------------------------------------------------------------------------------


def test_roll_back_begins_an_attempt_at_the_checkpoint(world: World) -> None:
    advance(world, record(3))
    world.restart()
    lose_everybody(world)
    result = world.run(back(world, record(3)))
    assert result.succeeded
    taken = transactions.decode_takeover(result, world.view(), 1)
    assert (taken.term, taken.epoch, taken.attempt, taken.lineage, set(taken.members)) == (2, 3, 3, 3, {"c"})
    view = world.view()
    assert view.is_checkpointed
    assert view.primaries[1].record.failovers == 0, "it is a restart, and no backup took over"
    assert not view.term_changed(), "the takeover is no reason to restart the attempt it began"
    world.commit(view=view)
    at = world.view().epoch
    assert at is not None
    assert (at.record.epoch, at.record.attempt, at.record.lineage, at.record.base) == (4, 3, 3, 3)


def test_commit_after_a_roll_back_fails(world: World) -> None:
    advance(world, record(3))
    view = world.view()
    lose_everybody(world)
    assert world.run(back(world, record(3))).succeeded
    assert not world.commit(view=view).succeeded
    assert not world.restart(view=view).succeeded


def test_two_lost_tasks_roll_back_once(world: World) -> None:
    advance(world, record(3))
    lose_everybody(world)
    view = world.view()
    assert world.run(back(world, record(3), view, task=1)).succeeded
    assert not world.run(back(world, record(3), view, task=2)).succeeded
    with pytest.raises(LookupError, match="the job is at epoch 3"):
        back(world, record(3), task=2)
    txn = transactions.take_over_from_nothing(world.view(), 2, "c", world.revisions["c"], stateful=True, writer="w")
    assert world.run(txn).succeeded
    assert world.view().stamp == Stamp(2, 3)


ROLL_BACK_FENCES: dict[str, Callable[[World], object]] = {
    "a member is back": lambda w: w.put(w.keys.node("b"), node_record("b").to_bytes()),
    "a member changed": lambda w: w.put(w.keys.member(1, "b"), MemberRecord(until=6).to_bytes()),
    "another was quicker": lambda w: w.run(back(w, record(3))),
    "own lease gone": lambda w: w.delete(w.keys.node("c")),
    "an epoch committed": lambda w: w.commit(),
    "another checkpoint": lambda w: advance(w, record(6)),
    "the job ended": lambda w: w.put(w.keys.status, StatusRecord(state=JobStatus.FAILED).to_bytes()),
}


@pytest.mark.parametrize("change", ROLL_BACK_FENCES.values(), ids=ROLL_BACK_FENCES.keys())
def test_roll_back_is_fenced(world: World, change: Callable[[World], object]) -> None:
    advance(world, record(3))
    lose_everybody(world)
    txn = back(world, record(3))
    change(world)
    assert not world.run(txn).succeeded


def test_finished_job_runs_again_after_a_roll_back(world: World) -> None:
    advance(world, record(3))
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    lose_everybody(world)
    late = back(world, record(3))
    assert world.run(back(world, record(3))).succeeded
    assert world.view().running
    assert not world.run(late).succeeded


def test_collected_job_does_not_roll_back(world: World) -> None:
    advance(world, record(3))
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    lose_everybody(world)
    txn = back(world, record(3))
    world.put(world.keys.collected, b"{}")
    assert not world.run(txn).succeeded


@pytest.mark.parametrize("state", [JobStatus.FAILED, JobStatus.CANCELLED])
def test_failed_job_does_not_roll_back(world: World, state: JobStatus) -> None:
    advance(world, record(3))
    lose_everybody(world)
    world.put(world.keys.status, StatusRecord(state=state).to_bytes())
    with pytest.raises(LookupError, match=f"the job {state}"):
        back(world, record(3))


def test_roll_back_needs_a_checkpoint(world: World) -> None:
    lose_everybody(world)
    with pytest.raises(LookupError, match="no checkpoint"):
        back(world, record(3))


def test_roll_back_may_use_an_earlier_checkpoint(world: World) -> None:
    advance(world, record(3))
    advance(world, record(6, before=("c3",)))
    lose_everybody(world)
    assert world.run(back(world, record(3))).succeeded
    view = world.view()
    assert view.checkpoint is not None
    assert (view.checkpoint.record.name, view.stamp) == ("c3", Stamp(2, 3))


def decide(view: JobView, *, stateful: bool = True, wished: bool = True) -> TakeoverMove:
    return succession(view, 1, "c", suspects=set("ab"), gone=set("ab"), wished=wished, stateful=stateful).move


def test_wished_node_rolls_back(world: World) -> None:
    advance(world, record(3))
    assert decide(world.view()) is TakeoverMove.NOTHING
    lose_everybody(world)
    assert decide(world.view()) is TakeoverMove.ROLL_BACK
    assert decide(world.view(), wished=False) is TakeoverMove.NOTHING
    assert decide(world.view(), stateful=False) is TakeoverMove.FROM_NOTHING


def test_undone_eviction_makes_no_heir(world: World) -> None:
    """ "until 6" was written, the job went back to 3: boundaries 4 to 6 are others now."""
    advance(world, record(3))
    world.evict(0, "a", "b")
    assert world.view().in_sync(0) == ["a", "b"]
    behind = world.view()
    world.die("e")
    assert world.run(back(world, record(3), task=3)).succeeded
    for _ in range(3):
        view = world.view()
        assert "b" not in view.in_sync(0)
        with pytest.raises(LookupError, match="was evicted"):
            world.take_over(0, "b", view=view)
        assert not world.take_over(0, "b", view=behind).succeeded
        world.commit()


def test_eviction_after_a_roll_back_counts(world: World) -> None:
    """Otherwise the last replica would count as lost at once."""
    advance(world, record(3))
    world.die("e")
    assert world.run(back(world, record(3), task=3)).succeeded
    (primary,) = world.view().in_sync(3)
    assert world.admit(3, primary, "a").succeeded
    assert world.evict(3, primary, "a").succeeded
    view = world.view()
    assert view.epoch is not None and view.epoch.record.lineage > 0
    assert "a" in view.in_sync(3) and view.holds(view.members_of(3)["a"].record)
    assert world.take_over(3, "a").succeeded


def test_old_view_takes_over_at_the_checkpoint(world: World) -> None:
    advance(world, record(3))
    view = world.view()
    world.die("e")
    assert world.run(back(world, record(3), task=3)).succeeded
    result = world.take_over(1, "b", view=view)
    assert result.succeeded
    taken = transactions.decode_takeover(result, view, 1)
    assert (taken.epoch, taken.attempt, taken.lineage) == (3, 2, 2)


# -- what replicas hold -------------------------------------------------------------------------------------------


def test_roll_back_drops_undone_boundaries() -> None:
    held = Boundaries()
    held.store(boundary(6), committed=True)
    held.store(boundary(7), committed=False)
    held.roll_back(2)
    assert (held.committed, held.pending) == (None, ())
    held.store(boundary(7), committed=False)
    held.store(boundary(6), committed=True)
    assert (held.committed, held.pending) == (None, ()), "nor of what comes late"
    held.store(boundary(3, attempt=2), committed=True)
    held.store(boundary(4, attempt=2), committed=False)
    assert held.note_committed(4) == boundary(4, attempt=2)


def test_boundaries_after_the_roll_back_stay() -> None:
    held = Boundaries()
    held.store(boundary(6), committed=True)
    held.store(boundary(7, attempt=2), committed=False)
    held.roll_back(2)
    assert held.pending == (boundary(7, attempt=2),)
    held.roll_back(1)
    assert held.pending == (boundary(7, attempt=2),)
    held.store(boundary(3, attempt=2), committed=True)  # what came back, from a primary that read of it first
    held.roll_back(2)
    assert held.committed == boundary(3, attempt=2)
