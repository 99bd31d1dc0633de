"""Every transaction of the protocol, executed: what it writes, and that each of its fences holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol_kit import RUN, World, node_record

from taskgraph.protocol import transactions
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import CheckpointRecord, GoneRecord, JobStatus, MemberRecord, StatusRecord
from taskgraph.protocol.view import JobView


@pytest.fixture
def world() -> World:
    """Tasks 0 and 1 on "a", backed by "b", in epoch 1; "c" is registered and holds nothing."""
    world = World("a", "b", "c")
    for task in (0, 1):
        world.first(task, "a")
        world.admit(task, "a", "b")
    world.commit()
    return world


def fenced(world: World, view: JobView, task: int = 0) -> dict[str, object]:
    return {
        "primary_revision": view.primaries[task].mod_revision,
        "node": "a",
        "node_revision": world.revisions["a"],
    }


# -- transactions decided from the world above, by name ------------------------------------------


def _register(world: World, view: JobView) -> Txn:
    return transactions.register(view, "d", node_record("d"))


def _resume(world: World, view: JobView) -> Txn:
    return transactions.resume_node(view, "a", node_record("a"))


def _update_node(world: World, view: JobView) -> Txn:
    return transactions.update_node(view, "a", node_record("a", draining=True), world.revisions["a"])


def _take_over(world: World, view: JobView) -> Txn:
    return transactions.take_over(
        view, 0, "b", world.revisions["b"], stateful=True, failure=True, writer=world.writer()
    )


def _admit(world: World, view: JobView) -> Txn:
    return transactions.admit(view, 0, candidate="c", writer=world.writer(), **fenced(world, view))  # type: ignore[arg-type]


def _evict(world: World, view: JobView) -> Txn:
    return transactions.evict(view, 0, member="b", writer=world.writer(), **fenced(world, view))  # type: ignore[arg-type]


def _remove_member(world: World, view: JobView) -> Txn:
    world.put(world.keys.gone("b"), GoneRecord(reason="killed").to_bytes())
    view.gone["b"] = world.view().gone["b"]
    return transactions.remove_member(view, 0, member="b", **fenced(world, view))  # type: ignore[arg-type]


def _commit(world: World, view: JobView) -> Txn:
    revision = view.primaries[0].mod_revision
    return transactions.commit(view, primary_revision=revision, finished=False, writer=world.writer())


def _last_commit(world: World, view: JobView) -> Txn:
    revision = view.primaries[0].mod_revision
    return transactions.commit(view, primary_revision=revision, finished=True, writer=world.writer())


def _restart(world: World, view: JobView) -> Txn:
    return transactions.restart(view, primary_revision=view.primaries[0].mod_revision, writer=world.writer())


def _fail(world: World, view: JobView) -> Txn:
    return transactions.fail(view, StatusRecord(state=JobStatus.FAILED, writer=world.writer()))


def _declare_gone(world: World, view: JobView) -> Txn:
    return transactions.declare_gone(view, "b", GoneRecord(reason="x"))


def _declare_absent_gone(world: World, view: JobView) -> Txn:
    record, revision = GoneRecord(reason="absent"), world.revisions["a"]
    return transactions.declare_absent_gone(view, "d", record, by="a", by_revision=revision)


def _give_results_up(world: World, view: JobView) -> Txn:
    return transactions.give_results_up(view, "nobody came", by="a", writer=world.writer())


# -- what may happen in between -------------------------------------------------------------------


def touch(key: Callable[[World], str]) -> Callable[[World], None]:
    def change(world: World) -> None:
        name = key(world)
        found = world.store.select(name, prefix=False)
        world.put(name, found[0].value if found else b"x")

    return change


def drop(key: Callable[[World], str]) -> Callable[[World], None]:
    return lambda world: world.delete(key(world))


SPEC = touch(lambda w: w.keys.spec)
EPOCH = touch(lambda w: w.keys.epoch)
STATUS = touch(lambda w: w.keys.status)
GENERATION = touch(lambda w: w.keys.generation)
PRIMARY = touch(lambda w: w.keys.primary(0))


def node_key(node: str) -> Callable[[World], str]:
    return lambda w: w.keys.node(node)


def member_key(node: str) -> Callable[[World], str]:
    return lambda w: w.keys.member(0, node)


NODE_A, NODE_B, NODE_C = (touch(node_key(node)) for node in "abc")
NO_NODE_A, NO_NODE_B, NO_NODE_C = (drop(node_key(node)) for node in "abc")
MEMBER_B, MEMBER_C = (touch(member_key(node)) for node in "bc")
NO_MEMBER_B = drop(lambda w: w.keys.member(0, "b"))


def gone(node: str) -> Callable[[World], None]:
    return touch(lambda w: w.keys.gone(node))


FENCES: list[tuple[Callable[[World, JobView], Txn], dict[str, Callable[[World], None]]]] = [
    (
        _register,
        {
            "submitted anew": SPEC,
            "node id taken": touch(lambda w: w.keys.node("d")),
            "declared gone": gone("d"),
        },
    ),
    (
        _resume,
        {
            "submitted anew": SPEC,
            "declared gone": gone("a"),
            "a takeover": GENERATION,
            "an earlier try": NODE_A,
        },
    ),
    (_update_node, {"lease gone": NO_NODE_A, "registered anew": NODE_A}),
    (
        _take_over,
        {
            "another was quicker": PRIMARY,
            "evicted meanwhile": MEMBER_B,
            "removed meanwhile": NO_MEMBER_B,
            "own lease gone": NO_NODE_B,
            "own key put again": NODE_B,
        },
    ),
    (
        _admit,
        {
            "no longer primary": PRIMARY,
            "own lease gone": NO_NODE_A,
            "candidate's key came to be": MEMBER_C,
            "candidate's process is gone": NO_NODE_C,
            "candidate registered anew": NODE_C,
            "candidate was declared gone": gone("c"),
        },
    ),
    (
        _evict,
        {
            "no longer primary": PRIMARY,
            "own lease gone": NO_NODE_A,
            "member key changed": MEMBER_B,
            "member key gone": NO_MEMBER_B,
            "an epoch committed": EPOCH,
        },
    ),
    (_remove_member, {"no longer primary": PRIMARY, "own lease gone": NO_NODE_A, "admitted again": MEMBER_B}),
    (
        _commit,
        {"no longer leader": PRIMARY, "some task was taken over": GENERATION, "committed or restarted": EPOCH},
    ),
    (
        _last_commit,
        {"no longer leader": PRIMARY, "some task was taken over": GENERATION, "restarted": EPOCH, "failed": STATUS},
    ),
    (_restart, {"no longer leader": PRIMARY, "committed or restarted": EPOCH}),
    (_fail, {"the job ended": STATUS}),
    (_declare_gone, {"said before": gone("b"), "another job": SPEC}),
    (
        _declare_absent_gone,
        {
            "said before": gone("d"),
            "another job": SPEC,
            "it came back": touch(node_key("d")),
            "own lease gone": NO_NODE_A,
            "own key put again": NODE_A,
        },
    ),
    (
        _give_results_up,
        {"another job": SPEC, "it runs again": STATUS, "collected": touch(lambda w: w.keys.collected)},
    ),
]
CASES = [
    pytest.param(make, change, id=f"{make.__name__[1:]}: {why}")
    for make, fences in FENCES
    for why, change in fences.items()
]


@pytest.mark.parametrize("make", [make for make, _ in FENCES], ids=lambda make: make.__name__[1:])
def test_holds_while_nothing_changed(world: World, make: Callable[[World, JobView], Txn]) -> None:
    assert world.run(make(world, world.view())).succeeded


@pytest.mark.parametrize(("make", "change"), CASES)
def test_every_fence_stops_its_write(
    world: World, make: Callable[[World, JobView], Txn], change: Callable[[World], None]
) -> None:
    txn = make(world, world.view())
    change(world)
    before = world.store.select(world.keys.root, prefix=True)
    assert not world.run(txn).succeeded
    assert world.store.select(world.keys.root, prefix=True) == before


UNRELATED: list[tuple[Callable[[World, JobView], Txn], Callable[[World], None]]] = [
    (_take_over, EPOCH),  # an epoch that committed meanwhile: the success branch reads it
    (_take_over, NO_NODE_A),
    (_admit, EPOCH),
    (_evict, NO_NODE_B),
    (_commit, NO_NODE_A),  # a leader whose lease is gone may commit: leases detect, terms protect
    (_commit, MEMBER_B),
    (_commit, STATUS),
    (_restart, GENERATION),
]


@pytest.mark.parametrize(("make", "change"), UNRELATED, ids=lambda f: getattr(f, "__name__", "")[1:])
def test_unrelated_changes_stop_no_write(
    world: World, make: Callable[[World, JobView], Txn], change: Callable[[World], None]
) -> None:
    txn = make(world, world.view())
    change(world)
    assert world.run(txn).succeeded


def test_no_transaction_is_larger_than_etcd_allows(world: World) -> None:
    for make, _ in FENCES:
        txn = make(world, world.view())
        assert max(len(txn.compares), len(txn.success)) < 100


# -- what they write ------------------------------------------------------------------------------


def test_registering_puts_the_nodes_key() -> None:
    world = World("a")
    assert world.view().nodes["a"].record == node_record("a")
    assert set(world.view().live_nodes(RUN)) == {"a"}


def test_takeover_begins_the_next_term(world: World) -> None:
    view, generation = world.view(), world.view().generation_revision
    result = world.take_over(0, "b")
    taken = transactions.decode_takeover(result, view, 0)
    after = world.view()
    assert (after.primary_node(0), after.term(0)) == ("b", 2)
    assert after.primaries[0].record.failovers == 1
    assert after.generation_revision == taken.revision == after.primaries[0].mod_revision
    assert after.generation_revision > generation
    assert (taken.term, taken.epoch, taken.attempt) == (2, 1, 1)
    assert set(taken.members) == {"a", "b"}, "the old primary, too, must acknowledge unless evicted in the new term"


def test_takeover_reads_the_newest_epoch(world: World) -> None:
    view = world.view()
    world.commit()
    world.restart()
    taken = transactions.decode_takeover(world.take_over(0, "b", view=view), view, 0)
    assert (taken.epoch, taken.attempt) == (2, 2)


def test_takeover_can_be_read_again(world: World) -> None:
    view = world.view()
    result = world.take_over(0, "b", view=view)
    told = transactions.decode_takeover(result, view, 0)
    again = world.run(transactions.reread_take_over(view, 0))
    assert transactions.decode_takeover(TxnResult(True, result.revision, again.reads), view, 0) == told


def test_hand_over_is_no_failover(world: World) -> None:
    world.take_over(0, "b", failure=False)
    assert world.view().primaries[0].record.failovers == 0
    assert world.view().term(0) == 2


def test_primary_may_take_over_from_itself(world: World) -> None:
    assert world.take_over(0, "a").succeeded
    assert (world.view().primary_node(0), world.view().term(0)) == ("a", 2)


def test_only_a_member_takes_over(world: World) -> None:
    with pytest.raises(LookupError, match="no member"):
        world.take_over(0, "c")


def test_evicted_member_takes_over_until_the_commit(world: World) -> None:
    world.evict(0, "a", "b")
    before = world.view()
    txn = _take_over(world, before)
    world.commit()
    assert not world.run(txn).succeeded, "the epoch is compared"
    with pytest.raises(LookupError, match="evicted"):
        _take_over(world, world.view())


def test_evicted_heir_is_a_member_again(world: World) -> None:
    world.evict(0, "a", "b")
    result = world.take_over(0, "b")
    assert result.succeeded
    taken = transactions.decode_takeover(result, world.view(), 0)
    assert taken.members["b"][1].until is None
    world.commit()
    assert world.view().in_sync(0) == ["a", "b"]


def test_of_two_members_one_takes_over(world: World) -> None:
    world.admit(0, "a", "c")
    view = world.view()
    assert world.take_over(0, "c", view=view).succeeded
    assert not world.take_over(0, "b", view=view).succeeded


def test_admitting_makes_a_member(world: World) -> None:
    assert world.admit(0, "a", "c").succeeded
    assert world.view().in_sync(0) == ["a", "b", "c"]
    assert world.view().members_of(0)["c"].record.until is None


def test_who_is_not_registered_is_not_admitted(world: World) -> None:
    """What the write compares is the candidate's key: of one that has none it compared that there is none."""
    with pytest.raises(LookupError, match="node d is not registered: it cannot be admitted to task 0"):
        world.admit(0, "a", "d")


