"""`tg.testing.run`: a job in this process, with kills at named moments and a shuffled schedule."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping

from taskgraph.errors import JobError, JobTimeout
from taskgraph.jobs import Job, JobResult
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Point
from taskgraph.protocol.view import JobView
from taskgraph.testing.clock import SPEED, FastForwardLoop
from taskgraph.testing.threads import LockStepThreads

__all__ = ["STAGES", "run"]

STAGES = ("compose", "processor", "sync", "snapshot", "done", "commit", "committed")
"""Where a node can be killed: before the task composes, before its first processor, before its sync points, before
its snapshot, when its backups hold the snapshot but it has not reported done, and, for task 0, just before and just
after the commit."""


def run(
    job: Job,
    *,
    kills: Mapping[tuple[int, int], str] | None = None,
    order: int = 0,
    nodes: int | None = None,
    strict: bool = True,
    timeout_s: float = 60.0,
) -> JobResult:
    """Runs a job in this process, in strict mode, and returns its result.

    Args:
        kills: (task, epoch) -> stage: the node of that task's primary is killed there, once. A node that was killed
            is replaced, and a kill waits until every task has a replica in sync on a node that stays alive. The stages
            are in `STAGES`.
        order: seed of the schedule: messages and watch events arrive in another order for every seed.
        nodes: how many nodes; default one more than a task has replicas; with kills there is a backup at least.
        strict: replay every epoch from its snapshot (see `Settings.strict`).
        timeout_s: the job fails after this time, naming what it waits for.

    Raises:
        JobFailed: user code raised, or strict mode found a mistake: the message names it.
        JobTimeout: it did not end.
        JobError: the arguments do not fit the job.
    """
    kills = dict(kills or {})
    for (task, epoch), stage in kills.items():
        if stage not in STAGES:
            raise JobError(f"kills: {stage!r} is no stage; the stages are: {', '.join(STAGES)}")
        if stage in ("commit", "committed") and task != 0:
            raise JobError(f"kills: {stage!r} happens at the leader, which is task 0's primary, not task {task}")
        if not 0 <= task < job.tasks or epoch < 0 or (job.epochs is not None and epoch >= job.epochs):
            raise JobError(f"kills: there is no task {task} in epoch {epoch}")
    backups = max(job.backups, 1) if kills else job.backups
    settings = dataclasses.replace(job.settings, strict=strict or job.settings.strict)
    job = dataclasses.replace(job, backups=backups, settings=settings)
    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        return runner.run(_run(job, kills, order, nodes or max(job.min_nodes, backups + 2), timeout_s))


def _survivable(cluster: InProcessCluster, node_id: str) -> bool:
    """Whether every task has a replica in sync on another node that lives.

    Not only the tasks whose primary is on this node: it may hold the last replica of one whose primary was killed just
    now. And what counts is what etcd says: a node's own view may be behind an eviction.
    """
    truth = JobView(cluster.keys.job)
    truth.reset(cluster.store.revision, cluster.store.select(cluster.keys.root, prefix=True))
    living = {node.id for node in cluster.nodes} - {node_id}
    return all(not living.isdisjoint(truth.in_sync(task)) for task in truth.primaries)


async def _run(job: Job, kills: dict[tuple[int, int], str], order: int, nodes: int, timeout_s: float) -> JobResult:
    rng = random.Random(order) if order else None

    def point(cluster: InProcessCluster, node_id: str) -> Point:
        async def at(stage: str, task: int, epoch: int) -> None:
            if kills.get((task, epoch)) != stage:
                return
            # In life nobody waits for that; here a kill that loses a task's state would tell nothing of the job.
            # Looked at again after every wait: of two kills that waited for the same, the first changes it.
            while not _survivable(cluster, node_id):
                await cluster.node(node_id).keeper.wait_until(lambda _: _survivable(cluster, node_id))
            if kills.pop((task, epoch), None) is not None:
                cluster.crash(node_id)
                cluster.add()
                await asyncio.Event().wait()  # the crash cancels whatever runs here

        return at

    cluster = InProcessCluster(job, rng=rng, threads=LockStepThreads, point=point)
    await cluster.start(nodes)
    try:
        async with asyncio.timeout(timeout_s * SPEED):
            result = await cluster.result()
    except TimeoutError:
        raise JobTimeout(
            f"job {cluster.spec.name!r} did not end within {timeout_s:g} s; {cluster.waits()}", job=cluster.spec.name
        ) from None
    finally:
        await cluster.stop()
    if kills:
        left = ", ".join(f"task {t} in epoch {e} ({stage})" for (t, e), stage in sorted(kills.items()))
        raise JobError(f"kills that never came to pass: {left}; the job ended before")
    return result
