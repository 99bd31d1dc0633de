"""What a driver sets in its context when it is imported, and a task in `setup`, holds on nodes."""

from __future__ import annotations

from contextvars import ContextVar

import taskgraph as tg

OF_DRIVER = ContextVar("OF_DRIVER", default="")
OF_TASK = ContextVar("OF_TASK", default="")
OF_DRIVER.set("driver")


class Looks(tg.Task, state=["seen"]):
    def setup(self) -> None:
        self.seen: list[str] = []
        OF_TASK.set(f"task {self.task_id}")

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.look)

    def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen = [OF_DRIVER.get(), OF_TASK.get()]
        OF_TASK.set("epoch")

    def result(self) -> list[str]:
        return self.seen


@tg.job
def looks() -> tg.Job:
    return tg.Job(tasks=2, epochs=3, builder=Looks)


def test_context_of_driver_and_setup() -> None:
    assert tg.run(looks(), nodes=2).values == {task: ["driver", f"task {task}"] for task in range(2)}
