"""Tasks that no node may hold: lost state fails the job, others wait, both with an event."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from cluster_kit import Gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch import inprocess
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import roles


class NoState(tg.Task):
    """Epoch 1 waits for `gate`."""

    reached: asyncio.Event
    gate: asyncio.Event

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 1:
            self.reached.set()
            await self.gate.wait()

    def result(self) -> int:
        return self.task_id


@pytest.fixture(autouse=True)
def fresh() -> None:
    for task in (Gated, NoState):
        task.reached, task.gate = asyncio.Event(), asyncio.Event()


def test_last_leaving_node_names_losses() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await Gated.reached.wait()
        first, second = cluster.nodes
        first.drain("asked to")
        await first.keeper.wait_until(lambda v: v.nodes[first.id].record.draining)
        second.drain("asked to, too")
        await asyncio.wait([member.run for member in cluster._members.values()])
        texts = told(cluster, "drain")
        assert texts[0] == f"{first.name} leaves: asked to"
        assert (
            f"{second.name} leaves: asked to, too; there is no other node that could take over what it has: start one "
            f"within 0.5 s (drain_s), or that is lost"
        ) in texts
        late = [text for text in texts if "without having handed over" in text]
        assert late and all(
            re.fullmatch(
                r"n\d leaves without having handed over task (0|1|0-1) within 0.5 s \(drain_s\): there was no other "
                r"node to take over",
                text,
            )
            for text in late
        )

    play(job(Gated, backups=0, settings=tg.Settings(drain_s=0.5)), scenario, nodes=2)


def test_task_waits_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "device_count", lambda: 0)
    monkeypatch.setattr(roles, "array_module", lambda devices: (np, None))  # also where there is no CuPy

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda _: len(told(cluster, "waits")) == 1)
        cluster._devices = 1  # of the nodes added from now on
        first = cluster.add()
        await NoState.reached.wait()
        assert holder(cluster, 0).id == first
        cluster.crash(first)
        survivor = cluster.nodes[0]
        await survivor.keeper.wait_until(lambda _: len(told(cluster, "waits")) == 2)
        why = (
            "tasks 0-1 wait for nodes that may hold them: they need a CUDA device (requires_gpu), "
            "and none of the 2 nodes that stay has one"
        )
        assert survivor.status().waits == (why,)
        assert told(cluster, "waits") == [why, why]
        assert cluster.nodes[1].status().waits == ()
        assert "tasks 0-1 wait for nodes that may hold them" in cluster.waits()
        NoState.gate.set()
        cluster.add()
        assert (await cluster.result()).values == {0: 0, 1: 1}

    play(job(NoState, backups=0, requires_gpu=True), scenario, nodes=2)
