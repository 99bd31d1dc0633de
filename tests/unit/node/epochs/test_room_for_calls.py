"""A node that limits waiting calls lets in the calls that they wait for."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult

TASKS = 4


class Sums(Counting, state=["total"]):
    """Every task's total is the sum of all totals of the epoch before."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"x": "all"})
        epoch.processor(self.add, inbound={"x": "all"})

    @tg.stateless
    async def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.01 * (1 + self.task_id))
        outs.put("x", epoch.number)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(ins.all("x").values())


@pytest.mark.parametrize(("max_parked", "in_flight"), [(2, 1), (2, 8), (16, 8), (40, 8)])
def test_job_ends_with_few_waiting_calls(max_parked: int, in_flight: int) -> None:

    async def scenario(cluster: InProcessCluster) -> JobResult:
        return await cluster.result(timeout_s=60)  # of the clock that leaps

    settings = tg.Settings(max_parked=max_parked, epochs_in_flight=in_flight, epochs_ahead=16)
    crowded = job(Sums, tasks=TASKS, epochs=20, settings=settings)
    result = play(crowded, scenario, nodes=2)
    assert result.values == dict.fromkeys(range(TASKS), TASKS * sum(range(20)))
    assert result.restarts == 0
