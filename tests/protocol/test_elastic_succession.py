"""Which view follows, on a job's keys in an in-memory etcd."""

from __future__ import annotations

import pytest
from protocol_kit import RUN, World, node_record

from taskgraph.protocol import transactions as of_all_jobs
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.succession import (
    all_drain,
    all_may_leave,
    first_view,
    leavers,
    lone_view,
    must_go_on_alone,
    next_view,
)
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Worker
from taskgraph.protocol.kv import Delete, Put, Txn
from taskgraph.protocol.records import CheckpointRecord, GoneRecord, JobStatus, StatusRecord
from taskgraph.protocol.view import JobView

NONE: frozenset[str] = frozenset()


def begun(*nodes: str) -> World:
    """The first view has all of the nodes."""
    world = World(*nodes)
    view = first_view(world.view(), nodes[0], run=RUN, fewest=len(nodes))
    assert view is not None
    assert put(world, view, nodes[0])
    return world


def put(world: World, view: View, node: str) -> bool:
    txn = transactions.propose(
        world.view(), view, node=node, node_revision=world.revisions[node], writer=world.writer()
    )
    return world.run(txn).succeeded


def whole(world: World, me: str, since: int = 0) -> Worker:
    """A worker that has read the view."""
    job = world.view()
    assert job.workers is not None
    worker = Worker(me, whole=True)
    worker.note_entry(since)
    worker.read_view(View.of(job.workers.record))
    return worker


def follows(world: World, me: str, core: Worker, **missed: str) -> View | None:
    """What the worker proposes, given one node that is "gone", one of the "suspects" and one "outvoted", or fewer."""
    sets = {why: frozenset(filter(None, [missed.get(why)])) for why in ("gone", "suspects", "outvoted")}
    return next_view(world.view(), me, core, **sets)


def test_most_senior_node_proposes_the_first_view() -> None:
    world = World("b", "a")
    assert first_view(world.view(), "a", run=RUN, fewest=2) is None
    assert first_view(world.view(), "b", run=RUN, fewest=3) is None
    assert first_view(world.view(), "b", run=RUN, fewest=2) == View(0, 0, (ViewEntry("b", 0), ViewEntry("a", 0)))


def test_first_view_has_living_nodes_of_the_run_alone() -> None:
    world = World("a", "b", "c")
    world.die("a")
    world.run(Txn(success=(Put(world.keys.node("z"), node_record("z", run="run-0").to_bytes()),)))
    assert first_view(world.view(), "b", run=RUN, fewest=1) == View(0, 0, (ViewEntry("b", 0), ViewEntry("c", 0)))


def test_nothing_follows_while_all_are_well() -> None:
    world = begun("a", "b")
    assert follows(world, "a", whole(world, "a")) is None
    assert follows(world, "a", whole(world, "a"), gone="z", suspects="y") is None


@pytest.mark.parametrize("why", ["gone", "suspects", "outvoted"])
def test_lost_worker_is_left_out(why: str) -> None:
    world = begun("a", "b", "c")
    core = whole(world, "c")
    view = follows(world, "c", core, **{why: "b"})
    assert view == View(1, 0, (ViewEntry("a", 0), ViewEntry("c", 0)))


def test_outvoted_worker_proposes_nothing() -> None:
    world = begun("a", "b", "c")
    assert follows(world, "a", whole(world, "a"), gone="c", outvoted="a") is None


def test_worker_that_has_not_read_the_view_proposes_nothing() -> None:
    world = begun("a", "b", "c")
    core = whole(world, "a")
    assert put(world, View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 0))), "a")
    assert follows(world, "a", core, gone="b") is None


def test_newcomer_leaves_out_only_those_that_are_gone() -> None:
    world = begun("a", "b", "c")
    assert put(world, View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 0), ViewEntry("c", 1))), "a")
    core = whole(world, "c", since=1)
    core.whole = False
    assert follows(world, "c", core, suspects="a") is None
    assert follows(world, "c", core, gone="a") == View(2, 0, (ViewEntry("b", 0), ViewEntry("c", 1)))


def test_worker_outside_leaves_out_its_earlier_entry() -> None:
    world = begun("a", "b")
    core = whole(world, "a", since=5)
    assert follows(world, "a", core, gone="b") == View(1, 0, (ViewEntry("b", 0),))


def test_draining_workers_leave_unless_all_do() -> None:
    world = begun("a", "b")
    world.put(world.keys.node("b"), node_record("b", draining=True).to_bytes())
    assert leavers(world.view(), NONE) == {"b"}
    assert leavers(world.view(), frozenset({"a"})) == NONE, "no other worker is left"
    world.put(world.keys.node("a"), node_record("a", draining=True).to_bytes())
    assert leavers(world.view(), NONE) == NONE


