"""`tg.testing.run` runs a job in this process, with kills at named stages and a shuffled schedule."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import tempfile
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from taskgraph.errors import JobError, JobTimeout, TaskGraphError
from taskgraph.jobs import Job, check_job
from taskgraph.launch.inprocess import InProcessCluster, ended_loop_error
from taskgraph.node.garbage import searching_garbage_less_often
from taskgraph.node.node import Point
from taskgraph.node.usercode.actor import call_under_way
from taskgraph.node.usercode.uncaught import expected_ends_silenced
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.testing.clock import FastForwardLoop
from taskgraph.testing.guard import IdleTimer, Stuck, run_guarded
from taskgraph.testing.limited import LimitedRun
from taskgraph.testing.threads import LockStepThreads
from taskgraph.testing.workers import WORKER_STAGES, WorkersRun
from taskgraph.testing.workers import check_kills as check_worker_kills

__all__ = ["STAGES", "WORKER_STAGES", "run"]

T = TypeVar("T")

_WORKERS = 3
"""Workers of an elastic job, unless `nodes` is given."""
_JUMPING_EPOCHS = 20
_JUMP_S = 0.1
"""In strict mode without kills, the clock jumps by `_JUMP_S` when each of the first `_JUMPING_EPOCHS` epochs starts,
as if the epoch before had taken that long. So timers of coroutines beside the job fire as they would on real nodes. No
epoch is under way at that moment, and no lease ends because of the jump."""

STAGES = ("compose", "processor", "sync", "snapshot", "done", "commit", "committed")
"""Stages at which a node can be killed: before the task composes, before its first processor, before its sync points,
before its snapshot, after its backups acknowledged the snapshot but before its report, and, for task 0, just before and
just after the commit."""


def run(
    job: Job[T],
    *,
    kills: Mapping[tuple[int, int], str] | None = None,
    order: int = 0,
    nodes: int | None = None,
    strict: bool = True,
    timeout_s: float = 60.0,
    stuck_s: float | None = 60.0,
) -> JobResult[T]:
    """Runs a job in this process, in strict mode, and returns its result.

    The job runs in a thread of its own. Its clock stands still while your code computes, and runs up to 1,000 times as
    fast as real time while all code waits: `await asyncio.sleep(1000)` takes a second. Durations in messages are by
    that clock, except those of `timeout_s` and `stuck_s`.

    The job's checkpoints go to a temporary directory, which is removed afterwards, and not to the job's own place.

    A strict run of an elastic job is two runs: one on one worker, and one with newcomers that join unasked. States,
    parts and the value must be the same in both.

    Args:
        kills: (task, epoch) -> stage: the node of that task's primary is killed at that stage, once. Each killed node
            is replaced, and a kill waits until every task has a replica in sync on another living node. The stages are
            in `STAGES`. Of an elastic job: (place in the view, step) -> stage of `WORKER_STAGES`.
        order: seed of the schedule: messages and watch events arrive in another order for every seed.
        nodes: how many nodes; default one more than a task has replicas, or three workers of an elastic job. With kills
            a task graph has at least one backup and two nodes.
        strict: replay every epoch from its snapshot (see `Settings.strict`).
        timeout_s: real seconds that the job may wait, for messages or in `await asyncio.sleep`: 1,000 times as long by
            the job's clock. Computing does not count. Then the job fails, and names what it waits for. It also
            fails after as many real seconds without a commit while none of your code runs; and, with `epochs=None`,
            after 200 epochs for each second of `timeout_s`: 12,000.
        stuck_s: real seconds that one call of your code (a hook, compute or handler) may run without a wait. After that
            it counts as an endless loop: the error has its stack, and a daemon thread keeps running it. The whole run
            may take ten times as long, with every `setup()`. None: no limit, e.g. in a debugger.

    Raises:
        JobFailed: user code raised, or strict mode found a mistake: the message names it.
        JobTimeout: the job did not end: it waited for `timeout_s`, or your code ran for `stuck_s`.
        JobError: the arguments do not fit the job.
    """
    check_job(job)
    _check_int("order", order, None)
    if nodes is not None:
        _check_int("nodes", nodes, 1)
    _check_seconds("timeout_s", timeout_s)
    if stuck_s is not None:
        _check_seconds("stuck_s", stuck_s)
    kills = _as_kills(kills)
    if job.elastic is None:
        _check_kills(job, kills)
    else:
        check_worker_kills(kills)
    __tracebackhide__ = True
    if kills and nodes == 1:
        raise JobError("kills: with nodes=1 no node is left that could take over; give nodes=2, or leave it out")
    if job.elastic is None:
        backups = max(job.backups, 1) if kills else job.backups
        settings = dataclasses.replace(job.settings, strict=strict or job.settings.strict)
        job = dataclasses.replace(job, backups=backups, settings=settings)
    least = _WORKERS if job.elastic is not None else job.backups + 2
    with contextlib.ExitStack() as until_over:
        until_over.enter_context(expected_ends_silenced())
        until_over.enter_context(searching_garbage_less_often())
        if job.checkpoint is not None:  # a test must not write to the place of real checkpoints
            place = until_over.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            job = dataclasses.replace(job, checkpoint=f"file://{place}")
        run: LimitedRun
        if job.elastic is None:
            run = _Run(job, kills, order, timeout_s, stuck_s)
        else:
            run = WorkersRun(job, kills, order, strict, timeout_s, stuck_s)
        try:
            return run_guarded(
                functools.partial(run.run_job, nodes or max(job.min_nodes, least)),
                run.turn,
                stuck_s,
                run.end_slow_run,
                IdleTimer(timeout_s, run.progress, run.end_wait),
            )
        except Stuck as stuck:
            raise run.error_of_stuck_code(stuck) from None
        except TaskGraphError as error:
            raise error.with_traceback(None)  # noqa: B904 (without our frames; it is the same error)
        except (asyncio.CancelledError, RuntimeError) as error:
            if by_user := ended_loop_error(error, job.name):
                raise by_user from None
            raise


def _check_kills(job: Job, kills: dict[tuple[int, int], str]) -> None:
    """Raises JobError if a kill does not fit a task graph."""
    for (task, epoch), stage in kills.items():
        if stage not in STAGES:
            raise JobError(f"kills: {stage!r} is no stage; the stages are: {', '.join(STAGES)}")
        if stage in ("commit", "committed") and task != 0:
            raise JobError(f"kills: {stage!r} happens at the leader, which is task 0's primary, not task {task}")
        if not 0 <= task < job.all_tasks or epoch < 0 or (job.epochs is not None and epoch >= job.epochs):
            raise JobError(f"kills: there is no task {task} in epoch {epoch}")


def _check_int(name: str, given: Any, least: int | None) -> None:
    fits = isinstance(given, Integral)  # numpy's, too
    if not fits or (least is not None and given < least):
        limit = "" if least is None else f" of at least {least}"
        raise JobError(f"tg.testing.run({name}={given!r:.100}): must be an int{limit}")


def _check_seconds(name: str, given: Any) -> None:
    fits = isinstance(given, Real)
    if not fits or not given > 0:
        raise JobError(f"tg.testing.run({name}={given!r:.100}): must be a number of seconds above 0")


def _as_kills(kills: Any) -> dict[tuple[int, int], str]:
    """Copies `kills`. Raises JobError if it is no dict {(int, int): stage}."""
    fits = isinstance(kills or {}, Mapping) and all(
        isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, Integral) for part in key)
        for key in kills or {}
    )
    if not fits:
        raise JobError(f"kills={kills!r}: must be {{(task, epoch): stage}}, as in kills={{(2, 1): 'processor'}}")
    return dict(kills or {})


def _current_view(cluster: InProcessCluster) -> JobView:
    """Makes a view from all of the job's keys in etcd. A node's own view may be older."""
    truth = JobView(cluster.keys.job)
    truth.reset(cluster.store.revision, cluster.store.select(cluster.keys.root, prefix=True))
    return truth


def _can_be_killed(cluster: InProcessCluster, node_id: str) -> bool:
    """True if every task has a replica in sync on a living node other than `node_id`.

    This includes tasks with other primaries: the node may have the last replica of a task whose primary just died.
    """
    truth = _current_view(cluster)
    living = {node.id for node in cluster.nodes} - {node_id}
    return all(not living.isdisjoint(truth.in_sync(task)) for task in truth.primaries)


async def _wait_until_killable(cluster: InProcessCluster, node_id: str) -> bool:
    """Waits until the node can be killed without losing a task, or the job is over. Returns True if it can."""

    def killable_or_over(view: object) -> bool:
        return _can_be_killed(cluster, node_id) or not _current_view(cluster).running

    # Check again after every wait: another kill that waited for the same state may have changed it.
    while not killable_or_over(None):
        await cluster.node(node_id).keeper.wait_until(killable_or_over)
    return _can_be_killed(cluster, node_id)


class _Run(LimitedRun):
    """One call of `run` with a task graph. `kills` are removed as they happen."""

    def __init__(
        self, job: Job, kills: dict[tuple[int, int], str], order: int, timeout_s: float, stuck_s: float | None
    ) -> None:
        super().__init__(job.name, timeout_s, stuck_s, endless=job.epochs is None)
        self._job = job
        self._kills = kills
        self._rng = random.Random(order) if order else None
        self._last_jump = 0

    async def run_job(self, nodes: int) -> JobResult:
        threads = functools.partial(LockStepThreads, self.turn)
        self._cluster = cluster = InProcessCluster(self._job, rng=self._rng, threads=threads, point=self._stage_hook)
        await cluster.start(nodes)
        try:
            result = await self.result_of(cluster)
        finally:
            await cluster.stop()
        if self._kills:
            left = ", ".join(f"task {t} in epoch {e} ({stage})" for (t, e), stage in sorted(self._kills.items()))
            raise JobError(f"kills that never came to pass: {left}; the job ended before")
        return result

    def _stage_hook(self, cluster: InProcessCluster, node_id: str) -> Point:
        """Returns the function that a node calls at each stage of a task in an epoch.

        It kills and replaces the node if a kill is due, fails an endless job, and may let the clock jump.
        """
        loop, takes_time = asyncio.get_running_loop(), self._job.settings.strict and not self._kills
        assert isinstance(loop, FastForwardLoop)

        async def at(stage: str, task: int, epoch: int) -> None:
            if takes_time and stage == "compose" and self._last_jump < epoch <= _JUMPING_EPOCHS:
                self._last_jump = epoch
                loop.stand_still(_JUMP_S)
                await asyncio.sleep(0)
            if (
                stage == "commit" and self.max_rounds is not None and epoch >= self.max_rounds
            ):  # all before have been committed
                self.fail_endless(
                    f"committed {self.max_rounds} epochs without an end: no processor called epoch.finish()"
                )
            due = self._kills.get((task, epoch))
            if due == "committed" and stage == "commit":
                await _wait_until_killable(cluster, node_id)  # this may be the last commit, after which it is too late
            if due != stage:
                return
            # A kill that loses a task's state would say nothing about the job, so it waits for a replica elsewhere.
            if await _wait_until_killable(cluster, node_id) and self._kills.pop((task, epoch), None) is not None:
                cluster.crash(node_id)
                self._drop_missed_kills(cluster, node_id)
                cluster.add()
                await asyncio.Event().wait()  # the crash cancels whatever runs here

        return at

    def _drop_missed_kills(self, cluster: InProcessCluster, crashed: str) -> None:
        """Drops "committed" kills of epochs that the crashed leader had committed: no node reaches that stage again."""
        truth = _current_view(cluster)
        if truth.epoch is None or truth.primary_node(0) != crashed:
            return
        for (task, epoch), stage in list(self._kills.items()):
            if stage == "committed" and epoch < truth.epoch.record.epoch:
                del self._kills[task, epoch]

    def progress(self) -> int:
        """Returns a number that grows with every write to etcd, so also with every commit."""
        return self._cluster.store.revision if self._cluster is not None else 0

    def error_of_stuck_code(self, stuck: Stuck) -> JobTimeout:
        """Returns an error that names the code that does not return, its task and its stack."""
        call = call_under_way(stuck.frame) if stuck.frame is not None else None
        if call is None:  # a function of its topology or of a codec
            return super().error_of_stuck_code(stuck)
        task, where, text = call
        views = [node.keeper.view for node in self._cluster.nodes] if self._cluster is not None else []
        epoch = max((view.epoch.record.epoch for view in views if view.epoch is not None), default=None)
        place = f"task {task}" + (f", epoch {epoch}" if epoch is not None else "")
        return self.stuck_error(f"{place}: {where!r}", text, task=task, epoch=epoch, where=where)
