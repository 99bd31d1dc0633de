"""Who gets an item, and who does not: the gate that every call of an epoch passes, where pulls take the short way."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, holder, job, play

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.messages import Item, Pull, Reason, Stamp
from taskgraph.results import JobResult


class Gives(Counting, state=["total"]):
    """Task 1 puts its item of epoch 1, and waits for `gate` then."""

    reached: asyncio.Event
    gate: asyncio.Event

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count, outbound={"x": "peers"})
        epoch.processor(self.take, inbound={"x": "peers"})

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.number)
        await super().count(epoch, ins, outs)
        if self.task_id == 1 and epoch.number == 1:
            self.reached.set()
            await self.gate.wait()

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert set(ins.all("x").values()) == {epoch.number}


@pytest.fixture
def gives() -> type[Gives]:
    class Fresh(Gives, state=["total"]):
        reached = asyncio.Event()
        gate = asyncio.Event()

    return Fresh


async def refused(by: Node, to: Node, message: Pull) -> str:
    with pytest.raises(Refused) as caught:
        await by.router.to_node(to.id, message, timeout_s=None)
    return caught.value.reason


def test_a_node_that_is_paused_gives_nothing_that_is_there(gives: type[Gives]) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gives.reached.wait()
        producer, other = holder(cluster, 1), holder(cluster, 0)
        pull = Pull(Stamp(1, 1), 0, 1, 1, "x")
        assert isinstance(await other.router.to_node(producer.id, pull, timeout_s=None), Item)
        producer.paused = True
        assert await refused(other, producer, pull) == Reason.PAUSED
        producer.paused = False
        gives.gate.set()
        return await cluster.result()

    assert play(job(gives), scenario, nodes=2).values == {0: 3, 1: 3}


def test_what_is_asked_for_in_a_term_that_is_gone_is_given_neither_now_nor_when_its_epoch_begins(
    gives: type[Gives],
) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gives.reached.wait()
        producer, zombie = holder(cluster, 1), holder(cluster, 0)
        assert producer is not zombie
        there, yet_to_come = (Pull(Stamp(1, epoch), 0, 1, 1, "x") for epoch in (1, 2))
        parked = asyncio.ensure_future(zombie.router.to_node(producer.id, yet_to_come, timeout_s=None))
        await asyncio.sleep(0.01)
        assert not parked.done()
        cluster.store.revoke(zombie.keeper.view.nodes[zombie.id].record.lease)
        await producer.keeper.wait_until(lambda view: view.term(0) == 2)
        assert await refused(zombie, producer, there) == Reason.STALE
        gives.gate.set()
        with pytest.raises(Refused) as caught:
            await parked
        assert caught.value.reason == Reason.STALE
        return await cluster.result()

    assert play(job(gives, epochs=4, settings=tg.Settings()), scenario, nodes=2).values == {0: 4, 1: 4}
