"""Nodes that are gone for long: a job that runs for months has thousands of them."""

from __future__ import annotations

import asyncio
from collections.abc import ItemsView, Iterator, KeysView
from typing import Any

import pytest
from cluster_kit import Counting, Gated, blindable, eyes, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary import forgetting
from taskgraph.protocol.kv import Delete, Put, Txn
from taskgraph.protocol.records import GoneRecord, Ran
from taskgraph.protocol.view import JobView

__all__ = ["blindable", "gated"]


class Counted(dict[str, Any]):
    """How often all of it was gone through."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()

    def keys(self) -> KeysView[str]:
        self.times += 1
        return super().keys()

    def items(self) -> ItemsView[str, Any]:
        self.times += 1
        return super().items()


class Slow(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.05)
        await super().count(epoch, ins, outs)


def test_a_node_that_looks_again_does_not_go_through_all_of_them(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        for number in range(20):
            record = GoneRecord(reason="killed", ran=(Ran("count", 0, 0),))
            cluster.store.execute(Txn(success=(Put(cluster.keys.gone(f"old-{number}"), record.to_bytes()),)))
        await asyncio.sleep(1.0)
        node = cluster.nodes[0]
        counted = node.keeper.view.gone = Counted(node.keeper.view.gone)
        assert len(counted) == 20 == len(node.gone)
        for _ in range(10):
            node.roles.reconsider()
            await asyncio.sleep(0.1)
        assert counted.times == 0
        cluster.crash(cluster.nodes[1].id)
        await asyncio.sleep(1.0)
        assert len(node.gone) == 21 and counted.times

    play(job(gated), scenario, nodes=2)


def test_what_a_node_knows_of_those_that_are_gone_does_not_grow_with_them() -> None:
    """Each was suspected, probed and reachable for ever, and all of them were looked at again and again."""

    async def scenario(cluster: InProcessCluster) -> None:
        lives = cluster.nodes[0]
        view = lives.keeper.view

        def whole(view: JobView) -> bool:
            return all(len(set(view.in_sync(task)) - view.gone.keys()) == 2 for task in range(2))

        for _ in range(12):
            await lives.keeper.wait_until(whole)
            cluster.crash(next(node for node in view.in_sync(0) if node != lives.id))
            cluster.add()
            await asyncio.sleep(0.2)
        await lives.keeper.wait_until(whole)
        assert len(view.gone) == 12
        suspicion = lives.suspicion
        known = [lives.suspects, suspicion._refused, suspicion._outlived, suspicion._probing, suspicion._missed]
        assert max(map(len, [*known, lives.router._addresses])) <= 4, known

    play(job(Slow, epochs=100_000), scenario, nodes=3)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it takes a thousand nodes."""
    monkeypatch.setattr(forgetting, "KEPT", 2)
    monkeypatch.setattr(forgetting, "BATCH", 2)


@pytest.mark.usefixtures("forgetful")
def test_what_is_said_of_those_that_are_gone_does_not_grow_with_them() -> None:
    """It did: with 100,000 of them each listing of the job took seconds."""

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
        assert len(view.gone) == 2 and lives.suspicion._told == view.gone.keys()
        assert len(cluster.store.select(cluster.keys.gone_nodes, prefix=True)) == 2

    play(job(Slow, epochs=100_000), scenario, nodes=3)


@pytest.mark.usefixtures("blindable", "forgetful")
def test_a_node_that_was_gone_does_not_come_back_once_that_is_forgotten() -> None:
    """It was frozen for days, say, while many others came and went."""

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
        assert left == f"ended itself: {frozen.name} was away for so long that it counts as gone"

    async def whole(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        await scenario(cluster)

    play(job(Slow, tasks=1, epochs=100_000), whole, nodes=3)


@pytest.mark.usefixtures("blindable", "forgetful")
def test_who_was_away_while_others_were_forgotten_comes_back() -> None:
    """They were gone before it read of its key last."""

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


@pytest.mark.usefixtures("blindable")
def test_who_was_away_for_a_moment_comes_back_however_many_ended_meanwhile() -> None:
    """A thousand nodes of a room went at once, and another one was cut off for some seconds: it ended, as it might have
    been one of them, and the job failed, since it alone had the state of a task."""

    async def scenario(cluster: InProcessCluster) -> None:
        observer, absent = holder(cluster, 0), holder(cluster, 1)
        assert observer is not absent
        eyes(absent).blind()
        cluster.store.revoke(observer.keeper.view.nodes[absent.id].record.lease)
        await asyncio.sleep(1.0)
        for number in range(forgetting.KEPT + 3 * forgetting.BATCH):
            key, record = cluster.keys.gone(f"n{100 + number}-local"), GoneRecord(reason="killed")
            cluster.store.execute(Txn(success=(Put(key, record.to_bytes()),)))
        await asyncio.sleep(observer.settings.lost_after_s / 2)
        eyes(absent).see()
        await observer.keeper.wait_until(lambda view: absent.id in view.nodes)
        await observer.keeper.wait_until(lambda view: view.forgotten is not None)
        assert absent in cluster.nodes

    async def begun(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch > 0)
        await scenario(cluster)

    play(job(Slow, epochs=100_000, backups=0), begun, nodes=2)


@pytest.mark.usefixtures("blindable", "forgetful")
def test_time_in_which_the_leader_was_paused_does_not_count() -> None:
    """Where etcd was away all others were, too, and come back when it does."""

    async def scenario(cluster: InProcessCluster) -> None:
        leader = holder(cluster, 0)
        for number in range(8):
            key, record = cluster.keys.gone(f"n{100 + number}-local"), GoneRecord(reason="killed")
            cluster.store.execute(Txn(success=(Put(key, record.to_bytes()),)))
        within_s = leader.settings.lost_after_s - 10.0
        await asyncio.sleep(within_s)
        cluster.store.execute(Txn(success=(Delete(cluster.keys.node(leader.id)),)))
        await asyncio.sleep(20.0)
        assert [event.kind for event in cluster.events].count("resumed") == 1
        assert leader.keeper.view.forgotten is None and len(leader.keeper.view.gone) == 8
        await asyncio.sleep(2 * leader.settings.lost_after_s)
        assert len(leader.keeper.view.gone) == 2

    async def begun(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch > 0)
        await scenario(cluster)

    play(job(Slow, tasks=1, epochs=100_000, backups=0), begun, nodes=1)
