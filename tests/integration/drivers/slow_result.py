"""A task whose `result()` takes as long as a file says so."""

from __future__ import annotations

import time
from pathlib import Path

import taskgraph as tg


class Slow(tg.Task, state=["steps"]):
    def __init__(self, gate: str, pace_s: float) -> None:
        self.gate, self.pace_s = gate, pace_s

    def setup(self) -> None:
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.step)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        time.sleep(self.pace_s)
        self.steps += 1

    def result(self) -> int:
        while not Path(self.gate).exists():
            time.sleep(0.01)
        return self.steps


@tg.job
def slow_result(gate: str, epochs: int = 3, pace_s: float = 0.0, where: str = "") -> tg.Job:
    return tg.Job(
        tasks=1, epochs=epochs, builder=lambda _: Slow(gate, pace_s), checkpoint=where or None, checkpoint_every=2
    )
