"""submit --on, scale, logs: commands for jobs whose nodes a launcher starts (docs/clusters.md)."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from dataclasses import dataclass

import uvloop

from taskgraph.clusters.api import Enclosed, Launcher, Request, find_launcher
from taskgraph.clusters.placed import (
    find_kept_by,
    find_placed,
    forget_placed,
    keep_placed,
    make_placed_job,
    placed_names,
)
from taskgraph.commands.common import access_of, etcd_of, node_tls_of, token_of_new_job
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TaskGraphError, UnknownJob
from taskgraph.jobs import Job
from taskgraph.launch.access import insecure_listen
from taskgraph.launch.runtime import Runtime
from taskgraph.observe.format import counted

__all__ = ["is_placed", "logs", "may_remove", "place_job", "place_of", "remove", "scale", "stop", "waiting"]

_WAITING_S = 5.0
_WAITING_LINES = 4
"""More would push the nodes of the job off the screen."""


def place_job(options: argparse.Namespace, job: Job) -> int:
    """Starts a job and its nodes with a launcher, or prints what that would do (--dry-run)."""
    for name in ("wait", "result", "run"):
        if getattr(options, name):
            raise JobError(
                f"--{name} goes without --on: `taskgraph result {job.name}` has the values once it has ended"
            )
    launcher = find_launcher(options.on)
    request = _make_request(options, job, token="")
    if options.dry_run:
        print(launcher.text(request), end="")
        return 0
    launcher.text(request)  # what is wrong is said before anything is written
    Runtime().make_placed_folder()
    before = Runtime().find_finished(request.job)
    token = token_of_new_job(options)
    request = dataclasses.replace(
        request, token=token.token if token is not None else "", token_file=str(token.path) if token is not None else ""
    )
    try:
        where = uvloop.run(launcher.start(request))
    except JobError:
        if token is not None:
            token.discard()
        raise
    Runtime().forget_ended(request.job, before)
    keep_placed(make_placed_job(request, options.on, where))
    name = request.job
    print(f"submitted job {name} on {options.on}: `taskgraph status {name}`, `taskgraph logs {name}`")
    return 0


def _make_request(options: argparse.Namespace, job: Job, token: str) -> Request:
    """Returns what the launcher is asked for. Raises JobError if the options do not fit."""
    if options.nodes is not None and options.nodes < 1:
        raise JobError(f"--nodes {options.nodes}: at least 1")
    if options.extra_nodes < 0:
        raise JobError(f"--extra-nodes {options.extra_nodes}: 0 or more")
    if options.extra_priority and not options.extra_nodes:
        raise JobError("--extra-priority goes with --extra-nodes")
    nodes = 4 if options.nodes is None else options.nodes
    if job.min_nodes > nodes + options.extra_nodes:
        raise JobError(
            f"the job begins with {job.min_nodes} nodes (min_nodes), and is to have {nodes + options.extra_nodes}"
        )
    JobSpec.of(job)  # raises if other processes could not make the job
    return Request(
        job=job.name,
        driver=options.driver,
        words=tuple(_words(options)),
        nodes=nodes,
        min_nodes=job.min_nodes,
        extra_nodes=options.extra_nodes,
        extra_priority=options.extra_priority or "",
        etcd=etcd_of(options) or "",
        etcd_access=access_of(options),
        token=token,
        node_tls=node_tls_of(options),
        insecure=insecure_listen(options.insecure_listen),
        drain_s=job.settings.drain_s,
        options=options,
    )


def _words(options: argparse.Namespace) -> list[str]:
    """Returns the options that describe the job, as the user typed them."""
    words = [word for text in options.option or () for word in ("-o", text)]
    words += [word for text in options.set or () for word in ("--set", text)]
    words += ["--name", options.name] if options.name else []
    words += ["--min-nodes", str(options.min_nodes)] if options.min_nodes is not None else []
    words += {False: [], None: [], True: ["--resume"], "changed": ["--resume-changed"]}[options.resume]
    return [*words, *(["--fresh"] if options.fresh else [])]


@dataclass(frozen=True, slots=True)
class LauncherOfJob:
    """A job's launcher, and where it started the job's nodes."""

    job: str
    on: str
    launcher: Launcher
    where: dict[str, str]


def place_of(options: argparse.Namespace) -> LauncherOfJob:
    """Finds the launcher of a job: by --on, or as this host remembers it; "local" for one that `run` started here.

    Raises:
        UnknownJob: this host has started no node of the job, and no --on is given.
        JobError: no job is named, and there is none, or several.
    """
    job = options.job
    if job is None:
        known, here = placed_names(), [entry.name for entry in Runtime().jobs()]
        names = [name for name in here if name in known]
        if len(names) != 1:
            names = sorted({*here, *known})
        if len(names) != 1:
            raise JobError(f"name the job: {', '.join(names) or 'this host has started none'}")
        job = names[0]
    placed = find_placed(job)
    if options.on is not None:
        launcher = find_launcher(options.on)
        remembered = placed.where if placed is not None and placed.on == options.on else {}
        return LauncherOfJob(job, options.on, launcher, {**remembered, **launcher.place(options)})
    if placed is None:
        if (Runtime().left_logs(job) or Runtime().kept_logs(job)).is_dir():
            return LauncherOfJob(job, "local", find_launcher("local"), {})
        known_text = ", ".join(placed_names())
        others = f" (there are: {known_text})" if known_text else ""
        raise UnknownJob(
            f"job {job!r} was not submitted with `--on` on this host{others}: say where it is with --on local, slurm "
            f"or kubernetes"
        )
    return LauncherOfJob(job, placed.on, find_launcher(placed.on), placed.where)


def is_placed(options: argparse.Namespace) -> bool:
    """Returns True if a launcher started the job's nodes, as far as the command line or this host says."""
    return options.on is not None or find_placed(options.job) is not None


