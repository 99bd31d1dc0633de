"""`tg.run`: an etcd, nodes on this host, the job, its result; nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import numbers
import operator
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ParamSpec, TypeVar

from taskgraph.coordination.api import AccessRefused, DataLost
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.opening import opened
from taskgraph.driver.loading import check_no_loop, check_not_importing, check_not_in_piece
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import (
    CoordinationError,
    JobError,
    JobFailed,
    JobRunning,
    OutcomeUnknown,
    TaskGraphError,
    Unavailable,
    UnknownJob,
    no_thread_text,
)
from taskgraph.jobs import Job, check_job
from taskgraph.launch.access import AccessOptions, etcd_access, node_access
from taskgraph.launch.collector import Collector
from taskgraph.launch.follow import Follower, find_kept
from taskgraph.launch.forkserver import ForkServer
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.resuming import Resume, begin, plan
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.shown import JobProgress
from taskgraph.launch.supervise import FrontEndHooks, Supervisor, end_reason
from taskgraph.network import rpc
from taskgraph.observe.events import Event
from taskgraph.protocol.records import JobStatus
from taskgraph.results import JobResult
from taskgraph.transport.hello import token_mark

__all__ = ["arun", "result", "run"]

log = logging.getLogger("taskgraph")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _checked(function: Callable[P, R]) -> Callable[P, R]:
    """Checks the job, and where and when it is started, before the call, since the coroutine may never be awaited.

    Cuts our frames from the traceback of our errors: they say nothing about the user's program.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        job: Any = args[0] if args else kwargs.get("job")
        try:
            check_job(job)
            check_not_importing(job.name)
            _refuse_at_interpreter_end(job.name)
            return function(*args, **kwargs)
        except TaskGraphError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return call


@_checked
def run(
    job: Job[T],
    *,
    nodes: int = 4,
    replace: bool = False,
    etcd: str | None = None,
    resume: Resume = False,
    fresh: bool = False,
    timeout_s: float | None = None,
    name: str = "",
    progress: bool = False,
) -> JobResult[T]:
    """Runs a job to its end and returns its result.

    Args:
        nodes: node processes started on this host; 0: everything in this process, without etcd.
        replace: start another node in place of one that dies; one that is drained is not replaced.
        etcd: endpoints of an etcd, separated by commas; None: an embedded one that ends with the job. Certificates,
            user and password come from TASKGRAPH_ETCD_CA, ..._CERT, ..._KEY, ..._USER and ..._PASSWORD (or
            ..._PASSWORD_FILE).
        resume: from the newest checkpoint of the job; from the beginning where there is none yet. "changed": also from
            one that another version of the driver wrote; what it holds must fit the tasks as they are now.
        fresh: from the beginning, although there are checkpoints.
        timeout_s: the job fails after this time.
        name: another one than the job has, so that two of them may run at a time.
        progress: show epochs, and what happens, on standard error, as `taskgraph run` does.

    Raises:
        JobError: it is no job, it cannot be run so, a driver starts it while it is imported, or the
            interpreter ends.
        JobFailed: user code raised (with its traceback), or the job cannot go on.
        JobTimeout: it did not end in time.
        JobRunning: a job of that name is running.
        CoordinationError: etcd cannot be reached or started.
        CheckpointError: it is to be resumed, and none of its checkpoints can be used.
        TaskGraphError: the directory that TASKGRAPH_RUNTIME_DIR names is not there, or it is not yours alone.
    """
    check_no_loop("tg.run", "`await tg.arun(...)`")
    running = arun(
        job,
        nodes=nodes,
        replace=replace,
        etcd=etcd,
        resume=resume,
        fresh=fresh,
        timeout_s=timeout_s,
        name=name,
        progress=progress,
    )
    try:
        return asyncio.run(running)
    except (asyncio.CancelledError, RuntimeError) as error:
        if nodes:
            raise
        from taskgraph.launch.inprocess import ended_loop_error

        if failed := ended_loop_error(error, name or job.name):
            raise failed from None
        raise


def _refuse_at_interpreter_end(job: str) -> None:
    """Raises JobError if the interpreter ends, and can start no thread: gRPC would end the process.

    The moment differs between versions of Python, so this starts a thread.
    """
    probe = threading.Thread(target=int, name="taskgraph-probe", daemon=True)
    try:
        probe.start()
    except RuntimeError as error:
        if no_thread_text(error):  # a limit on threads: other code reports that
            return
        raise JobError(
            f"job {job!r} cannot be run, as no thread can be started ({error}): run it before the main thread "
            f"ends, not in atexit, and let that join a thread which runs it"
        ) from None
    probe.join()


