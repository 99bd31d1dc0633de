"""A task whose `result()` takes as long as a file says so."""

from __future__ import annotations

import time
from pathlib import Path

import taskgraph as tg


class Slow(tg.Task, state=["steps"]):
    def __init__(self, gate: str) -> None:
        self.gate = gate

    def setup(self) -> None:
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.step)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.steps += 1

    def result(self) -> int:
        while not Path(self.gate).exists():
            time.sleep(0.01)
        return self.steps


@tg.job
def slow_result(gate: str, epochs: int = 3) -> tg.Job:
    return tg.Job(tasks=1, epochs=epochs, builder=lambda _: Slow(gate))
