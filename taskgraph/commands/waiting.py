"""Waits for a submitted job from within a cluster: follows it, prints its events and values, ends with its code.

This is what the launcher's pod, or the first element of an array, runs with `submit --wait`.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path

from taskgraph.commands.common import FoundJob, on_ending_signals, restore_signals
from taskgraph.commands.joining import print_end
from taskgraph.commands.looking import print_values
from taskgraph.errors import JobError
from taskgraph.launch.collector import Collector
from taskgraph.launch.follow import find_kept
from taskgraph.launch.kept import KeptJob
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
    waiting = asyncio.current_task()
    assert waiting is not None
    on_ending_signals(lambda _: waiting.cancel())
    try:
        ends = _until_collected(follower, Path(options.result) if options.result is not None else None)
        async with shown, alongside(ends, follower.raise_if_broken()) as (ending, broken):
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
    restore_signals()
    if status.state == State.FINISHED and result is None and follower.view.collected:
        return await _print_collected(reached, follower, Path(options.result) if options.result is not None else None)
    return await print_end(reached, follower, status, result, left=False)


async def _until_collected(follower: Collector, path: Path | None) -> tuple[StatusRecord, JobResult | None]:
    """Waits for the job's end, and for its values. A finished job may run again if it lost its results.

    Args:
        path: the file for the values. They are written before the nodes leave, so that they are not lost in between.
    """
    take = None if path is None else partial(_write_result, path)
    while True:
        status = await follower.wait_for_end()
        if status.state != State.FINISHED:
            return status, None
        result = await follower.collect(first=True, take=take)
        if result is not None or follower.finished:
            return status, result


async def _print_collected(reached: FoundJob, follower: Collector, path: Path | None) -> int:
    """Prints values that were collected before: this command was started again, or `taskgraph result` was faster."""
    kept = await find_kept(reached.coordinator, reached.name) or KeptJob()
    if kept.result:
        if path is not None:
            _write(path, kept.result)
        print_values(kept.parsed_result, as_json=False)
        return 0
    if path is not None and _exists(path):
        say(f"job {reached.name} has finished; its values are in {path}")
        return 0
    return await print_end(reached, follower, StatusRecord(state=State.FINISHED), None, left=False)


def _exists(path: Path) -> bool:
    return path.exists()


def _write_result(path: Path, result: JobResult) -> None:
    _write(path, result.to_json())


def _write(path: Path, json: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{json}\n".encode())
    except OSError as error:
        raise JobError(f"--result {path}: the values cannot be written: {error.strerror}") from error
