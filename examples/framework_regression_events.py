"""The numbers of framework_regression.py in event-driven style: flags and requests, and no channel at all.

A flag says that something is there, a request fetches it. In every epoch

    root      flags its children: "vector"
    a task    flagged "vector": requests the vector of its parent, flags its own children "vector";
              a leaf flags its parent "sum"
    a task    flagged "sum" by a child: requests that child's sum; with the sums of all its children it flags its
              own parent "sum"
    root      has all sums when the epoch has grown quiet: then its sync point runs, and reports the value

An epoch ends when nothing runs, waits or travels any more. Nobody counts messages, and nobody says "done".

    taskgraph run examples/framework_regression_events.py --nodes 4
    taskgraph run examples/framework_regression_events.py --nodes 4 -o tasks=31 -o epochs=1000
    python examples/framework_regression_events.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

Vector = NDArray[np.float64]


class Node(tg.Task, state=["values"]):
    """Any task; what the epoch needs is in `epoch.scratch`, what outlives the epoch in `values` (the root's)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def setup(self) -> None:
        self.values: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.sums = {}
        if self.task_id == 0:
            epoch.scratch.vector = np.full(self.length, float(epoch.number))
            epoch.flag("children", "vector")
            epoch.processor(self.record)  # neither inbound nor outbound: a sync point, once the epoch is quiet

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        if meta == "vector":
            epoch.scratch.vector = await epoch.request(sender, "vector")
            epoch.flag("children", "vector")
        else:
            epoch.scratch.sums[sender] = await epoch.request(sender, "sum")
        if self.task_id and len(epoch.scratch.sums) == len(epoch.neighbors("children")):
            epoch.flag("parents", "sum")

    @tg.handles("vector")
    def give_vector(self, epoch: tg.Epoch, sender: int, payload: None) -> Vector:
        vector: Vector = epoch.scratch.vector
        return vector

    @tg.handles("sum")
    def give_sum(self, epoch: tg.Epoch, sender: int, payload: None) -> Vector:
        return self.total(epoch)

    def total(self, epoch: tg.Epoch) -> Vector:
        # Flags arrive in any order; floating-point sums are made in one: that of the children.
        own: Vector = epoch.scratch.vector * self.task_id
        return sum((epoch.scratch.sums[child] for child in epoch.neighbors("children")), start=own)

    def record(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = self.total(epoch)
        value = int(total[0])
        assert (total == value).all(), f"epoch {epoch.number}: {total}"
        self.values.append(value)
        epoch.report(value=value)

    def result(self) -> list[int] | None:
        return self.values if self.task_id == 0 else None


@tg.job
def framework_regression_events(tasks: int = 15, epochs: int = 11, length: int = 10, backups: int = 1) -> tg.Job:
    if length < 1:
        raise ValueError("length must be 1 at least: the value of an epoch is the vector's first number")
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda task_id: Node(length),
        topology=tg.tree(fanout=2),
    )


if __name__ == "__main__":
    tg.main(framework_regression_events)
