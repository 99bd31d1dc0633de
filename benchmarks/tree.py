"""The work all benchmarks measure: tree regression.

In every epoch the root publishes n float64 values, each task relays them, multiplies them by its id, adds its
children's sums and passes the sum up; the root checks the sum exactly.
"""

from __future__ import annotations

import numpy as np

import taskgraph as tg


class Tree(tg.Task, state=["count"]):
    """Coroutines: on the event loop, without a hop to a thread."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.count = np.zeros(1)

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"x": "children"})
            epoch.processor(self.check, inbound={"sum": "children"})
        else:
            epoch.processor(self.relay, inbound={"x": "parents"}, outbound={"x": "children"})
            epoch.processor(self.add, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"})

    async def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", np.full(self.n, float(epoch.number)))

    async def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])

    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = ins["x"] * self.task_id
        for one in ins.all("sum").values():
            total += one
        outs.put("sum", total)

    async def check(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = sum(ins.all("sum").values())
        expected = float(epoch.number) * sum(range(self.tasks))
        if not np.all(total == expected):
            raise ValueError(f"epoch {epoch.number}: the sum is {total}, not {expected}")
        self.count += 1

    def result(self) -> float | None:
        return float(self.count[0]) if self.task_id == 0 else None


class ThreadedTree(Tree):
    """The same with plain functions, each run in a worker thread."""

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        outs.put("x", np.full(self.n, float(epoch.number)))

    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        outs.put("x", ins["x"])

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        total = ins["x"] * self.task_id
        for one in ins.all("sum").values():
            total += one
        outs.put("sum", total)

    def check(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        total = sum(ins.all("sum").values())
        expected = float(epoch.number) * sum(range(self.tasks))
        if not np.all(total == expected):
            raise ValueError(f"epoch {epoch.number}: the sum is {total}, not {expected}")
        self.count += 1


@tg.job
def tree(tasks: int = 7, epochs: int = 1000, n: int = 1, backups: int = 1, threads: bool = False) -> tg.Job:
    """A tree regression of `n` float64 values (8 n bytes an item)."""
    kind = ThreadedTree if threads else Tree
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: kind(n), topology=tg.tree(), backups=backups)