def test_evicted_member_may_be_admitted_again(world: World) -> None:
    world.evict(0, "a", "b")
    assert world.admit(0, "a", "b").succeeded
    assert world.view().members_of(0)["b"].record.until is None


def test_late_admission_fails_after_a_removal(world: World) -> None:
    """Its answer was lost, it was sent again, the member came and went; and then the first one arrives."""
    late = _admit(world, world.view())
    assert world.run(_admit(world, world.view())).succeeded
    assert world.evict(0, "a", "c").succeeded
    with pytest.raises(LookupError, match="not gone"):
        transactions.remove_member(world.view(), 0, member="c", **fenced(world, world.view()))  # type: ignore[arg-type]
    assert not world.run(late).succeeded
    world.put(world.keys.gone("c"), GoneRecord(reason="killed").to_bytes())
    removal = transactions.remove_member(world.view(), 0, member="c", **fenced(world, world.view()))  # type: ignore[arg-type]
    assert world.run(removal).succeeded
    assert not world.run(late).succeeded


def test_eviction_holds_until_the_committed_epoch(world: World) -> None:
    assert world.evict(0, "a", "b").succeeded
    assert world.view().members_of(0)["b"].record.until == 1


def test_removed_member_is_none(world: World) -> None:
    assert world.run(_remove_member(world, world.view())).succeeded
    assert set(world.view().members_of(0)) == {"a"}


