"""A fit on a tree that runs long enough for faults to meet it; every sum depends on all epochs before."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import taskgraph as tg


class Steady(tg.Task, state=["theta"]):
    """In its last epoch it stands still until `gate` exists, if given. The epoch that finds `finish` is the last."""

    def __init__(self, gate: str, finish: str, pace_s: float) -> None:
        self.gate = gate
        self.finish = finish
        self.pace_s = pace_s

    def setup(self) -> None:
        rng = np.random.default_rng(self.task_id)
        self.x = rng.normal(size=(200, 5))
        self.y = self.x @ np.arange(5.0) + rng.normal(size=200)
        self.theta = np.zeros(5)

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"theta": "children"})
            epoch.processor(self.update, inbound={"grad": "children"})
        else:
            epoch.processor(self.relay, inbound={"theta": "parents"}, outbound={"theta": "children"})
            epoch.processor(self.add, inbound={"theta": "parents", "grad": "children"}, outbound={"grad": "parents"})

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        time.sleep(self.pace_s)  # however fast the machine is, there is time for faults
        if self.finish and Path(self.finish).exists():
            epoch.finish()
        while self.gate and epoch.last and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)
        outs.put("theta", self.theta)

    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("theta", ins["theta"])

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("grad", self.grad(ins["theta"], ins))

    def grad(self, theta: np.ndarray, ins: tg.Inputs) -> np.ndarray:
        return self.x.T @ (self.x @ theta - self.y) + sum(ins.all("grad").values())

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        noise = epoch.rng.normal(scale=1e-3, size=5)  # the state never settles: a lost or repeated epoch would show
        self.theta = self.theta - self.grad(self.theta, ins) / (400 * self.tasks) + noise
        epoch.report(size=float(np.abs(self.theta).sum()))

    def result(self) -> np.ndarray | None:
        return self.theta if self.task_id == 0 else None


@tg.job
def steady(
    tasks: int = 7,
    epochs: int = 200,
    backups: int = 1,
    lease_ttl_s: float = 5.0,
    gate: str = "",
    finish: str = "",
    pace_s: float = 0.02,
    checkpoint: str = "",
) -> tg.Job:
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Steady(gate, finish, pace_s),
        topology=tg.tree(),
        checkpoint=checkpoint or None,
        checkpoint_every=5,
        settings=tg.Settings(lease_ttl_s=lease_ttl_s, lease_stall_s=min(2.0, lease_ttl_s / 2)),
    )
