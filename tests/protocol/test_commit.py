"""The leader's decisions: what counts as a report, and when it seals, commits, restarts, fails, or waits."""

from __future__ import annotations

import pytest
from protocol_kit import World, report, two_tasks

from taskgraph.protocol.commit import Action, Commit, KeepWaiting, Leader, Restart, SealTasks, UnequalSums
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.sums import decode_sum
from taskgraph.protocol.view import JobView

S = Stamp(1, 0)


@pytest.fixture
def world() -> World:
    return two_tasks()


def led(world: World, *, epochs: int | None = 10, ahead: int = 0) -> Leader:
    leader = Leader(2, epochs, ahead=ahead)
    stamp = world.view().stamp
    assert stamp is not None
    leader.begin(stamp)
    return leader


def decide(leader: Leader, view: JobView | World, **options: bool) -> Action:
    return leader.decide(view.view() if isinstance(view, World) else view, **options)


def test_names_tasks_without_a_report(world: World) -> None:
    leader = led(world)
    assert decide(leader, world) == KeepWaiting((0, 1), "not finished with the epoch")
    assert leader.receive_reports(report(1, S))
    assert decide(leader, world) == KeepWaiting((0,), "not finished with the epoch")


def test_commits_when_all_are_done_and_every_edge_agrees(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, sent=5, received=7))
    leader.receive_reports(report(1, S, sent=7, received=5))
    assert decide(leader, world) == Commit(finished=False)


def test_sums_are_compared_modulo_two_to_the_128(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, sent=(1 << 128) - 1, received=4))
    leader.receive_reports(report(1, S, sent=5, received=0))
    assert decide(leader, world) == Commit(finished=False)


@pytest.mark.parametrize(("epochs", "finish", "finished"), [(1, False, True), (2, False, False), (None, False, False)])
def test_last_epoch_finishes_the_job(world: World, epochs: int | None, finish: bool, finished: bool) -> None:
    leader = led(world, epochs=epochs)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S, finish=finish))
    assert decide(leader, world) == Commit(finished)


def test_any_task_may_finish_the_job(world: World) -> None:
    leader = led(world, epochs=None)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S, finish=True))
    assert decide(leader, world) == Commit(finished=True)


def test_report_of_another_stamp_is_void(world: World) -> None:
    leader = led(world)
    assert not leader.receive_reports(report(0, Stamp(0, 0)))
    assert not leader.receive_reports(report(0, Stamp(1, 1)))
    assert not leader.receive_reports(report(0, Stamp(2, 0)))
    assert leader.reports() == {}


def test_report_of_an_old_term_is_void(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S))
    world.die("b")
    assert world.take_over(1, "a").succeeded
    assert decide(leader, world) == KeepWaiting((1,), "not finished with the epoch")
    leader.receive_reports(report(1, S, term=2))
    assert decide(leader, world) == Commit(finished=False)


def test_commit_waits_for_an_evicted_heir(world: World) -> None:
    """After the commit it cannot take over, and the state would be lost."""
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S))
    assert world.evict(1, "b", "a").succeeded
    assert decide(leader, world) == Commit(finished=False), "its primary holds all of it"
    world.die("b")
    assert decide(leader, world) == KeepWaiting(
        (1,), "its primary is gone, and no backup could take over after the commit"
    )
    assert not leader.unreported(world.view()) and leader.blocking(world.view()) == (1,), "who waits can say for what"
    assert world.take_over(1, "a").succeeded
    leader.receive_reports(report(1, S, term=2))
    assert decide(leader, world) == Commit(finished=False)


def test_repeated_report_is_not_new(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    assert leader.blocking(world.view()) == (1,)
    idle = report(1, S, done=False, version=1)
    assert leader.receive_reports(idle)
    assert decide(leader, world) == SealTasks(((1, 1),))
    leader.note_sealed(1, 1, 1)
    assert leader.blocking(world.view()) == (1,), "its done may be lost"
    assert not leader.receive_reports(idle)
    for news in (True, False):  # no number is like itself that is none
        assert leader.receive_reports(report(1, S, numbers={"loss": float("nan")})) is news
    assert not leader.receive_reports(idle)
    assert not leader.blocking(world.view())


@pytest.mark.parametrize("why", ["a member is left", "nobody is left", "there is no state", "it is not gone"])
def test_commit_waits_for_no_other_heir(why: str) -> None:
    world = World("a", "b", "c")
    world.first(0, "c")
    world.first(1, "b", stateful=why != "there is no state")
    world.admit(1, "b", "a")
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S))
    if why != "a member is left":
        assert world.evict(1, "b", "a").succeeded
    if why == "nobody is left":
        world.die("a")
    if why != "it is not gone":
        world.die("b")
    assert decide(leader, world) == Commit(finished=False)


