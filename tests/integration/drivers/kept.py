"""Every task has state that depends on all epochs before and on its neighbors; checkpoints now and then."""

from __future__ import annotations

import numpy as np

import taskgraph as tg


class Kept(tg.Task, state=["place", "steps"]):
    def setup(self) -> None:
        self.place = np.full(1000, float(self.task_id))
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"place": "right"})
        epoch.processor(self.step, inbound={"place": "left"})

    def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("place", self.place)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.place = 0.7 * self.place + 0.2 * ins["place"] + epoch.rng.normal(size=1000)
        self.steps += 1
        epoch.report(**{f"at{self.task_id}": float(self.place[0]), "steps": self.steps})

    def result(self) -> np.ndarray:
        return self.place


@tg.job
def kept(
    tasks: int = 5, epochs: int = 300, backups: int = 1, every: int = 20, where: str = "", lost_after_s: float = 30.0
) -> tg.Job:
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=Kept,
        topology=tg.ring(),
        checkpoint=where or None,
        checkpoint_every=every,
        settings=tg.Settings(lost_after_s=lost_after_s),
    )
