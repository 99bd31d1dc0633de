"""How fast elastic jobs are, and how long failures and joins stop them.

    python benchmarks/elastic.py COMMAND [--full] [--rounds N] [--only CASE]

    steps      steps/s against DDP over Gloo that accumulates the same parts, in turns
    overhead   steps that add 8 bytes: the framework's own time
    allreduce  one array of each of 4 workers, against Gloo; also over TCP alone
    kill       SIGKILL of one worker of 4 and of 8, until the next step is complete
    torchft    the same of torchft (also at the end of `kill`)
    freeze     SIGSTOP of one worker of 4
    join       a newcomer, with 1 and with 256 MiB of state
    goodput    steps with a kill every 20 s

Workers are processes of this host, with one thread of PyTorch each.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from elastic_faults import POINTS, goodput, inject, join
from fit import APART, add, fit, read_log
from running import RunningJob

import taskgraph as tg

HERE = Path(__file__).parent
_WARM = 15
"""Steps that are not counted."""


def spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):8.2f}  p95 {p95:8.2f}  max {ordered[-1]:8.2f}  ({len(ordered)})"


async def _run(job: Any, workers: int, listen: str) -> None:
    async with RunningJob(job, nodes=workers, listen=listen) as running:
        await running.result()


def step_times(job: Any, workers: int, *, apart: bool = False, **arguments: Any) -> tuple[list[float], float]:
    """Returns milliseconds of each step after the warm-up, of the first worker, and a step's CPU time, of all.

    Args:
        apart: workers reach each other over TCP alone, as on different hosts.
    """
    with tempfile.TemporaryDirectory() as log:
        if apart:
            os.environ[APART] = "1"
        asyncio.run(_run(job(log=log, **arguments), workers, "127.0.0.1" if apart else ""))
        os.environ.pop(APART, None)
        lines = read_log(Path(log))
    ends = [line.at_ns for line in min(lines.items())[1]]
    half = len(ends) // 2
    used = sum((of[-1].cpu_ns - of[half].cpu_ns) / (len(of) - 1 - half) for of in lines.values())
    return [(b - a) / 1e6 for a, b in itertools.pairwise(ends[_WARM:])], used / 1e6


def of_peer(script: str, **arguments: Any) -> Any:
    """Returns what a peer prints."""
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(HERE / "peers" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def ddp_times(**arguments: Any) -> tuple[list[float], float]:
    times, used = of_peer("ddp.py", **arguments)
    return times[_WARM:], used


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def steps(given: argparse.Namespace) -> None:
    """Steps/s against DDP, in turns."""
    cases = [("0.27M", 24, 24, 1.0), ("5.8M", 24, 24, 1.0), ("0.27M", 8, 4, 0.7), ("5.8M", 8, 4, 0.7)]
    rounds = given.rounds or (5 if given.full else 3)
    for model, parts, theirs, bar in cases:
        if given.only and given.only not in f"{model} {parts}":
            continue
        count = given.steps or (150 if model == "0.27M" else 50)
        ours: list[tuple[list[float], float]] = []
        ddp: list[tuple[list[float], float]] = []
        for _ in range(rounds):
            ddp.append(ddp_times(workers=4, model=model, parts=theirs, steps=count))
            ours.append(step_times(fit, 4, model=model, parts=parts, steps=count))
        ratios = sorted(mean(b) / mean(a) for (a, _), (b, _) in zip(ours, ddp, strict=True))
        print(f"{model} parameters, {parts} parts of {240 // parts} rows, 4 workers; ms for each step")
        for name, runs in (("ours", ours), (f"DDP, {theirs} parts", ddp)):
            means, used = statistics.median(mean(run) for run, _ in runs), statistics.median(cpu for _, cpu in runs)
            every = list(itertools.chain(*(run for run, _ in runs)))
            print(f"  {name:15} mean {means:8.2f}  {spread(every)}  CPU {used:8.2f}")
        ratio = statistics.median(ratios)
        print(
            f"  steps/s: {ratio:.2f} of DDP's (rounds: {ratios[0]:.2f} to {ratios[-1]:.2f}), bar {bar:g}: "
            f"{'met' if ratio >= bar else 'MISSED'}",
            flush=True,
        )


def overhead(given: argparse.Namespace) -> None:
    """The framework's own time: steps that sum 8 bytes."""
    for workers in (1, 4):
        times, used = step_times(add, workers, steps=given.steps or 400)
        print(f"24 parts that add 8 B, {workers} workers: ms {spread(times)}  CPU {used:.2f}; bar 2", flush=True)


