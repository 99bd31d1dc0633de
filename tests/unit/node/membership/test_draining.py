"""A node that is told to leave at an odd moment: nothing is lost with it."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, blindable, eyes, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["blindable"]

SETTINGS = tg.Settings(epochs_ahead=0, drain_s=2.0)


class Paced(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.02)
        await super().count(epoch, ins, outs)


def paced() -> tg.Job:
    """It lasts several times `drain_s`, and without backups: who leaves with a task's state fails it."""
    return job(Paced, tasks=4, epochs=300, backups=0, settings=SETTINGS)


def test_a_node_that_is_told_to_leave_before_it_is_registered_never_is() -> None:
    """It joined, was given tasks, and left with their state."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await first.epoch_read(2)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        told_to = cluster.node(cluster.add())
        told_to.drain("SIGTERM")
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)
        run = cluster._members[told_to.id].run
        assert run.done() and run.exception() is None
        assert seen == {first.id}

    play(paced(), scenario, nodes=1)


@pytest.mark.usefixtures("blindable")
def test_a_node_that_is_told_to_leave_while_it_registers_says_so_at_once() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await first.epoch_read(2)
        told_to = cluster.node(cluster.add())
        eyes(told_to).answer_late(cluster.keys.node(told_to.id))
        await eyes(told_to).written.wait()
        told_to.drain("SIGTERM")
        eyes(told_to).answer()
        await first.keeper.wait_until(lambda view: told_to.id in view.nodes and view.nodes[told_to.id].record.draining)
        began = asyncio.get_running_loop().time()
        await asyncio.wait([cluster._members[told_to.id].run])
        assert asyncio.get_running_loop().time() - began < SETTINGS.drain_s, "it handed everything over"
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(paced(), scenario, nodes=1)
