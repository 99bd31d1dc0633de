"""A primary's care for its task's replicas: evictions, admissions, waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cluster_kit import (
    Counting,
    Gated,
    Joining,
    blindable,
    die,
    eyes,
    gated,
    holder,
    job,
    joining,
    play,
    set_up_when_offered,
    told,
)

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.backoff import Backoff
from taskgraph.node.node import Node
from taskgraph.node.serving import Serving
from taskgraph.protocol.messages import Accepted, Offer, Stamp
from taskgraph.protocol.placement import Wish
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult

__all__ = ["blindable", "gated", "joining", "set_up_when_offered"]


def truth(cluster: InProcessCluster) -> JobView:
    """A view with everything that etcd holds."""
    view = JobView(cluster.keys.job)
    view.reset(cluster.store.revision, cluster.store.select(cluster.keys.root, prefix=True))
    return view


@pytest.mark.usefixtures("blindable")
def test_boundary_waits_for_unanswered_admission(gated: type[Gated]) -> None:
    """By its key in etcd the candidate is an heir already, and must have the boundary."""
    waits_for_nobody = tg.Settings(epochs_ahead=0, admit_wait_s=0.0)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        alone, joined = holder(cluster, 0), cluster.add()
        eyes(alone).answer_late(cluster.keys.member(0, joined))
        await eyes(alone).written.wait()
        cluster.network.cut(alone.id, joined)
        gated.gate.set()
        await asyncio.sleep(1.0)
        assert joined in truth(cluster).in_sync(0)
        assert truth(cluster).stamp == Stamp(1, 1), "it takes no boundary"
        cluster.network.heal(alone.id, joined)
        eyes(alone).answer()
        return await cluster.result()

    assert play(job(gated, tasks=1, settings=waits_for_nobody), scenario, nodes=1).values == {0: 3}


def test_predecessors_evicted_member_is_readmitted(gated: type[Gated]) -> None:
    """With its old key "until 1" it would be asked for every boundary, and be no heir."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        heir, marked = (n for n in first.keeper.view.in_sync(0) if n != first.id)
        backups = first.roles.primaries[0].backups
        await backups._evict(backups._peers[marked], Backoff())
        cluster.crash(first.id)
        assert truth(cluster).members_of(0)[marked].record.until == 1
        other = cluster.node(marked)
        await other.keeper.wait_until(lambda view: view.term(0) == 2)
        assert truth(cluster).primary_node(0) == heir
        gated.gate.set()
        result = await cluster.result()
        assert truth(cluster).in_sync(0) == [heir, marked]
        return result

    assert play(job(gated, tasks=1, epochs=6, backups=2), scenario, nodes=3).values == {0: 6}


def test_too_few_members_wait_with_reason(gated: type[Gated]) -> None:
    gated.gate.set()
    safe = job(gated, tasks=1, backups=2, settings=tg.Settings(min_in_sync=3, admit_wait_s=0.0))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(30)
        assert not ended.done()
        assert holder(cluster, 0).roles.primaries[0].waiting_for == "1 more in-sync replicas (min_in_sync=3)"
        assert "task 0 waits for 1 more in-sync replicas (min_in_sync=3)" in cluster.waits()
        (waits,) = told(cluster, "waits")
        assert "epoch 0 waits: task 0 waits for 1 more in-sync replicas (min_in_sync=3), " in waits
        assert truth(cluster).stamp == Stamp(1, 0)
        cluster.add()
        return await ended

    assert play(safe, scenario, nodes=2).values == {0: 3}


@pytest.mark.usefixtures("set_up_when_offered")
def test_epoch_0_waits_for_backups() -> None:
    """Epoch 0 waits `admit_wait_s` for a slow set-up; later epochs do not."""

    class SlowSetup(Gated, state=["total"]):
        reached, gate = asyncio.Event(), asyncio.Event()

        async def setup(self) -> None:  # type: ignore[override]
            self.total = 0
            if setups:
                await asyncio.sleep(10_000)
            setups.append(1)

    setups: list[int] = []
    SlowSetup.gate.set()
    waiting = job(SlowSetup, tasks=1, settings=tg.Settings(admit_wait_s=20.0))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(15)
        assert holder(cluster, 0).roles.primaries[0].waiting_for == "the admission of n2"
        assert "task 0 waits for the admission of n2" in cluster.waits()
        assert truth(cluster).stamp == Stamp(1, 0)
        await asyncio.sleep(10)
        assert ended.done()
        return ended.result()

    assert play(waiting, scenario, nodes=2).values == {0: 3}


