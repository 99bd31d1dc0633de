"""Kills nodes while tasks push to a table, and counts the pushes of each row: none may be lost or doubled.

    python benchmarks/table_ledger.py [--kills 100] [--seed 1]

Each push adds 1 to rows that the task and the epoch choose. So at the end each row must be the number of pushes to it,
which follows from the number of epochs. Five tasks (three workers, two servers) run on four nodes, each with a backup.
A node is killed with SIGKILL at a random moment, the leader's in every third kill or so, and another one is started.
After each kill the job goes on until all replicas are in sync again: two kills at once could take both replicas of a
task.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob

import taskgraph as tg

_NODES, _WORKERS, _ROWS, _PUSHED = 4, 3, 5000, 40


def chosen(task: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([task, epoch]).integers(0, _ROWS, _PUSHED)


class Pusher(tg.Task, state=["found"]):
    def __init__(self, stop: str) -> None:
        self.stop = stop

    def setup(self) -> None:
        self.found: list[int] | None = None

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.wrong = None
        epoch.flag(self.task_id)
        epoch.processor(self.keep)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("counts")
        if self.task_id == 0 and os.path.exists(self.stop):
            expected = np.zeros(_ROWS, np.int64)
            for number in range(epoch.number):
                for task in range(self.tasks):
                    np.add.at(expected, chosen(task, number), 1)
            epoch.scratch.wrong = table.pull()[:, 0].astype(np.int64) - expected
        ids = chosen(self.task_id, epoch.number)
        table.push(ids[:25], np.ones((25, 1)))
        table.push(ids[25:], np.ones((_PUSHED - 25, 1)))

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        wrong = epoch.scratch.wrong
        if wrong is not None:
            self.found = [int(-wrong[wrong < 0].sum()), int(wrong[wrong > 0].sum()), epoch.number]
            epoch.finish()

    def result(self) -> list[int] | None:
        return self.found


@tg.job
def table_ledger(stop: str) -> tg.Job:
    table = tg.Table(1, init="zeros", lr=-1.0, dtype="float64", rows=_ROWS, servers=2)
    return tg.Job(tasks=_WORKERS, builder=lambda _: Pusher(stop), tables={"counts": table})


async def kill(job: RunningJob, rng: random.Random) -> None:
    """Kills a node, and starts another one."""
    leader = job.view.primary_node(0)
    live = sorted(job.view.live_nodes(job.run))
    victim = leader if leader in live and rng.random() < 0.2 else rng.choice(live)
    os.kill(job.view.nodes[victim].record.pid, signal.SIGKILL)
    await job.until(f"{victim} to be gone", lambda view: victim not in view.nodes, timeout_s=60)
    await job.start_another()


async def main(kills: int, seed: int) -> int:
    rng, began = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        async with RunningJob(table_ledger(stop=str(stop)), nodes=_NODES) as job:
            await job.until_settled(_NODES)
            for number in range(kills):
                await asyncio.sleep(rng.uniform(0.0, 0.5))
                await kill(job, rng)
                await job.until_settled(_NODES, timeout_s=60)
                if number % 10 == 9:
                    print(f"  {time.monotonic() - began:6.0f} s: {number + 1} kills", flush=True)
            stop.touch()
            result = await job.result()
    found: Any = result.value
    lost, doubled, epochs = found
    pushed = epochs * _WORKERS * _PUSHED
    print(f"{kills} kills, {result.failovers} failovers, {result.restarts} epochs that began again, {epochs} epochs")
    print(f"{pushed} gradients pushed: {lost} lost, {doubled} counted too often")
    return 1 if lost or doubled else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.kills, given.seed)))
