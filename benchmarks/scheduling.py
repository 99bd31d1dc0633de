"""Two elastic jobs of 4 slots each on 6 slots, against a gang that needs all 4 at once.

    python benchmarks/scheduling.py [--steps 40] [--part-ms 40]

    gang     the second job begins when the first one has ended
    first    first come, first served: the second job has the 2 slots that are left, and 4 once the first one has ended
    fair     3 slots each: a worker of the first job drains when the second job arrives

A slot is a worker process. Parts wait instead of computing, so that six of them fit on any machine. This script moves
the workers, by draining and starting them: the framework has no scheduler for several jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob

import taskgraph as tg

_PARTS, _SLOTS, _WANTED = 24, 6, 4
_ARRIVES_S = 1.0
"""The second job arrives so long after the first one."""


def _wait(run: tg.Run, part_s: float, steps: int) -> int:
    run.state()
    for step in run.steps(rows=_PARTS * steps, batch=_PARTS, parts=_PARTS, passes=1):
        for part in step:
            time.sleep(part_s)
            part.add()
    return steps


@tg.elastic(name="benchmark-first")
def first(run: tg.Run, part_s: float, steps: int) -> int:
    return _wait(run, part_s, steps)


@tg.elastic(name="benchmark-second")
def second(run: tg.Run, part_s: float, steps: int) -> int:
    return _wait(run, part_s, steps)


@contextlib.asynccontextmanager
async def started(job: Any, workers: int) -> AsyncIterator[RunningJob]:
    async with RunningJob(job, nodes=workers) as running:
        await running.until("the first view", lambda view: view.workers is not None)
        yield running


async def gang(one: Any, two: Any) -> float:
    began = time.monotonic()
    for job in (one, two):
        async with started(job, _WANTED) as running:
            await running.result()
    return time.monotonic() - began


async def served_first(one: Any, two: Any) -> float:
    began = time.monotonic()
    async with started(one, _WANTED) as running, started(two, _SLOTS - _WANTED) as other:
        await running.result()
        await other.nodes.start(2 * _WANTED - _SLOTS)
        await other.result()
    return time.monotonic() - began


async def fair(one: Any, two: Any) -> float:
    began, share = time.monotonic(), _SLOTS // 2
    async with started(one, _WANTED) as running:
        await asyncio.sleep(_ARRIVES_S)
        assert running.view.workers is not None
        leaver = running.view.nodes[running.view.workers.record.workers[-1][0]]
        os.kill(leaver.record.pid, signal.SIGTERM)  # drains
        async with started(two, _SLOTS - _WANTED) as other:
            await running.until("the drained worker to leave", lambda view: len(view.nodes) == share)
            await other.nodes.start(share - (_SLOTS - _WANTED))
            await asyncio.gather(running.result(), other.result())
    return time.monotonic() - began


def main(given: argparse.Namespace) -> None:
    part_s = given.part_ms / 1e3
    jobs = [job(part_s=part_s, steps=given.steps) for job in (first, second)]
    whole = asyncio.run(gang(*jobs))
    print(f"gang: {whole:.1f} s")
    for name, run, most, least in (("first", served_first, 0.79, 0.84), ("fair", fair, 0.72, 0.92)):
        took = asyncio.run(run(*jobs))
        used = 2 * _PARTS * given.steps * part_s / (_SLOTS * took)
        met = "met" if took <= most * whole else "MISSED"
        full = "met" if used >= least else "MISSED"
        print(
            f"{name}: {took:.1f} s, {took / whole:.2f} of the gang's, bar {most}: {met}; "
            f"slots that computed: {used:.0%}, bar {least:.0%}: {full}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--part-ms", type=float, default=40.0)
    main(parser.parse_args())