def test_report_of_a_later_term_waits_for_the_view(world: World) -> None:
    leader, behind = led(world), world.view()
    leader.receive_reports(report(0, S))
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2))
    assert decide(leader, behind) == KeepWaiting((1,), "not finished with the epoch")
    assert decide(leader, world) == Commit(finished=False)


def test_done_is_final(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, sent=1))
    leader.receive_reports(report(0, S, done=False, version=9, sent=2))
    leader.receive_reports(report(0, S, sent=3))
    assert decode_sum(leader.reports()[0].sent) == 1


def test_late_idle_report_is_ignored(world: World) -> None:
    """A report and its repetition arrived in the wrong order: the leader waited for ever."""
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S, done=False, version=2, sent=2))
    assert not leader.receive_reports(report(1, S, done=False, version=1, sent=1))
    assert leader.reports()[1].version == 2
    leader.receive_reports(report(1, S, done=False, version=3, sent=3))
    assert leader.reports()[1].version == 3
    leader.receive_reports(report(1, S))
    leader.receive_reports(report(1, S, done=False, version=4, sent=4))
    assert leader.reports()[1].done


def test_report_of_an_old_term_is_ignored(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(1, S, term=2, sent=2))
    leader.receive_reports(report(1, S, term=1, sent=1))
    assert leader.reports()[1].term == 2


def test_new_attempt_drops_all_reports(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.request_restart(S, "why")
    world.restart()
    leader.begin(Stamp(2, 0))
    assert leader.reports() == {}
    assert decide(leader, world) == KeepWaiting((0, 1), "not finished with the epoch")


def test_same_stamp_keeps_reports(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.begin(S)
    assert set(leader.reports()) == {0}


def test_decides_nothing_from_a_view_of_another_stamp(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S))
    world.restart()
    assert isinstance(decide(leader, world), KeepWaiting)
    assert isinstance(decide(Leader(2, 10), world), KeepWaiting)


# -- restarts -------------------------------------------------------------------------------------


def test_restarts_when_asked_for_the_attempt_at_work(world: World) -> None:
    leader = led(world)
    assert leader.request_restart(S, "first")
    assert leader.request_restart(S, "second")
    assert decide(leader, world) == Restart("first")


def test_ignores_requests_for_a_restart_of_another_attempt(world: World) -> None:
    leader = led(world)
    for stamp in (Stamp(0, 0), Stamp(2, 0), Stamp(1, 1)):
        assert not leader.request_restart(stamp, "why")
    assert isinstance(decide(leader, world), KeepWaiting)


def test_unequal_sums_without_a_replaced_primary_are_a_bug_of_the_job(world: World) -> None:
    # First takeovers count as changes of this epoch, so look at an epoch that began after them.
    world.commit()
    at = Stamp(1, 1)
    leader = led(world)
    leader.receive_reports(report(0, at, sent=1))
    leader.receive_reports(report(1, at, received=2))
    assert decide(leader, world) == UnequalSums()


def names_both_causes(restart: Restart) -> None:
    """The message names both likely causes, and how to find out."""
    assert all(text in restart.why for text in ("that no snapshot holds", "not deterministic", "tg.testing.run"))


def test_unequal_sums_after_a_take_over_restart_the_epoch(world: World) -> None:
    world.commit()
    at = Stamp(1, 1)
    leader = led(world)
    world.take_over(1, "a")
    leader.receive_reports(report(0, at, sent=1))
    leader.receive_reports(report(1, at, term=2, received=2))
    action = decide(leader, world)
    assert isinstance(action, Restart) and "recomputed something differently" in action.why
    names_both_causes(action)


# -- sealing --------------------------------------------------------------------------------------


def test_seals_idle_tasks_once_everything_sent_was_received(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, done=False, version=3, sent=8))
    leader.receive_reports(report(1, S, done=False, version=1, received=5))
    assert decide(leader, world) == KeepWaiting((0, 1), "a message is still on its way")
    leader.receive_reports(report(1, S, done=False, version=2, received=8))
    assert decide(leader, world) == SealTasks(((0, 3), (1, 2)))


