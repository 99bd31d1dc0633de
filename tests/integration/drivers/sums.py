"""Sums up a tree, like the regression example, with places to stop and to fail that a test chooses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import taskgraph as tg


class Sums(tg.Task, state=["values"]):
    def __init__(self, pause_at: int, gate: str, paused: str, fail_at: int, setup_gate: str, finish: str) -> None:
        self.pause_at, self.gate, self.paused = pause_at, gate, paused
        self.fail_at, self.setup_gate, self.finish = fail_at, setup_gate, finish

    def setup(self) -> None:
        while self.setup_gate and not Path(self.setup_gate).exists():
            time.sleep(0.01)
        self.values: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.record, inbound={"sum": "children"})
        else:
            epoch.processor(self.add, inbound={"sum": "children"}, outbound={"sum": "parents"})

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 2 and epoch.number == self.fail_at:
            raise ZeroDivisionError("one shard is empty")
        outs.put("sum", self.task_id * epoch.number + sum(ins.all("sum").values()))

    def record(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == self.pause_at and self.paused:
            Path(self.paused).touch()
        while epoch.number == self.pause_at and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)
        self.values.append(sum(ins.all("sum").values()))
        epoch.report(value=self.values[-1])
        if self.finish and Path(self.finish).exists():
            epoch.finish()
        if epoch.last:
            epoch.report(threads=int(os.environ.get("OMP_NUM_THREADS", "0")))

    def result(self) -> list[int] | None:
        return self.values if self.task_id == 0 else None


@tg.job
def sums(  # `finish`: a file; the epoch in which it is there is the last
    tasks: int = 7,
    epochs: int = 6,
    pause_at: int = -1,
    gate: str = "",
    paused: str = "",
    fail_at: int = -1,
    setup_gate: str = "",
    finish: str = "",
    min_nodes: int = 1,
    blas_threads: int = 1,
    lease_ttl_s: float = 5.0,
    ahead: int = tg.Settings().epochs_ahead,
) -> tg.Job:
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        builder=lambda task_id: Sums(pause_at, gate, paused, fail_at, setup_gate, finish),
        topology=tg.tree(),
        min_nodes=min_nodes,
        settings=tg.Settings(blas_threads=blas_threads, lease_ttl_s=lease_ttl_s, epochs_ahead=ahead),
    )


if __name__ == "__main__":
    tg.main(sums)