def test_commit_moves_the_epoch_and_keeps_the_attempt(world: World) -> None:
    world.restart()
    world.commit()
    view = world.view()
    assert view.stamp == Stamp(2, 2)
    assert view.running


def test_last_commit_finishes_the_job_in_the_same_revision(world: World) -> None:
    assert world.commit(finished=True).succeeded
    view = world.view()
    assert view.epoch is not None
    assert view.status is not None
    assert view.status.record.state == JobStatus.FINISHED
    assert view.status.mod_revision == view.epoch.mod_revision


def test_one_of_two_commits_of_an_epoch_happens(world: World) -> None:
    view = world.view()
    assert world.commit(view=view).succeeded
    assert not world.commit(view=view).succeeded
    assert not world.restart(view=view).succeeded


def test_restart_keeps_the_epoch_and_raises_the_attempt(world: World) -> None:
    world.restart()
    world.restart()
    assert world.view().stamp == Stamp(3, 1)


def test_failing_keeps_the_first_word(world: World) -> None:
    view = world.view()
    assert world.run(transactions.fail(view, StatusRecord(state=JobStatus.FAILED, reason="first"))).succeeded
    assert not world.run(transactions.fail(view, StatusRecord(state=JobStatus.FAILED, reason="second"))).succeeded
    status = world.view().status
    assert status is not None
    assert status.record.reason == "first"