def test_all_leave_once_a_checkpoint_is_complete() -> None:
    world = begun("a", "b")

    def drain(node: str) -> None:
        world.put(world.keys.node(node), node_record(node, draining=True).to_bytes())

    def save(sums: int) -> None:
        world.put(world.keys.checkpoint, CheckpointRecord(epoch=sums, attempt=1, name="c").to_bytes())

    drain("a")
    save(1)
    assert not all_drain(world.view()) and not all_may_leave(world.view())
    drain("b")
    assert all_drain(world.view()) and not all_may_leave(world.view()), "the checkpoint is of before"
    save(2)
    assert all_may_leave(world.view())
    world.put(world.keys.node("c"), node_record("c").to_bytes())
    assert not all_drain(world.view()) and not all_may_leave(world.view()), "a newcomer takes the state over"


def test_draining_worker_leaves_once_all_others_hold_the_totals() -> None:
    world = begun("a", "b")
    world.put(world.keys.node("a"), node_record("a", draining=True).to_bytes())
    core = whole(world, "a")
    assert follows(world, "a", core) is None, "the flush of the view goes on"
    job = world.view()
    assert job.workers is not None
    core.receive_report("b", View.of(job.workers.record), FlushReport(0, True, (), ()))
    assert follows(world, "a", core) == View(1, 0, (ViewEntry("b", 0),))


def test_draining_worker_leaves_once_a_newcomer_is_at_work() -> None:
    """If it left before, the newcomer would not hear its report, and the last whole worker would be gone."""
    world = begun("a")
    assert put(world, View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 1))), "a")
    world.put(world.keys.node("a"), node_record("a", draining=True).to_bytes())
    core = whole(world, "a")
    core.receive_report("b", View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 1))), FlushReport(0, False, (), ()))
    assert follows(world, "a", core) is None
    core.receive_contribution("b", Contribution(1, 0, (), b""))
    assert follows(world, "a", core) == View(2, 0, (ViewEntry("b", 1),))


def test_draining_worker_waits_anew_for_a_newcomer_that_enters_again() -> None:
    world = begun("a")
    core = whole(world, "a")

    def enter(number: int) -> None:
        view = View(number, 0, (ViewEntry("a", 0), ViewEntry("b", number)))
        assert put(world, view, "a")
        core.receive_report("b", view, FlushReport(0, False, (), ()))

    enter(1)
    core.receive_holds_totals("b", 1, 0)
    assert core.all_whole
    without = View(2, 0, (ViewEntry("a", 0),))
    assert put(world, without, "a")
    core.read_view(without)
    enter(3)
    world.put(world.keys.node("a"), node_record("a", draining=True).to_bytes())
    assert follows(world, "a", core) is None, "b may not have its report of this view"
    core.receive_holds_totals("b", 3, 0)
    assert follows(world, "a", core) == View(4, 0, (ViewEntry("b", 3),))


def test_newcomer_goes_on_alone_once_all_workers_are_gone() -> None:
    world = begun("a", "b")
    world.register("c")
    core = whole(world, "c", since=1)
    core.whole = False

    def alone(gone: set[str], excluded_by: int = -1) -> bool:
        return must_go_on_alone(
            world.view(), "c", core, gone=frozenset(gone), excluded_by=excluded_by, none_whole_in=-1
        )

    assert not alone({"a"})
    assert alone({"a", "b"})
    assert not alone({"a", "b"}, excluded_by=1), "a newer view is on its way"
    assert lone_view(world.view(), "c") == View(1, 1, (ViewEntry("c", 1),))


def test_whole_worker_never_goes_on_alone() -> None:
    world = begun("a", "b")
    core = whole(world, "a")
    assert not must_go_on_alone(world.view(), "a", core, gone=frozenset({"b"}), excluded_by=-1, none_whole_in=0)


def test_returns_count_until_one_gets_further() -> None:
    world = begun("a")

    def returned(dead: str, me: str, sums: int, *, intended: bool = False) -> int:
        """A node returns, another one joins."""
        record = GoneRecord(reason="killed by SIGKILL", intended=intended)
        world.run(Txn(success=(Delete(world.keys.node(dead)), Put(world.keys.gone(dead), record.to_bytes()))))
        world.register(me)
        job, proposer = world.view(), (me, world.revisions[me])
        alone = lone_view(job, me)
        txn = transactions.return_alone(job, alone, (dead,), proposer, sums=sums, writer=world.writer())
        assert world.run(txn).succeeded and put(world, alone.joined_by("other"), me)
        workers = world.view().workers
        assert workers is not None
        return workers.record.returns

    assert returned("a", "b", 3) == 1
    assert returned("b", "c", 3) == 2
    assert returned("c", "d", 3, intended=True) == 2, "`taskgraph kill` does not count"
    assert returned("d", "e", 2) == 3
    assert returned("e", "f", 4) == 1


def test_most_senior_goes_on_alone_where_no_worker_holds_all_totals() -> None:
    world = begun("a", "b")
    for me, begins in (("a", True), ("b", False)):
        core = whole(world, me)
        core.whole = False
        for none_whole_in in (-1, 0):
            found = must_go_on_alone(world.view(), me, core, gone=NONE, excluded_by=-1, none_whole_in=none_whole_in)
            assert found == (begins and none_whole_in == 0)


