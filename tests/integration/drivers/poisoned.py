"""A task that meets an error of its CUDA device, as CuPy would raise it: at one epoch, so many times."""

from __future__ import annotations

from pathlib import Path

import taskgraph as tg

OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


class Poisoned(tg.Task, state=["steps"]):
    def __init__(self, times: int, marks: str) -> None:
        self.times, self.marks = times, Path(marks)

    def setup(self) -> None:
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.fit, outbound={"step": self.task_id})
        epoch.processor(self.step, inbound={"step": self.task_id})

    def fit(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        met = len(list(self.marks.iterdir()))
        if self.task_id == 1 and epoch.number == 2 and met < self.times:
            (self.marks / f"met{met}").touch()
            raise OutOfMemoryError("Out of memory allocating 1,073,741,824 bytes")
        outs.put("step", 1)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.steps += ins["step"]

    def teardown(self) -> None:
        if list(self.marks.iterdir()):
            print(f"teardown of task {self.task_id}")

    def result(self) -> int:
        return self.steps


@tg.job
def poisoned(times: int = 1, marks: str = "", tasks: int = 3, epochs: int = 6, backups: int = 1) -> tg.Job:
    builder = lambda task_id: Poisoned(times, marks)  # noqa: E731
    return tg.Job(tasks=tasks, epochs=epochs, builder=builder, backups=backups)
