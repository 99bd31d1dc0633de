"""A node whose device failed hands its tasks over, then ends."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, holder, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.deviceloss import DeviceLost
from taskgraph.node.node import Node
from taskgraph.node.usercode.errors import UserCodeError

OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})
ERROR = UserCodeError("fit", OutOfMemoryError("1 GiB"))


@pytest.fixture(autouse=True)
def fresh() -> None:
    Gated.reached, Gated.gate = asyncio.Event(), asyncio.Event()


def own(node: Node) -> Node:
    """Makes the node end as if it were alone in its process."""
    node.own_process = True
    return node


async def alone(cluster: InProcessCluster) -> Node:
    """Returns the node that is left of two."""
    await Gated.reached.wait()
    left = holder(cluster, 0)
    for node in cluster.nodes:
        if node is not left:
            cluster.crash(node.id)
    await left.keeper.wait_until(lambda view: len(view.nodes) == 1 and len(view.gone) == 1)
    return own(left)


def test_node_ends_after_handing_over() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        left = await alone(cluster)
        assert "no other node is there" in str(left.device_loss.leave_or_explain(ERROR, 0, 1))
        cluster.add()
        await left.keeper.wait_until(lambda view: len(view.nodes) == 2)
        cluster._members[left.id].crashed = True  # that it ends is no failure of the cluster
        assert left.device_loss.leave_or_explain(ERROR, 0, 1) is None, "at once: it waits for nobody"
        assert left.device_loss.leave_or_explain(ERROR, 1, 1) is None, "it is ending already"
        with pytest.raises(DeviceLost, match="'fit', epoch 1: OutOfMemoryError: 1 GiB"):
            await left._failure
        view = cluster.nodes[-1].keeper.view
        await cluster.nodes[-1].keeper.wait_until(lambda _: left.id in view.gone)
        assert (view.gone[left.id].record.task, view.gone[left.id].record.epoch) == (0, 1)
        Gated.gate.set()
        assert (await cluster.result()).values == {0: 3, 1: 3}

    play(job(Gated, epochs=3), scenario, nodes=2)