def test_distant_backup_gets_in_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Serving._take_offer

    async def from_far(self: Serving, peer: str, message: Offer) -> Accepted:
        await asyncio.sleep(0.05)
        return await offer(self, peer, message)

    class Fast(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.01)
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> int:
        first = cluster.nodes[0]
        await first.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 5)
        primary_node = holder(cluster, 0)
        cluster.crash(next(node for node in cluster.nodes if node is not primary_node).id)
        monkeypatch.setattr(Serving, "_take_offer", from_far)
        monkeypatch.setattr(Serving, "_take_offer_now", lambda *_: None)
        joined = cluster.add()
        await primary_node.keeper.wait_until(lambda view: joined in view.in_sync(0) or not view.running)
        assert primary_node.keeper.view.stamp is not None
        return primary_node.keeper.view.stamp.epoch

    assert play(job(Fast, tasks=1, epochs=3000), scenario, nodes=2) < 1000


@pytest.mark.parametrize("end", [InProcessCluster.crash, die], ids=["its launcher tells", "its port refuses"])
def test_member_stays_if_replacement_dies(joining: type[Joining], end: Callable[[InProcessCluster, str], None]) -> None:
    """Placement wants the new node instead of the only member."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await joining.reached.wait()
        joining.joins = True
        joined = cluster.add()
        await joining.joining.wait()
        wishes = [holder(cluster, task).wish(task) for task in range(2)]
        assert any(wish is not None and joined in wish.backups for wish in wishes)
        end(cluster, joined)
        await asyncio.sleep(20)
        assert not told(cluster, "evicted")
        assert [len(truth(cluster).in_sync(task)) for task in range(2)] == [2, 2]
        cluster.crash(holder(cluster, 1).id)
        joining.gate.set()
        return await cluster.result()

    assert play(job(joining), scenario, nodes=2).values == {0: 3, 1: 3}


class Arriving(Gated, state=["total"]):
    """After `arrive` is set, each set-up announces itself, and waits for an event of its own."""

    arrive: bool
    setups: list[asyncio.Event]
    began: asyncio.Event

    async def setup(self) -> None:  # type: ignore[override]
        self.total = 0
        if type(self).arrive:
            self.setups.append(may := asyncio.Event())
            self.began.set()
            await may.wait()


@pytest.fixture
def arriving() -> type[Arriving]:
    class Fresh(Arriving, state=["total"]):
        reached, gate, began = asyncio.Event(), asyncio.Event(), asyncio.Event()
        arrive, setups = False, []

    return Fresh


async def wished(
    cluster: InProcessCluster, node: Node, arriving: type[Arriving], monkeypatch: pytest.MonkeyPatch
) -> str:
    """A new node that placement wishes for as the only backup, during its set-up."""
    arriving.arrive = True
    arriving.began.clear()
    joined = cluster.add()
    await node.keeper.wait_until(lambda view: joined in view.nodes)
    monkeypatch.setattr(node, "wish", lambda task: Wish(primary=node.id, backups=(joined,)))
    node.keeper.notify_later()
    await arriving.began.wait()
    return joined


def test_first_ready_candidate_is_admitted(arriving: type[Arriving], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that join faster than a set-up takes would otherwise leave the task without a backup."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await arriving.reached.wait()
        node = holder(cluster, 0)
        third = await wished(cluster, node, arriving, monkeypatch)
        fourth = await wished(cluster, node, arriving, monkeypatch)
        arriving.setups[0].set()
        await node.keeper.wait_until(lambda view: third in view.in_sync(0))
        arriving.setups[1].set()
        await node.keeper.wait_until(lambda view: fourth in view.in_sync(0) and third not in view.active_members(0))
        arriving.gate.set()
        return await cluster.result()

    assert play(job(arriving, tasks=1), scenario, nodes=1).values == {0: 3}
