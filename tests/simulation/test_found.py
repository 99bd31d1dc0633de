"""What the simulation found, each as small as it got."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import taskgraph as tg
from taskgraph.coordination.api import WatchCompacted
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import OutcomeUnknown, Refused
from taskgraph.launch import inprocess
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.backups import Backups
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.node.primary.primary import Primary
from taskgraph.node.serving import Serving
from taskgraph.observe.events import Event
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.messages import Audit, HandOver, Reason, Report, Stamp
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.loop import Process, SimLoop


class Counts(tg.Task, state=["value"]):
    def setup(self) -> None:
        self.value = 0

    def compose(self, epoch: Any) -> None:
        epoch.processor(self.count)

    def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        self.value += 1


async def test_a_hand_over_to_a_node_that_is_leaving_is_refused() -> None:
    cluster = InProcessCluster(tg.Job(tasks=1, epochs=1, builder=lambda _: Counts()))
    await cluster.start(2)
    nodes = cluster.nodes
    await cluster.result(timeout_s=60)
    await cluster.stop()
    backup = next(node for node in nodes if 0 not in node.roles.primaries)
    view = backup.keeper.view
    assert view.stamp is not None
    with pytest.raises(Refused, match="cannot take over task 0"):
        await backup.takeovers.accept_handover(HandOver(view.stamp, 0, view.term(0)))


async def test_a_candidate_whose_key_vanishes_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its primary waited for it without ever letting the event loop run: the whole node stood still, for ever."""
    cluster = InProcessCluster(tg.Job(tasks=1, epochs=2, builder=lambda _: Counts()))
    vanished: list[str] = []
    offer = Backups._offer

    async def then_vanish(self: Backups, tender: Any, *args: Any, **kwargs: Any) -> None:
        await offer(self, tender, *args, **kwargs)
        node = tender.node
        if not vanished and self._insync.may_admit(node):
            vanished.append(node)
            cluster.store.revoke(self._node.keeper.view.nodes[node].record.lease)
            await self._node.keeper.load()  # seen here, and the node has not placed the task anew yet

    monkeypatch.setattr(Backups, "_offer", then_vanish)
    await cluster.start(2)
    try:
        result = await cluster.result(timeout_s=60)
    finally:
        await cluster.stop()
    assert vanished and result.epochs == 2


@pytest.mark.parametrize("executed", [True, False])
async def test_a_node_whose_lease_ends_while_it_registers(monkeypatch: pytest.MonkeyPatch, executed: bool) -> None:
    """It took the answer for a job that was submitted anew, or a lease that was gone for the end, and left."""
    late: list[Txn] = []

    class Slow(MemoryCoordinator):
        async def txn(self, txn: Txn) -> TxnResult:
            leases = [op.lease for op in txn.success if isinstance(op, Put) and op.lease]
            if leases and not late:
                late.append(txn)
                if executed:
                    await super().txn(txn)
                self.store.revoke(leases[0])  # as it expires
                raise OutcomeUnknown("the answer was lost")
            return await super().txn(txn)

    monkeypatch.setattr(inprocess, "MemoryCoordinator", Slow)
    cluster = InProcessCluster(tg.Job(tasks=1, epochs=2, builder=lambda _: Counts()))
    await cluster.start(2)
    try:
        result = await cluster.result(timeout_s=60)
    finally:
        await cluster.stop()
    assert late and result.epochs == 2


class Flags(tg.Task, state=["heard"]):
    """Each tells the other something; so each may take messages until it is sealed."""

    def setup(self) -> None:
        self.heard = 0

    def compose(self, epoch: Any) -> None:
        epoch.processor(self.tell, outbound={"x": 1 - self.task_id})
        epoch.processor(self.count, inbound={"x": 1 - self.task_id})

    def tell(self, epoch: Any, ins: Any, outs: Any) -> None:
        epoch.flag(1 - self.task_id, self.task_id)
        outs.put("x", self.task_id)

    def on_flag(self, epoch: Any, sender: int, meta: Any) -> None:
        epoch.scratch.heard = meta

    def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        self.heard += 1 + epoch.scratch.heard

    def result(self) -> int:
        return self.heard


def _job(kind: type[tg.Task]) -> InProcessCluster:
    return InProcessCluster(tg.Job(tasks=2, epochs=1, builder=lambda _: kind(), topology=tg.full()))


