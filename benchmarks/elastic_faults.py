"""Workers of an elastic job die, freeze and join, while every worker logs its steps; for `benchmarks/elastic.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fit import Line, read_log
from running import RunningJob

from taskgraph.protocol.records import name_of
from taskgraph.protocol.view import JobView

POINTS = ("part", "sent", "report")
"""Moments of `taskgraph.node.inject`: before a worker sends sums, once another one has them, in a new view."""
_LOOK_S = 0.05
_LONG_S = 60.0


def ms(ns: float) -> float:
    return ns / 1e6


class Workers:
    """The workers of a running elastic job, and their logs."""

    def __init__(self, running: RunningJob, log: Path, faults: Path) -> None:
        self._running = running
        self._log = log
        self._faults = faults
        self.registered: dict[str, int] = {}  # name -> when its key was read from etcd

    def note(self) -> None:
        for node in self._running.view.nodes:
            self.registered.setdefault(name_of(node), time.monotonic_ns())

    @property
    def view(self) -> dict[str, int]:
        """Name -> process id, of the workers of the view."""
        view = self._running.view
        if view.workers is None:
            return {}
        return {name_of(w): view.nodes[w].record.pid for w, _ in view.workers.record.workers if w in view.nodes}

    def lines(self) -> dict[str, list[Line]]:
        return read_log(self._log)

    async def until_there(self, count: int) -> None:
        """Waits until so many workers are in the view, and each has computed parts."""

        def there(view: JobView) -> bool:
            return view.workers is not None and len(view.workers.record.workers) == count

        await self._running.until(f"{count} workers", there, timeout_s=_LONG_S)
        async with asyncio.timeout(_LONG_S):
            while not all(any(line.parts for line in self.lines().get(name, ())) for name in self.view):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)

    async def replace(self, count: int) -> None:
        """Starts another worker, and waits until it is there."""
        await self._running.start_another()
        await self.until_there(count)

    async def signal(self, number: signal.Signals) -> tuple[str, int]:
        """Sends a signal to a worker at a random moment. Returns its name, and when that was."""
        name, pid = random.choice(list(self.view.items()))
        await asyncio.sleep(0.2 * random.random())
        at = time.monotonic_ns()
        os.kill(pid, number)
        return name, at

    async def die_at(self, point: str) -> tuple[str, int]:
        """Lets the next worker die that comes to a point. Returns its name, and when that was."""
        before, fault = self._pids(), self._faults / f"kill,{point}"
        dead = {name for name, pid in before.items() if not _lives(pid)}
        fault.touch()
        while fault.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        at = time.monotonic_ns()
        while True:
            for name, pid in {**before, **self._pids()}.items():  # a newcomer may be the one
                if name not in dead and not _lives(pid):
                    return name, at
            await asyncio.sleep(0.001)

    def _pids(self) -> dict[str, int]:
        """Name -> process id, of all registered workers."""
        nodes = self._running.view.nodes
        return {name_of(node): known.record.pid for node, known in nodes.items()}

    async def until_next_step(self, lost: str, at: int) -> float:
        """Returns the milliseconds from `at` until all others hold the total of a step, in a view without the lost one.

        A step that the lost worker had given all its parts to may be complete earlier.
        """
        others = [name for name in self.view if name != lost]
        async with asyncio.timeout(_LONG_S):
            while True:
                lines = self.lines()
                next_ = [
                    [line.at_ns for line in lines[name] if line.at_ns > at and lost not in line.workers]
                    for name in others
                ]
                if all(next_):
                    return ms(max(ends[0] for ends in next_) - at)
                await asyncio.sleep(_LOOK_S)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@contextlib.asynccontextmanager
async def workers_of(job: Any, count: int, *, points: bool = False, **arguments: Any) -> AsyncIterator[Workers]:
    """Runs a job of `fit.py` on so many workers."""
    with tempfile.TemporaryDirectory() as log, tempfile.TemporaryDirectory() as faults:
        if points:
            os.environ["TASKGRAPH_INJECT"] = faults
        try:
            async with RunningJob(job(log=log, steps=10**9, **arguments), nodes=count) as running:
                workers = Workers(running, Path(log), Path(faults))
                stop = running.follower.keeper.on_change(workers.note)
                try:
                    await workers.until_there(count)
                    yield workers
                finally:
                    stop()
        finally:
            os.environ.pop("TASKGRAPH_INJECT", None)


@dataclass
class Faults:
    """What was seen.

    Attributes:
        step_ms: of undisturbed steps.
        until_next_ms: kind of fault -> from the fault until the next step is complete.
        parts_again: parts that workers which live computed twice, or two of them, but for the first part of a newcomer,
            which the most senior worker checks.
        steps_lost: steps that a worker holds no total of, between two that it does.
    """

    step_ms: list[float]
    until_next_ms: dict[str, list[float]]
    parts_again: int
    steps_lost: int


async def undisturbed(workers: Workers, seconds: float) -> list[float]:
    """Returns milliseconds of the steps of the first worker, for some seconds."""
    name, since = next(iter(workers.view)), time.monotonic_ns()
    await asyncio.sleep(seconds)
    ends = [line.at_ns for line in workers.lines()[name] if line.at_ns >= since]
    return [ms(b - a) for a, b in itertools.pairwise(ends)]


async def inject(job: Any, count: int, kinds: list[str], **arguments: Any) -> Faults:
    """Lets a worker die ("kill", or one of `POINTS`) or freeze ("stop") for each of `kinds`, and replaces it."""
    found: dict[str, list[float]] = {}
    async with workers_of(job, count, points=any(kind in POINTS for kind in kinds), **arguments) as workers:
        step_ms = await undisturbed(workers, 4.0)
        for kind in kinds:
            if kind in ("kill", "stop"):
                pids = workers.view
                lost, at = await workers.signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                found.setdefault(kind, []).append(await workers.until_next_step(lost, at))
                if kind == "stop":
                    os.kill(pids[lost], signal.SIGKILL)
                await workers.replace(count)
                continue
            joining = None
            if kind == "report":  # workers report when the view changes: a newcomer enters
                joining = asyncio.create_task(workers._running.start_another())
            lost, at = await workers.die_at(kind)
            found.setdefault(kind, []).append(await workers.until_next_step(lost, at))
            if joining is not None:
                await joining
                await workers.until_there(count)
            else:
                await workers.replace(count)
        lines = workers.lines()
    computed = Counter((line.step, part) for of in lines.values() for line in of for part in line.parts)
    for of in lines.values():
        if first := next((line for line in of if line.parts and line.step), None):
            computed[first.step, first.parts[0]] -= computed[first.step, first.parts[0]] > 1
    lost_steps = sum(b.step - a.step - 1 for of in lines.values() for a, b in itertools.pairwise(of))
    return Faults(step_ms, found, sum(times - 1 for times in computed.values()), lost_steps)


@dataclass
class Join:
    """One newcomer.

    Attributes:
        until_first_part_ms: from its registration to its first step with a part.
        longest_ms: the longest step of another worker meanwhile.
    """

    until_first_part_ms: float
    longest_ms: float


async def join(job: Any, count: int, joins: int, **arguments: Any) -> tuple[list[float], list[Join]]:
    """Starts newcomers one after the other, each of which is killed once it is in. Returns undisturbed steps, too."""
    found: list[Join] = []
    async with workers_of(job, count, **arguments) as workers:
        step_ms = await undisturbed(workers, 4.0)
        for _ in range(joins):
            before = set(workers.view)
            await workers.replace(count + 1)
            (newcomer,) = set(workers.view) - before
            lines, registered = workers.lines(), workers.registered[newcomer]
            began = next(line.at_ns for line in lines[newcomer] if line.parts)
            pauses = [
                ms(b.at_ns - a.at_ns)
                for name in before
                for a, b in itertools.pairwise(lines[name])
                if b.at_ns > registered and a.at_ns < began
            ]
            found.append(Join(ms(began - registered), max(pauses)))
            os.kill(workers.view[newcomer], signal.SIGKILL)
            await workers.until_there(count)
    return step_ms, found


async def goodput(job: Any, count: int, minutes: float, every_s: float, **arguments: Any) -> tuple[float, int]:
    """Returns the steps with a kill every so often, each replaced, as a part of the undisturbed ones; and the kills."""
    async with workers_of(job, count, **arguments) as workers:
        step_ms = statistics.mean(await undisturbed(workers, 15.0))
        senior, began, kills = next(iter(workers.view)), time.monotonic_ns(), 0
        starting: list[asyncio.Task[None]] = []
        while time.monotonic_ns() < began + minutes * 60e9:
            await asyncio.sleep(every_s / 2)
            name = random.choice([name for name in workers.view if name != senior])
            os.kill(workers.view[name], signal.SIGKILL)
            kills += 1
            starting.append(asyncio.create_task(workers._running.start_another()))
            await asyncio.sleep(every_s / 2)
        ended = time.monotonic_ns()
        await asyncio.gather(*starting)
        steps = sum(began <= line.at_ns < ended for line in workers.lines()[senior])
    return steps * step_ms / ms(ended - began), kills
