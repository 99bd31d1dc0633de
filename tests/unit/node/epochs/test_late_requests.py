"""Requests and flags after the seal are refused."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, holder, job, play

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.graph.values import encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Flag, Reason, Request, Stamp
from taskgraph.results import JobResult


@pytest.mark.parametrize("what", ["request", "pure request", "flag"])
def test_no_handler_after_the_snapshot(what: str) -> None:
    asked: list[int] = []
    reached, gate = asyncio.Event(), asyncio.Event()

    class Asked(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)
            epoch.processor(self.settle)

        async def settle(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 1 and epoch.number == 1:
                reached.set()
                await gate.wait()

        @tg.handles("ask", pure=what == "pure request")
        def ask(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
            asked.append(payload)
            return payload

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: int) -> None:
            asked.append(meta)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await reached.wait()
        at, value = Stamp(1, 1), encode(7)
        late = Flag(at, 0, 1, 1, value) if what == "flag" else Request(at, 0, 1, 1, "ask", 5, value)
        with pytest.raises(Refused) as caught:
            await holder(cluster, 0).router.to_node(holder(cluster, 1).id, late, timeout_s=None)
        assert caught.value.reason == Reason.DONE
        gate.set()
        return await cluster.result()

    assert play(job(Asked), scenario, nodes=2).values == {0: 3, 1: 3}
    assert not asked
