"""Epochs free their values at once, without the garbage collector."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import taskgraph as tg


class Summed(tg.Task, state=["total"]):
    def __init__(self) -> None:
        self.total = np.zeros(1)

    async def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id:
            epoch.processor(self.relay, inbound={"x": "parents"}, outbound={"x": "children"})
            epoch.processor(self.add, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"})
        else:
            epoch.processor(self.publish, outbound={"x": "children"})
            epoch.processor(self.update, inbound={"sum": "children"})

    async def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", self.total)

    async def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])

    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("sum", ins["x"] + sum(ins.all("sum").values()))

    async def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1


class InThreads(Summed):
    def compose(self, epoch: tg.Epoch) -> None:  # type: ignore[override]
        if self.task_id:
            epoch.processor(self.pass_on, inbound={"x": "parents"}, outbound={"x": "children"})
            epoch.processor(self.add, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"})
        else:
            epoch.processor(self.publish, outbound={"x": "children"})
            epoch.processor(self.update, inbound={"sum": "children"})

    def pass_on(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])


class Asked(Summed):
    """A task with flags and requests."""

    async def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.flag("children", self.total)
        outs.put("x", await epoch.request(1, "half", self.total))

    @tg.handles("half")
    async def half(self, epoch: tg.Epoch, sender: int, payload: object) -> object:
        return payload

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: object) -> None:
        epoch.scratch.seen = meta


async def garbage(kind: type[Summed], epochs: int) -> int:
    """Returns how many objects a job leaves to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        job = tg.Job(tasks=3, epochs=epochs, builder=lambda _: kind(), topology=tg.tree(), backups=0)
        await tg.arun(job, nodes=0)
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Summed, InThreads, Asked])
async def test_epochs_leave_nothing_to_the_collector(kind: type[Summed]) -> None:
    few, many = await garbage(kind, 40), await garbage(kind, 100)
    # What a coordinator in memory remembers of a commit goes when it does. An attempt would be dozens for each task.
    assert many - few < 60 * 6
