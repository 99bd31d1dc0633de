"""A node that leaves while others still talk to it."""

from __future__ import annotations

import asyncio

from cluster_kit import job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Put, Txn

tearing_down: list[int] = []


class Slow(tg.Task, state=["total"]):
    total: int

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1

    async def teardown(self) -> None:
        tearing_down.append(self.task_id)
        await asyncio.sleep(1)


def test_an_offer_that_comes_while_tasks_are_torn_down_does_not_end_the_node_with_an_error() -> None:
    tearing_down.clear()

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        nodes, runs = cluster.nodes, [member.run for member in cluster._members.values()]
        tearing_down.clear()
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        while len(tearing_down) < len(nodes):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)
        for node in nodes:
            for task in set(range(8)) - node.replicas.keys():
                node.replica(task)  # as for an offer that was on its way
        await asyncio.wait(runs)
        assert [run.exception() for run in runs] == [None] * 4

    play(job(Slow, tasks=8, epochs=2), scenario, nodes=4)
