"""How long a failure stops a job: from the signal to the next commit, detection, takeover and replay apart.

    python benchmarks/failover.py [--kills 40] [--drains 10] [--freezes 4] [--tasks 7] [--nodes 4]

A tree job runs without pause. Again and again a node is ended in one of four ways, and another is started:

- kill -9 of the node of the root's primary, and of that of another task;
- a drain (SIGTERM): what counts is the longest pause between two commits until the node has left, and that no
  attempt was spent;
- SIGSTOP: the node is frozen, its sockets stay open; only its lease tells. Counts from the signal; what is more than
  the TTL and 300 ms is counted, too.

The time of a failure is counted until the first commit *after* the takeover, as read from etcd by a watcher; a
commit that was on its way already does not count. A kill is noticed by the launcher of the node and by the peers'
connections, whichever is first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob
from tree import tree

import taskgraph as tg

_MANY = 100
"""Of fewer samples the 99th percentile is the largest."""


@dataclass
class Sample:
    detection_ms: float
    takeover_ms: float
    replay_ms: float

    @property
    def total_ms(self) -> float:
        return self.detection_ms + self.takeover_ms + self.replay_ms


async def fail(job: RunningJob, task: int, number: signal.Signals) -> Sample:
    """Sends the signal to the node of a task's primary; returns when an epoch committed after its takeover."""
    view = job.view
    victim = view.primary_node(task)
    assert victim is not None
    term, pid = view.term(task), view.nodes[victim].record.pid
    detected: list[float] = []

    def look() -> None:
        if not detected and (victim in job.view.gone or victim not in job.view.nodes):
            detected.append(time.monotonic())

    stop = job.follower.keeper.on_change(look)
    job.events.clear()
    wall = time.time()
    began = time.monotonic()
    os.kill(pid, number)
    try:
        await job.until("the takeover", lambda v: v.term(task) > term)
        taken = time.monotonic()
        at = job.committed
        await job.until("a commit after the takeover", lambda v: v.stamp is not None and v.stamp.epoch > at)
        committed = time.monotonic()
    finally:
        stop()
    seen = [began + event.at - wall for event in job.events if event.kind == "lost"] + detected
    first = min([t for t in seen if t >= began], default=taken)
    first = min(first, taken)
    return Sample((first - began) * 1e3, (taken - first) * 1e3, (committed - taken) * 1e3)


async def drain(job: RunningJob, task: int) -> tuple[float, int]:
    """The longest pause between two commits, ms, while the task's node leaves, and the attempts it cost."""
    view = job.view
    victim = view.primary_node(task)
    assert victim is not None
    assert view.stamp is not None
    attempt, before = view.stamp.attempt, job.commits[-1][0]
    os.kill(view.nodes[victim].record.pid, signal.SIGTERM)
    await job.until("the node to leave", lambda v: victim not in v.nodes)
    at = job.committed
    await job.until("the next commit", lambda v: v.stamp is not None and v.stamp.epoch > at)
    times = [t for t, _ in job.commits if t >= before]
    assert job.view.stamp is not None
    pause = max(b - a for a, b in itertools.pairwise(times))
    return pause * 1e3, job.view.stamp.attempt - attempt


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    many = len(ordered) >= _MANY
    p99 = f"  p99 {ordered[round(0.99 * (len(ordered) - 1))]:7.1f}" if many else ""
    return f"median {statistics.median(ordered):7.1f}{p99}  max {ordered[-1]:7.1f}  ({len(ordered)})"


def show(what: str, samples: list[Sample]) -> None:
    print(f"{what}, ms")
    print(f"  until the next commit  {spread([s.total_ms for s in samples])}")
    for part in ("detection", "takeover", "replay"):
        print(f"    {part:20} {spread([getattr(s, part + '_ms') for s in samples])}")


def other(job: RunningJob, tasks: int, i: int) -> int:
    """A task whose primary is not on the root's node; another one each time."""
    root = job.view.primary_node(0)
    others = [task for task in range(tasks) if job.view.primary_node(task) != root]
    return others[i % len(others)]


async def replace(job: RunningJob, nodes: int) -> None:
    """Starts another node in place of the one that is gone."""
    await job.start_another()
    await job.until_settled(nodes)


async def main(kills: int, drains: int, freezes: int, tasks: int, nodes: int) -> None:
    async with RunningJob(tree(tasks=tasks, epochs=10_000_000), nodes=nodes) as job:
        await job.until_settled(nodes)
        began, at = time.monotonic(), job.committed
        await asyncio.sleep(2.0)
        rate = (job.committed - at) / (time.monotonic() - began)
        print(f"{tasks} tasks on {nodes} nodes, one backup each, {rate:.0f} epochs/s; Python {sys.version.split()[0]}")
        killed: dict[str, list[Sample]] = {"root": [], "other": []}
        for i in range(kills):
            which = "root" if i % 2 == 0 else "other"
            task = 0 if which == "root" else other(job, tasks, i)
            killed[which].append(await fail(job, task, signal.SIGKILL))
            await replace(job, nodes)
        drained: list[tuple[float, int]] = []
        for i in range(drains):
            drained.append(await drain(job, other(job, tasks, i)))
            await replace(job, nodes)
        stopped: list[Sample] = []
        for _ in range(freezes):
            await asyncio.sleep(random.random())  # at any time between two renewals, and two looks of etcd
            task = tasks - 1
            victim = job.view.primary_node(task)
            assert victim is not None
            pid = job.view.nodes[victim].record.pid
            stopped.append(await fail(job, task, signal.SIGSTOP))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await replace(job, nodes)
    if killed["root"]:
        show("kill -9 of the root's primary", killed["root"])
    if killed["other"]:
        show("kill -9 of another primary", killed["other"])
    if drained:
        print(f"drain: longest pause between commits, ms  {spread([pause for pause, _ in drained])}")
        print(f"       attempts it cost: {sum(spent for _, spent in drained)}")
    if stopped:
        show("frozen (SIGSTOP)", stopped)
        bar_ms = tg.Settings().lease_ttl_s * 1e3 + 300
        print(f"  more than {bar_ms:g}: {sum(s.total_ms > bar_ms for s in stopped)} of {len(stopped)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="of the root's node, and of another, in turn")
    parser.add_argument("--drains", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    asyncio.run(main(given.kills, given.drains, given.freezes, given.tasks, given.nodes))
