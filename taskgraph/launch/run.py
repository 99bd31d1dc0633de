"""`tg.run`: an etcd, nodes on this host, the job, its result; nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.driver import JobSpec
from taskgraph.errors import CoordinationError, JobError, JobFailed, JobRunning, JobTimeout, TaskGraphError, UnknownJob
from taskgraph.jobs import EpochReport, Job, JobResult
from taskgraph.launch.follow import Follower, kept_events, node_statuses
from taskgraph.launch.inprocess import arun_inprocess
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.observe.events import Event
from taskgraph.protocol.records import State, StatusRecord

__all__ = ["Hooks", "arun", "connect", "job_failed", "launch_nodes", "result", "run"]

_NODE_END_S = 5.0


@dataclasses.dataclass
class Hooks:
    """What a front end wants to hear of a run, and can do about it.

    Attributes:
        on_event: every event of the job.
        on_start: (follower, nodes) once the nodes are started.
    """

    on_event: Callable[[Event], None] | None = None
    on_start: Callable[[Follower, LocalNodes], None] | None = None


def run(
    job: Job, *, nodes: int = 4, etcd: str | None = None, resume: bool = False, timeout_s: float | None = None
) -> JobResult:
    """Runs a job to its end and returns its result.

    Args:
        nodes: node processes started on this host; 0: everything in this process, without etcd.
        etcd: endpoints of an etcd, separated by commas; None: an embedded one that ends with the job.
        resume: from a durable checkpoint; not part of this release.
        timeout_s: the job fails after this time.

    Raises:
        JobFailed: user code raised (with its traceback), or the job cannot go on.
        JobTimeout: it did not end in time.
        JobRunning: a job of that name is running.
        CoordinationError: etcd cannot be reached or started.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(arun(job, nodes=nodes, etcd=etcd, resume=resume, timeout_s=timeout_s))
    raise JobError("tg.run cannot be called where an event loop runs (a notebook, an async def): `await tg.arun(...)`")


async def arun(
    job: Job,
    *,
    nodes: int = 4,
    etcd: str | None = None,
    resume: bool = False,
    timeout_s: float | None = None,
    hooks: Hooks | None = None,
    name: str = "",
    tls: dict[str, str] | None = None,
) -> JobResult:
    """`run`, for a running event loop. Cancelling it ends the job."""
    if resume:
        raise JobError("resume: durable checkpoints are not part of this release; run the job from its beginning")
    if nodes < 0:
        raise JobError(f"nodes={nodes}: at least 1, or 0 for everything in this process")
    if nodes == 0:
        return await arun_inprocess(job, timeout_s=timeout_s)
    began = time.monotonic()
    spec = JobSpec.of(job, name=name, expected_nodes=nodes)
    hooks = hooks or Hooks()
    async with AsyncExitStack() as stack:
        entry, coordinator = await stack.enter_async_context(_prepared(spec, etcd, tls or {}))
        await submit(coordinator, spec)
        follower = Follower(coordinator, spec, entry.token_bytes)
        await follower.start(hooks.on_event)
        stack.push_async_callback(follower.stop)
        return await _run_nodes(job, spec, entry, coordinator, follower, nodes, hooks, began, timeout_s)


@asynccontextmanager
async def _prepared(
    spec: JobSpec, etcd: str | None, tls: dict[str, str]
) -> AsyncIterator[tuple[JobEntry, EtcdCoordinator]]:
    """An etcd, and the job's entry in the runtime directory."""
    runtime = Runtime()
    known = runtime.find(spec.name)
    if known is not None:
        raise JobRunning(
            f"a job {spec.name!r} is running on this host already (started by process {known.pid}): follow it with "
            f"`taskgraph status {spec.name} --watch`, end it with `taskgraph shutdown {spec.name}`, or give this one "
            f"another name with --name"
        )
    async with AsyncExitStack() as stack:
        endpoint = etcd
        if endpoint is None:
            endpoint = (await stack.enter_async_context(EmbeddedEtcd())).endpoint
        coordinator = await stack.enter_async_context(await connect(endpoint, tls))
        entry = JobEntry(
            name=spec.name,
            etcd=endpoint,
            token=secrets.token_hex(32),
            pid=os.getpid(),
            embedded=etcd is None,
            tls=tls,
        )
        runtime.remove(spec.name)
        runtime.put(entry)
        try:
            yield entry, coordinator
        finally:
            runtime.remove(spec.name)


