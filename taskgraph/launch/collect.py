"""Making a job's result out of what its tasks keep, or the error of one that has none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

from taskgraph.errors import JobCancelled, JobFailed, UnknownJob
from taskgraph.graph.values import decode, verify
from taskgraph.jobs import EpochReport, JobResult
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import PrimaryRecord, State, StatusRecord
from taskgraph.protocol.view import Versioned

__all__ = [
    "assemble",
    "complete",
    "damaged",
    "job_failed",
    "mib",
    "not_kept",
    "shortened",
    "size_bytes",
    "why_not_kept",
]

T = TypeVar("T")


def complete(found: Sequence[TaskResult], tasks: int) -> bool:
    """Whether these are the results of all tasks, of one (epoch, attempt)."""
    return sorted(r.task for r in found) == list(range(tasks)) and len({(r.epoch, r.attempt) for r in found}) == 1


def damaged(found: Sequence[TaskResult]) -> list[int]:
    """Tasks whose values are not those that their digests were taken of, where the tasks made them."""
    return [r.task for r in found if r.value is not None and not verify(r.value)]


def size_bytes(found: Sequence[TaskResult]) -> int:
    """The encoded size of all values."""
    return sum(r.value.size_bytes for r in found if r.value is not None)


def assemble(
    name: str, found: Sequence[TaskResult], primaries: Iterable[Versioned[PrimaryRecord]], wall_s: float
) -> JobResult:
    """The job's result from the complete results of its tasks."""
    rows: dict[int, dict[int, dict[str, float]]] = {}
    for task_result in found:
        for row in task_result.reports:
            rows.setdefault(row.epoch, {})[row.task] = row.numbers
    reports = []
    for epoch in sorted(rows):
        numbers: dict[str, float] = {}
        for task in sorted(rows[epoch], reverse=True):
            numbers.update(rows[epoch][task])
        reports.append(EpochReport(epoch, numbers, dict(sorted(rows[epoch].items()))))
    return JobResult(
        name=name,
        values={r.task: decode(r.value) for r in sorted(found, key=lambda r: r.task) if r.value is not None},
        reports=tuple(reports),
        epochs=found[0].epoch,
        failovers=sum(p.record.failovers for p in primaries),
        restarts=found[0].attempt - 1,
        wall_s=wall_s,
    )


def mib(size: int) -> str:
    """A size in bytes, for people."""
    return f"{size / (1 << 20):.1f} MiB"


def shortened(text: str, limit: int) -> tuple[str | None, str]:
    """A result as JSON of fewer than `limit` bytes: without its reports, where it is too large with them.

    Args:
        text: all of it, as `JobResult.to_json` wrote it.

    Returns:
        It, and an empty text; where the values alone are too large None, and why.
    """
    if len(text) < limit:  # it is ASCII
        return text, ""
    left_out = f"reports left out: with them it was {mib(len(text))}, and less than {mib(limit)} is kept in etcd"
    short = json.dumps({**json.loads(text), "reports": [], "left_out": left_out})
    if len(short) < limit:
        return short, ""
    why = f"as JSON they take {mib(len(short))}, and less than {mib(limit)} is kept in etcd: who ran the job got them"
    return None, why


def why_not_kept(collected: KeyValue | None) -> str:
    """Why etcd has no values of a job, as whoever collected them wrote; empty where that is not known."""
    if collected is None:
        return "nobody asked for them while its nodes were there (settings.results_kept_s)"
    return str(json.loads(collected.value).get("not_kept", ""))


def not_kept(why: str) -> UnknownJob:
    """What is raised for a job that finished and whose values are nowhere any more.

    Args:
        why: empty where it is not known: another host's launcher may have collected them, or nobody.
    """
    tell = why or "whoever collected them, if anybody did, has them"
    return UnknownJob(f"the job finished, but its values are not kept: {tell}")


def job_failed(name: str, status: StatusRecord) -> JobFailed:
    """What the driver's process raises for a job that ended otherwise than finished."""
    kind = JobCancelled if status.state == State.CANCELLED else JobFailed
    return kind(
        status.reason or f"job {name!r} was {status.state}",
        job=name,
        task=status.task,
        epoch=status.epoch,
        where=status.where,
        traceback_text=status.traceback,
    )
