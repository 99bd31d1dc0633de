"""Which nodes a failure names when a task lost all replicas."""

from __future__ import annotations

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, RunningCode

__all__ = ["blindable", "gated"]


async def left_behind(cluster: InProcessCluster, gated: type[Gated]) -> tuple[Node, list[Node]]:
    """A living node that was evicted a few epochs ago, and the task's members."""
    await gated.reached.wait()
    primary = holder(cluster, 0)
    keeper = primary.keeper
    await keeper.wait_until(lambda view: len(view.in_sync(0)) == 3)
    behind = next(node for node in cluster.nodes if node is not primary)
    eyes(behind).refuse(keeper.view.keys.node(behind.id))
    cluster.store.revoke(keeper.view.nodes[behind.id].record.lease)
    await keeper.wait_until(lambda view: view.members_of(0)[behind.id].record.until is not None)
    eyes(primary).refuse(keeper.view.keys.member(0, behind.id))  # it is not admitted again
    eyes(behind).refuse("")
    await behind.wait_while_paused()
    gated.gate.set()
    await keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 4)
    assert behind.id in keeper.view.members_of(0) and behind.id not in keeper.view.in_sync(0)
    return behind, [node for node in cluster.nodes if node is not behind]


@pytest.mark.usefixtures("blindable")
def test_failure_omits_evicted_node(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        _, others = await left_behind(cluster, gated)
        for node in others:
            cluster.crash(node.id)
        names = ", ".join(node.name for node in others)
        with pytest.raises(tg.JobFailed, match=rf"task 0: every replica in sync is gone \({names}\)"):
            await cluster.result()

    play(job(gated, tasks=1, epochs=10_000, backups=2), scenario, nodes=3)


def test_failure_names_earlier_death_of_same_code(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        stamp = first.keeper.view.stamp
        assert stamp is not None
        for node, task in (("n8-1", 1), ("n9-1", 0)):
            died = GoneRecord(reason="exited with code 11", running_code=(RunningCode("crash", task, stamp.epoch),))
            cluster.store.execute(Txn(success=(Put(cluster.keys.gone(node), died.to_bytes()),)))
        cluster.crash(first.id)
        with pytest.raises(tg.JobFailed, match="n9 exited with code 11 while it ran 'crash' of task 0") as failed:
            await cluster.result()
        assert "n8" not in str(failed.value), "that was another task's"

    play(job(gated, tasks=2, backups=0), scenario, nodes=3)
