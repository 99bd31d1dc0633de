"""The framework's own arithmetic, small enough to check by hand: 0, 105, 210, ..., 1050.

Fifteen tasks form a binary tree. In every epoch the root publishes a vector filled with the epoch's number, every
task i contributes the vector times i, the sums travel up, and the root reports one number: 105 (that is
0 + 1 + ... + 14) times the epoch's. Whatever is killed meanwhile, the numbers stay.

    taskgraph run examples/framework_regression.py --nodes 4
    taskgraph run examples/framework_regression.py --nodes 4 -o tasks=31 -o epochs=1000
    python examples/framework_regression.py

The same in event-driven style, with flags and requests in place of channels: framework_regression_events.py.
"""

from __future__ import annotations

import numpy as np

import taskgraph as tg


class Worker(tg.Task):
    """Any task but the root: hands the vector down and the sums up. It remembers nothing from epoch to epoch."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.relay, inbound={"vector": "parents"}, outbound={"vector": "children"})
        epoch.processor(self.add, inbound={"vector": "parents", "sum": "children"}, outbound={"sum": "parents"})

    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("vector", ins["vector"])

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        # `ins.all` is in the order declared, never of arrival: the sum is the same in every run.
        outs.put("sum", ins["vector"] * self.task_id + sum(ins.all("sum").values()))


class Root(tg.Task, state=["values"]):
    """Task 0: publishes, and keeps one value per epoch. Backups hold its `values` too: no failure takes them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def setup(self) -> None:
        self.values: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.publish, outbound={"vector": "children"})
        epoch.processor(self.record, inbound={"sum": "children"})  # no outbound: a sync point, where state may change

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("vector", np.full(self.length, float(epoch.number)))

    def record(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = sum(ins.all("sum").values(), start=np.zeros(self.length))
        value = int(total[0])
        assert (total == value).all(), f"epoch {epoch.number}: {total}"
        self.values.append(value)
        epoch.report(value=value)

    def result(self) -> list[int]:
        return self.values


@tg.job
def framework_regression(tasks: int = 15, epochs: int = 11, length: int = 10, backups: int = 1) -> tg.Job:
    if length < 1:
        raise ValueError("length must be 1 at least: the value of an epoch is the vector's first number")
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda task_id: Root(length) if task_id == 0 else Worker(),
        topology=tg.tree(fanout=2),
    )


if __name__ == "__main__":
    tg.main(framework_regression)
