"""What the leader commits together where tasks work ahead of the last commit, and what it must not."""

from __future__ import annotations

import pytest
from protocol_kit import World, report, two_tasks

from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.commit import Action, Commit, KeepWaiting, Leader, Restart, SealTasks, UnequalSums
from taskgraph.protocol.messages import Encoded, Report, Stamp

FIRST = Stamp(1, 0)


def at(epoch: int, attempt: int = 1) -> Stamp:
    return Stamp(attempt, epoch)


def done(task: int, epoch: int, *, attempt: int = 1, term: int = 1, ahead: bool = True, **options: object) -> Report:
    return report(task, at(epoch, attempt), term=term, ahead=ahead, **options)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return two_tasks()


def led(ahead: int = 3, epochs: int | None = 10) -> Leader:
    leader = Leader(2, epochs, ahead=ahead)
    leader.begin(FIRST)
    return leader


def told(leader: Leader, *reports: Report) -> Leader:
    for one in reports:
        assert leader.receive_reports(one)
    return leader


def decide(leader: Leader, world: World) -> Action:
    return leader.decide(world.view())


def test_complete_epochs_commit_together(world: World) -> None:
    leader = told(led(), done(0, 0), done(1, 0), done(0, 1), done(1, 1), done(0, 2))
    assert decide(leader, world) == Commit(finished=False, epochs=2, awaited=False)


def test_waiting_task_is_noticed(world: World) -> None:
    leader = told(led(), done(0, 0), done(1, 0), done(0, 1), done(1, 1, ahead=False))
    assert decide(leader, world) == Commit(finished=False, epochs=2, awaited=True)


def test_epochs_commit_in_order(world: World) -> None:
    leader = told(led(), done(0, 0), done(0, 1), done(1, 1))
    assert decide(leader, world) == KeepWaiting((1,), "not finished with the epoch")


def test_reports_too_far_ahead_do_not_count(world: World) -> None:
    leader = led(ahead=2)
    assert leader.receive_reports(done(0, 2))
    assert not leader.receive_reports(done(0, 3))
    assert not led(ahead=0).receive_reports(done(0, 1))


def test_each_epoch_is_judged_by_its_own_sums(world: World) -> None:
    """The sums of both together would agree."""
    first = (done(0, 0, sent=5, received=3), done(1, 0, sent=3, received=5))
    second = (done(0, 1, sent=9, received=0), done(1, 1, sent=0, received=7))
    third = (done(0, 2, sent=0, received=2), done(1, 2))
    leader = told(led(), *first, *second, *third)
    assert decide(leader, world) == Commit(finished=False, epochs=1, awaited=False)


def test_report_ahead_counts_when_its_epoch_is_at_work(world: World) -> None:
    leader = told(led(), done(0, 0), done(1, 0), done(0, 1))
    world.commit()
    leader.begin(at(1))
    assert decide(leader, world) == KeepWaiting((1,), "not finished with the epoch")
    told(leader, done(1, 1))
    assert decide(leader, world) == Commit(finished=False, epochs=1, awaited=False)


def test_restart_drops_reports_ahead(world: World) -> None:
    leader = told(led(), *(done(task, epoch) for task in (0, 1) for epoch in (0, 1)))
    world.restart()
    leader.begin(at(0, attempt=2))
    assert decide(leader, world) == KeepWaiting((0, 1), "not finished with the epoch")
    assert not leader.receive_reports(done(0, 1))
    told(leader, done(0, 1, attempt=2))


def test_no_commit_after_the_last_epoch(world: World) -> None:
    reports = [done(task, epoch) for task in (0, 1) for epoch in (0, 1, 2)]
    assert decide(told(led(epochs=2), *reports), world) == Commit(finished=True, epochs=2, awaited=False)
    reports[1] = done(0, 1, finish=True)
    assert decide(told(led(), *reports), world) == Commit(finished=True, epochs=2, awaited=False)


def test_report_of_an_old_term_stops_later_epochs(world: World) -> None:
    leader = told(led(), *(done(task, epoch) for task in (0, 1) for epoch in (0, 1, 2)))
    world.die("b")
    world.take_over(1, "a")
    assert decide(leader, world) == KeepWaiting((1,), "not finished with the epoch")
    told(leader, done(1, 0, term=2))
    assert decide(leader, world) == Commit(finished=False, epochs=1, awaited=False)
    told(leader, done(1, 2, term=2))
    assert decide(leader, world) == Commit(finished=False, epochs=1, awaited=False)
    told(leader, done(1, 1, term=2))
    assert decide(leader, world) == Commit(finished=False, epochs=3, awaited=False)


