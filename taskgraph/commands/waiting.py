"""Waits for a submitted job from within a cluster: follows it, prints its events and values, ends with its code.

This is what the launcher's pod, or the first element of an array, runs with `submit --wait`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from taskgraph.clusters.api import Inside, find_launcher
from taskgraph.commands.common import FoundJob, on_ending_signals, restore_signals
from taskgraph.commands.joining import print_end
from taskgraph.commands.looking import print_values
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.launch.collector import Collector
from taskgraph.launch.follow import find_kept, ignoring_etcd_failures
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.shown import JobProgress
from taskgraph.observe.events import Event
from taskgraph.observe.screen import say
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.system.files import write_whole
from taskgraph.system.streams import bound_stderr_waits

__all__ = ["inside_of", "wait_for"]

log = logging.getLogger("taskgraph.waiting")

_OUTPUT = Path("-")
"""In place of a file for the values: standard output."""
_NO_NODES_S = 3.0
_LAST_EVENT_S = 3.0
_LOOK_S = 0.1


async def wait_for(reached: FoundJob, options: argparse.Namespace) -> int:
    """Follows a job to its end, collects its values, and lets its nodes go; returns the job's exit code.

    A signal ends only this command: the job goes on, and the command may be started again.
    """
    bound_stderr_waits()
    spec = reached.spec
    shown = JobProgress(reached.name, spec.own_tasks, spec.epochs, spec.backups, elastic=spec.elastic)
    follower = Collector(reached.coordinator, spec, reached.entry.token_bytes, reached.entry.node_access)
    await follower.start(shown.event)
    shown.set_view(follower.view)
    waiting = asyncio.current_task()
    assert waiting is not None
    on_ending_signals(lambda _: waiting.cancelling() or waiting.cancel())  # a second one must not break the first off
    inside = inside_of(options.within) if options.within is not None else None
    path = Path(options.result) if options.result is not None else None
    try:
        ends = _wait_and_collect(follower, path)
        async with (
            shown,
            alongside(ends, follower.wait_until_broken()) as (ending, broken),
            alongside(_report_nodes(inside, follower, reached.name), _say_without_nodes(follower, spec)),
        ):
            await any_done(ending, broken)
            if not ending.done():
                await broken
            status, result = ending.result()
            if status.state != JobStatus.FINISHED:
                await _wait_for_end_event(follower, status)
        await follower.keep_end(status)
    except asyncio.CancelledError:
        say(f"this command was ended; job {reached.name} goes on")
        return 130
    finally:
        await follower.stop()
    restore_signals()
    try:
        if status.state == JobStatus.FINISHED and result is None and follower.view.collected:
            return await _print_collected(reached, follower, path)
        if path == _OUTPUT and result is not None:
            return 0
        return await print_end(reached, follower, status, result, left=False)
    finally:
        if inside is not None:
            await _let_launcher_end_nodes(inside, reached.name)


def inside_of(name: str) -> Inside:
    """Returns the launcher of that name, for a command that it started within its cluster.

    Raises:
        JobError: there is no such launcher, or it starts no such commands.
    """
    launcher = find_launcher(name)
    if not isinstance(launcher, Inside):
        raise JobError(f"--within {name}: launcher {name} starts no command within its cluster")
    return launcher


async def _report_nodes(inside: Inside | None, follower: Collector, job: str) -> None:
    """Writes into the job's events what the cluster says of its nodes. Does nothing if `inside` is None."""

    async def report(kind: str, node: str, text: str) -> None:
        await follower.keep_event(Event(time.time(), "launcher", kind, f"{node} {text}", fields={"node": node}))

    if inside is not None:
        try:
            await inside.watch_pods(job, report)
        except TaskGraphError as error:
            say(f"no event will say why nodes go: {error}")
        except Exception:  # a mistake of ours, which must not end the job's launcher
            log.exception("no event will say why nodes go")


async def _say_without_nodes(follower: Collector, spec: JobSpec) -> None:
    """Prints that the job has no nodes, each time that none has been there for `_NO_NODES_S`. Runs until cancelled."""

    def has_none(view: JobView) -> bool:
        return view.running and not view.live_nodes(spec.run)

    while True:
        await follower.keeper.wait_until(has_none, structure=True)
        try:
            async with asyncio.timeout(_NO_NODES_S):
                await follower.keeper.wait_until(lambda view: not has_none(view), structure=True)
        except TimeoutError:
            say(f"job {spec.name} has no nodes: it waits until some are started")
            await follower.keeper.wait_until(lambda view: not has_none(view), structure=True)


async def _let_launcher_end_nodes(launcher: Inside, job: str) -> None:
    """Lets the launcher end what is left of the job's nodes. An error is only printed."""
    try:
        await launcher.ended(job)
    except TaskGraphError as error:  # how the job ended counts for more
        say(f"the job's nodes are not ended: {error}")


async def _wait_for_end_event(follower: Collector, status: StatusRecord) -> None:
    """Waits a moment for the event of a job's failure or cancellation, which a node writes after the status."""
    async with ignoring_etcd_failures(_LAST_EVENT_S):
        while not any(event.kind == status.state for event in await follower.events_of_run()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


async def _wait_and_collect(follower: Collector, path: Path | None) -> tuple[StatusRecord, JobResult | None]:
    """Waits for the job's end, collects its values, and returns both; None: there are no values to collect.

    A finished job may run again if it lost its results; then this waits for its next end.

    Args:
        path: the file for the values. They are written before the nodes leave, so that they are not lost in between.
    """
    take = None if path is None else partial(_write_result, path)
    while True:
        status = await follower.wait_for_end()
        if status.state != JobStatus.FINISHED:
            return status, None
        result = await follower.collect(first=True, take=take)
        if result is not None or follower.finished:
            return status, result


async def _print_collected(reached: FoundJob, follower: Collector, path: Path | None) -> int:
    """Prints values that were collected before, as by this command before it was started again. Returns its code."""
    kept = await find_kept(reached.coordinator, reached.name) or KeptJob()
    if kept.result:
        if path is not None:
            _write(path, kept.result)
        if path != _OUTPUT:
            print_values(kept.parsed_result, as_json=False)
        return 0
    if path is not None and _exists(path):
        say(f"job {reached.name} has finished; its values are in {path}")
        return 0
    return await print_end(reached, follower, StatusRecord(state=JobStatus.FINISHED), None, left=False)


def _exists(path: Path) -> bool:
    return path.exists()


def _write_result(path: Path, result: JobResult) -> None:
    _write(path, result.to_json())


def _write(path: Path, json: str) -> None:
    """Writes the values, as JSON, to a file or to standard output. Raises JobError if it cannot."""
    if path == _OUTPUT:
        print(json, flush=True)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{json}\n".encode())
    except OSError as error:
        raise JobError(f"--result {path}: the values cannot be written: {error.strerror}") from error