async def connect(etcd: str, tls: dict[str, str]) -> EtcdCoordinator:
    """Connects to an etcd; raises Unavailable with what was tried."""
    return await EtcdCoordinator.connect(etcd, **tls)  # type: ignore[arg-type]


async def _run_nodes(
    job: Job,
    spec: JobSpec,
    entry: JobEntry,
    coordinator: EtcdCoordinator,
    follower: Follower,
    count: int,
    hooks: Hooks,
    began: float,
    timeout_s: float | None,
) -> JobResult:
    """Starts nodes, follows the job to its end, collects; whatever happens, the nodes are gone afterwards."""
    all_gone = asyncio.get_running_loop().create_future()

    def on_exit(name: str, code: int) -> None:
        if nodes.alive == 0 and not all_gone.done():
            all_gone.set_result(None)

    threads = job.settings.blas_threads
    nodes = LocalNodes(entry, coordinator, Runtime(), blas_threads=threads, on_exit=on_exit)
    grace_s = _NODE_END_S
    try:
        await nodes.start(count)
        if hooks.on_start is not None:
            hooks.on_start(follower, nodes)
        try:
            async with asyncio.timeout(timeout_s):
                result = await _result(spec, follower, nodes, all_gone, began)
        except TimeoutError:
            waits = await _waits(follower, spec, entry)
            await follower.cancel_job(f"it did not end within {timeout_s:g} s")
            raise JobTimeout(f"job {spec.name!r} did not end within {timeout_s:g} s; {waits}", job=spec.name) from None
        await nodes.wait(_NODE_END_S)
        return result
    except asyncio.CancelledError:
        grace_s = 1.0
        await asyncio.shield(_cancel(follower))
        raise
    except JobFailed:
        await nodes.wait(_NODE_END_S)
        raise
    finally:
        await _finish(spec, coordinator, follower, nodes, grace_s)


async def _cancel(follower: Follower) -> None:
    try:
        async with asyncio.timeout(2.0):
            await follower.cancel_job("interrupted")
    except (CoordinationError, TimeoutError):
        return  # its nodes and, where it is embedded, its etcd end with us


async def _finish(
    spec: JobSpec, coordinator: EtcdCoordinator, follower: Follower, nodes: LocalNodes, grace_s: float
) -> None:
    await nodes.stop(grace_s)
    try:
        async with asyncio.timeout(2.0):
            events, _ = await kept_events(coordinator, spec.name)
            kept = await coordinator.get(follower.view.keys.result)
            status = await coordinator.get(follower.view.keys.status)
    except (CoordinationError, TimeoutError):
        return  # there is nobody left to ask what to keep
    Runtime().keep_finished(
        spec.name,
        {
            "run": spec.run,
            "status": json.loads(status.value) if status else {},
            "result": json.loads(kept.value) if kept else None,
            "events": [json.loads(event.to_bytes()) for event in events],
        },
    )


