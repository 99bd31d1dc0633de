"""Tasks with several epochs in flight, whose computes a test can hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import holder

import taskgraph as tg
from taskgraph.graph.values import decode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Stamp


class Script:
    """The computes that a test's tasks reached, and where the test holds them."""

    def __init__(self) -> None:
        self.came: list[tuple[str, int, int]] = []
        self._gates: dict[tuple[str, int, int], asyncio.Event] = {}
        self._changed = asyncio.Event()

    def hold(self, where: str, task: int, epoch: int) -> asyncio.Event:
        """Makes computes that reach this point wait for the returned event."""
        return self._gates.setdefault((where, task, epoch), asyncio.Event())

    async def at(self, where: str, task: int, epoch: int) -> None:
        """A compute reached this point."""
        self.came.append((where, task, epoch))
        self._changed.set()
        if (gate := self._gates.get((where, task, epoch))) is not None:
            await gate.wait()

    async def until(self, where: str, task: int, epoch: int) -> None:
        while (where, task, epoch) not in self.came:
            self._changed.clear()
            await self._changed.wait()

    def epochs(self, where: str, task: int) -> list[int]:
        """The epochs in which this point was reached, in order."""
        return [epoch for place, of, epoch in self.came if (place, of) == (where, task)]


class Early(tg.Task, state=["seen"]):
    """`early` may run ahead of the commit; `late`, which changes state, may not."""

    script: Script
    seen: list[int]

    def setup(self) -> None:
        self.seen = []

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.early, outbound={"x": self.task_id})
        epoch.processor(self.late, inbound={"x": self.task_id})

    @tg.stateless
    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("early", self.task_id, epoch.number)
        await self.first(epoch)
        outs.put("x", epoch.number)

    async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("late", self.task_id, epoch.number)
        self.seen = [*self.seen, ins["x"]]
        epoch.report(**{f"seen {self.task_id}": len(self.seen)})

    async def first(self, epoch: tg.Epoch) -> None:
        """A processor that a test may add, and that may run early."""

    def result(self) -> list[int]:
        return self.seen


@pytest.fixture
def early() -> type[Early]:
    class Fresh(Early, state=["seen"]):
        script = Script()

    return Fresh


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": 12, "builder": builder, "backups": 1, **options})


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


def at_work(cluster: InProcessCluster) -> Stamp:
    stamp = holder(cluster, 0).keeper.view.stamp
    assert stamp is not None
    return stamp


def whole(found: tg.JobResult, epochs: int = 12) -> None:
    """Each task's state, and the reports, have each epoch once, in order."""
    assert found.values == {task: list(range(epochs)) for task in found.values}
    assert found.epochs == epochs
    assert [(row.epoch, dict(row.numbers)) for row in found.reports] == [
        (epoch, {f"seen {task}": epoch + 1 for task in found.values}) for epoch in range(epochs)
    ]


def stamps(cluster: InProcessCluster, task: int) -> list[Stamp]:
    """The stamps of the attempts that the task's primary keeps."""
    return [attempt.stamp for attempt in holder(cluster, task).roles.primaries[task].attempts]


def boundaries(cluster: InProcessCluster, task: int) -> dict[int, Any]:
    """epoch -> the state in the primary's boundaries."""
    kept = holder(cluster, task).roles.primaries[task].backups._boundaries.values()
    return {boundary.stamp.epoch: decode(boundary.value)["state"] for boundary in kept}
