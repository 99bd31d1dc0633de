"""The work all benchmarks measure, as a job of ours: tree regression.

In every epoch the root publishes n float64 values, each task relays them, multiplies them by its id, adds its
children's sums and passes the sum up; the root checks the sum exactly. `work.py` says the same for everybody else.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

import taskgraph as tg


class Tree(tg.Task, state=["count"]):
    """Coroutines: on the event loop, without a hop to a thread."""

    def __init__(self, n: int, wait_s: float) -> None:
        self.n = n
        self.wait_s = wait_s
        self.count = np.zeros(1)
        self._clock: dict[str, float] = {}  # of this process, not of the task: no state

    @tg.stateless
    async def compose(self, epoch: tg.Epoch) -> None:
        self._compose(epoch)

    def _compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"x": "children"})
            epoch.processor(self.check, inbound={"sum": "children"})
        else:
            if epoch.neighbors("children"):
                epoch.processor(self.relay, inbound={"x": "parents"}, outbound={"x": "children"})
            epoch.processor(self.add, inbound={"x": "parents", "sum": "children"}, outbound={"sum": "parents"})

    @tg.stateless
    async def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self._publish(epoch, outs)

    @tg.stateless
    async def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", ins["x"])

    @tg.stateless
    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        self._add(ins, outs)

    async def check(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self._check(epoch, ins)

    def _publish(self, epoch: tg.Epoch, outs: tg.Outputs) -> None:
        self._clock.setdefault("first", time.monotonic())
        outs.empty("x", self.n).fill(float(epoch.number))

    def _add(self, ins: tg.Inputs, outs: tg.Outputs) -> None:
        total = np.multiply(ins["x"], float(self.task_id), out=outs.empty("sum", self.n))
        for one in ins.all("sum").values():
            np.add(total, one, out=total)

    def _check(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        sums = list(ins.all("sum").values())
        total = sums[0] if len(sums) == 1 else sum(sums[1:], sums[0])
        expected = float(epoch.number) * sum(range(self.tasks))
        if not np.all(total == expected):
            raise ValueError(f"epoch {epoch.number}: the sum is {total}, not {expected}")
        self.count += 1

    def result(self) -> list[float] | None:
        """Of the root: epochs checked, and when its first one began, in this host's monotonic time."""
        return [float(self.count[0]), self._clock["first"]] if self.task_id == 0 else None


class ThreadedTree(Tree):
    """The same with plain functions, each run in a worker thread."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:  # type: ignore[override]
        self._compose(epoch)

    @tg.stateless
    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        self._publish(epoch, outs)

    @tg.stateless
    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        outs.put("x", ins["x"])

    @tg.stateless
    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        self._add(ins, outs)

    def check(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        self._check(epoch, ins)


@tg.job
def tree(
    tasks: int = 7,
    epochs: int = 1000,
    n: int = 1,
    backups: int = 1,
    threads: bool = False,
    ahead: int = tg.Settings().epochs_ahead,
    in_flight: int = 1,
    wait_ms: float = 0.0,
) -> tg.Job:
    """A tree regression of `n` float64 values (8 n bytes an item).

    Args:
        wait_ms: each `add` waits that long, as for a device (not with `threads`).
    """
    kind = ThreadedTree if threads else Tree
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        builder=lambda _: kind(n, wait_ms / 1e3),
        topology=tg.tree(),
        backups=backups,
        settings=tg.Settings(epochs_ahead=ahead, epochs_in_flight=in_flight),
    )
