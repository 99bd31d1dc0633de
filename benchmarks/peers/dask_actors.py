"""Dask distributed: every task an actor on a worker process of its own; actors call each other, worker to worker.

The root is the client, whose calls go to the workers themselves, too, and not by way of the scheduler.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Array, Meter, arguments, check, children, tell


class Task:
    def __init__(self, task: int) -> None:
        self.id = task
        self.below: list[Any] = []

    def link(self, below: list[Any]) -> None:
        self.below = below

    async def epoch(self, x: Array) -> Array:
        pending = [child.epoch(x) for child in self.below]
        total = x * float(self.id)
        for one in pending:
            np.add(total, await one, out=total)
        return total


async def main(tasks: int, n: int, seconds: float) -> None:
    dask.config.set({"distributed.comm.compression": None})
    async with (
        LocalCluster(
            n_workers=tasks - 1, threads_per_worker=1, processes=True, asynchronous=True, dashboard_address=None
        ) as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        workers = list(cluster.scheduler.workers)
        actors: dict[int, Any] = {}
        for task in range(1, tasks):
            actors[task] = await client.submit(Task, task, actor=True, workers=[workers[task - 1]])
        for task in range(1, tasks):
            await actors[task].link([actors[child] for child in children(task, tasks)])
        meter, number = Meter(seconds), 0
        while True:
            x = np.full(n, float(number))
            pending = [actors[child].epoch(x) for child in children(0, tasks)]
            check(sum([await one for one in pending]), tasks, number)
            number += 1
            if not meter.again():
                break
        tell(meter.figures)


if __name__ == "__main__":
    given = arguments(__doc__)
    asyncio.run(main(given.tasks, given.n, given.seconds))
