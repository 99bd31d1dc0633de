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
STEPS = 40
GLOO_S = 60.0
"""The time limit of an operation of Gloo: a job that waits for it has not closed the group."""


async def start(cli: Cli, nodes: int, *options: str) -> Command:
    return await cli.start("run", DRIVER, "--nodes", str(nodes), "--json", "-o", f"log={cli.root / 'log'}", *options)


def steps_of(cli: Cli, worker: str) -> list[tuple[int, float]]:
    """Number and time of each step of a worker."""
    lines = [line.split() for path in cli.root.glob(f"log-{worker}-*") for line in path.read_text().splitlines()]
    return sorted((int(number), float(at)) for number, at in lines)


def pid_of(cli: Cli, worker: str) -> int:
    (path,) = cli.root.glob(f"log-{worker}-*")
    return int(path.name.rpartition("-")[2])


def be_quick(cli: Cli) -> None:
    """Nothing has to happen before the end any longer."""
    (cli.root / "log-hurry").touch()


async def has_reached(cli: Cli, step: int) -> None:
    await becomes(lambda: any(number >= step for number, _ in steps_of(cli, "n1")), 60.0)


async def check(run: Command, steps: int = STEPS) -> None:
    done = await run.done(60.0)
    assert done.code == 0, done.err
    value = json.loads(done.out.splitlines()[-1])["values"]["0"][1]
    assert value == pytest.approx(2.8 * steps, rel=1e-5), "a part was counted twice, or not at all"


@pytest.mark.parametrize("seed", [0])
async def test_worker_dies_in_the_middle_of_a_sum(cli: Cli, seed: int) -> None:
    run = await start(cli, 3)
    await has_reached(cli, 10)
    pid = pid_of(cli, "n2")
    await asyncio.sleep(random.Random(seed).uniform(0.0, 0.05))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    be_quick(cli)
    await check(run)
    for worker in ("n1", "n3"):
        steps = steps_of(cli, worker)
        assert [number for number, _ in steps] == list(range(STEPS)), "a step was lost, or made twice"
        next_at = min(at for _, at in steps if at > killed_at)
        assert next_at - killed_at < GLOO_S
    await cli.nothing_left()


async def test_frozen_worker_is_left_behind(cli: Cli) -> None:
    run = await start(cli, 3, "-o", "steps=100")
    await has_reached(cli, 5)
    pid = pid_of(cli, "n2")
    stop(pid)
    try:
        await run.until("n2 does not answer")
        be_quick(cli)
        await has_reached(cli, 99)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher kills it when the job has ended
            os.kill(pid, signal.SIGCONT)
    await check(run, 100)
    steps = steps_of(cli, "n1")
    assert max(after - before for (_, before), (_, after) in itertools.pairwise(steps)) < GLOO_S


async def test_worker_joins(cli: Cli) -> None:
    run = await start(cli, 2, "-o", "steps=150", "-o", "pause_s=0.01")
    await has_reached(cli, 5)
    launch = await cli.start("launch", "fit", "--nodes", "1")
    await launch.until("n3 joined after")
    be_quick(cli)
    await check(run, 150)
