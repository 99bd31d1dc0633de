"""An etcd whose members disagree refuses writes that fit its answers: the job stands still, and says why."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play, told

from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["blindable", "gated"]


@pytest.mark.usefixtures("blindable")
def test_unexplained_refused_commits_are_event(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        leader = holder(cluster, 0)
        eyes(leader).refuse(leader.keeper.view.keys.epoch)
        gated.gate.set()
        await asyncio.sleep(30)
        assert not ended.done()
        assert leader.roles.leader is not None
        (line,) = leader.roles.leader.waits
        assert "etcd refused its commit" in line and "endpoint hashkv --cluster" in line
        (waits,) = told(cluster, "waits")
        assert waits.startswith("epoch 1 waits: etcd refused its commit")
        eyes(leader).refuse("")
        assert (await ended).values == {0: 3, 1: 3}
        assert leader.roles.leader is None or not leader.roles.leader.waits

    play(job(gated), scenario, nodes=2)
