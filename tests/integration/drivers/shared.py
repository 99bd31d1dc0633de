"""Descent on parameters that are equal on all tasks; each task also counts what it has seen."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import taskgraph as tg


class Descent(tg.Task, state=["seen"], shared=["theta"]):
    """In its last epoch it stands still until the file `gate` exists."""

    def __init__(self, gate: str, pace_s: float, size: int) -> None:
        self.gate = gate
        self.pace_s = pace_s
        self.size = size

    def setup(self) -> None:
        self.x = np.random.default_rng(self.task_id).normal(size=self.size)
        self.theta = np.zeros(self.size)
        self.seen = np.zeros(2)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.gradient, outbound={"grad": "all"})
        epoch.processor(self.update, inbound={"grad": "all"})

    def gradient(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        time.sleep(self.pace_s)
        while self.gate and epoch.last and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)
        outs.put("grad", (self.x - self.theta) / (4 * self.tasks) + self.seen[0] * 1e-6)

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        grads = ins.all("grad")
        self.theta += sum(grads[task] for task in sorted(grads))
        self.seen += self.task_id + self.theta[:2]

    def result(self) -> np.ndarray:
        return np.concatenate([self.theta[:50], self.seen])


@tg.job
def shared(
    tasks: int = 4,
    epochs: int = 60,
    backups: int = 1,
    gate: str = "",
    pace_s: float = 0.02,
    size: int = 50_000,
    checkpoint: str = "",
) -> tg.Job:
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Descent(gate, pace_s, size),
        topology=tg.full(),
        checkpoint=checkpoint or None,
        checkpoint_every=5,
        settings=tg.Settings(lease_ttl_s=5.0, lease_stall_s=2.0),
    )
