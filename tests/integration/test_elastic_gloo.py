"""Elastic jobs whose totals PyTorch's Gloo makes, on real processes: workers die in the middle of a sum."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from cli_kit import Cli, Command
from processes_kit import becomes, stop

pytest.importorskip("torch")

DRIVER = str(Path(__file__).parent / "drivers" / "elastic_gloo.py")
GLOO_S = 60.0
"""The time limit of an operation of Gloo: a job that waits for it has not closed the group."""


async def start(cli: Cli, nodes: int, *options: str) -> Command:
    files = ("-o", f"log={cli.root / 'log'}", "-o", f"end={cli.root / 'end'}")
    return await cli.start("run", DRIVER, "--nodes", str(nodes), "--json", *files, *options)


def steps_of(cli: Cli, worker: str) -> list[tuple[int, float]]:
    """Number and time of each step of a worker."""
    lines = [line.split() for path in cli.root.glob(f"log-{worker}-*") for line in path.read_text().splitlines()]
    return sorted((int(number), float(at)) for number, at in lines)


def pid_of(cli: Cli, worker: str) -> int:
    (path,) = cli.root.glob(f"log-{worker}-*")
    return int(path.name.rpartition("-")[2])


async def makes_steps(cli: Cli, count: int, after: float = 0.0) -> None:
    """Waits for this number of steps of n1, after this time."""
    await becomes(lambda: sum(at > after for _, at in steps_of(cli, "n1")) >= count, 100.0)


async def ends(cli: Cli, run: Command) -> int:
    """Ends the job at its next step; returns how many it made."""
    (cli.root / "end").touch()
    done = await run.done(100.0)
    assert done.code == 0, done.err
    _, value, steps = json.loads(done.out.splitlines()[-1])["values"]["0"]
    assert value == 28 * steps, "a part was counted twice, or not at all"
    return int(steps)


async def test_workers_join_die_and_freeze(cli: Cli) -> None:
    """One joins, then another one dies in the middle of a sum, then one freezes."""
    run = await start(cli, 2)
    await makes_steps(cli, 5)
    launch = await cli.start("launch", "fit", "--nodes", "1")
    await launch.until("n3 joined after")
    joined_at = time.time()
    await makes_steps(cli, 10, after=joined_at)

    pid = pid_of(cli, "n2")
    await asyncio.sleep(random.Random(0).uniform(0.0, 0.05))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    await makes_steps(cli, 5, after=killed_at)

    frozen = pid_of(cli, "n3")
    stop(frozen)
    try:
        await run.until("n3 does not answer")
        await makes_steps(cli, 50, after=time.time())
        made = await ends(cli, run)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher kills it when the job has ended
            os.kill(frozen, signal.SIGCONT)
    await launch.done()
    steps = steps_of(cli, "n1")
    assert [number for number, _ in steps] == list(range(made)), "a step was lost, or made twice"
    assert max(after - before for (_, before), (_, after) in itertools.pairwise(steps)) < GLOO_S / 2
    for worker in ("n1", "n3"):
        next_at = min(at for _, at in steps_of(cli, worker) if at > killed_at)
        assert next_at - killed_at < GLOO_S / 6
    await cli.nothing_left()
