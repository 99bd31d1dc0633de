"""run, submit: commands that begin a job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from taskgraph.commands.common import (
    NewToken,
    access_of,
    access_words,
    as_before,
    etcd_of,
    listening_of,
    node_access_of,
    take_orders,
    token_for,
)
from taskgraph.driver import JobSpec
from taskgraph.errors import CheckpointError, CoordinationError, JobError, JobFailed
from taskgraph.jobs import Job, JobFunction
from taskgraph.launch.access import Access
from taskgraph.launch.follow import Follower
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.logs import LogTails, passing_on, printed
from taskgraph.launch.resuming import mark_begun, plan
from taskgraph.launch.run import arun, connect
from taskgraph.launch.runtime import Runtime
from taskgraph.launch.shown import tick
from taskgraph.launch.submit import submit
from taskgraph.launch.supervise import Hooks
from taskgraph.loading import load_driver, made_by
from taskgraph.observe.events import Event
from taskgraph.observe.format import values_text
from taskgraph.observe.progress import Progress
from taskgraph.options import fields_of, parse
from taskgraph.protocol.records import State
from taskgraph.results import JobResult
from taskgraph.settings import Settings
from taskgraph.streams import never_wait, settle

__all__ = ["job_of", "print_result", "run", "submit_command"]


def job_of(options: argparse.Namespace, function: JobFunction[...] | None) -> Job:
    """The job from the driver named, with its options and settings; raises JobError where it makes none."""
    function = function or load_driver(options.driver)
    job = made_by(function, function.parse_options(options.option or ()))
    if options.set:
        given = parse("taskgraph", fields_of(Settings), options.set, flag="--set", kind="setting")
        job = dataclasses.replace(job, settings=dataclasses.replace(job.settings, **given))
    return dataclasses.replace(job, name=options.name) if options.name else job


def run(options: argparse.Namespace, function: JobFunction[...] | None = None) -> int:
    """Starts nodes here, follows the job, prints its values."""
    job = job_of(options, function)
    listening_of(options, options.nodes)  # refused before anything is written
    token = token_for(options)
    try:
        return uvloop.run(_run(options, job, token))
    except (JobError, CheckpointError):
        if token is not None:
            token.forget()
        raise


async def _run(options: argparse.Namespace, job: Job, token: NewToken | None) -> int:
    name = job.name
    progress = Progress(name, job.tasks, job.epochs, job.backups)
    started: list[tuple[Follower, LocalNodes]] = []
    tails: list[LogTails] = []
    told_finished = asyncio.Event()

    def on_event(event: Event) -> None:
        if event.kind == State.FINISHED:
            told_finished.set()
        progress.event(event)

    def finished() -> bool:
        # Of nodes in this process only the event tells.
        return told_finished.is_set() or any(follower.view.finished for follower, _ in started)

    def on_start(follower: Follower, nodes: LocalNodes) -> None:
        progress.follow(follower.view)
        started.append((follower, nodes))
        if options.logs:
            tails.append(LogTails(nodes.logs(), progress.line))

    if options.nodes:  # with none, tasks run here, and may write more than anybody reads at once
        never_wait()
    running = asyncio.ensure_future(
        arun(
            job,
            nodes=options.nodes,
            etcd=etcd_of(options),
            resume=options.resume,
            fresh=options.fresh,
            timeout_s=options.timeout,
            hooks=Hooks(on_event, on_start),
            access=Access(
                etcd=access_of(options),
                nodes=node_access_of(options),
                listening=listening_of(options, options.nodes),
                token=token.token if token is not None else None,
            ),
        )
    )
    interrupts = _on_interrupt(running, started, finished)
    ticking = asyncio.ensure_future(tick(progress, tails))
    try:
        here = options.logs and options.nodes == 0
        try:
            with passing_on(progress.line) if here else contextlib.nullcontext():
                result = await running
        finally:
            for tail in tails:
                tail.close()
        progress.end(result.reports)
    except JobFailed:
        progress.end()
        if started and (logs := Runtime().kept_logs(name)).is_dir():
            print(f"the logs of its nodes are in {logs}", file=sys.stderr)
        raise
    except asyncio.CancelledError as error:
        if interrupts:
            progress.end()
            notes = getattr(error, "__notes__", ())  # of nodes in this process, or of an etcd that is away
            if finished():
                ended = f"; {_left_text(name, [follower for follower, _ in started])} nothing is left behind"
            else:
                ended = "" if notes and options.nodes else f"; job {name!r} was ended, nothing is left behind"
            hint = "".join(follower.way_on("; ") for follower, _ in started)
            hint += "".join(f"; {note}" for note in notes)
            print(f"taskgraph: interrupted{ended}{hint}", file=sys.stderr)
            return 130
        raise
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        progress.end()
    as_before()
    if options.json and options.nodes == 0:
        print()  # tasks print to the same output, and perhaps not to the end of a line
    print_result(result, as_json=options.json, kept=bool(started))
    if started and not options.logs and printed(logs := Runtime().kept_logs(name)):
        print(f"what its tasks printed is in {logs}; --logs shows it at once", file=sys.stderr)
    return 0


def _left_text(name: str, followers: Sequence[Follower]) -> str:
    """What became of the values of a job that had finished when its run was ended."""
    if any(follower.kept_json for follower in followers):
        return f"job {name!r} had finished, and `taskgraph result {name}` has its values;"
    return f"job {name!r} had finished, and its values were not collected;"


def _on_interrupt(
    running: asyncio.Future[JobResult], started: list[tuple[Follower, LocalNodes]], finished: Callable[[], bool]
) -> list[str]:
    """The first Ctrl-C (SIGTERM, SIGHUP) ends the job cleanly, the second at once.

    Returns:
        What the first one ended, once it did.
    """
    ended: list[str] = []

    def obey() -> None:
        if not ended:
            ended.append(what := "without its results" if finished() else "the job")
            print(f"\ntaskgraph: ending {what}; once more to force it", file=sys.stderr, flush=True)
            running.cancel()
        else:
            for _, nodes in started:
                nodes.kill_now()

    take_orders(finished=finished, obeyed=lambda: bool(ended), obey=obey)
    return ended


def print_result(result: JobResult, *, as_json: bool, kept: bool) -> None:
    """Values on standard output, how it went on standard error.

    Args:
        kept: they may be asked for again.
    """
    settle()  # on a terminal they come after what happened
    try:
        if as_json or result.values:
            print(result.to_json() if as_json else values_text(result.values), flush=True)
    except OSError as error:
        if kept:
            error.add_note(
                f"the job finished: `taskgraph result {result.name}` has its values, as far as they were kept"
            )
        raise
    if as_json:
        return
    extra = [f"{n} {word}" for n, word in ((result.failovers, "failovers"), (result.restarts, "restarts")) if n]
    tail = f" ({', '.join(extra)})" if extra else ""
    print(f"job {result.name}: {result.epochs} epochs in {result.wall_s:.2f} s{tail}", file=sys.stderr)


def submit_command(options: argparse.Namespace, function: JobFunction[...] | None = None) -> int:
    """Puts a job into an etcd; nodes are started with `launch` or `node`."""
    job, etcd = job_of(options, function), etcd_of(options)
    if etcd is None:
        raise JobError("submit needs your etcd: give --etcd, or use `taskgraph run`, which brings its own")
    spec = JobSpec.of(job)
    token = token_for(options, Path(f"{spec.name}.token"))
    assert token is not None

    async def put() -> None:
        try:
            coordinator = await connect(etcd, access_of(options))
        except CoordinationError:
            token.forget()
            raise
        async with coordinator:
            try:
                planned, beginning = await plan(coordinator, spec, resume=options.resume, fresh=options.fresh)
                await submit(coordinator, planned, beginning)
            except (JobError, CheckpointError):
                token.forget()
                raise
            await mark_begun(planned, beginning)

    uvloop.run(put())
    if token.written:
        print(f"wrote the job's token to {token.path}, which only you can read")
    print(f"submitted job {spec.name} with driver {spec.fingerprint}; start nodes, on any host that has the driver,")
    print("each with --listen HOST besides where there are several (a name or address of it that the others reach):")
    print(f"  taskgraph launch {spec.name} --nodes N --etcd {etcd}{access_words(options)} --token-file {token.path}")
    return 0
