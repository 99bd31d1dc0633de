"""A node that cannot set up a backup ends if the job can do without it; else the job fails, and says where."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

import pytest
from cluster_kit import IN_STEP, Gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.failed_setups import SetUpFailed
from taskgraph.node.node import Node


class Lacking(Gated, state=["total"]):
    """Once `lacks` is set, the set-up raises."""

    lacks: bool
    reached: asyncio.Event
    gate: asyncio.Event

    def setup(self) -> Any:
        if type(self).lacks:
            raise FileNotFoundError("data/x.npy")
        super().setup()


@pytest.fixture
def lacking() -> type[Lacking]:
    class Fresh(Lacking, state=["total"]):
        lacks = False
        reached, gate = asyncio.Event(), asyncio.Event()

    return Fresh


def joins(cluster: InProcessCluster) -> Node:
    """Adds a node as if it had its own process; its end does not fail the cluster."""
    node = cluster.node(cluster.add())
    node.own_process = node.failed_set_ups.alone = True
    cluster._members[node.id].crashed = True
    return node


async def one_left(cluster: InProcessCluster, kind: type[Lacking]) -> Node:
    """In epoch 1 one node holds everything, and wants a backup."""
    await kind.reached.wait()
    left = holder(cluster, 0)
    for node in cluster.nodes:
        if node is not left:
            cluster.crash(node.id)
    await left.keeper.wait_until(lambda view: len(view.nodes) == 1 and len(view.gone) == 1)
    return left


def test_node_that_cannot_set_up_ends(lacking: type[Lacking]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        left = await one_left(cluster, lacking)
        lacking.lacks = True
        new = joins(cluster)
        await left.keeper.wait_until(lambda view: new.id in view.gone)
        where = f"n3 (host {new.host}, working directory {os.getcwd()})"
        why = f"{where} cannot hold a backup of task 0: 'setup' raised FileNotFoundError: data/x.npy; it ends"
        with pytest.raises(SetUpFailed, match="the job goes on without it"):
            await new._failure
        assert left.keeper.view.gone[new.id].record.reason.startswith(f"ended itself: {why}")
        assert not left.keeper.view.gone[new.id].record.running_code, "it is not the code that is to blame"
        lacking.lacks = False
        good = cluster.add()
        await left.keeper.wait_until(lambda view: all(good in view.in_sync(task) for task in range(2)))
        lacking.gate.set()
        assert (await cluster.result()).values == {0: 3, 1: 3}
        assert any(why in text for text in told(cluster, "gone"))

    play(job(lacking, epochs=3), scenario, nodes=2)


@pytest.mark.parametrize("why", ["shared process", "min_in_sync", "primary", "suspected"])
def test_job_that_needs_failing_node_fails(why: str, lacking: type[Lacking]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        left = await one_left(cluster, lacking)
        lacking.lacks = True
        new = joins(cluster)
        if why == "shared process":
            new.failed_set_ups.alone = new.own_process = False
        elif why == "primary":
            new.failed_set_ups._busy = lambda: True
        elif why == "suspected":
            new.suspects = frozenset({left.id})
            new.suspicion.update = lambda: None  # type: ignore[method-assign]
        place = "" if why == "shared process" else rf" on n3 \(host .*, working directory {os.getcwd()}\)"
        with pytest.raises(tg.JobFailed, match=rf"task 0, epoch 1, 'setup'{place}: FileNotFoundError: data/x.npy"):
            await cluster.result()

    settings = dataclasses.replace(IN_STEP, min_in_sync=2 if why == "min_in_sync" else 1)
    play(job(lacking, epochs=3, settings=settings), scenario, nodes=2)