@pytest.mark.slow
async def test_a_link_that_is_slow_when_ledgers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of a task that lives were held up, so sums differed; it was asked for its ledger, and could not be
    reached: the job failed, although nobody had seen anything wrong."""
    refused: list[str] = []
    dispatch = Serving._dispatch

    async def slow(self: Serving, peer: str, message: Any) -> Any:
        if not (isinstance(message, Audit | Report) and message.task == 1):
            return await dispatch(self, peer, message)
        if not refused:  # an earlier report arrived
            assert isinstance(message, Report)
            await dispatch(self, peer, msgspec.structs.replace(message, version=0, received=bytes(16), done=False))
        if refused.count("Audit") < 2:
            refused.append(type(message).__name__)
            raise Refused(Reason.PAUSED, "as if it could not be reached")
        return await dispatch(self, peer, message)

    monkeypatch.setattr(Serving, "_dispatch", slow)
    cluster = _job(Flags)
    await cluster.start(2)
    try:
        result = await cluster.result(timeout_s=60)
    finally:
        await cluster.stop()
    assert result.values == {0: 2, 1: 1}


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_watch_that_missed_what_was_compacted_says_so(seed: int) -> None:
    """A mistake of the simulation: made again it began after the compaction, and a node missed that it was primary."""

    async def run() -> None:
        etcd = SimEtcd(SimStore(lambda revision, events: None), random.Random(seed), delay_s=0.001, lag_s=0.001)
        process = Process("n1")
        node = SimCoordinator(etcd, process, process, on_txn=lambda *_: None, timeout_s=1.0)
        told: list[tuple[int, bool]] = []

        async def watch() -> None:
            async for batch in node.watch("/", 1):
                told.append((batch.revision, batch.reopened))  # noqa: PERF401 - it ends with an exception

        watching = asyncio.create_task(watch())
        etcd.store.execute(Txn(success=(Put("/a", b"0"),)))
        etcd.wake()
        await asyncio.sleep(1.0)
        node.stall(True)
        for n in range(5):
            etcd.store.execute(Txn(success=(Put("/a", b"%d" % n),)))
        etcd.store.compact(etcd.store.revision - 1)
        node.break_streams()
        node.stall(False)
        with pytest.raises(WatchCompacted):
            await watching
        assert told == [(2, False), (2, True)]
        await node.close()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("again", [False, True])
def test_a_simulated_watch_that_broke_says_that_it_goes_on(again: bool) -> None:
    """As the real one does, before anything that came meanwhile: so whoever watches lists. None ever did here."""

    async def run() -> None:
        etcd = SimEtcd(SimStore(lambda revision, events: None), random.Random(1), delay_s=0.001, lag_s=0.001)
        process = Process("n1")
        keeper = ViewKeeper(
            SimCoordinator(etcd, process, process, on_txn=lambda *_: None, timeout_s=1.0), "j", refresh_s=0.01
        )
        node, lists = keeper._coordinator, 0
        assert isinstance(node, SimCoordinator)
        load = keeper.load

        async def counted() -> None:
            nonlocal lists
            lists += 1
            await load()

        keeper.load = counted  # type: ignore[method-assign]
        watching = asyncio.create_task(keeper.run())
        etcd.store.execute(Txn(success=(Put(keeper.view.keys.generation, b"0"),)))
        etcd.wake()
        await asyncio.sleep(1.0)
        assert lists == 0 and keeper.view.revision == 2
        for broken in range(1, 2 + again):
            node.break_streams()
            await asyncio.sleep(1.0)
            assert lists == broken
        etcd.store.execute(Txn(success=(Put(keeper.view.keys.generation, b"1"),)))
        etcd.wake()
        await asyncio.sleep(1.0)
        assert lists == 1 + again and keeper.view.revision == 3
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await node.close()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(run())


def test_a_simulated_etcd_that_was_started_before_its_time_is_not_started_again() -> None:
    """The end of its restart gave leases their whole TTL once more, after all failures had ended: a node's key was
    still there when it was looked for (seed 51422 with mistakes)."""

    async def run() -> None:
        etcd = SimEtcd(SimStore(lambda revision, events: None), random.Random(1), delay_s=0.001, lag_s=0.001)
        lease = etcd.store.grant(2.0)
        etcd.store.execute(Txn(success=(Put("/a", b"", lease=lease),)))
        etcd.stop()
        etcd.later(1.5, etcd.start)
        await asyncio.sleep(0.1)
        etcd.start()
        await asyncio.sleep(2.8)  # its TTL, a moment, and how often etcd looks
        assert not etcd.store.select("/a", prefix=False)
        etcd.stop()
        assert etcd.down
        etcd.start()
        assert etcd.serving

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(run())


async def test_a_node_that_dies_while_it_is_asked_for_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked waited for what it would never say. Python 3.12 and later came there by themselves."""
    asked: list[str] = []
    results = Node.results

    async def dies_first(self: Node) -> list[TaskResult]:
        if not asked:
            asked.append(self.id)
            cluster.crash(self.id)
            await asyncio.Event().wait()
        return await results(self)

    monkeypatch.setattr(Node, "results", dies_first)
    cluster = InProcessCluster(tg.Job(tasks=2, epochs=2, backups=1, builder=lambda _: Counts()))
    await cluster.start(3)
    try:
        result = await cluster.result(timeout_s=10)
    finally:
        await cluster.stop()
    assert len(asked) == 1 and result.epochs == 2


