"""launch, node: commands that start nodes for a job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from taskgraph.commands.common import (
    FoundJob,
    access_of,
    check_launcher,
    ended_text,
    ended_with_launcher,
    etcd_of,
    known_at,
    listening_of,
    node_tls_of,
    obey_ending_signals,
    reach,
    restore_signals,
    see_also_text,
    token_of,
    wait_until_launcher_gone,
)
from taskgraph.commands.running import print_result, run
from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.etcd.options import NoAddress
from taskgraph.coordination.opening import opened
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TaskGraphError, UnknownJob
from taskgraph.jobs import JobFunction
from taskgraph.launch.begin import command, options
from taskgraph.launch.collector import Collector
from taskgraph.launch.follow import Follower, ignoring_etcd_failures
from taskgraph.launch.kept import collected_record, job_failed, lost_text
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.shown import JobProgress
from taskgraph.launch.supervise import launch_nodes
from taskgraph.node.config import NodeConfig
from taskgraph.observe.screen import say
from taskgraph.protocol.keys import NAME_RULE, Keys, is_name
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.system.environment import node_env
from taskgraph.system.streams import bound_stderr_waits
from taskgraph.transport.hello import token_mark

__all__ = ["launch", "node", "print_end"]

log = logging.getLogger("taskgraph.node")

_DRAINED_CODES = (0, *range(6, 126))
"""Lower codes are errors, and shells use higher ones."""
_LAST_LOOK_S = 2.0
_TOKEN_AGAIN_S = 2.0
"""The pause before a node with a wrong token reads its token file again."""
_ADDRESS_AGAIN_S = 0.1
_FIRST_SAID_S, _SAY_AGAIN_S = 5.0, 60.0
"""How long a node waits for an etcd that has no address yet before it says so, and says so again."""


def launch(options: argparse.Namespace, function: JobFunction[...] | None = None) -> int:
    """Starts nodes on this host for a submitted job. With a driver: the whole job, as run."""
    if options.nodes < 1:
        raise JobError(f"--nodes {options.nodes}: at least 1")
    if function is not None and options.job is None:
        return run(options, function)
    if options.job and _is_driver(options.job):
        options.driver = options.job
        return run(options)
    if any(getattr(options, name) for name in ("option", "set", "name", "resume", "fresh")):
        raise JobError(
            "-o, --set, --name, --resume, --resume-changed and --fresh go with a driver, or with `submit`: a submitted "
            "job has its options already"
        )
    if options.json or options.timeout is not None:
        job = options.job or "JOB"
        raise JobError(
            f"--timeout and --json go with a driver; for a submitted job use `taskgraph result {job} --json` and "
            f"`taskgraph shutdown {job}`"
        )
    return uvloop.run(_launch(options))


def _is_driver(text: str) -> bool:
    """Returns True if a word names a driver. A job's name has no `:` or `/`; a name with a dot may be a module."""
    if text.endswith(".py") or ":" in text or "/" in text:
        return True
    if Runtime().find(text) is not None or "." not in text:
        return False
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(text) is not None
    return False


