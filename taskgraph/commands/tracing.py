"""trace: writes what every node of a running job does, epoch by epoch or step by step, to a file for Perfetto."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from taskgraph.commands.common import FoundJob, on_ending_signals, reach, restore_signals
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError
from taskgraph.launch.tracing import NodeTrace, Tracer, every_text
from taskgraph.observe.screen import say
from taskgraph.observe.trace import clock
from taskgraph.observe.trace_file import TraceFile
from taskgraph.protocol.records import JobStatus
from taskgraph.system.alongside import alongside
from taskgraph.system.files import OF_THE_HOST, chosen_file, why_unwritable
from taskgraph.system.signals import obey_sigterm

__all__ = ["missing_parts", "trace"]

_REFRESH_S = 0.3
_INTERRUPTED = 130
_COMMITTED_ELSEWHERE = "the node that committed them was not traced, or died"


def trace(options: argparse.Namespace) -> int:
    """Traces some epochs of a running job."""
    if options.epochs < 1:
        raise JobError(f"--epochs {options.epochs}: must be at least 1")
    if options.every is not None and options.every < 1:
        raise JobError(f"--every {options.every}: must be at least 1, which traces all epochs")
    path = Path(options.output)
    if why := why_unwritable(path):
        raise JobError(f"--output {path}: {why}")
    obey_sigterm()
    return uvloop.run(_trace(options, path))


async def _trace(options: argparse.Namespace, path: Path) -> int:
    """Traces the job, writes the file, and prints a summary. Returns the exit code."""
    async with reach(options) as reached:
        reached.spec.check_protocol()
        keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=_REFRESH_S)
        await keeper.load()
        began_ns = clock()
        tracer = Tracer(
            keeper,
            reached.spec.run,
            reached.entry.token_bytes,
            reached.entry.node_access,
            epochs=options.epochs,
            every=options.every or 0,
            total=reached.spec.epochs,
            say=say,
        )
        await _run(tracer, keeper)
        state = keeper.view.status.record if keeper.view.status is not None else None
    try:
        about = _write(path, reached, tracer, began_ns)
    except _NothingTraced as error:
        if not tracer.ended_early:
            raise
        say(str(error))
        return _INTERRUPTED
    for line in about["missing"]:
        say(f"missing: {line}")
    if state is not None and state.state == JobStatus.FAILED:
        say(f"the job failed meanwhile: {state.reason}")
    print(_summary(path, about), file=sys.stderr if _is_stdout(path) else sys.stdout)
    return _INTERRUPTED if tracer.ended_early else 0


async def _run(tracer: Tracer, keeper: ViewKeeper) -> None:
    """Traces to the end, or until the first Ctrl-C, SIGTERM or SIGHUP. The second one ends the command at once."""

    def interrupt(number: int) -> None:
        restore_signals()
        tracer.end_early()

    on_ending_signals(interrupt)
    # The nodes report commits: a watch of all keys would cost more than tracing a few epochs does.
    watch = keeper.run_with_listings(keeper.view.keys.nodes, keeper.view.keys.status)
    async with alongside(watch):
        await tracer.run()
    restore_signals()


def _write(path: Path, reached: FoundJob, tracer: Tracer, began_ns: int) -> dict[str, Any]:
    """Writes the file; returns its description of itself."""
    try:
        with chosen_file(path) as file:
            out = TraceFile(file, (tracer.first, tracer.until), began_ns)
            nodes = []
            for part in sorted(tracer.nodes.values(), key=lambda part: part.record.name):
                if (about := _about(part)) is not None:
                    spans = out.node(
                        part.record.name, _label(part, about), round(about["clock_offset_us"] * 1000), part.spans()
                    )
                    nodes.append({**about, "spans": spans})
            last = min(out.last, tracer.until - 1)
            if tracer.ended_early:  # nodes sent their last spans at different moments
                last = min([last, *(part.epoch - 1 for part in tracer.nodes.values() if not part.missing)])
            missing = missing_parts(tracer, last)
            if last < tracer.first:
                raise _NothingTraced(
                    f"not one {tracer.unit} from {tracer.first} on was traced from its beginning to its "
                    f"{'end' if tracer.elastic else 'commit'}: "
                    f"{'; '.join(missing)}"
                )
            found = {
                "job": reached.name,
                f"first_{tracer.unit}": tracer.first,
                f"last_{tracer.unit}": last,
                "every": tracer.every,
                "began_ns": began_ns,
                "nodes": nodes,
                "missing": missing,
            }
            out.close(found)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno in OF_THE_HOST:
            raise  # no mistake in the command line: its reader has enough, or the host has no room
        raise JobError(f"--output {path}: it cannot be written: {error.strerror or error}") from error
    return found


class _NothingTraced(JobError):
    """The trace has no whole epoch: no file is written."""


def _is_stdout(path: Path) -> bool:
    """Returns True if the path is this process's standard output, as with `-o /dev/stdout | gzip`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _about(part: NodeTrace) -> dict[str, Any] | None:
    """Returns the description of a node that ends up in the file; None: the node never answered."""
    if part.clock is None:
        return None
    return {
        "name": part.record.name,
        "host": part.record.host,
        "pid": part.record.pid,
        "shares_our_clock": part.shared,
        "clock_offset_us": 0.0 if part.shared else part.clock.ahead_ns / 1000,
        "clock_within_us": part.clock.within_ns / 1000,
        "lost_spans": part.lost,
        "missing": part.missing,
    }


