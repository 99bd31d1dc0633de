"""Large items along a tree, some of them kept for many epochs: what a task still reads must stay as it was."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import taskgraph as tg


class Bulk(tg.Task, state=["theta"]):
    """In its last epoch it stands still until the file `gate` exists, if given."""

    def __init__(self, n: int, pace_s: float, gate: str) -> None:
        self.gate = gate
        self.n = n
        self.pace_s = pace_s
        self.theta = np.zeros(n)
        self.kept: list[tuple[np.ndarray, float]] = []  # no state: a new primary begins with none

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"x": "children"})
            epoch.processor(self.update, inbound={"sum": "children"})
        else:
            epoch.processor(self.relay, inbound={"x": "parents"}, outbound={"x": "children"})
            epoch.processor(self.add, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"})

    def keep(self, epoch: tg.Epoch, array: np.ndarray) -> None:
        for kept, total in self.kept:
            if float(kept.sum()) != total:
                raise ValueError(f"what was received earlier is {kept.sum()} now, not {total}")
        if epoch.number % 7 == self.task_id % 7:
            self.kept.append((array, float(array.sum())))
            del self.kept[:-3]

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        time.sleep(self.pace_s)
        while self.gate and epoch.last and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)
        outs.put("x", self.theta)

    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.keep(epoch, ins["x"])
        total = outs.empty("sum", self.n)
        np.multiply(ins["x"], 1 / (self.task_id + 1), out=total)
        for one in ins.all("sum").values():
            total += one

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = sum(ins.all("sum").values())
        self.theta = 1.0 - 0.1 * total + epoch.rng.normal(scale=1e-3, size=self.n)
        epoch.report(size=float(np.abs(self.theta).sum()))

    def result(self) -> list[float] | None:
        return [float(self.theta.sum()), *map(float, self.theta[:5])] if self.task_id == 0 else None


@tg.job
def bulk(
    tasks: int = 7, epochs: int = 200, backups: int = 1, n: int = 40_000, pace_s: float = 0.02, gate: str = ""
) -> tg.Job:
    build = lambda _: Bulk(n, pace_s, gate)  # noqa: E731
    return tg.Job(tasks=tasks, epochs=epochs, backups=backups, builder=build, topology=tg.tree())