def test_seals_only_those_that_are_not_done(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S, done=False, version=4))
    assert decide(leader, world) == SealTasks(((1, 4),))


def test_does_not_seal_before_all_have_reported(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(1, S, done=False))
    assert decide(leader, world) == KeepWaiting((0,), "not finished with the epoch")


def test_accepted_seal_is_sent_to_a_successor_only(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S))
    leader.receive_reports(report(1, S, done=False, version=4))
    leader.note_sealed(1, 1, 4)
    assert decide(leader, world) == KeepWaiting((1,), "sealed, not done yet")
    leader.receive_reports(report(1, S, done=False, version=5))
    assert decide(leader, world) == SealTasks(((1, 5),))
    leader.note_sealed(1, 1, 5)
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, done=False, version=5))
    assert decide(leader, world) == SealTasks(((1, 5),))


def test_sealed_tasks_that_are_done_commit(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, done=False, version=1, sent=2))
    leader.receive_reports(report(1, S, done=False, version=1, received=2))
    leader.note_sealed(0, 1, 1)
    leader.note_sealed(1, 1, 1)
    leader.receive_reports(report(0, S, sent=2))
    assert decide(leader, world) == KeepWaiting((1,), "sealed, not done yet")
    leader.receive_reports(report(1, S, received=2))
    assert decide(leader, world) == Commit(finished=False)


def test_unequal_sums_of_idle_tasks_diverge(world: World) -> None:
    world.commit()
    at = Stamp(1, 1)
    leader = led(world)
    leader.receive_reports(report(0, at, done=False, sent=1))
    leader.receive_reports(report(1, at, done=False))
    assert isinstance(decide(leader, world), KeepWaiting)
    assert decide(leader, world, settled=True) == UnequalSums()
    world.take_over(1, "a")
    leader.receive_reports(report(1, at, term=2, done=False))
    assert decide(leader, world, settled=True) == UnequalSums(replaced=True)  # the other one may be at work again


def test_report_of_an_unknown_task_is_void(world: World) -> None:
    leader = led(world)
    assert not leader.receive_reports(report(2, S), report(-1, S))
    leader.receive_reports(report(0, S), report(7, S))
    assert not leader.ready
    leader.receive_reports(report(1, S))
    assert leader.ready
    assert decide(leader, world) == Commit(finished=False)


def test_idle_report_of_a_later_term_replaces_done(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, numbers={"a": 1.0}), report(1, S))
    assert leader.numbers(0) == {0: {"a": 1.0}}
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, done=False, version=1))
    assert leader.numbers(0) is None
    assert decide(leader, world) == SealTasks(((1, 1),))
    leader.receive_reports(report(1, S, term=2, numbers={"b": 2.0}))
    assert leader.numbers(0) == {0: {"a": 1.0}, 1: {"b": 2.0}}
    assert decide(leader, world) == Commit(finished=False)


def test_numbers_of_a_replaced_primary_are_dropped(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S), report(1, S, numbers={"a": 1.0}))
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2))
    assert leader.numbers(0) == {}


def test_ready_needs_reports_of_the_attempt(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S), report(1, S))
    assert leader.ready
    leader.begin(Stamp(2, 0))
    assert not leader.ready and leader.numbers(0) is None
    leader.receive_reports(report(0, Stamp(2, 0)), report(1, Stamp(2, 0)))
    assert leader.ready


def test_returned_numbers_do_not_change(world: World) -> None:
    """They are stored in a boundary, and a later term may report others."""
    leader = led(world)
    leader.receive_reports(report(0, S), report(1, S, numbers={"a": 1.0}))
    told = leader.numbers(0)
    leader.receive_reports(report(1, S, term=2, numbers={"a": 2.0}))
    assert told == {1: {"a": 1.0}}
    assert leader.numbers(0) == {1: {"a": 2.0}}


