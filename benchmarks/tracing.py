"""What `taskgraph trace` takes from the job it looks at: seconds with and without it, in turns, in one running job.

    python benchmarks/tracing.py --pairs 100 --tasks 7 --backups 1

Prints epochs per second and the processor time of all nodes per epoch, with and without; medians of the turns, and the
median and the quartiles of the ratios of neighbors; every other pair begins with tracing. How long `taskgraph trace`
needs to start and to write its file is not in it; what it does while the job is looked at is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

import uvloop
from running import RunningJob
from tree import tree

from taskgraph.launch.tracing import Tracer

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SETTLE_S = 0.3


def processor_s(pids: list[int]) -> float:
    """What the processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) * _TICK_S


async def turn(job: RunningJob, pids: list[int], seconds: float) -> tuple[float, float]:
    """Epochs per second, and microseconds of all nodes' processor time per epoch."""

    def epoch() -> int:
        stamp = job.view.stamp
        assert stamp is not None and job.view.running, "give it more epochs"
        return stamp.epoch

    began, first, used = time.monotonic(), epoch(), processor_s(pids)
    await asyncio.sleep(seconds)
    done = epoch() - first
    if not done:
        raise SystemExit(f"no epoch was committed in {seconds:g} s: give --seconds more, or --n less")
    return done / (time.monotonic() - began), (processor_s(pids) - used) / done * 1e6


async def traced(job: RunningJob, pids: list[int], seconds: float, every: int) -> tuple[float, float]:
    """The same while the job is traced, from here."""
    keeper, began = job.follower.keeper, asyncio.Event()
    tracer = Tracer(keeper, job.run, job.token, None, epochs=1_000_000, every=every, say=lambda _: began.set())
    tracing = asyncio.ensure_future(tracer.run())
    try:
        await began.wait()
        await asyncio.sleep(_SETTLE_S)
        return await turn(job, pids, seconds)
    finally:
        tracer.end_early()
        await tracing


async def main(options: argparse.Namespace) -> None:
    job = tree(tasks=options.tasks, epochs=10_000_000, n=options.n, backups=options.backups)
    async with RunningJob(job, nodes=options.nodes) as running:
        await running.follower.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch > 50)
        pids = [node.record.pid for node in running.view.nodes.values()]
        off, on = [], []
        for number in range(2 * options.pairs):
            if number % 4 in (0, 3):
                off.append(await turn(running, pids, options.seconds))
            else:
                on.append(await traced(running, pids, options.seconds, options.every))
                await asyncio.sleep(_SETTLE_S)
    for at, what in enumerate(("epochs per second", "us of processor time per epoch")):
        a, b = [x[at] for x in off], [x[at] for x in on]
        low, ratio, high = statistics.quantiles([y / x for x, y in zip(a, b, strict=True)], n=4)
        medians = f"{statistics.median(a):.1f} off, {statistics.median(b):.1f} on"
        print(f"{what}: {medians}, ratio {ratio:.4f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="turns of each kind (100)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each turn (0.7)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--n", type=int, default=1, help="float64 values an item (1)")
    parser.add_argument("--every", type=int, default=0, help="one epoch in this many; 0: as `taskgraph trace` (0)")
    parser.add_argument("--backups", type=int, default=1)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, to have a spread")
    uvloop.run(main(given))