async def _launch(options: argparse.Namespace) -> int:
    """Starts nodes for a submitted job, waits until the job ends or they have left, and returns the exit code."""
    listening = listening_of(options, options.nodes)
    async with reach(options) as reached:
        token = reached.entry.token
        if not token:
            raise JobError(f"the nodes need the token of job {reached.name!r}: give --token-file")
        reached.check_token()
        entry = JobEntry(
            name=reached.name,
            etcd=reached.entry.etcd,
            token=token,
            pid=os.getpid(),
            embedded=False,
            tls=reached.entry.tls,
            node_tls=reached.entry.node_tls,
            run=reached.spec.run,
        )
        follower = Collector(reached.coordinator, reached.spec, entry.token_bytes, entry.node_access)
        async with alongside(follower.keeper.load_persistently(), wait_until_launcher_gone(reached.entry)) as (
            load,
            gone,
        ):
            await any_done(load, gone)
            if not load.done():
                raise _launcher_ended_error(reached)
            await load
        if (found := follower.view.status) is not None and not follower.view.has_work:
            return await _print_ended(reached, found.record)
        reached.spec.check_protocol()  # the job would refuse each of its nodes
        runtime = Runtime()
        runtime.join(entry)
        bound_stderr_waits()
        shown = JobProgress(reached.name, reached.spec.own_tasks, reached.spec.epochs, reached.spec.backups)
        shown.set_view(follower.view)
        leave = asyncio.Event()

        def on_start(nodes: LocalNodes) -> None:
            if options.logs:
                shown.follow_logs(nodes)

        async def launching() -> tuple[StatusRecord, JobResult | None]:
            await follower.start(shown.event)
            return await launch_nodes(
                entry,
                reached.coordinator,
                follower,
                reached.spec,
                options.nodes,
                listening,
                on_start,
                leave,
                etcd_ends=reached.entry.embedded,
                replace=options.replace,
            )

        try:
            async with shown, alongside(launching(), wait_until_launcher_gone(reached.entry)) as (work, gone):
                _on_signals(work, leave, follower, reached.spec.setting("drain_s"))
                await any_done(work, gone)
                if not work.done():  # the work may still read how the job ended
                    await asyncio.wait([work], timeout=_LAST_LOOK_S)
                if not work.done() and follower.view.has_work:
                    leave.set()  # there is no etcd to hand over by
                    raise _launcher_ended_error(reached)
                status, result = await work
            if status.state != JobStatus.RUNNING and not reached.entry.embedded:  # else the run keeps the end
                asks = f"`taskgraph result {reached.name} --etcd {entry.etcd}` asks the job's etcd for them"
                await follower.keep_end(status, asks)
        except asyncio.CancelledError:
            say(await _end_of_nodes_text("were ended", reached, follower))
            return 130
        finally:
            await follower.stop()
            _remove_entry(runtime, entry)
        restore_signals()
        return await print_end(reached, follower, status, result, left=leave.is_set())


def _launcher_ended_error(reached: FoundJob) -> UnknownJob:
    """Makes the error for a job whose embedded etcd ended with its launcher."""
    check_launcher(reached.entry)
    name, kept = reached.name, Runtime().find_finished(reached.name, reached.spec.run)
    how = f" ({ended_text(kept.state)}): see {see_also_text(name)}" if kept is not None else ""
    return UnknownJob(f"job {name!r} has ended with its launcher, which ran its etcd{how}")


async def print_end(
    reached: FoundJob, follower: Collector, status: StatusRecord, result: JobResult | None, *, left: bool
) -> int:
    """Prints how the job ended; returns the exit code.

    Args:
        left: the nodes started here were asked to leave.
    """
    name, lost = reached.name, follower.kept.not_kept
    if result is not None:
        print_result(result, as_json=False, kept=True, elastic=follower.view.workers is not None)
    if status.state == JobStatus.FINISHED and lost:
        say(f"job {name} finished, but its values are lost: {lost}")
        return 1
    if result is not None:
        if follower.only_on_nodes:
            print(f"job {name}: {await _values_text(reached)}", file=sys.stderr)
        return 0
    if status.state == JobStatus.FINISHED:
        print(f"job {name} finished; {await _values_text(reached)}", file=sys.stderr)
        return 0
    if status.state == JobStatus.RUNNING and (left or not status.reason):
        say(await _end_of_nodes_text("have left", reached, follower))
        return 130 if left else 0
    if status.state == JobStatus.RUNNING:
        say(f"{status.reason.rstrip()}\nthe job may go on elsewhere: `taskgraph status {name}`")
        return 1
    raise job_failed(name, status)


async def _print_ended(reached: FoundJob, status: StatusRecord) -> int:
    """Prints that the job had ended before, so that no nodes start; returns the exit code."""
    name = reached.name
    if status.state == JobStatus.FINISHED:
        print(f"job {name} has finished already: no nodes were started; {await _values_text(reached)}", file=sys.stderr)
        return 0
    error = job_failed(name, status)
    error.add_note("the job had ended before: no nodes were started; `taskgraph submit` starts it again")
    raise error


