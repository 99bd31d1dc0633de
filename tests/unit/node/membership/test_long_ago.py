"""Nodes that are gone for long: a job that runs for months has thousands of them."""

from __future__ import annotations

import asyncio
from collections.abc import ItemsView, Iterator, KeysView
from typing import Any

from cluster_kit import Gated, gated, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, Ran

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
