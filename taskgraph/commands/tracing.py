"""trace: what every node of a running job does, epoch by epoch, as a file for Perfetto."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvloop

from taskgraph.commands.common import Reached, ending_signals, hung_up, on_ending_signals, reach
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError
from taskgraph.launch.tracing import NodeTrace, Tracer, words_of
from taskgraph.observe.clocks import NodeClock
from taskgraph.observe.screen import say
from taskgraph.observe.trace import clock
from taskgraph.observe.trace_file import TraceFile
from taskgraph.protocol.records import State
from taskgraph.system.files import OF_THE_HOST, chosen_file, why_unwritable
from taskgraph.transport.endpoints import host_key

__all__ = ["trace"]

_REFRESH_S = 0.3
_INTERRUPTED = 130


def trace(options: argparse.Namespace) -> int:
    """Traces some epochs of a running job."""
    if options.epochs < 1:
        raise JobError(f"--epochs {options.epochs}: at least one")
    if options.every < 0:
        raise JobError(f"--every {options.every}: at least 1, which is all of them; without it few enough are chosen")
    path = Path(options.output)
    try:
        why = why_unwritable(path)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise JobError(f"--output {path}: {why}")
    for number in ending_signals():
        signal.signal(number, _leave)
    return uvloop.run(_trace(options, path))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """As Ctrl-C, for every signal that ends a command: what was spooled goes."""
    if number == signal.SIGHUP:
        hung_up()
    raise KeyboardInterrupt


async def _trace(options: argparse.Namespace, path: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="taskgraph-trace-") as folder:
        async with reach(options) as reached:
            reached.spec.check_protocol()
            keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=_REFRESH_S)
            await keeper.load()
            entry, began_ns = reached.entry, clock()
            tracer = Tracer(
                keeper,
                reached.spec.run,
                entry.token_bytes,
                entry.node_access,
                Path(folder),
                epochs=options.epochs,
                every=options.every,
                total=reached.spec.epochs,
                say=say,
            )
            interrupted = await _run(tracer, keeper)
            state = keeper.view.status.record if keeper.view.status is not None else None
        try:
            about = _write(path, reached, tracer, began_ns)
        except _NothingTraced as error:
            if not interrupted:
                raise
            say(str(error))
            return _INTERRUPTED
    for line in about["missing"]:
        say(f"missing: {line}")
    if state is not None and state.state == State.FAILED:
        say(f"the job failed meanwhile: {state.reason}")
    print(_summary(path, about), file=sys.stderr if _is_output(path) else sys.stdout)
    return _INTERRUPTED if interrupted else 0


async def _run(tracer: Tracer, keeper: ViewKeeper) -> bool:
    """Traces to the end, or until the first Ctrl-C (SIGTERM, SIGHUP). Whether that came."""
    interrupted = False
    loop = asyncio.get_running_loop()

    def interrupt(number: int) -> None:
        nonlocal interrupted
        interrupted = True
        at_once()  # a second one
        tracer.enough()

    def at_once() -> None:
        for number in ending_signals():
            if loop.remove_signal_handler(number):
                signal.signal(number, _leave)

    on_ending_signals(interrupt)
    # Of commits its nodes tell: a watch of all would take as long at each as tracing takes of a few epochs.
    watching = asyncio.ensure_future(keeper.run_by(keeper.view.keys.nodes, keeper.view.keys.status))
    try:
        await tracer.run()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        at_once()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return interrupted


def _write(path: Path, reached: Reached, tracer: Tracer, began_ns: int) -> dict[str, Any]:
    """Writes the file; returns what it says of itself."""
    ours = host_key()
    try:
        with chosen_file(path) as file:
            out = TraceFile(file, (tracer.first, tracer.until), began_ns)
            nodes = []
            for part in sorted(tracer.nodes.values(), key=lambda part: part.record.name):
                if not part.readings:
                    continue  # never heard; named as missing
                times = NodeClock(part.readings, ours)
                about = _about(part, times)
                about["spans"] = out.node(part.record.name, _labels(part, times), times, part.spans())
                nodes.append(about)
            last = min(out.ended, tracer.until - 1)
            if last < tracer.first:
                raise _NothingTraced(
                    f"not one epoch from {tracer.first} on was traced from its beginning to its commit: "
                    f"{'; '.join(_missing(tracer, last))}"
                )
            found = {
                "job": reached.name,
                "first_epoch": tracer.first,
                "last_epoch": last,
                "every": tracer.every,
                "nodes": nodes,
                "missing": _missing(tracer, last),
            }
            out.close(found)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno in OF_THE_HOST:
            raise  # as for every command: whoever read it has enough, or the host has no room
        raise JobError(f"--output {path}: it cannot be written: {error.strerror or error}") from error
    return found


class _NothingTraced(JobError):
    """Not one whole epoch: there is no file."""


def _is_output(path: Path) -> bool:
    """Whether the trace went to standard output, as where `-o /dev/stdout` is piped on."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _about(part: NodeTrace, times: NodeClock) -> dict[str, Any]:
    return {
        "name": part.record.name,
        "host": part.record.host,
        "pid": part.record.pid,
        "shares_our_clock": times.shared,
        "clock_offset_us": times.measured_ns / 1000,
        "clock_within_us": times.within_ns / 1000,
        "lost_spans": part.lost,
        "missing": part.missing,
    }


def _labels(part: NodeTrace, times: NodeClock) -> str:
    """What a viewer shows beside a node's name."""
    words = [f"{part.record.host}, process {part.record.pid}"]
    if not times.shared:
        words.append(f"clock {times.measured_ns / 1000:+.1f} us within {times.within_ns / 1000:.1f} us")
    if part.lost:
        words.append(f"{part.lost} spans lost")
    if part.missing:
        words.append(f"missing: {part.missing}")
    return ", ".join(words)


def _missing(tracer: Tracer, last: int) -> list[str]:
    """What is not in the trace, and why."""
    lines = [f"node {part.record.name}: {part.missing}" for part in tracer.nodes.values() if part.missing]
    lines += [
        f"node {part.record.name}: {part.lost} spans, more than it may keep at a time"
        for part in tracer.nodes.values()
        if part.lost
    ]
    first, until = max(last + 1, tracer.first), tracer.until
    # Whom tracing ends early told of their last epochs one a little earlier than the other.
    committed = first if tracer.ended_early else max(first, min(tracer.epoch, until))
    if first < committed:
        lines.append(f"epochs {first} to {committed - 1}: who told their commits was not traced, or is gone")
    if committed < until:
        lines.append(f"epochs {committed} to {until - 1}: they did not commit while the job was traced")
    return lines


def _summary(path: Path, about: dict[str, Any]) -> str:
    nodes = about["nodes"]
    foreign = [node["clock_within_us"] for node in nodes if not node["shares_our_clock"]]
    clocks = f"clocks within {max(foreign):.0f} us of each other" if foreign else "all on one clock"
    epochs = f"epochs {about['first_epoch']} to {about['last_epoch']}{words_of(about['every'])}"
    return (
        f"{path}: {epochs}, of job {about['job']}: {sum(node['spans'] for node in nodes)} spans on "
        f"{len(nodes)} nodes, {clocks}. Open it in https://ui.perfetto.dev"
    )
