"""A job's view: the same from a listing, from watch events, and from both with an overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol_kit import JOB, RUN, World, node_record

from taskgraph.errors import DecodeError
from taskgraph.protocol import transactions
from taskgraph.protocol.kv import Delete, KeyValue, Put, Txn
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    JobStatus,
    PrimaryRecord,
    RunningCode,
    StatusRecord,
)
from taskgraph.protocol.view import JobView, WritesLost


def busy_world() -> World:
    """A history in which every kind of key was put, changed or deleted."""
    world = World("a", "b", "c")
    world.first(0, "a")
    world.admit(0, "a", "b")
    world.admit(0, "a", "c")
    world.commit()
    world.restart()
    world.evict(0, "a", "c")
    world.die("a")
    world.take_over(0, "b")
    world.put(world.keys.event("1"), b"not for the view")
    world.put(world.keys.collected, b"{}")
    world.put(world.keys.checkpoint, CheckpointRecord(epoch=1, attempt=1, name="x").to_bytes())
    world.delete(world.keys.collected)
    world.delete(world.keys.member(0, "c"))
    return world


def facts(view: JobView) -> dict[str, object]:
    """What a listing tells, too: not what only a watch knows."""
    left_out = ("keys", "structure_revision", "gone_revision", "attempt_revision")
    return {name: value for name, value in vars(view).items() if name not in left_out}


def test_events_and_listing_give_equal_views() -> None:
    world = busy_world()
    expected = facts(world.view())
    for revision in range(1, world.store.revision + 1):
        replay = JobView(JOB)
        for made in range(2, world.store.revision + 1):
            events = [e for e in world.store.events_from(made, world.keys.root) if e.kv.mod_revision == made]
            replay.apply(made, events)
            if made == revision:
                # From here on as a watch that started again too early: all of history once more.
                replay.apply(made, world.store.events_from(2, world.keys.root)[: len(events)])
        # A deleted key leaves an empty dict of members at most, as a listing would not.
        replay.members = {t: m for t, m in replay.members.items() if m}
        assert facts(replay) == expected


def test_repeated_events_change_nothing() -> None:
    world = busy_world()
    view = world.view()
    before = facts(view)
    view.apply(world.store.revision, world.store.events_from(2, world.keys.root))
    assert facts(view) == before


def test_structure_revision_stands_still_while_epochs_commit() -> None:
    world = World("a")
    world.first(0, "a")
    view = world.view()
    structure = view.structure_revision
    for _ in range(3):
        before = world.store.revision
        world.commit()
        view.apply(world.store.revision, world.store.events_from(before + 1, world.keys.root))
    assert view.structure_revision == structure
    assert view.stamp == Stamp(1, 3)
    world.die("a")
    view.apply(world.store.revision, world.store.events_from(before + 1, world.keys.root))
    assert view.structure_revision == world.store.revision


def test_structure_revision_stands_still_while_events_come_and_go() -> None:
    """After a failover of hundreds of tasks there are as many, and nodes would place all tasks anew for each."""
    world = World("a")
    world.first(0, "a")
    view = world.view()
    structure = view.structure_revision
    world.put(world.keys.event("1"), b"{}")
    world.delete(world.keys.event("1"))
    view.apply(world.store.revision, world.store.events_from(structure + 1, world.keys.root))
    assert (view.structure_revision, view.revision) == (structure, world.store.revision)


def test_reading_a_fresh_view() -> None:
    view = JobView(JOB)
    assert view.stamp is None
    assert not view.running
    assert view.term(0) == 0
    assert view.primary_node(0) is None
    assert view.in_sync(0) == []
    assert view.members_of(0) == {}


def test_reading_primaries_and_members() -> None:
    world = World("a", "b", "c")
    world.first(0, "a")
    world.admit(0, "a", "c")
    world.admit(0, "a", "b")
    view = world.view()
    assert view.running
    assert view.primary_node(0) == "a"
    assert view.is_primary(0, "a", 1)
    assert not view.is_primary(0, "a", 2)
    assert not view.is_primary(0, "b", 1)
    assert view.in_sync(0) == ["a", "c", "b"], "in the order of admission"


def test_evicted_member_is_in_sync_until_the_next_commit() -> None:
    world = World("a", "b")
    world.first(0, "a")
    world.admit(0, "a", "b")
    world.evict(0, "a", "b")
    assert world.view().in_sync(0) == ["a", "b"]
    world.commit()
    assert world.view().in_sync(0) == ["a"]
    assert set(world.view().members_of(0)) == {"a", "b"}


def test_status_that_is_not_running() -> None:
    world = World("a")
    world.put(world.keys.status, StatusRecord(state=JobStatus.FAILED, reason="x").to_bytes())
    assert not world.view().running


def test_live_nodes_are_of_this_run_and_not_gone() -> None:
    world = World("a", "b")
    world.put(world.keys.node("old"), node_record("old", run="run-0").to_bytes())
    world.put(world.keys.gone("b"), GoneRecord(reason="x").to_bytes())
    assert set(world.view().live_nodes(RUN)) == {"a"}


def test_unreadable_record_is_refused() -> None:
    world = World()
    primary = PrimaryRecord(node="a", term=1, stateful=True).to_bytes()
    for key, value, why in (
        (world.keys.epoch, b"rubbish", "not a EpochRecord"),
        (world.keys.gone("a"), b"rubbish", "not a GoneRecord"),
        (f"{world.keys.tasks}one/primary", primary, "invalid literal"),
    ):
        with pytest.raises(DecodeError) as refused:
            JobView(JOB).reset(9, [KeyValue(key, value, 1, 1)])
        said = str(refused.value)
        assert said.startswith(f"the key {key} in etcd cannot be read: {why}")
        assert f"`etcdctl del --prefix {world.keys.root}`" in said


def since(world: World, view: JobView) -> JobView:
    """`view`, which was read before, with all that was written since, in one batch."""
    view.apply(world.store.revision, world.store.events_from(view.revision + 1, world.keys.root))
    return view


@pytest.mark.parametrize("name", ["spec", "epoch", "tasks/0/primary"])
def test_deleted_key_is_named(name: str) -> None:
    """The job stood still without a word, or failed with a reason that was none."""
    world = World("a")
    world.first(0, "a")
    watching, reading = world.view(), world.view()
    key = world.keys.root + name
    world.delete(key)
    with pytest.raises(DecodeError, match=f"the key {key} in etcd was deleted"):
        since(world, watching)
    with pytest.raises(DecodeError, match=f"the key {key} in etcd was deleted"):
        reading.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))


def test_listing_without_needed_keys_is_refused() -> None:
    world = World()
    world.delete(world.keys.epoch)
    with pytest.raises(DecodeError, match=f"the key {world.keys.epoch} in etcd was deleted"):
        world.view()


def test_deleted_job_misses_no_key() -> None:
    world = World("a")
    world.first(0, "a")
    watching, reading = world.view(), world.view()
    world.run(Txn(success=(Delete(world.keys.root, prefix=True),)))
    assert since(world, watching).status is None
    reading.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
    assert reading.status is None and reading.epoch is None


def test_ended_job_misses_no_key() -> None:
    world = World("a")
    world.first(0, "a")
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    world.put(world.keys.collected, b"{}")
    view = world.view()
    world.delete(world.keys.primary(0))
    assert not since(world, view).primaries


def test_new_run_replaces_the_old_one() -> None:
    """Also one whose results nobody had collected; its watchers hear of all of that at once, or list it."""
    world = World("a")
    world.first(0, "a")
    world.put(world.keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    watching, reading = world.view(), world.view()
    begun = Txn(
        success=(
            Delete(world.keys.tasks, prefix=True),
            Put(world.keys.spec, b"another"),
            Put(world.keys.epoch, EpochRecord(epoch=0, attempt=1).to_bytes()),
            Put(world.keys.status, StatusRecord(state=JobStatus.RUNNING).to_bytes()),
        )
    )
    world.run(begun)
    assert since(world, watching).running and not watching.primaries
    reading.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
    assert reading.running and not reading.primaries
    world.first(0, "a")
    since(world, watching)
    world.delete(world.keys.primary(0))
    with pytest.raises(DecodeError, match="was deleted"):
        since(world, watching)


def listing(world: World) -> tuple[KeyValue, ...]:
    return world.store.select(world.keys.root, prefix=True)


@pytest.mark.parametrize(
    ("since", "says"),
    [
        (lambda world: world.commit(), "job 'demo' was in epoch 2, attempt 1, and is in epoch 1, attempt 1, now"),
        (lambda world: world.restart(), "job 'demo' was in epoch 1, attempt 2, and is in epoch 1, attempt 1, now"),
        (lambda world: world.take_over(0, "b"), "/taskgraph/demo/tasks/0/primary was of term 2, and is of 1 now"),
        (lambda world: world.put(world.keys.spec, b"another"), "the run of job 'demo' is one before"),
    ],
    ids=["a commit", "a restart", "a take-over", "another run"],
)
def test_lost_data_of_the_store_is_noticed(since: Callable[[World], object], says: str) -> None:
    """An older snapshot with higher revisions: nodes died of an epoch that was committed without its boundary."""
    world = World("a", "b")
    world.first(0, "a")
    world.admit(0, "a", "b")
    world.commit()
    snapshot = listing(world)
    since(world)
    view = world.view()
    known = facts(view)
    for _ in range(2):
        with pytest.raises(WritesLost) as lost:
            view.reset(1000, snapshot)
        assert str(lost.value) == says and facts(view) == known, "what is known stays"


def test_allowed_steps_back_are_no_loss() -> None:
    world = World("a", "b")
    world.first(0, "a")
    world.commit()
    view = world.view()
    world.put(world.keys.epoch, EpochRecord(epoch=0, attempt=2, lineage=2).to_bytes())  # a roll-back
    view.reset(world.store.revision, listing(world))
    assert view.stamp == Stamp(2, 0)
    world.run(Txn(success=(Delete(world.keys.tasks, prefix=True), Put(world.keys.spec, b"another"))))
    world.put(world.keys.epoch, EpochRecord(epoch=0, attempt=1).to_bytes())
    view.reset(world.store.revision, listing(world))
    assert view.stamp == Stamp(1, 0)
    world.run(Txn(success=(Delete(world.keys.root, prefix=True),)))
    view.reset(world.store.revision, listing(world))
    assert view.spec is None and view.stamp is None


def test_replacement_counts_for_its_attempt() -> None:
    world = World("a", "b", "c")
    world.first(0, "a")
    world.admit(0, "a", "b")
    view = world.view()
    since = view.revision

    def follow() -> None:
        nonlocal since
        view.apply(world.store.revision, world.store.events_from(since + 1, world.keys.root))
        since = world.store.revision

    world.restart()
    follow()
    assert not view.term_changed(in_attempt=True)
    world.die("a")
    world.take_over(0, "b")
    follow()
    assert view.term_changed()
    assert view.term_changed(in_attempt=True)
    world.commit()
    follow()
    assert not view.term_changed()
    assert view.term_changed(in_attempt=True)
    view.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
    assert view.term_changed(in_attempt=True)
    world.restart()
    follow()
    assert not view.term_changed(in_attempt=True)
    assert world.view().term_changed(in_attempt=True), "nobody told it when the attempt began"
    world.admit(0, "b", "c")
    world.die("b")
    world.take_over(0, "c")
    follow()
    assert view.term_changed(in_attempt=True)
    world.restart()
    view.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
    assert not view.term_changed(in_attempt=True), "it began after all that was known by then"


def test_staying_members_do_not_depend_on_the_epoch() -> None:
    """As placement is computed again when the structure changes, and not when an epoch commits."""
    world = World("a", "b", "c")
    world.first(0, "a")
    world.admit(0, "a", "c")
    world.admit(0, "a", "b")
    assert world.view().active_members(0) == ["a", "c", "b"]
    world.evict(0, "a", "c")
    assert world.view().in_sync(0) == ["a", "c", "b"]
    assert world.view().active_members(0) == ["a", "b"]
    world.commit()
    assert world.view().in_sync(0) == world.view().active_members(0) == ["a", "b"]


def test_deaths_are_sorted_by_last_epoch() -> None:
    world = World("a", "b", "c", "d", "e")
    for node, epochs in {"a": (3, 7), "b": (5,), "c": (-1,), "d": (), "e": (9, -1)}.items():
        ran = tuple(RunningCode("send", 0, epoch) for epoch in epochs)
        world.put(world.keys.gone(node), GoneRecord(reason="killed", running_code=ran).to_bytes())
    view = world.view()
    assert set(view.deaths_from(0)) == {"a", "b", "c", "e"}
    assert set(view.deaths_from(6)) == set(view.deaths_from(7)) == {"a", "c", "e"}
    assert set(view.deaths_from(8)) == {"c", "e"}
    world.put(world.keys.gone("b"), GoneRecord(reason="killed", running_code=(RunningCode("send", 0, 8),)).to_bytes())
    world.delete(world.keys.gone("c"))
    assert set(world.view().deaths_from(8)) == {"b", "e"}


@pytest.mark.parametrize("listed", [True, False])
def test_view_of_one_run_ignores_others(listed: bool) -> None:
    """Its name was submitted again before the node heard that its own run had ended: it took its tasks over."""
    world = World("a", "b")
    world.first(0, "b")
    view = JobView(JOB, one_run=True)
    view.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
    world.store.execute(
        Txn(
            success=(
                Delete(world.keys.tasks, prefix=True),
                Put(world.keys.epoch, EpochRecord(epoch=0, attempt=1, writer="again").to_bytes()),
                Put(world.keys.spec, b'{"run": "again"}'),
                Put(world.keys.generation, b"again"),
                Put(world.keys.status, StatusRecord(state=JobStatus.RUNNING, writer="again").to_bytes()),
            )
        )
    )
    again = world.store.revision
    world.put(world.keys.node("c"), node_record("c", run="again").to_bytes())
    for _ in range(2):  # and at any time later
        if listed:
            view.reset(world.store.revision, world.store.select(world.keys.root, prefix=True))
        else:
            view.apply(world.store.revision, world.store.events_from(view.revision + 1, world.keys.root))
        assert view.superseded and view.revision == world.store.revision >= again
        assert view.spec == b"{}" and view.primary_node(0) == "b" and "c" not in view.nodes
    gone = GoneRecord(reason="it left")
    assert not world.run(transactions.declare_gone(view, "a", gone)).succeeded
    failed = StatusRecord(state=JobStatus.FAILED, reason="its own mistake")
    assert not world.run(transactions.fail(view, failed)).succeeded
    from_nothing = transactions.take_over_from_nothing(
        view, 0, "a", world.revisions["a"], stateful=True, writer=world.writer()
    )
    assert not world.run(from_nothing).succeeded
