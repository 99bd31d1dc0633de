"""A processor that ends its process, without a word."""

from __future__ import annotations

import os

import taskgraph as tg


class Fatal(tg.Task, state=["steps"]):
    def __init__(self, fatal_at: int) -> None:
        self.fatal_at = fatal_at

    def setup(self) -> None:
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.crash, outbound={"step": self.task_id})
        epoch.processor(self.step, inbound={"step": self.task_id})

    def crash(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == self.fatal_at:
            os._exit(11)
        outs.put("step", 1)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.steps += ins["step"]

    def result(self) -> int:
        return self.steps


@tg.job
def fatal(tasks: int = 3, epochs: int = 6, fatal_at: int = 2, ahead: int = tg.Settings().epochs_ahead) -> tg.Job:
    settings = tg.Settings(epochs_ahead=ahead)
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda task_id: Fatal(fatal_at), settings=settings)