def test_failing_takes_fences_of_its_own(world: World) -> None:
    view = world.view()
    fence = transactions._primary_fences(view, 1, view.primaries[1].mod_revision, "a", world.revisions["a"])
    world.take_over(1, "b")
    assert not world.run(transactions.fail(view, StatusRecord(state=JobStatus.FAILED), fence)).succeeded


@pytest.mark.parametrize("make", [_commit, _evict, _restart, _take_over], ids=lambda make: make.__name__[1:])
def test_job_that_was_not_submitted_is_an_error(world: World, make: Callable[[World, JobView], Txn]) -> None:
    view = world.view()
    view.epoch = None
    with pytest.raises(LookupError):
        make(world, view)


# -- without any of the members -------------------------------------------------------------------


def lost(world: World, *nodes: str) -> World:
    for node in nodes:
        world.die(node)
    return world


def from_nothing(world: World, view: JobView, *, task: int = 0, stateful: bool = False) -> Txn:
    return transactions.take_over_from_nothing(
        view, task, "c", world.revisions["c"], stateful=stateful, writer=world.writer()
    )


def test_first_primary_is_its_own_first_member() -> None:
    world = World("a")
    world.first(0, "a")
    view = world.view()
    assert (view.primary_node(0), view.term(0)) == ("a", 1)
    assert view.in_sync(0) == ["a"]
    assert view.generation_revision == view.primaries[0].mod_revision


def test_of_two_first_primaries_one_is_it() -> None:
    world = World("a", "b")
    view = world.view()
    txns = [transactions.take_over_from_nothing(view, 0, n, world.revisions[n], stateful=True, writer=n) for n in "ab"]
    assert [world.run(txn).succeeded for txn in txns] == [True, False]


