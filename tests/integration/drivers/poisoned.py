"""Task 1 meets an error of its CUDA device, as CuPy would raise it: at one place, so many times."""

from __future__ import annotations

import time
from pathlib import Path

import taskgraph as tg

OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


class Poisoned(tg.Task, state=["steps"]):
    def __init__(self, place: str, times: int, marks: str) -> None:
        self.place, self.times, self.marks = place, times, Path(marks)

    def meet(self, place: str) -> None:
        met = len(list(self.marks.iterdir()))
        if self.task_id == 1 and place == self.place and met < self.times:
            (self.marks / f"met{met}").touch()
            raise OutOfMemoryError("Out of memory allocating 1,073,741,824 bytes")

    def setup(self) -> None:
        try:
            self.marks.with_name(f"set up {self.task_id}").touch(exist_ok=False)
            self.meet("setup")
        except FileExistsError:
            self.meet("setup of a backup")
        self.steps = 0

    @tg.handles("ask")
    def ask(self, epoch: tg.Epoch, sender: int, payload: None) -> int:
        self.meet("handler")
        return 1

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.fit, outbound={"step": self.task_id})
        epoch.processor(self.step, inbound={"step": self.task_id})

    def fit(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 2:
            self.meet("fit")
            while self.place == "setup of a backup" and not list(self.marks.iterdir()):
                time.sleep(0.01)  # until a backup is set up
        outs.put("step", epoch.request(1, "ask", None).wait() if self.task_id == 0 else 1)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.steps += ins["step"]

    def teardown(self) -> None:
        if list(self.marks.iterdir()):
            print(f"teardown of task {self.task_id}")

    def result(self) -> int:
        self.meet("result")
        return self.steps


@tg.job
def poisoned(place: str = "fit", times: int = 1, marks: str = "", backups: int = 1) -> tg.Job:
    return tg.Job(tasks=3, epochs=6, builder=lambda task_id: Poisoned(place, times, marks), backups=backups)