def test_checkpoint_of_an_earlier_view_is_refused() -> None:
    """Its lineage may have ended meanwhile, and a job that returned would go on from totals that were undone."""
    world = begun("a", "b")
    job = world.view()
    assert put(world, View(1, 0, (ViewEntry("b", 0),)), "b")
    record = CheckpointRecord(epoch=3, attempt=1, name="c", writer="a")
    txn = transactions.point_to_checkpoint(job, record, node="a", node_revision=world.revisions["a"])
    assert not world.run(txn).succeeded
    txn = transactions.point_to_checkpoint(world.view(), record, node="b", node_revision=world.revisions["b"])
    assert world.run(txn).succeeded


def test_end_in_an_earlier_view_is_refused() -> None:
    """Its last total may have been undone by a job that returned."""
    world = begun("a", "b")
    job = world.view()
    assert put(world, View(1, 0, (ViewEntry("b", 0),)), "b")
    txn = transactions.finish(job, sums=3, node="a", node_revision=world.revisions["a"], writer=world.writer())
    assert not world.run(txn).succeeded
    job = world.view()
    txn = transactions.finish(job, sums=3, node="b", node_revision=world.revisions["b"], writer=world.writer())
    assert world.run(txn).succeeded


def test_return_from_an_older_checkpoint_is_refused() -> None:
    world = begun("a", "b")
    job = world.view()
    record = CheckpointRecord(epoch=3, attempt=1, name="c", writer="a")
    assert world.run(
        transactions.point_to_checkpoint(job, record, node="a", node_revision=world.revisions["a"])
    ).succeeded

    def returns(job: JobView) -> bool:
        view, proposer = View(2, 1, (ViewEntry("b", 0),)), ("b", world.revisions["b"])
        return world.run(transactions.return_alone(job, view, (), proposer, sums=0, writer=world.writer())).succeeded

    assert not returns(job)
    assert returns(world.view())


@pytest.mark.parametrize("meanwhile", ["", "a checkpoint is complete", "another worker is in a view"])
def test_job_fails_for_want_of_a_state_only_while_there_is_none(meanwhile: str) -> None:
    world = begun("a")
    world.register("b")
    job = world.view()
    if meanwhile == "a checkpoint is complete":
        record = CheckpointRecord(epoch=3, attempt=1, name="c", writer="a")
        txn = transactions.point_to_checkpoint(job, record, node="a", node_revision=world.revisions["a"])
        assert world.run(txn).succeeded
    elif meanwhile:
        assert put(world, View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 1))), "b")
    failed = StatusRecord(state=JobStatus.FAILED, writer=world.writer())
    txn = of_all_jobs.fail(job, failed, transactions.compare_without_state(job))
    assert world.run(txn).succeeded == (not meanwhile)


@pytest.mark.parametrize("write", ["a view", "a return", "the end", "a checkpoint"])
def test_node_without_its_key_writes_nothing(write: str) -> None:
    """Others have called it lost, or its lease has ended: it may be frozen, and write late."""

    def txn(job: JobView, node: str, revision: int) -> Txn:
        view, fence = View(1, 0, (ViewEntry("b", 0),)), {"node": node, "node_revision": revision}
        if write == "a view":
            return transactions.propose(job, view, writer=world.writer(), **fence)
        if write == "a return":
            return transactions.return_alone(job, view, (), (node, revision), sums=0, writer=world.writer())
        if write == "the end":
            return transactions.finish(job, sums=3, writer=world.writer(), **fence)
        return transactions.point_to_checkpoint(
            job, CheckpointRecord(epoch=3, attempt=1, name="c", writer="a"), **fence
        )

    world = begun("a", "b")
    late = txn(world.view(), "a", world.revisions["a"])
    world.die("a")
    assert not world.run(late).succeeded
    assert world.run(txn(world.view(), "b", world.revisions["b"])).succeeded


def test_view_of_an_earlier_run_is_refused() -> None:
    world = begun("a", "b")
    job = world.view()
    world.put(world.keys.spec, b"submitted again")
    late = transactions.propose(
        job, View(1, 0, (ViewEntry("b", 0),)), node="b", node_revision=world.revisions["b"], writer=world.writer()
    )
    assert not world.run(late).succeeded


def test_end_of_a_failed_job_and_an_older_checkpoint_are_refused() -> None:
    world = begun("a", "b")
    job, fence = world.view(), {"node": "a", "node_revision": world.revisions["a"]}
    end = transactions.finish(job, sums=9, writer=world.writer(), **fence)
    older, newer = (
        transactions.point_to_checkpoint(job, CheckpointRecord(epoch=sums, attempt=1, name="c", writer="a"), **fence)
        for sums in (3, 6)
    )
    assert world.run(newer).succeeded and not world.run(older).succeeded
    world.put(world.keys.status, StatusRecord(state=JobStatus.FAILED, writer=world.writer()).to_bytes())
    assert not world.run(end).succeeded