@_checked
async def arun(
    job: Job[T],
    *,
    nodes: int = 4,
    replace: bool = False,
    etcd: str | None = None,
    resume: Resume = False,
    fresh: bool = False,
    timeout_s: float | None = None,
    name: str = "",
    progress: bool = False,
    hooks: FrontEndHooks | None = None,
    access: AccessOptions | None = None,
) -> JobResult[T]:
    """Runs a job like `run`, in a running event loop. Cancelling it ends the job.

    `hooks` and `access` are for the command line. With `progress` there are no other hooks.
    """
    nodes = _as_count(nodes)
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise JobError(f"timeout_s={timeout_s!r}: must be None or a number of seconds above 0")
    if name:
        job = dataclasses.replace(job, name=name)
    async with AsyncExitStack() as stack:
        shown = None
        if progress:
            shown = await stack.enter_async_context(
                JobProgress(job.name, job.tasks, job.epochs, job.backups, elastic=job.elastic is not None)
            )
            hooks = FrontEndHooks(shown.event, lambda follower, nodes: shown.set_view(follower.view))
        hooks = hooks or FrontEndHooks()
        if nodes == 0:
            if replace:
                raise JobError("with 0 nodes all runs in this process: there is no node to replace")
            from taskgraph.launch.inprocess import arun_inprocess  # else no node is loaded in this process

            on_event = hooks.on_event or _warn_unchanged
            result = await arun_inprocess(job, timeout_s=timeout_s, on_event=on_event, resume=resume, fresh=fresh)
        else:
            before = sys.exception()
            try:
                result = await _on_nodes(
                    job,
                    nodes,
                    hooks,
                    access or AccessOptions(),
                    replace=replace,
                    etcd=etcd,
                    resume=resume,
                    fresh=fresh,
                    timeout_s=timeout_s,
                )
            except BaseException as error:
                rpc.forget_frames(error, before)  # the error must not keep connections open
                raise
        if shown is not None:
            shown.end(result.reports)
        return result


def _warn_unchanged(event: Event) -> None:
    """Logs the event that an elastic job trains nothing; `on_event` of a run in this process that has no other."""
    if event.kind == "unchanged":
        log.warning("%s", event.text)


async def _on_nodes(
    job: Job[T],
    nodes: int,
    hooks: FrontEndHooks,
    access: AccessOptions,
    *,
    replace: bool,
    etcd: str | None,
    resume: Resume,
    fresh: bool,
    timeout_s: float | None,
) -> JobResult[T]:
    """Runs a job on node processes of this host."""
    check_not_in_piece(job.name)
    access.listening.check(nodes)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        log.warning("this program ignores SIGCHLD: how a node or etcd ended is unknown, and reported as exit code 255")
    token = access.token or secrets.token_hex(32)
    spec = JobSpec.of(job, expected_nodes=nodes, token_mark=token_mark(bytes.fromhex(token)))
    async with AsyncExitStack() as stack:
        runtime = Runtime()
        if not stack.enter_context(runtime.claim(spec.name)) or runtime.find(spec.name) is not None:
            raise _running_here_error(runtime, spec.name)
        runtime.remove(spec.name)  # what a launcher that was killed left
        embedded = ahead = None
        if etcd is None:
            stack.callback(runtime.remove, spec.name)
            etcd_log = runtime.make_job_folder(spec.name) / "etcd.log"
            # What nodes need is loaded while etcd starts.
            ahead = await stack.enter_async_context(ForkServer(etcd_log.parent, spec.setting("blas_threads")))
            embedded = await stack.enter_async_context(EmbeddedEtcd(private=True, log=etcd_log, nodes=nodes))
        entry = JobEntry(
            name=spec.name,
            etcd=embedded.endpoint if embedded is not None else etcd or "",
            token=token,
            pid=os.getpid(),
            embedded=embedded is not None,
            tls={} if etcd is None else etcd_access() if access.etcd is None else access.etcd,  # ours wants none
            node_tls=node_access() if access.nodes is None else access.nodes,
            run=spec.run,
        )
        coordinator = await stack.enter_async_context(opened(entry.etcd, entry.tls))
        spec, beginning = await plan(coordinator, spec, resume=resume, fresh=fresh, timeout_s=timeout_s)
        follower = Collector(coordinator, spec, entry.token_bytes, entry.node_access)
        if embedded is None:
            stack.push_async_exit(partial(_cancel_unbegun, follower, entry))
        await begin(coordinator, spec, beginning)
        runtime.put(entry)
        stack.callback(runtime.remove, spec.name)
        stack.push_async_callback(follower.stop)
        etcd_ended = embedded.wait_for_end if embedded is not None else None
        supervisor = Supervisor(
            spec,
            entry,
            coordinator,
            follower,
            hooks,
            listening=access.listening,
            etcd_ended=etcd_ended,
            ahead=ahead,
            replace=replace,
        )
        return await supervisor.run(nodes, timeout_s)