async def test_a_job_that_finished_and_then_lost_a_task_goes_back_and_finishes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had its results yet. It went back to its checkpoint, and passed for finished there: other tasks had the
    results of the last epoch, and so the job had none, and waited for ever (seeds 495 and 782)."""
    concluded = Primary._conclude
    finished: list[int] = []

    async def then_die(self: Primary) -> None:
        view = self.node.keeper.view
        if self.task == 1 and not view.running and not finished:
            finished.append(view.epoch.record.epoch if view.epoch is not None else 0)
            for holder in view.in_sync(1):
                cluster.crash(holder)
                cluster.add()
            await asyncio.Event().wait()
        await concluded(self)

    async def checkpointed(stage: str, task: int, epoch: int) -> None:
        if (stage, epoch) == ("done", 3):  # so there is one to go back to, and it is not the last boundary
            await cluster.nodes[0].keeper.wait_until(lambda v: v.checkpoint is not None)

    monkeypatch.setattr(Primary, "_conclude", then_die)
    job = tg.Job(tasks=3, epochs=4, builder=lambda _: Sums(), checkpoint=f"file://{tmp_path}", checkpoint_every=2)
    cluster = InProcessCluster(job, point=lambda *_: checkpointed)
    await cluster.start(4)
    try:
        result = await cluster.result(timeout_s=30)
    finally:
        await cluster.stop()
    assert finished == [4] and result.restarts == 1
    assert [event.kind for event in cluster.events].count("rolled back") == 1
    assert (result.epochs, result.values) == (4, {0: 4, 1: 4, 2: 4})


class Sums(Counts, state=["value"]):
    def result(self) -> int:
        return int(self.value)


class ReportsAnything(Counts, state=["value"]):
    """What it reports differs each time it computes; nothing is sent, so that all sums agree always."""

    drawn = itertools.count()

    def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        self.value += 1
        epoch.report(**{f"t{self.task_id}": float(next(self.drawn))})


async def test_a_successor_that_reports_other_numbers_than_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary of task 0 had the predecessor's, and the successor's were committed (seed 20952)."""
    committed: dict[int | None, dict[str, Any]] = {}
    crashed: list[int] = []
    kept = asyncio.Event()
    rows_now = LeaderRole.rows_now

    def notes(self: LeaderRole, stamp: Stamp, own: dict[str, float]) -> Any:
        rows = rows_now(self, stamp, own)
        if rows is not None and stamp.epoch == 3:
            kept.set()
        return rows

    async def dies_before_it_is_committed(stage: str, task: int, epoch: int) -> None:
        if (stage, epoch) != ("commit", 2) or crashed:
            return
        await kept.wait()
        crashed.append(epoch)
        leader = next(node for node in cluster.nodes if 0 in node.roles.primaries)
        cluster.crash(leader.keeper.view.primary_node(1) or "")
        await leader.keeper.wait_until(lambda view: view.term(1) == 2)

    def note(event: Event) -> None:
        if event.kind == "commit":
            committed[event.epoch] = dict(event.fields)

    monkeypatch.setattr(LeaderRole, "rows_now", notes)
    job = tg.Job(tasks=2, epochs=8, backups=1, builder=lambda _: ReportsAnything())
    cluster = InProcessCluster(job, point=lambda *_: dies_before_it_is_committed, on_event=note)
    await cluster.start(3)
    try:
        result = await cluster.result(timeout_s=60)
    finally:
        await cluster.stop()
    assert crashed == [2] and result.failovers == 1
    assert {report.epoch: report.numbers for report in result.reports} == committed


