"""Kills workers of an elastic job, also the most senior one and while etcd stands still: each row once in a pass.

    python benchmarks/elastic_ledger.py [--kills 100] [--seed 1]
    python benchmarks/elastic_ledger.py --bits
    python benchmarks/elastic_ledger.py --changing [--seed 1]

A row that a step has read is counted in the state, which also has weights whose bits depend on the order of adding. At
the end both must be those of a run on one worker. No number divides another: 101 rows, steps of 37, 7 parts, 4 workers.
Every killed worker is replaced. In every fifth kill the most senior worker dies; in every tenth etcd stands still
meanwhile, for longer than a lease.

With `--bits` the job runs on 1 to 8 workers without failures, and the bits are compared. With `--changing` a worker is
started, drained or killed after every fifth step, which waits for that; a started one enters within the next five.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob

import taskgraph as tg

_ROWS, _BATCH, _PARTS, _WORKERS = 101, 37, 7, 4
_ETCD_AWAY_S = 1.5 * tg.Settings().lease_ttl_s
_STEPS = 100
"""Of a run without failures, and of one with another number of workers, at most `_MOST`, after every `_EVERY` steps."""
_EVERY, _MOST = 5, 8
_SLOW_S = 0.1
_WAIT_S = 120


@tg.elastic(name="benchmark-ledger")
def ledger(run: tg.Run, stop: str = "", steps: int = 0, part_s: float = 0.0, changes: str = "") -> Any:
    """Ends after so many steps, or once the file `stop` exists. Returns steps, how often each row was read, weights.

    With `changes`, after every fifth step there is a file in that folder that says so, and the job waits for another.
    """
    x = np.random.default_rng(0).normal(size=(_ROWS, 5)).astype(np.float32)
    s = run.state(w=np.zeros(5, np.float32), read=np.zeros(_ROWS, np.int64))
    for step in run.steps(rows=_ROWS, batch=_BATCH, parts=_PARTS):
        for part in step:
            part.add(g=x[part.rows].T @ (x[part.rows] @ s.w - 1))
            part.collect(rows=part.rows)
            time.sleep(part_s)
        s.w -= np.float32(0.001) * step["g"]
        for rows in step.all("rows"):
            s.read[rows] += 1
        if changes and (done := step.number + 1) % _EVERY == 0 and done < _STEPS:
            run.once(partial(_hand_over, Path(changes, f"due-{done}"), Path(changes, f"done-{done}")))
        if step.number + 1 == steps or (stop and run.once(Path(stop).exists)):
            return step.number + 1, s.read, s.w
    raise AssertionError("the steps ended")


def _hand_over(due: Path, done: Path) -> None:
    """Says that a change of the workers is due, and waits until it is done."""
    due.touch()
    _wait_for(done)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {_WAIT_S} s in vain for {path.name}: has the job failed?")
        time.sleep(0.01)


def workers_of(job: RunningJob) -> list[str]:
    """Returns the workers of the view, the most senior one first."""
    return [worker for worker, _ in job.view.workers.record.workers] if job.view.workers is not None else []


async def until_there(job: RunningJob) -> None:
    """Waits until all workers are in the view, and in etcd."""

    def there(view: Any) -> bool:
        workers = workers_of(job)
        return len(workers) == _WORKERS and all(worker in view.nodes for worker in workers)

    await job.until(f"{_WORKERS} workers", there, timeout_s=120)


async def kill(job: RunningJob, number: int, rng: random.Random) -> None:
    """Kills a worker, and starts another one."""
    victim = workers_of(job)[0] if number % 5 == 4 else rng.choice(workers_of(job))
    etcd_away = number % 10 == 9
    if etcd_away:
        os.kill(job.etcd_pid, signal.SIGSTOP)
    os.kill(job.view.nodes[victim].record.pid, signal.SIGKILL)
    if etcd_away:
        await asyncio.sleep(_ETCD_AWAY_S)
        os.kill(job.etcd_pid, signal.SIGCONT)
    await job.until(f"a view without {victim}", lambda view: victim not in workers_of(job), timeout_s=120)
    await job.start_another()
    await until_there(job)


async def under_kills(kills: int, seed: int) -> Any:
    rng, began = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        async with RunningJob(ledger(stop=str(stop), part_s=0.002), nodes=_WORKERS) as job:
            await until_there(job)
            for number in range(kills):
                await asyncio.sleep(rng.uniform(0.0, 0.5))
                await kill(job, number, rng)
                if number % 10 == 9:
                    print(f"  {time.monotonic() - began:6.0f} s: {number + 1} kills", flush=True)
            stop.touch()
            return (await job.result()).value


async def change(job: RunningJob, how: str, rng: random.Random) -> None:
    """Drains or kills a worker, and waits for the view without it; or starts one, which enters at a later step."""
    if how == "start":
        await job.start_another()
        return
    victim = rng.choice(workers_of(job))
    os.kill(job.view.nodes[victim].record.pid, signal.SIGTERM if how == "drain" else signal.SIGKILL)
    await job.until(f"a view without {victim}", lambda _: victim not in workers_of(job), timeout_s=120)


async def changing(seed: int) -> tuple[Any, list[int]]:
    """Returns the job's value, and how many workers there were when each five steps ended."""
    rng, counts = random.Random(seed), [_WORKERS]
    with tempfile.TemporaryDirectory() as folder:
        async with RunningJob(ledger(steps=_STEPS, part_s=_SLOW_S, changes=folder), nodes=_WORKERS) as job:
            await until_there(job)
            for steps in range(_EVERY, _STEPS, _EVERY):
                await asyncio.to_thread(_wait_for, Path(folder, f"due-{steps}"))
                counts.append(len(workers_of(job)))
                fits = ["start", "start"] * (counts[-1] < _MOST) + ["drain", "kill"] * (counts[-1] > 1)
                await change(job, rng.choice(fits), rng)
                await asyncio.to_thread(Path(folder, f"done-{steps}").touch)
            return (await job.result()).value, counts[1:]


async def undisturbed(workers: int) -> Any:
    async with RunningJob(ledger(steps=_STEPS), nodes=workers) as job:
        return (await job.result()).value


def main(given: argparse.Namespace) -> int:
    if given.bits:
        found = [asyncio.run(undisturbed(workers)) for workers in range(1, 9)]
        equal = len({(steps, w.tobytes()) for steps, _, w in found}) == 1
        print(f"{_STEPS} steps on 1 to 8 workers: {'equal bits' if equal else 'the bits DIFFER'}")
        return 0 if equal else 1
    if given.changing:
        found, counts = asyncio.run(changing(given.seed))
        calm = tg.run(ledger(steps=_STEPS), nodes=0).value
        equal = all(np.array_equal(mine, other) for mine, other in zip(found, calm, strict=True))
        print(f"{_STEPS} steps; workers at the end of each {_EVERY}: {counts}")
        print("equal bits" if equal else "the bits DIFFER")
        return 0 if equal else 1
    steps, read, w = asyncio.run(under_kills(given.kills, given.seed))
    _, expected, calm = tg.run(ledger(steps=steps), nodes=0).value
    missing, again = (expected - read).clip(0).sum(), (read - expected).clip(0).sum()
    equal = w.tobytes() == calm.tobytes()
    print(
        f"{given.kills} kills in {steps} steps: {read.sum()} rows read, {missing} missing, {again} read twice in a pass"
    )
    print(f"the weights {'have' if equal else 'do NOT have'} the bits of one worker without failures")
    return 1 if missing or again or not equal else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--changing", action="store_true")
    sys.exit(main(parser.parse_args()))
