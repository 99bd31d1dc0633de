"""When a node pauses, and what it says then."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, Gated, blindable, gated, holder, job, paused, play, stand_still, told

import taskgraph as tg
from taskgraph.coordination.api import Listing
from taskgraph.coordination.memory import MemoryCoordinator, MemoryLease
from taskgraph.errors import Refused
from taskgraph.launch.inprocess import InProcessCluster, arun_inprocess
from taskgraph.observe.events import Event
from taskgraph.protocol.kv import Delete, Txn
from taskgraph.protocol.messages import Call, Reason, Release, Seal, Stamp, Waits
from taskgraph.results import JobResult
from taskgraph.testing.clock import FastForwardLoop

__all__ = ["blindable", "gated"]


def test_pause_names_lease_trouble(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLease, "trouble", lambda _: "can't start new thread")

    async def scenario(cluster: InProcessCluster) -> list[str]:
        await gated.reached.wait()
        stand_still(60.0)
        gated.gate.set()
        await cluster.result()
        return told(cluster, "paused")

    assert play(job(gated), scenario, nodes=1) == [
        "the lease could not be renewed in time (can't start new thread): serving stops, work is kept"
    ]


def test_status_shows_reason_of_pause(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLease, "trouble", lambda _: "etcd 10.0.0.1:2379: no answer for 1.7 s")

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        node = holder(cluster, 0)
        assert not any("paused" in line for line in node.status().waits)
        why = "the lease could not be renewed in time (etcd 10.0.0.1:2379: no answer for 1.7 s)"
        async with paused(node):
            assert node.status().waits[0] == f"{node.name} is paused: {why}"
            assert f"{node.name} is paused: {why}" in cluster.waits()
        assert not any("paused" in line for line in node.status().waits)
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=2).values == {0: 3}


def test_pauses_third_of_ttl_early(gated: type[Gated]) -> None:
    """Others may take over once the key is gone: the node has to know earlier."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        node = holder(cluster, 0)
        lease = node.registration._lease
        assert isinstance(lease, MemoryLease)
        lease.stop()
        await node.keeper.wait_until(lambda _: node.paused)
        left_s = lease.valid_until() - asyncio.get_running_loop().time()
        assert 0 <= lease.ttl_s / 3 - left_s < 0.2
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=2).values == {0: 3}


@pytest.mark.parametrize("call", [Waits(Stamp(1, 1), 0), Release(0, 1, 99, 0), Seal(Stamp(1, 1), 0, 99)], ids=type)
def test_paused_node_refuses_calls(gated: type[Gated], call: Call) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        node = holder(cluster, 0)
        async with paused(node):
            with pytest.raises(Refused, match="n1 cannot prove its lease") as caught:
                await node.serving("somebody", call)
            assert caught.value.reason == Reason.PAUSED
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=1).values == {0: 3}


@pytest.mark.parametrize("all_of_them", [False, True])
def test_deleted_key_is_put_back(gated: type[Gated], all_of_them: bool) -> None:
    """As after `etcdctl del --prefix .../nodes/`."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        await first.keeper.wait_until(lambda view: all(len(view.in_sync(task)) == 2 for task in range(2)))
        before, key = dict(first.keeper.view.nodes), first.keeper.view.keys.node(first.id)
        deleted = Delete(key.removesuffix(first.id), prefix=True) if all_of_them else Delete(key)
        at = (await first.coordinator.txn(Txn(success=(deleted,)))).revision
        await first.keeper.wait_for_revision(at)
        await first.keeper.wait_until(lambda view: view.nodes.keys() == before.keys())
        await asyncio.sleep(2.0)
        assert len(told(cluster, "paused")) == len(told(cluster, "resumed")) == (3 if all_of_them else 1)
        assert told(cluster, "paused")[0].startswith("somebody deleted this node's key in etcd: ")
        # Where all were away they wait for each other; of one that is, others take over at once.
        assert bool(told(cluster, "takeover")) is not all_of_them
        gated.gate.set()
        result = await cluster.result()
        assert len(cluster.nodes) == 3 and not told(cluster, "gone")
        return result

    assert play(job(gated), scenario, nodes=3).values == {0: 3, 1: 3}


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "resumes"])
def test_slow_listing_keeps_lease(gated: type[Gated], joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a slow link."""
    lists = MemoryCoordinator.list

    async def slowly(self: MemoryCoordinator, prefix: str) -> Listing:
        await asyncio.sleep(12.0)
        return await lists(self, prefix)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        monkeypatch.setattr(MemoryCoordinator, "list", slowly)
        if joins:
            cluster.add()
        else:
            key = first.keeper.view.keys.node(first.id)
            await first.coordinator.txn(Txn(success=(Delete(key),)))
        await asyncio.sleep(60.0)
        assert len(first.keeper.view.nodes) == 2 + joins and not told(cluster, "gone")
        assert len(told(cluster, "paused")) == len(told(cluster, "resumed")) == (0 if joins else 1)
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated), scenario, nodes=2).values == {0: 3, 1: 3}


class Busy(Counting, state=["total"]):
    """Blocks the loop in every epoch."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        stand_still(60.0)
        await super().count(epoch, ins, outs)


def test_busy_single_process_does_not_pause() -> None:
    events: list[Event] = []
    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        result = runner.run(arun_inprocess(job(Busy, backups=0), on_event=events.append, timeout_s=3600))
    assert result.values == {0: 3, 1: 3}
    assert not [event.kind for event in events if event.kind in ("paused", "resumed")]
