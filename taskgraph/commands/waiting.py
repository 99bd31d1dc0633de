"""Waits for a submitted job from within a cluster: follows it, prints its events and values, ends with its code.

This is what the launcher's pod, or the first element of an array, runs with `submit --wait`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

from taskgraph.commands.common import FoundJob, restore_signals
from taskgraph.commands.joining import print_end
from taskgraph.errors import JobError
from taskgraph.launch.collector import Collector
from taskgraph.launch.shown import JobProgress
from taskgraph.observe.screen import say
from taskgraph.protocol.records import State, StatusRecord
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.system.files import write_whole
from taskgraph.system.streams import never_wait

__all__ = ["wait_for"]


async def wait_for(reached: FoundJob, options: argparse.Namespace) -> int:
    """Follows a job to its end, collects its values, and lets its nodes go; returns the job's exit code.

    A signal ends only this command: the job goes on, and the command may be started again.
    """
    never_wait()
    spec = reached.spec
    shown = JobProgress(reached.name, spec.tasks, spec.epochs, spec.backups, elastic=spec.elastic)
    follower = Collector(reached.coordinator, spec, reached.entry.token_bytes, reached.entry.node_access)
    await follower.start(shown.event)
    shown.follow(follower.view)
    try:
        async with shown, alongside(_until_collected(follower), follower.raise_if_broken()) as (ending, broken):
            await any_done(ending, broken)
            if not ending.done():
                await broken
            status, result = ending.result()
        await follower.keep_end(status)
    except asyncio.CancelledError:
        say(f"this command was ended; job {reached.name} goes on")
        return 130
    finally:
        await follower.stop()
    if options.result is not None and result is not None:
        _write_result(Path(options.result), result)
    restore_signals()
    return await print_end(reached, follower, status, result, left=False)


async def _until_collected(follower: Collector) -> tuple[StatusRecord, JobResult | None]:
    """Waits for the job's end, and for its values. A finished job may run again if it lost its results."""
    while True:
        status = await follower.wait_for_end()
        if status.state != State.FINISHED:
            return status, None
        result = await follower.collect()
        if result is not None or follower.finished:
            return status, result


def _write_result(path: Path, result: JobResult) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, result.to_json().encode() + b"\n")
    except OSError as error:
        raise JobError(f"--result {path}: the values cannot be written: {error.strerror}") from error