async def remove(options: argparse.Namespace) -> None:
    """Removes what the launcher made for a job that is not submitted yet."""
    place = place_of(options)
    await place.launcher.stop(place.job, place.where)


async def stop(options: argparse.Namespace) -> str:
    """Removes what the launcher made for a job that has ended; returns a sentence that says so."""
    place = place_of(options)
    await place.launcher.stop(place.job, place.where)
    placed = find_placed(place.job)
    if placed is None or find_kept_by(placed) is None:  # else `result` goes on to find the values
        forget_placed(place.job)
    return f"its nodes on {place.on} are gone, and what was made for them"


async def may_remove(options: argparse.Namespace) -> bool:
    """Returns False, to keep what was made for the job, if its launcher is `Enclosed` and does not say it has ended."""
    place = place_of(options)
    return not isinstance(place.launcher, Enclosed) or await place.launcher.has_ended(place.job, place.where)


async def waiting(job: str) -> list[str]:
    """Returns lines for `status`: what the scheduler says of the job's nodes that do not run yet.

    Only of jobs that this host submitted. A scheduler that cannot be asked is one such line.
    """
    if (placed := find_placed(job)) is None:
        return []
    try:
        async with asyncio.timeout(_WAITING_S):
            lines = await find_launcher(placed.on).waiting(job, placed.where)
    except TimeoutError:
        return [f"{placed.on} did not say within {_WAITING_S:g} s which nodes it has not started yet"]
    except (TaskGraphError, OSError) as error:
        return [f"{placed.on} does not say which nodes it has not started yet: {error}"]
    more = len(lines) - _WAITING_LINES
    return lines if more <= 0 else [*lines[:_WAITING_LINES], f"and {counted(more, 'more line')} of {placed.on}"]


async def scale(options: argparse.Namespace) -> int:
    """Changes how many nodes a job has."""
    place = place_of(options)
    if options.nodes < 1:  # the state of its tasks would be lost
        raise JobError(f"{options.nodes} nodes: leave at least 1, or end the job with `taskgraph shutdown {place.job}`")
    done = await place.launcher.scale(place.job, place.where, options.nodes)
    print(f"job {place.job} on {place.on}, {counted(options.nodes, 'node')}: {done}")
    return 0


async def logs(options: argparse.Namespace) -> int:
    """Prints what the nodes of a job print."""
    place = place_of(options)
    async for line in place.launcher.logs(place.job, place.where, options.node, follow=options.follow):
        print(line, flush=True)
    return 0
