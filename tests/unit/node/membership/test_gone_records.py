"""Records of gone nodes: a job that runs for months has thousands."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, blindable, eyes, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary import forgetting
from taskgraph.protocol.view import JobView

__all__ = ["blindable", "gated"]


class Slow(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.05)
        await super().count(epoch, ins, outs)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes records after a few nodes, not a thousand."""
    monkeypatch.setattr(forgetting, "KEPT", 2)
    monkeypatch.setattr(forgetting, "BATCH", 2)


@pytest.mark.usefixtures("forgetful")
def test_records_of_gone_nodes_are_bounded() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        lives = cluster.nodes[0]
        view = lives.keeper.view

        def whole(view: JobView) -> bool:
            return all(len(set(view.in_sync(task)) - view.gone.keys()) == 2 for task in range(2))

        for _ in range(9):
            await lives.keeper.wait_until(whole)
            cluster.crash(next(node for node in view.in_sync(0) if node != lives.id))
            cluster.add()
            await asyncio.sleep(0.2)
        await lives.keeper.wait_until(whole)
        await asyncio.sleep(3 * lives.settings.lost_after_s)
        assert len(view.gone) == 2 and lives.suspicion._emitted == view.gone.keys()
        assert len(cluster.store.select(cluster.keys.gone_nodes, prefix=True)) == 2

    play(job(Slow, epochs=100_000), scenario, nodes=3)


@pytest.mark.usefixtures("blindable", "forgetful")
def test_node_with_deleted_record_stays_gone() -> None:
    """It may have been frozen for days."""

    async def scenario(cluster: InProcessCluster) -> None:
        observer = holder(cluster, 0)
        frozen = next(node for node in cluster.nodes if node.id in observer.keeper.view.in_sync(0) and node != observer)
        eyes(frozen).blind()
        cluster.store.revoke(observer.keeper.view.nodes[frozen.id].record.lease)
        await observer.keeper.wait_until(lambda view: frozen.id in view.gone)
        while frozen.id in observer.keeper.view.gone:
            cluster.crash(cluster.add())
            await asyncio.sleep(1.0)
        assert frozen in cluster.nodes and frozen.paused
        eyes(frozen).see()
        await asyncio.sleep(5.0)
        assert frozen not in cluster.nodes and frozen.id not in observer.keeper.view.nodes
        assert not any("resumed" in text for text in told(cluster, "resumed"))
        left = observer.keeper.view.gone[frozen.id].record.reason
        assert left == f"ended itself: {frozen.name} was absent for so long that it counts as gone"

    async def whole(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        await scenario(cluster)

    play(job(Slow, tasks=1, epochs=100_000), whole, nodes=3)


@pytest.mark.usefixtures("blindable", "forgetful")
def test_absent_node_survives_others_deletion() -> None:
    """The others were gone before it last read its key."""

    async def scenario(cluster: InProcessCluster) -> None:
        observer = holder(cluster, 0)
        absent = next(node for node in cluster.nodes if node is not observer)
        for _ in range(4):
            cluster.crash(cluster.add())
            await asyncio.sleep(0.5)
        await asyncio.sleep(observer.settings.lost_after_s - 5.0)
        eyes(absent).blind()
        cluster.store.revoke(observer.keeper.view.nodes[absent.id].record.lease)
        await observer.keeper.wait_until(lambda view: view.forgotten is not None)
        assert absent.id not in observer.keeper.view.nodes
        eyes(absent).see()
        await observer.keeper.wait_until(lambda view: absent.id in view.nodes)
        assert absent in cluster.nodes

    async def whole(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        await scenario(cluster)

    play(job(Slow, tasks=1, epochs=100_000), whole, nodes=2)