async def _result(
    spec: JobSpec, follower: Follower, nodes: LocalNodes, all_gone: asyncio.Future[None], began: float
) -> JobResult:
    """The job's result, or its failure, or that nobody is left to compute it."""

    async def to_the_end() -> JobResult:
        status = await follower.ended()
        if status.state != State.FINISHED:
            raise job_failed(spec.name, status)
        failed = asyncio.ensure_future(_failed_after_all(follower))
        collecting = asyncio.ensure_future(follower.results())
        try:
            await asyncio.wait([failed, collecting], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise job_failed(spec.name, failed.result())
            result = follower.assemble(collecting.result(), time.monotonic() - began)
        finally:
            for task in (failed, collecting):
                task.cancel()
            await asyncio.gather(failed, collecting, return_exceptions=True)
        await follower.collected(result)
        return result

    ending = asyncio.ensure_future(to_the_end())
    try:
        waits: list[asyncio.Future[Any]] = [ending, all_gone]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await asyncio.wait([ending], timeout=1.0)  # they may have ended because the job did
        if ending.done():
            return ending.result()
        tails = "\n".join(
            f"--- {name} (exit code {code}), the end of its log:\n{nodes.log_tail(name)}"
            for name, code in nodes.codes().items()
        )
        raise JobFailed(f"job {spec.name!r}: every node has ended, nobody is left to go on\n{tails}", job=spec.name)
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


async def _failed_after_all(follower: Follower) -> StatusRecord:
    """A `result()` that raises fails a job that had finished."""
    await follower.keeper.wait_until(lambda v: v.status is None or v.status.record.state != State.FINISHED)
    status = follower.view.status
    return status.record if status else StatusRecord(state=State.CANCELLED, reason="the job was deleted")


def job_failed(name: str, status: StatusRecord) -> JobFailed:
    """What the driver's process raises for a job that ended otherwise than finished."""
    return JobFailed(
        status.reason or f"job {name!r} was {status.state}",
        job=name,
        task=status.task,
        epoch=status.epoch,
        where=status.where,
        traceback_text=status.traceback,
    )


async def _waits(follower: Follower, spec: JobSpec, entry: JobEntry) -> str:
    statuses = await node_statuses(follower.view, spec.run, entry.token_bytes)
    lines: list[str] = []
    for status in statuses.values():
        if isinstance(status, TaskGraphError):
            continue
        lines += status.waits
        lines += [f"task {r.task}: {w}" for r in status.replicas if r.role == "primary" for w in r.waits]
    return "it waits: " + "; ".join(dict.fromkeys(lines)) if lines else "it was still computing"


async def launch_nodes(
    entry: JobEntry, coordinator: EtcdCoordinator, follower: Follower, spec: JobSpec, count: int, listen: str
) -> StatusRecord:
    """Nodes on this host for a job that was submitted elsewhere; returns when the job ended or all nodes did."""
    nodes = LocalNodes(entry, coordinator, Runtime(), blas_threads=spec.settings.get("blas_threads", 1), listen=listen)
    try:
        await nodes.start(count)
        ended = asyncio.ensure_future(follower.ended())
        gone = asyncio.ensure_future(nodes.wait(float("inf")))
        try:
            await asyncio.wait([ended, gone], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await nodes.wait(float(spec.settings.get("results_kept_s", 300.0)) + _NODE_END_S)
                return ended.result()
            return StatusRecord(state=State.RUNNING, reason="every node started here has ended")
        finally:
            for task in (ended, gone):
                task.cancel()
            await asyncio.gather(ended, gone, return_exceptions=True)
    finally:
        await nodes.stop(_NODE_END_S)


def result(name: str, etcd: str | None = None) -> JobResult:
    """The result of a finished job, as far as it was kept: values as JSON says them (arrays as lists).

    Raises:
        UnknownJob: no job of that name is known.
        JobFailed: it failed, was cancelled, or has not finished.
    """
    kept = Runtime().finished(name) if etcd is None else asyncio.run(_kept(name, etcd))
    if kept is None:
        raise UnknownJob(f"no finished job {name!r} is known here; pass etcd=... for one that ran elsewhere")
    if kept["result"] is None:
        status = kept["status"] or {}
        raise job_failed(name, StatusRecord(**status) if status else StatusRecord(state=State.CANCELLED))
    raw = kept["result"]
    reports = tuple(
        EpochReport(r["epoch"], r["numbers"], {int(t): n for t, n in r["by_task"].items()}) for r in raw["reports"]
    )
    values = {int(task): value for task, value in raw["values"].items()}
    return JobResult(**{**raw, "values": values, "reports": reports})


async def _kept(name: str, etcd: str) -> dict[str, Any] | None:
    from taskgraph.protocol.keys import Keys

    keys = Keys(name)
    async with await connect(etcd, {}) as coordinator:
        status, found = await coordinator.get(keys.status), await coordinator.get(keys.result)
    if status is None:
        return None
    return {"status": json.loads(status.value), "result": json.loads(found.value) if found else None}


def log_paths(name: str) -> list[Path]:
    """Where the nodes of a running job of this host print."""
    return sorted(Runtime().folder(name).glob("*.log"))
