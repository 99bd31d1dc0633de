"""How long 64 MiB take from `outs.put` in one process to a compute in another that can read them.

    python benchmarks/put.py [--n 8388608]

A job of two tasks on two nodes of this host, on node processes and an etcd as always. The value carries the time of its
put: monotonic time is the same in all processes of a host. Prints milliseconds, a median over epochs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob
from work import arguments, tell

import taskgraph as tg

_WARM = 8
_LEAST = 12


class Pipe(tg.Task):
    """Task 0 sends, task 1 receives, and keeps what it measured outside of its state: its node lives to the end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.kept: dict[str, Any] = {"took": []}

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.send, outbound={"x": 1})
        else:
            epoch.processor(self.take, inbound={"x": 0})

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if "array" not in self.kept:
            self.kept["array"] = np.ones(self.n)  # touched memory: what is measured is the way, not its birth
        self.kept["array"][-1] = epoch.number
        outs.put("x", {"put": time.monotonic(), "x": self.kept["array"]})

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        value = ins["x"]
        x = value["x"]
        first, last = x[0], x[-1]
        took = time.monotonic() - value["put"]
        if (first, last) != (1.0, epoch.number) or x.size != self.n:
            raise ValueError(f"epoch {epoch.number}: {x}")
        if epoch.number >= _WARM:
            self.kept["took"].append(took * 1e3)

    def result(self) -> list[float] | None:
        return self.kept["took"] if self.task_id == 1 else None


@tg.job
def pipe(n: int = 8_388_608, epochs: int = 40) -> tg.Job:
    return tg.Job(tasks=2, epochs=epochs, builder=lambda _: Pipe(n), backups=0)


async def main(given: argparse.Namespace) -> None:
    epochs = _WARM + max(_LEAST, round(20 * given.seconds))
    async with asyncio.timeout(60.0 + epochs), RunningJob(pipe(given.n, epochs), nodes=2) as running:
        view = running.view
        result = await running.result()
        if view.primary_node(0) is not None and view.primary_node(0) == view.primary_node(1):
            raise SystemExit("both tasks are on one node: the figure would be of something else")
    took = result.values[1]
    tell({"ms": statistics.median(took), "least_ms": min(took), "epochs": len(took)})


if __name__ == "__main__":
    asyncio.run(main(arguments(__doc__, lambda parser: parser.set_defaults(n=8_388_608))))
