"""`tg.testing.run` of an elastic job.

A strict run is two runs. The first has one worker, which computes all parts in order; its states, parts and value are
recorded. In the second run newcomers join and old workers leave or die; what any worker computes is compared with the
record.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from types import CodeType

from taskgraph.elastic_jobs.run import Run
from taskgraph.errors import JobError, JobFailed
from taskgraph.jobs import Job
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult
from taskgraph.testing.compared import DECIDE, OneWorkerRecord
from taskgraph.testing.limited import LimitedRun
from taskgraph.testing.scene import Scene
from taskgraph.testing.threads import LockStepThreads
from taskgraph.testing.watchers import Comparer, Recorder, Watcher, with_watcher

__all__ = ["WORKER_STAGES", "WorkersRun", "check_kills"]

Watching = Callable[[Scene, Run, CodeType], Watcher]
WORKER_STAGES = ("begin", "part", "sums", "total")
"""Stages at which a worker of an elastic job can be killed: between two steps; before its first part of the step; when
it has computed its parts, and some workers may have got their sums; with the step's total, before its code goes on."""


def check_kills(kills: dict[tuple[int, int], str]) -> None:
    """Raises JobError if a kill does not fit an elastic job."""
    for (place, step), stage in kills.items():
        if stage not in WORKER_STAGES:
            stages = ", ".join(WORKER_STAGES)
            raise JobError(f"kills: {stage!r} is no stage of an elastic job; the stages are: {stages}")
        if place < 0 or step < 0:
            raise JobError(f"kills: ({place}, {step}) must be the place of a worker in the view, from 0, and a step")


class WorkersRun(LimitedRun):
    """One call of `tg.testing.run` with an elastic job: in strict mode two runs, each with its own scene.

    Args:
        kills: (place in the view, step) -> stage.
        order: seed of the order in which messages arrive.
    """

    def __init__(
        self,
        job: Job,
        kills: dict[tuple[int, int], str],
        order: int,
        strict: bool,
        timeout_s: float,
        stuck_s: float | None,
    ) -> None:
        super().__init__(job.name, timeout_s, stuck_s, endless=True)
        self._job = job
        self._kills = kills
        self._order = order
        self._strict = strict
        self._scene = self._new_scene({}, churn=False)

    async def run_job(self, nodes: int) -> JobResult:
        if not self._strict:
            return await self._run(self._job, nodes, self._new_scene(self._kills, churn=False), Watcher)
        record = OneWorkerRecord()
        alone = dataclasses.replace(self._job, min_nodes=1, checkpoint=None)
        scene = self._new_scene({}, churn=False)
        await self._run(alone, 1, scene, functools.partial(Recorder, record))
        scene = self._new_scene(self._kills, churn=True)
        result = await self._run(self._job, nodes, scene, functools.partial(Comparer, record))
        if scene.differing:  # in calls of the run: of states, parts and totals the comparer says more
            raise JobFailed(f"{scene.differing[0]}\n{DECIDE}", job=self._job.name)
        return result

    def _new_scene(self, kills: dict[tuple[int, int], str], *, churn: bool) -> Scene:
        return Scene(dict(kills), churn, random.Random(self._order), self._check_endless)

    async def _run(self, job: Job, nodes: int, scene: Scene, watch: Watching) -> JobResult:
        assert job.elastic is not None
        rng = random.Random(self._order) if self._order else None
        threads = functools.partial(LockStepThreads, self.turn)
        job = dataclasses.replace(job, _elastic=with_watcher(job.elastic, functools.partial(watch, scene)))
        self._scene = scene
        self._cluster = cluster = InProcessCluster(job, rng=rng, threads=threads, on_event=scene.on_event)
        scene.attach(cluster)
        await cluster.start(nodes)
        try:
            result = await self.result_of(cluster)
        finally:
            await scene.stop()
            await cluster.stop()
        if scene.kills:
            left = ", ".join(f"worker {w} in step {s} ({stage})" for (w, s), stage in sorted(scene.kills.items()))
            raise JobError(f"kills that never came to pass: {left}; the job ended before, or had fewer workers")
        return result

    def _check_endless(self, step: int) -> None:
        assert self.max_rounds is not None
        if step >= self.max_rounds:
            self.fail_endless(
                f"took {self.max_rounds} steps without an end: no `break`, and run.steps has no passes=..."
            )

    def progress(self) -> int:
        """Returns a number that grows with every total that user code gets."""
        written = self._cluster.store.revision if self._cluster is not None else 0
        return written + sum(node.engine.user_position for node in self._scene.nodes)
