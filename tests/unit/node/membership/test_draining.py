"""A node that drains at an odd moment loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from cluster_kit import Counting, Gated, blindable, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.coordination.api import WatchBatch
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.launch import inprocess
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node
from taskgraph.observe.format import ids_text
from taskgraph.transport.memory import MemoryNetwork, MemoryTransport

__all__ = ["blindable", "gated"]

SETTINGS = tg.Settings(epochs_ahead=0, drain_s=2.0)


class Paced(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.02)
        await super().count(epoch, ins, outs)


def paced() -> tg.Job:
    """A job without backups that lasts several times `drain_s`."""
    return job(Paced, tasks=4, epochs=300, backups=0, settings=SETTINGS)


async def works(node: Node) -> None:
    """Returns when the job is well under way."""
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)


def test_drained_node_does_not_register() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        told_to = cluster.node(cluster.add())
        told_to.drain("SIGTERM")
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)
        run = cluster._members[told_to.id].run
        assert run.done() and run.exception() is None
        assert seen == {first.id}

    play(paced(), scenario, nodes=1)


class Late(MemoryCoordinator):
    """A node's handle on etcd: events come 50 ms late."""

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        async for batch in super().watch(prefix, start_revision):
            await asyncio.sleep(0.05)
            yield batch


def test_drained_node_is_not_said_to_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port closes before the others read that it left, and before they read its goodbye."""
    monkeypatch.setattr(inprocess, "MemoryCoordinator", Late)

    def leave_without_goodbye(network: MemoryNetwork, transport: MemoryTransport) -> None:
        network.crash(transport.node)

    monkeypatch.setattr(MemoryNetwork, "_leave", leave_without_goodbye)

    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        await leave(cluster, first)
        await asyncio.sleep(1)
        assert not told(cluster, "lost") and not told(cluster, "gone")

    play(paced(), scenario, nodes=3)


def few() -> tg.Job:
    return job(Counting, tasks=3, epochs=5, backups=1, settings=SETTINGS)


async def leave(cluster: InProcessCluster, node: Node) -> float:
    """Drains a node; returns how long it took to leave."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    node.drain("SIGTERM")
    await asyncio.wait([cluster._members[node.id].run])
    return loop.time() - began


def test_finished_job_is_handed_over() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first, second = cluster.nodes
        await first.keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(1)
        assert await leave(cluster, first) < 0.5
        assert second.keeper.view.finished
        third = cluster.node(cluster.add())
        assert await leave(cluster, second) < 0.5
        assert set(third.roles.primaries) == {0, 1, 2}
        assert len(told(cluster, "drain")) == 2 and not [text for text in told(cluster, "drain") if "without" in text]
        assert (await cluster.result()).values == dict.fromkeys(range(3), 5)

    play(few(), scenario, nodes=2)


def test_leaving_with_sole_results_is_event() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        (node,) = cluster.nodes
        await node.keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(1)
        assert await leave(cluster, node) >= SETTINGS.drain_s
        begun, late = told(cluster, "drain")
        assert begun.endswith("start one within 2 s (drain_s), or that is lost")
        assert late.endswith("task 0-2 within 2 s (drain_s): there was no other node to take over")

    play(few(), scenario, nodes=1)


@pytest.mark.parametrize("backups", [0, 1])
def test_leaving_without_etcd_names_losses(monkeypatch: pytest.MonkeyPatch, backups: int) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        await first.keeper.wait_until(lambda v: all(len(v.in_sync(task)) == 1 + backups for task in range(4)))
        monkeypatch.setattr(Registration, "_is_unrenewed", lambda self, lease: self is first.registration)
        await first.keeper.wait_until(lambda _: first.paused)
        has = sorted(first.roles.primaries)
        await leave(cluster, first)
        late = [text for text in told(cluster, "drain") if text.startswith(first.name)][-1]
        tasks = ids_text(has)
        assert late.startswith(
            f"{first.name} leaves without having handed over task {tasks} within 2 s (drain_s): {first.name} is "
            f"paused: the lease could not be renewed in time, and cannot write to etcd that another node takes over; "
        )
        means = (
            f"of task {tasks} another node in sync takes over once etcd answers it, and computes the epoch at work "
            f"again"
            if backups
            else f"task {tasks} no other node has"
        )
        assert late.endswith(f"; {means}")
        if backups:
            assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(job(Paced, tasks=4, epochs=300, backups=backups, settings=SETTINGS), scenario, nodes=2)


def test_leaving_mid_epoch_names_recomputation(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        await first.keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        await leave(cluster, first)
        assert told(cluster, "drain")[-1] == (
            f"{first.name} leaves without having handed over task 0 within 2 s (drain_s): no other node has taken "
            f"over; of task 0 another node in sync takes over, and computes the epoch at work again"
        )
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3}

    play(job(gated, tasks=1, settings=SETTINGS), scenario, nodes=2)