def test_unequal_sums_after_a_replacement_restart(world: World) -> None:
    """A task may have received an item of the old term in epoch 1."""
    view = world.view()

    def follow() -> None:
        view.apply(world.store.revision, world.store.events_from(view.revision + 1, world.keys.root))

    world.die("b")
    world.take_over(1, "a")
    world.commit()
    follow()
    leader = led()
    leader.begin(at(1))
    told(leader, done(0, 1, received=5), done(1, 1, term=2, sent=6))
    assert isinstance(leader.decide(view), Restart)
    world.restart()
    follow()
    leader.begin(at(1, attempt=2))
    told(leader, done(0, 1, attempt=2, received=5), done(1, 1, attempt=2, term=2, sent=6))
    assert leader.decide(view) == UnequalSums()


def test_restart_request_ends_with_its_commit(world: World) -> None:
    leader = led()
    assert leader.request_restart(at(2), "why")
    assert decide(leader, world) == Restart("why")
    world.commit()
    leader.begin(at(1))
    assert decide(leader, world) == Restart("why")
    world.commit()
    leader.begin(at(2))
    assert decide(leader, world) == Restart("why"), "it is the one at work"
    world.commit()
    leader.begin(at(3))
    assert isinstance(decide(leader, world), KeepWaiting)
    assert not leader.request_restart(at(2), "late")
    assert not leader.request_restart(at(7), "too far")
    assert not leader.request_restart(at(4, attempt=2), "another attempt")


def test_restart_requests_survive_other_commits(world: World) -> None:
    """A request arrives while the commit of epoch 0 is on its way."""
    for asked in ((0, 1), (1, 0)):
        leader = led()
        for epoch in asked:
            assert leader.request_restart(at(epoch), f"of epoch {epoch}")
        assert decide(leader, world) == Restart("of epoch 1"), "which undoes epoch 0, too"
        committed = two_tasks()
        committed.commit()
        leader.begin(at(1))
        assert decide(leader, committed) == Restart("of epoch 1")


def test_later_restart_request_is_kept(world: World) -> None:
    leader = told(led(), done(0, 0), done(1, 0, numbers={"a": 1.0}), done(0, 1), done(1, 1, numbers={"a": 1.0}))
    for epoch in (0, 1):
        assert leader.keep_numbers(epoch, {}) == {1: {"a": 1.0}}
    assert leader.request_restart(at(0), "of epoch 0")
    assert leader.receive_reports(done(1, 1, term=2, numbers={"a": 2.0}))
    world.commit()
    leader.begin(at(1))
    decision = decide(leader, world)
    assert isinstance(decision, Restart) and "other numbers" in decision.why


def test_pressing_means_enough_epochs_or_a_waiter() -> None:
    leader = led(ahead=4)
    assert leader.enough == 2
    told(leader, done(0, 0), done(1, 0), done(0, 1))
    assert leader.ready
    assert not leader.urgent
    told(leader, done(1, 1))
    assert leader.urgent
    leader.begin(at(2))
    assert not leader.urgent
    assert not leader.ready
    told(leader, done(0, 2, ahead=False))
    assert not leader.urgent, "not all have reported it"
    told(leader, done(1, 2))
    assert leader.urgent
    leader.begin(at(3))
    assert not leader.urgent
    told(leader, done(0, 3, ahead=False))
    leader.begin(at(3, attempt=2))
    told(leader, done(0, 3, attempt=2), done(1, 3, attempt=2))
    assert leader.ready
    assert not leader.urgent, "who waited did so in another attempt"


def test_without_epochs_ahead_all_commits_press() -> None:
    leader = told(led(ahead=0), done(0, 0, ahead=False))
    assert not leader.urgent
    assert told(leader, done(1, 0, ahead=False)).urgent


def test_several_epochs_commit_in_one_write(world: World) -> None:
    revision = world.store.revision
    view = world.view()
    txn = transactions.commit(
        view, primary_revision=view.primaries[0].mod_revision, finished=False, writer="w", epochs=3
    )
    assert world.run(txn).succeeded
    assert world.store.revision == revision + 1
    assert world.view().stamp == at(3)


def boundary(epoch: int, *, attempt: int = 1, term: int = 1) -> Boundary:
    return Boundary(Stamp(attempt, epoch), term, Encoded(f"{epoch}/{attempt}/{term}".encode(), (), b"0" * 16))


def test_all_boundaries_of_a_commit_are_found() -> None:
    held = Boundaries()
    held.store(boundary(0), committed=True)
    for one in (boundary(1), boundary(2), boundary(2, term=2), boundary(3, term=2), boundary(4)):
        held.store(one, committed=False)
    passed = held.committing_at(3)
    assert passed == (boundary(1), boundary(2, term=2), boundary(3, term=2))
    assert held.note_committed(3) == boundary(3, term=2)
    assert held.committing_at(3) == ()
    assert held.pending == (boundary(4),)


def test_seal_counts_for_one_epoch(world: World) -> None:
    leader = told(led(), done(0, 0), done(1, 0, done=False, version=2))
    assert decide(leader, world) == SealTasks(((1, 2),))
    leader.note_sealed(1, 1, 2)
    world.commit()
    leader.begin(at(1))
    told(leader, done(0, 1), done(1, 1, done=False, version=2))
    assert decide(leader, world) == SealTasks(((1, 2),))