class Stateless(tg.Task):
    def compose(self, epoch: Any) -> None:
        epoch.processor(self.count)

    def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        epoch.report(epoch=float(epoch.number))


def tear(place: Path) -> None:
    for file in place.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:12])


async def test_a_torn_file_of_reports_alone_does_not_fail_a_job(tmp_path: Path) -> None:
    """Of a task 0 without state a checkpoint has what was reported, and nothing that the job needs (seed 41611)."""
    crashed: list[int] = []

    async def tears_it_and_dies(stage: str, task: int, epoch: int) -> None:
        if (stage, epoch) != ("commit", 3) or crashed:
            return
        (node,) = cluster.nodes
        await node.keeper.wait_until(lambda v: v.checkpoint is not None and v.checkpoint.record.epoch == 3)
        tear(tmp_path)
        crashed.append(epoch)
        cluster.crash(node.id)
        cluster.add()
        await asyncio.Event().wait()

    job = tg.Job(
        tasks=1,
        epochs=6,
        backups=0,
        builder=lambda _: Stateless(),
        checkpoint=f"file://{tmp_path}",
        checkpoint_every=1,
        settings=tg.Settings(epochs_ahead=0),
    )
    cluster = InProcessCluster(job, point=lambda *_: tears_it_and_dies)
    await cluster.start(1)
    try:
        result = await cluster.result(timeout_s=60)
    finally:
        await cluster.stop()
    assert crashed == [3] and (result.epochs, result.failovers) == (6, 0)
    assert {report.epoch: report.numbers for report in result.reports} == {e: {"epoch": float(e)} for e in (3, 4, 5)}
    (refused,) = [event.text for event in cluster.events if event.kind == "checkpoint refused"]
    assert "is torn" in refused and "reported before epoch 3 may be missing" in refused


async def test_a_node_that_takes_one_task_more_while_it_is_asked_for_its_results() -> None:
    """It had all of them when it was woken, and one was missing when it came to tell them: it raised."""
    cluster = InProcessCluster(tg.Job(tasks=1, epochs=2, backups=0, builder=lambda _: Counts()))
    await cluster.start(1)
    try:
        await cluster.result(timeout_s=10)
        (node,) = cluster.nodes
        primary = node.roles.primaries[0]
        final, primary.final = primary.final, None
        asked = asyncio.create_task(node.results())
        await asyncio.sleep(0)
        primary.final = final
        node.keeper.notify()
        primary.final = None  # in the same step of the event loop
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asked.done()
        primary.final = final
        node.keeper.notify()
        assert [result.task for result in await asked] == [0]
    finally:
        await cluster.stop()


class HangsOnce(Counts, state=["value"]):
    hangs = True

    async def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        if self.task_id == 1 and epoch.number == 2 and HangsOnce.hangs:
            HangsOnce.hangs = False
            await asyncio.Event().wait()
        self.value += 1


async def test_a_leader_that_dies_between_the_request_for_a_restart_and_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had acknowledged the request, and nobody made it again: the epoch stood still for ever (seed 87838)."""
    died: list[str] = []
    restart = LeaderRole._restart

    async def dies(self: LeaderRole, why: str) -> None:
        if not died:
            died.append(why)
            cluster.crash(self._node.id)
            await asyncio.Event().wait()
        await restart(self, why)

    monkeypatch.setattr(LeaderRole, "_restart", dies)
    monkeypatch.setattr(HangsOnce, "hangs", True)
    job = tg.Job(tasks=2, epochs=4, backups=1, builder=lambda _: HangsOnce(), settings=tg.Settings(epochs_ahead=0))
    cluster = InProcessCluster(job)
    await cluster.start(3)
    try:
        keeper = cluster.nodes[0].keeper
        await keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch == 2)
        primary = cluster.node(keeper.view.primary_node(1) or "").roles.primaries[1]
        await primary.node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch == 2)
        primary.ask_restart(Stamp(1, 2), "a test")
        result = await cluster.result(timeout_s=10)
    finally:
        await cluster.stop()
    assert died == ["a test"]
    assert (result.epochs, result.failovers, result.restarts) == (4, 1, 1)