def _on_signals(work: asyncio.Future[Any], leave: asyncio.Event, follower: Follower, within_s: float) -> None:
    """Makes the first Ctrl-C (SIGTERM, SIGHUP) let the nodes hand over and leave, and the second end them at once.

    After the job has finished, the first one only warns that its results would be lost.
    """

    def obey() -> None:
        if leave.is_set() or not follower.view.running:
            work.cancel()
            return
        leave.set()
        text = f"the nodes started here hand over their tasks, and leave within {within_s:g} s (drain_s)"
        say(f"{text}; once more to end them at once", anew=True)

    obey_ending_signals(finished=lambda: follower.finished, obeyed=leave.is_set, obey=obey)


async def _values_text(reached: FoundJob) -> str:
    """Returns where the values of a finished job are, if another command collected them or gave them up."""
    async with ignoring_etcd_failures(_LAST_LOOK_S):
        found = await reached.coordinator.get(Keys(reached.name).collected)
        if found is not None and not (kept := collected_record(found)).result and kept.not_kept:
            return f"its values are not kept: {kept.not_kept}"
    here = reached.entry.embedded or Runtime().find_finished(reached.name, reached.spec.run) is not None
    where = "" if here else f" --etcd {reached.entry.etcd}"  # without --etcd this host may find an earlier run
    return f"its values: `taskgraph result {reached.name}{where}`"


async def _end_of_nodes_text(how: str, reached: FoundJob, follower: Follower) -> str:
    """Returns the line for the end of the nodes started here; `how`: "have left".

    If no other node lives, it adds what is lost: the state of a job, or the values of a finished one.
    """
    text = f"the nodes started here {how}"
    async with ignoring_etcd_failures(_LAST_LOOK_S):
        await follower.keeper.load()
    view = follower.view
    if view.live_nodes(reached.spec.run):
        return text
    if view.running and (view.primaries or view.workers is not None):
        whose = "workers" if reached.spec.elastic else "tasks"
        text += f"; job {reached.name} has no node left, and the state of its {whose} is lost"
        if view.checkpoint is not None:
            text += f"; new nodes go on from its checkpoint of {reached.spec.unit} {view.checkpoint.record.epoch}"
    elif follower.finished and not view.collected:
        text += f"; job {reached.name} had finished, but its values are lost: "
        text += lost_text(reached.name, view.checkpoint, reached.spec.unit)
    return text


def _remove_entry(runtime: Runtime, entry: JobEntry) -> None:
    """Removes this launcher's entry of the job from this host's records; prints an error, and does not raise it."""
    try:
        runtime.leave(entry)
    except (OSError, TaskGraphError) as error:
        say(str(error))


def node(options: argparse.Namespace) -> int:
    """Runs one node in this process, and ends the process with it."""
    if not is_name(options.job):  # the node would wait for ever
        raise JobError(f"--job {options.job!r}: no job can have that name: {NAME_RULE}")
    if options.drained_code not in _DRAINED_CODES:
        raise JobError(f"--drained-code {options.drained_code}: 0, or 6 to 125: other codes have a meaning already")
    etcd = etcd_of(options)
    local = Runtime().find(options.job)
    if etcd is None and local is not None:
        etcd = local.etcd
    if etcd is None:
        raise JobError(f"the etcd of job {options.job!r} is unknown: give --etcd")
    known = known_at(options.job, etcd)
    if (token := _token_at(options, etcd)) is None:
        raise JobError(f"a node needs the token of job {options.job!r}: give --token-file")
    listening = listening_of(options, 1)
    node_tls = node_tls_of(options) or (known.node_tls if known is not None else {})
    tls = access_of(options) or (known.tls if known is not None else {})
    from taskgraph.node import process  # only this command loads a node
    from taskgraph.node.ready_file import prepare_ready_file

    if options.ready_file:
        prepare_ready_file(Path(options.ready_file))
    process.end_on_sigterm(drained_code=options.drained_code)
    process.log_to_stderr()
    spec, token = uvloop.run(_wait_until_submitted(etcd, tls, options, token, known))
    _restart_in_node_env(spec)
    process.main(
        NodeConfig(
            job=options.job,
            name=options.name or f"{os.uname().nodename}-{os.getpid()}",
            etcd=etcd,
            token=token,
            tls=tls,
            sockets=str(Runtime().make_socket_folder(options.job).path),
            listening=listening,
            node_tls=node_tls,
            drained_code=options.drained_code,
            ready_file=options.ready_file or "",
        ),
        gone=partial(ended_with_launcher, known) if known is not None and known.embedded else None,
    )
    raise AssertionError("process.main ends the process")


