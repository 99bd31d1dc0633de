"""User code that runs for very long is told of."""

from __future__ import annotations

import asyncio

from cluster_kit import job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster


class Slow(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.rest)

    async def rest(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(60)


def test_tasks_that_are_slow_at_once_are_told_in_their_order() -> None:
    """It was another one in each process, and so a seed of the simulation did not replay exactly."""

    async def scenario(cluster: InProcessCluster) -> list[str]:
        await asyncio.sleep(30)
        return told(cluster, "slow")

    said = play(job(Slow, tasks=10, epochs=1), scenario, nodes=1)
    assert [text.partition(":")[0] for text in said] == [f"task {task}" for task in range(10)]