def _label(part: NodeTrace, about: dict[str, Any]) -> str:
    """Returns the text beside a node's name in a viewer: host, process, offset of its clock, what the trace lacks."""
    words = [f"{part.record.host}, process {part.record.pid}"]
    if not about["shares_our_clock"]:
        words.append(f"clock {about['clock_offset_us']:+.1f} us within {about['clock_within_us']:.1f} us")
    if part.lost:
        words.append(f"{part.lost} spans lost")
    if part.missing:
        words.append(f"missing: {part.missing}")
    return ", ".join(words)


def missing_parts(tracer: Tracer, last: int) -> list[str]:
    """Names the nodes, spans and epochs that a trace lacks, each with the reason."""
    nodes = tracer.nodes.values()
    unit = tracer.unit
    lines = [f"node {part.record.name}: {part.missing}" for part in nodes if part.missing]
    lines += [
        f"node {part.record.name}: {part.lost} spans that its buffer had no room for" for part in nodes if part.lost
    ]
    first, until = max(last + 1, tracer.first), tracer.until
    committed = first if tracer.ended_early else max(first, min(tracer.epoch, until))
    if first < committed:
        why = "no worker that was traced ended them" if tracer.elastic else _COMMITTED_ELSEWHERE
        lines.append(f"{unit}s {first} to {committed - 1}: {why}")
    if committed < until:
        why = "were not complete" if tracer.elastic else "did not commit"
        lines.append(f"{unit}s {committed} to {until - 1}: they {why} while the job was traced")
    return lines


def _summary(path: Path, about: dict[str, Any]) -> str:
    """Returns the line that says what the file has."""
    nodes = about["nodes"]
    foreign = [node["clock_within_us"] for node in nodes if not node["shares_our_clock"]]
    clocks = f"clocks within {max(foreign):.0f} us of each other" if foreign else "all on one clock"
    unit = "step" if "first_step" in about else "epoch"
    epochs = f"{unit}s {about[f'first_{unit}']} to {about[f'last_{unit}']}{every_text(about['every'])}"
    return (
        f"{path}: {epochs}, of job {about['job']}: {sum(node['spans'] for node in nodes)} spans on "
        f"{len(nodes)} nodes, {clocks}. Open it in https://ui.perfetto.dev"
    )
