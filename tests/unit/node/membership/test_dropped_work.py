"""A task's primary dropped its work: it is not suspected, so its own node must begin anew."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult


class Slow(Counting, state=["total"]):
    """The first compute of epoch 1 of the task `stuck` never ends."""

    stuck: int
    reached: asyncio.Event

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == self.stuck and epoch.number == 1 and not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()
        await super().count(epoch, ins, outs)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("task", [0, 1])
def test_dropped_work_gets_new_term(task: int, nodes: int) -> None:
    class Fresh(Slow, state=["total"]):
        stuck = task
        reached = asyncio.Event()

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await Fresh.reached.wait()
        node = holder(cluster, task)
        node.roles.step_down(task)  # the view shows no other primary: the work is dropped all the same
        result = await cluster.result()
        view = node.keeper.view
        assert (view.primary_node(task), view.term(task)) == (node.id, 2)
        assert view.term(1 - task) == 1
        assert told(cluster, "takeover") == [f"task {task}: {node.name} is primary (term 2)"]
        return result

    result = play(job(Fresh), scenario, nodes=nodes)
    assert result.values == {0: 3, 1: 3}