def _token_at(options: argparse.Namespace, etcd: str) -> str | None:
    """Returns the token of a job in that etcd, hex: from the named file, or as this host knows it; None: neither."""
    token = token_of(options)
    if token is None and (local := Runtime().find(options.job) or known_at(options.job, etcd)) is not None:
        token = local.token
    return token


async def _wait_for_job_and_token(
    coordinator: Coordinator, options: argparse.Namespace, etcd: str, token: str
) -> tuple[JobSpec, str]:
    """Waits until the job is in etcd and `token`, or the file named for it, is its token; returns its spec and token.

    A waiting node may have the token of an earlier run.
    """
    from taskgraph.node import process

    warned = ""
    while True:
        spec, _ = await process.wait_for_job(coordinator, options.job)
        why = "waiting for the right one in the file that --token-file names"
        if spec.token_mark and token_mark(bytes.fromhex(token)) != spec.token_mark:
            try:
                token = _token_at(options, etcd) or token
            except JobError as error:  # perhaps the file is just being replaced
                why = f"waiting for the right one: {error}"
        if spec.token_mark in ("", token_mark(bytes.fromhex(token))):
            return spec, token
        if warned != spec.run:
            log.warning("job %r was submitted with another token: %s", options.job, why)
            warned = spec.run
        await asyncio.sleep(_TOKEN_AGAIN_S)


async def _wait_until_submitted(
    etcd: str, tls: dict[str, str], options: argparse.Namespace, token: str, entry: JobEntry | None
) -> tuple[JobSpec, str]:
    """Waits for etcd, then for the job and its token; returns its spec and token.

    Raises:
        UnknownJob: the launcher of `entry`, which runs its etcd, has ended.
    """
    say_at = time.monotonic() + _FIRST_SAID_S
    async with AsyncExitStack() as stack:
        while True:
            try:
                coordinator = await stack.enter_async_context(opened(etcd, tls))
                break
            except NoAddress as error:  # the etcd of `file:PATH` has not started yet, or starts elsewhere
                if time.monotonic() >= say_at:
                    log.warning("waiting for etcd: %s", error)
                    say_at = time.monotonic() + _SAY_AGAIN_S
                await asyncio.sleep(_ADDRESS_AGAIN_S)
        submitted = _wait_for_job_and_token(coordinator, options, etcd, token)
        async with alongside(submitted, wait_until_launcher_gone(entry)) as (waiting, gone):
            await any_done(waiting, gone)
            if not waiting.done():
                raise UnknownJob(f"job {options.job!r} has ended with its launcher, which ran its etcd")
            return await waiting


def _restart_in_node_env(spec: JobSpec) -> None:
    """Replaces this process by the same command in the environment of the job's nodes, unless it has that already.

    Python and BLAS read it when they are loaded, and the job was not known then.
    """
    wanted = node_env(spec.setting("blas_threads"))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        sys.stdout.flush()
        main = getattr(sys.modules["__main__"], "__spec__", None)
        as_module = main is not None and main.name == "taskgraph.__main__" and not sys.flags.safe_path
        # Keep `python -m taskgraph`, which also imports from the working directory.
        words = [sys.executable, *options(), "-m", "taskgraph"] if as_module else command("taskgraph")
        os.execv(sys.executable, [*words, *sys.argv[1:]])
