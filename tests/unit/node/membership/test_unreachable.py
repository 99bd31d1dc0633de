"""A living node that another one cannot reach: the wait for it is named with its cause."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.serving import Serving
from taskgraph.observe.events import Event
from taskgraph.protocol.messages import Call, Reply, Waits


class Talking(tg.Task):
    """Every task hears from every other in every epoch."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.say, outbound={"word": "peers"})
        epoch.processor(self.hear, inbound={"word": "peers"})

    def say(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("word", epoch.number)

    async def hear(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.1)


def told(cluster: InProcessCluster) -> list[Event]:
    return [event for event in cluster.events if event.kind == "unreachable"]


async def work(cluster: InProcessCluster) -> tuple[Node, Node]:
    """Two nodes, once both compute."""
    first, second = cluster.nodes
    await first.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)
    return first, second


def test_unreachable_pair_is_one_event() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first, second = await work(cluster)
        cluster.network.cut(first.id, second.id)
        await asyncio.sleep(10)
        why = f"n1 cannot reach n2: the link between {first.id} and {second.id} is cut"
        assert why in first.status().waits and why in [event.text for event in told(cluster)]
        assert len(told(cluster)) == len({event.text for event in told(cluster)}) <= 2
        cluster.network.heal(first.id, second.id)
        await asyncio.sleep(3)
        assert not any("cannot reach" in wait for node in (first, second) for wait in node.status().waits)

    play(job(Talking, epochs=10_000), scenario, nodes=2)


class Crossed(Talking):
    """Each task answers before it sends."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.answer, inbound={"word": "peers"}, outbound={"answer": "peers"})
        epoch.processor(self.say, outbound={"word": "peers"})
        epoch.processor(self.hear, inbound={"answer": "peers"})

    def answer(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("answer", ins["word"])


def test_slow_answer_is_not_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(serving: Serving, caller: str, call: Call) -> Reply:
        if isinstance(call, Waits):
            await asyncio.sleep(3.0)
        return await serve(serving, caller, call)

    serve = Serving.__call__
    monkeypatch.setattr(Serving, "__call__", late)

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(tg.JobFailed, match="a cycle of waits"):
            await cluster.result()
        assert not told(cluster)

    play(job(Crossed, epochs=3), scenario, nodes=2)