def allreduce(given: argparse.Namespace) -> None:
    """A step that sums one array of each of 4 workers, against Gloo's allreduce, in turns."""
    for kib, apart, bar in ((64, False, 1.0), (1024, False, 2.0), (16384, False, 2.0), (16384, True, 0.5)):
        over = " over TCP" if apart else ""
        if given.only and given.only != f"{kib}{over}":
            continue
        n, count, ours, gloo = kib * 128, given.steps or (300 if kib < 16384 else 60), [], []
        for _ in range(given.rounds or (5 if given.full else 2)):
            gloo.append(of_peer("gloo_sum.py", n=n, steps=count)[_WARM:])
            ours.append(step_times(add, 4, apart=apart, n=n, parts=4, steps=count)[0])
        ratios = sorted(statistics.median(b) / statistics.median(a) for a, b in zip(ours, gloo, strict=True))
        ratio = statistics.median(ratios)
        print(f"the sum of {kib} KiB of 4 workers{over}")
        print(f"  ours, a step     ms {spread(list(itertools.chain(*ours)))}")
        print(f"  Gloo, allreduce  ms {spread(list(itertools.chain(*gloo)))}")
        print(
            f"  {ratio:.2f} of Gloo's speed (rounds: {ratios[0]:.2f} to {ratios[-1]:.2f}), bar {bar:g}: "
            f"{'met' if ratio >= bar else 'MISSED'}",
            flush=True,
        )


def verdict(value: float, bar: float) -> str:
    return f"{value:.0f}, bar {bar:.0f}: {'met' if value <= bar else 'MISSED'}"


def kill(given: argparse.Namespace) -> None:
    """SIGKILL of one worker, at random and at named moments, until the next step is complete."""
    for count in (4, 8):
        if given.only and given.only != str(count):
            continue
        kinds = ["kill", "kill", *POINTS] * (given.rounds or (10 if given.full else 2))
        seen = asyncio.run(inject(fit, count, kinds))
        t = statistics.median(seen.step_ms)
        every = sorted(itertools.chain(*seen.until_next_ms.values()))
        print(f"SIGKILL of 1 of {count}, until the next step is complete; an undisturbed step: {spread(seen.step_ms)}")
        for kind, times in seen.until_next_ms.items():
            print(f"  {kind if kind in POINTS else 'any moment':12} ms {spread(times)}")
        p95 = every[min(len(every) - 1, round(0.95 * len(every)))]
        print(f"  all: median {verdict(statistics.median(every), t + 100)}; p95 {verdict(p95, 2 * t + 300)}")
        print(f"  steps lost: {seen.steps_lost}; parts computed again: {seen.parts_again}", flush=True)
    torchft(given)


def torchft(given: argparse.Namespace) -> None:
    """The same of torchft, if it is installed."""
    if importlib.util.find_spec("torchft") is None:
        print("torchft: skipped (pip install torchft)")
        return
    step_ms, kills = of_peer("torchft_ddp.py", kills=given.rounds or (5 if given.full else 1))
    print(f"torchft, SIGKILL of 1 of 4: ms {spread(kills)}; an undisturbed step: {spread(step_ms)}", flush=True)


def freeze(given: argparse.Namespace) -> None:
    """SIGSTOP of one worker of 4."""
    seen = asyncio.run(inject(fit, 4, ["stop"] * (given.rounds or (20 if given.full else 3))))
    t, times = statistics.median(seen.step_ms), seen.until_next_ms["stop"]
    bar = tg.Settings().lease_ttl_s * 1e3 + t + 200
    print(f"SIGSTOP of 1 of 4, until the next step is complete: ms {spread(times)}; largest {verdict(max(times), bar)}")
    print(f"  an undisturbed step: {spread(seen.step_ms)}", flush=True)


def joins(given: argparse.Namespace) -> None:
    """A newcomer, from its registration to its first step with a part."""
    for mib in (1, 256):
        count = given.rounds or (20 if given.full else 3)
        step_ms, seen = asyncio.run(join(add, 3, count, n=32_768, state_mib=mib))
        t = statistics.median(step_ms)
        times, pauses = [one.until_first_part_ms for one in seen], [one.longest_ms for one in seen]
        bar = 2 * t + mib * 2**20 / 1e9 * 1e3 + 100
        print(f"joins with {mib} MiB of state; an undisturbed step: {spread(step_ms)}")
        print(f"  until its first part: ms {spread(times)}; median {verdict(statistics.median(times), bar)}")
        text = verdict(statistics.median(pauses), 2 * t + 30)
        print(f"  longest step of the others: ms {spread(pauses)}; median {text}", flush=True)


def under_kills(given: argparse.Namespace) -> None:
    """Steps with a kill every 20 s, each worker replaced."""
    part, kills = asyncio.run(goodput(fit, 4, 10.0 if given.full else 1.0, 20.0))
    text = "met" if part >= 0.9 else "MISSED"
    print(f"{kills} kills, one every 20 s: {part:.2f} of the undisturbed steps; bar 0.9: {text}", flush=True)


COMMANDS = {
    "steps": steps,
    "overhead": overhead,
    "allreduce": allreduce,
    "kill": kill,
    "torchft": torchft,
    "freeze": freeze,
    "join": joins,
    "goodput": under_kills,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--full", action="store_true", help="as many rounds, kills and minutes as the bars ask for")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with this in their name")
    given = parser.parse_args()
    COMMANDS[given.command](given)