def _as_count(nodes: Any) -> int:
    """Checks and returns the number of nodes; takes numpy's ints, too."""
    try:
        number = operator.index(nodes)
    except TypeError:
        number = -1
    if number < 0 or isinstance(nodes, bool):
        raise JobError(f"nodes={nodes!r}: must be an int of at least 1, or 0 for everything in this process")
    return number


_CANCEL_S = 2.0


async def _cancel_unbegun(
    follower: Follower, entry: JobEntry, kind: object, error: BaseException | None, trace: object
) -> None:
    """Cancels the job after a start that failed with `error`, so that its name is free; adds a note if etcd refuses.

    A run that went further has written its end itself, unless etcd did not answer.
    """
    if error is None:
        return
    try:
        async with asyncio.timeout(_CANCEL_S):
            await follower.cancel_job(end_reason(error))
    except (CoordinationError, TimeoutError) as failed:
        if isinstance(error, DataLost):  # with the job
            return
        if follower.view.status is None:
            if isinstance(error, JobError | AccessRefused):  # it was not submitted
                return
        elif not follower.view.running:  # as far as we know
            return
        away = isinstance(failed, Unavailable | OutcomeUnknown | TimeoutError)
        error.add_note(
            f"{'etcd does not answer' if away else f'its end was not written ({failed})'}, so that job {entry.name!r} "
            f"may be left there as running: end it with `taskgraph shutdown {entry.name} --etcd {entry.etcd}`"
        )


def _running_here_error(runtime: Runtime, name: str) -> JobRunning:
    """Makes the error for a job whose name runs on this host already."""
    known = runtime.find(name)
    whose = f" (started by process {known.pid})" if known is not None else ""
    return JobRunning(
        f"a job {name!r} is running on this host already{whose}: follow it with `taskgraph status {name} --watch`, end "
        f"it with `taskgraph shutdown {name}`, or give this one another name: --name, or name=... of tg.run"
    )


def result(name: str, etcd: str | None = None) -> JobResult:
    """Returns the result of a finished job, as far as it was kept, with values as in JSON: arrays are lists.

    Args:
        etcd: where it ran, if not here on an embedded one; how to get in is found as by `run`.

    Raises:
        UnknownJob: no job of that name is known; or it finished, and its values are not kept.
        JobFailed: it failed, was cancelled, or has not finished. Without `etcd`, an earlier run's result is returned
            until a job has ended.
        JobError: the name is not a string; or `etcd` is given, and an event loop runs in this thread.
    """
    if not isinstance(name, str):
        raise JobError(f"tg.result takes the name of a job, not {name!r:.100}")
    if etcd is None:
        kept = Runtime().find_finished(name)
    else:
        check_no_loop("tg.result(..., etcd=...)", "`await asyncio.to_thread(tg.result, name, etcd)`")
        kept = asyncio.run(_find_kept(name, etcd))
    if (kept is None and etcd is None and Runtime().find(name)) or (kept and kept.state == JobStatus.RUNNING):
        raise JobFailed(f"job {name!r} has not finished: `taskgraph status {name}` shows how far it is", job=name)
    if kept is None:
        raise UnknownJob(f"no finished job {name!r} is known here; pass etcd=... for one that ran elsewhere")
    found = kept.require_result(name)
    if left_out := found.get("left_out"):
        log.warning("of job %r: %s", name, left_out)
    return JobResult.from_json(json.dumps(found))


async def _find_kept(name: str, etcd: str) -> KeptJob | None:
    """Returns what etcd has of a job; None: there is no such job."""
    async with opened(etcd, etcd_access()) as coordinator:
        return await find_kept(coordinator, name)