def test_task_without_state_is_taken_over_from_nobody(world: World) -> None:
    lost(world, "a", "b")
    result = world.run(from_nothing(world, world.view()))
    assert result.succeeded
    taken = transactions.decode_takeover(result, world.view(), 0)
    assert (taken.term, taken.epoch) == (2, 1)
    assert set(taken.members) == {"c"}, "the keys of the gone members are deleted"
    assert world.view().primaries[0].record.failovers == 0, "it was nobody's backup"


def test_state_is_not_taken_over_from_nobody_after_epoch_0(world: World) -> None:
    lost(world, "a", "b")
    with pytest.raises(LookupError, match="no members left"):
        from_nothing(world, world.view(), stateful=True)


FROM_NOTHING_FENCES: dict[str, Callable[[World], None]] = {
    "another was quicker": PRIMARY,
    "a member changed": MEMBER_B,
    "a member is back": NODE_B,
    "own lease gone": NO_NODE_C,
    "an epoch committed": EPOCH,
    "a checkpoint appeared": touch(lambda w: w.keys.checkpoint),
    "the job ended": STATUS,
}


@pytest.mark.parametrize("change", FROM_NOTHING_FENCES.values(), ids=FROM_NOTHING_FENCES.keys())
def test_taking_over_from_nobody_is_fenced(world: World, change: Callable[[World], None]) -> None:
    lost(world, "a", "b")
    txn = from_nothing(world, world.view())
    change(world)
    assert not world.run(txn).succeeded


def test_member_whose_node_is_still_registered_is_not_passed_over(world: World) -> None:
    lost(world, "a")
    assert not world.run(from_nothing(world, world.view())).succeeded


def test_member_evicted_before_the_committed_boundary_does_not_matter(world: World) -> None:
    world.evict(0, "a", "b")
    world.commit()
    lost(world, "a")
    assert world.run(from_nothing(world, world.view())).succeeded, "b lives, but holds nothing that counts"
    assert set(world.view().members_of(0)) == {"c"}


def checkpointed(world: World) -> None:
    world.put(world.keys.checkpoint, CheckpointRecord(epoch=1, attempt=1, name="x").to_bytes())


def test_lost_state_fails_the_job_only_while_it_is_lost(world: World) -> None:
    status = StatusRecord(state=JobStatus.FAILED, reason="lost")
    lost(world, "a")
    assert not world.run(transactions.fail_lost(world.view(), 0, status)).succeeded, "b still holds it"
    lost(world, "b")
    for change in (PRIMARY, MEMBER_B, EPOCH, STATUS, checkpointed):
        txn = transactions.fail_lost(world.view(), 0, status)
        change(world)
        assert not world.run(txn).succeeded
    assert world.run(transactions.fail_lost(world.view(), 0, status)).succeeded


@pytest.mark.parametrize("state", [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.FINISHED])
def test_lost_state_is_nothing_to_a_job_that_has_ended(world: World, state: JobStatus) -> None:
    """Its view said so already: the reason for which it had ended was overwritten with another."""
    lost(world, "a", "b")
    world.put(world.keys.status, StatusRecord(state=state, reason="the first").to_bytes())
    world.put(world.keys.collected, b"{}")
    with pytest.raises(LookupError, match="the job has ended"):
        transactions.fail_lost(world.view(), 0, StatusRecord(state=JobStatus.FAILED, reason="lost"))


def test_results_that_are_lost_before_they_were_collected_fail_the_job(world: World) -> None:
    lost(world, "a", "b")
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    assert world.run(
        transactions.fail_lost(world.view(), 0, StatusRecord(state=JobStatus.FAILED, reason="lost"))
    ).succeeded


def test_collected_job_loses_nothing(world: World) -> None:
    lost(world, "a")
    lost(world, "b")
    txn = transactions.fail_lost(world.view(), 0, StatusRecord(state=JobStatus.FAILED, reason="lost"))
    world.run(Txn(success=(Put(world.keys.collected, b"{}"),)))
    assert not world.run(txn).succeeded


def test_takeover_reads_evictions() -> None:
    assert MemberRecord.from_bytes(MemberRecord(until=0).to_bytes()).until == 0
