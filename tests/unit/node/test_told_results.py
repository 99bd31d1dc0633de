"""What a node tells of a finished job beside its values: how long it lasted there."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster


class Pacing(Counting, state=["total"]):
    """An epoch takes ten seconds."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(10)
        await super().count(epoch, ins, outs)


def test_a_job_lasted_until_its_result_was_there_whenever_it_is_asked_for() -> None:
    async def scenario(cluster: InProcessCluster) -> list[float]:
        (node,) = cluster.nodes
        await node.results()
        await asyncio.sleep(200)
        return [each.lasted_s for each in await node.results()]

    told = play(job(lambda task_id: Pacing(), backups=0), scenario, nodes=1)
    assert told == [pytest.approx(30, abs=2)] * 2
