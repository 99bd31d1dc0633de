"""Large requests and large answers, with effects and without; some answers are kept for many epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import taskgraph as tg


class Asks(tg.Task, state=["theta", "taken"]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.theta = np.arange(float(n))
        self.taken = 0.0
        self.mapped = 0  # how many pieces of shared memory this process has mapped at the end
        self.kept: list[tuple[np.ndarray, float]] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"got": "right"})
        epoch.processor(self.update, inbound={"got": "left"})

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        to = (self.task_id + 1) % self.tasks
        view = await epoch.request(to, "look")
        answer = await epoch.request(to, "scale", view)
        for kept, total in self.kept:
            if float(kept.sum()) != total:
                raise ValueError(f"what was received earlier is {kept.sum()} now, not {total}")
        if epoch.number % 5 == 0:
            self.kept.append((view, float(view.sum())))
            self.kept.append((answer, float(answer.sum())))
            del self.kept[:-6]
        outs.put("got", answer)

    @tg.handles("look", pure=True)
    def look(self, epoch: tg.Epoch, sender: int, payload: object) -> np.ndarray:
        return self.theta

    @tg.handles("scale")
    def scale(self, epoch: tg.Epoch, sender: int, payload: np.ndarray) -> np.ndarray:
        epoch.scratch.took = float(payload[-1])
        return payload * 0.5

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.taken += epoch.scratch.took
        if epoch.last:
            self.mapped = Path("/proc/self/maps").read_text().count("memfd:taskgraph")
        got = next(iter(ins.all("got").values()))
        self.theta = got + 0.25 * self.theta + self.task_id

    def result(self) -> list[float]:
        return [self.taken, float(self.theta.sum()), float(self.mapped)]


@tg.job
def asks(tasks: int = 4, epochs: int = 80, n: int = 40_000) -> tg.Job:
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Asks(n), topology=tg.ring())
