"""Nodes that are gone for long: a job that runs for months has thousands of them."""

from __future__ import annotations

import asyncio
from collections.abc import ItemsView, Iterator, KeysView
from typing import Any

from cluster_kit import Counting, Gated, gated, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, Ran
from taskgraph.protocol.view import JobView

__all__ = ["gated"]


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
