"""An allreduce of arrays that become large in an epoch in which a node is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

GROWS = 3
"""The epoch in which values become large, and the node is killed."""


class Sums(tg.Task, shared=["total", "count"], state=["own"]):
    def __init__(self, via: Literal["auto", "tree", "ring"], size: int, mark: str) -> None:
        self.via = via
        self.size = size
        self.mark = Path(mark) if mark else None

    def setup(self) -> None:
        self.total = np.zeros(self.size)
        self.count = 0
        self.own = np.random.default_rng(self.task_id).normal(size=self.size)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allreduce("sum", self.value, self.update, via=self.via)
        epoch.allgather("own", lambda epoch, ins: self.own[0], self.note)

    def value(self, epoch: tg.Epoch, ins: tg.Inputs) -> dict[str, Any]:
        if self.mark is not None and (self.task_id, epoch.number) == (1, GROWS) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        size = self.size if epoch.number >= GROWS else 100
        return {"x": (self.own + self.total / 3)[:size], "n": 1}

    def update(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        found = ins["sum"]["x"]
        self.total = np.append(self.total[: len(found)] + found, self.total[len(found) :])
        self.count += ins["sum"]["n"]

    def note(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.own = self.own + ins.all("own")[(self.task_id + 1) % self.tasks]

    def result(self) -> tuple[NDArray[np.float64], int]:
        return self.total, self.count


@tg.job
def sums(
    tasks: int = 4, epochs: int = 6, via: Literal["auto", "tree", "ring"] = "tree", size: int = 600_000, mark: str = ""
) -> tg.Job:
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Sums(via, size, mark))
