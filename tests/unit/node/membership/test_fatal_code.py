"""Code that killed several nodes fails the job, unless its epoch has committed since."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.fatal import DeadlyCode
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import GoneRecord, RunningCode

__all__ = ["blindable", "gated"]


@pytest.mark.usefixtures("blindable")
def test_deaths_before_commit_fail_nothing(gated: type[Gated]) -> None:
    """A node that counts deaths may not have read the commit yet."""

    async def later(cluster: InProcessCluster, leads: str) -> None:
        behind = next(node for node in cluster.nodes if node.id != leads)
        assert behind.keeper.view.stamp == Stamp(1, 1)
        died = GoneRecord(reason="killed by SIGSEGV", running_code=(RunningCode("count", 0, 1),))
        failing = asyncio.ensure_future(
            behind.takeovers._fatal_code._fail(DeadlyCode(0, 1, {"n8-1": died, "n9-1": died}))
        )
        await asyncio.sleep(1.0)
        eyes(behind).see()
        await failing

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        leads = holder(cluster, 0)
        behind = next(node for node in cluster.nodes if node is not leads)
        await behind.keeper.wait_until(lambda view: view.stamp == Stamp(1, 1))
        eyes(behind).blind(at=cluster.keys.epoch)
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3}

    play(job(gated, tasks=1, backups=0), scenario, nodes=2, stages={("compose", 0, 2): later})