def test_numbers_of_a_boundary_must_commit(world: World) -> None:
    """A successor may compute other numbers although all sums agree."""
    leader = led(world, ahead=1)
    leader.receive_reports(report(0, S), report(1, S, numbers={"a": 1.0}))
    assert leader.keep_numbers(0, {}) == {1: {"a": 1.0}}
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, done=False, version=1))
    assert not isinstance(decide(leader, world), Restart), "it may still report the same"
    leader.receive_reports(report(1, S, term=2, numbers={"a": 2.0}))
    decision = decide(leader, world)
    assert isinstance(decision, Restart) and "task 1 reports other numbers" in decision.why
    names_both_causes(decision)
    leader.begin(Stamp(2, 0))
    leader.receive_reports(report(0, Stamp(2, 0)), report(1, Stamp(2, 0), term=2, numbers={"a": 2.0}))
    assert leader._restart is None and leader.numbers(0) == {1: {"a": 2.0}}


@pytest.mark.parametrize("numbers", [{"a": 1.0}, {}, {"a": float("inf"), "b": 0.0}])
def test_equal_numbers_of_a_successor_are_accepted(world: World, numbers: dict[str, float]) -> None:
    leader = led(world, ahead=1)
    leader.receive_reports(report(0, S), report(1, S, numbers=numbers))
    leader.keep_numbers(0, {})
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, numbers=numbers))
    assert decide(leader, world) == Commit(finished=False)


def test_nan_equals_nan(world: World) -> None:
    leader = led(world, ahead=1)
    leader.receive_reports(report(0, S), report(1, S, numbers={"loss": float("nan")}))
    leader.keep_numbers(0, {})
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, numbers={"loss": float("inf") - float("inf")}))
    assert decide(leader, world) == Commit(finished=False)


@pytest.mark.parametrize("numbers", [{}, {"b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.5}])
def test_numbers_compare_names_and_values(world: World, numbers: dict[str, float]) -> None:
    leader = led(world, ahead=1)
    leader.receive_reports(report(0, S), report(1, S, numbers={"a": 1.0}))
    leader.keep_numbers(0, {})
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, numbers=numbers))
    assert isinstance(decide(leader, world), Restart)


def test_single_task_needs_no_report_for_its_numbers() -> None:
    leader = Leader(1, 10, ahead=4)
    leader.begin(S)
    assert leader.keep_numbers(0, {"a": 1.0}) == {0: {"a": 1.0}}


def test_numbers_without_a_boundary_may_change(world: World) -> None:
    leader = led(world, ahead=1)
    leader.receive_reports(report(0, S), report(1, S, numbers={"a": 1.0}))
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2, numbers={}))
    assert decide(leader, world) == Commit(finished=False)


def test_numbers_do_not_wait_for_task_0(world: World) -> None:
    """Its numbers are known before its boundary is acknowledged."""
    leader = led(world, ahead=4)
    assert leader.numbers(1, {"a": 1.0}) is None, "nobody has reported anything"
    later = Stamp(S.attempt, S.epoch + 1)
    leader.receive_reports(report(1, later, numbers={"b": 2.0}))
    assert leader.numbers(1) is None
    assert leader.numbers(1, {"a": 1.0}) == {0: {"a": 1.0}, 1: {"b": 2.0}}
    assert leader.numbers(1, {}) == {1: {"b": 2.0}}
    assert leader.numbers(1) is None, "it was not kept"
    leader.receive_reports(report(0, later, numbers={"a": 3.0}))
    assert leader.numbers(1, {"a": 1.0}) == {0: {"a": 3.0}, 1: {"b": 2.0}}, "what was reported is what counts"


def test_numbers_wait_for_other_tasks(world: World) -> None:
    leader = led(world)
    leader.receive_reports(report(0, S, numbers={"a": 1.0}))
    assert leader.numbers(0, {"a": 1.0}) is None
    leader.receive_reports(report(1, S, done=False))
    assert leader.numbers(0, {"a": 1.0}) is None


def test_successor_may_withdraw_the_end_of_the_job(world: World) -> None:
    leader = Leader(2, None)
    leader.begin(S)
    leader.receive_reports(report(0, S), report(1, S, finish=True))
    assert decide(leader, world) == Commit(finished=True)
    world.die("b")
    world.take_over(1, "a")
    leader.receive_reports(report(1, S, term=2))
    assert decide(leader, world) == Commit(finished=False)
