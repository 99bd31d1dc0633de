"""A coroutine that forks its process, and whose child does not end by itself."""

from __future__ import annotations

import asyncio
import os

import taskgraph as tg


class Forking(tg.Task, state=["total"]):
    """Task 1 forks in epoch 5: in what it computes, or `in_task`, in a task of asyncio's of its own."""

    def __init__(self, in_task: bool) -> None:
        self.in_task = in_task

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.give, outbound={"number": "children"})
            epoch.processor(self.take, inbound={"number": "children"})
        else:
            epoch.processor(self.answer, inbound={"number": "parents"}, outbound={"number": "parents"})

    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("number", epoch.number)

    async def answer(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 5 and self.task_id == 1:
            await (asyncio.create_task(self.fork()) if self.in_task else self.fork())
        outs.put("number", ins["number"] * self.task_id)

    async def fork(self) -> None:
        child = os.fork()
        if child:
            await asyncio.to_thread(os.waitpid, child, 0)  # the child is first to do what comes now

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(ins.all("number").values())
        await asyncio.sleep(0.01)

    def result(self) -> int | None:
        return self.total if self.task_id == 0 else None


@tg.job
def forking(in_task: bool = False) -> tg.Job:
    return tg.Job(
        tasks=4,
        epochs=40,
        builder=lambda task: Forking(in_task),
        topology=tg.tree(fanout=3),
        settings=tg.Settings(epochs_ahead=0),
    )
