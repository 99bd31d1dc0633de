"""Makes a job's result out of the results of its tasks, and the JSON copies of it that are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from taskgraph.errors import worded
from taskgraph.graph.values import decode, verify
from taskgraph.node.reports import PlainRows, ReportLog
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.records import PrimaryRecord
from taskgraph.protocol.view import Versioned
from taskgraph.results import EpochReport, JobResult, declared, json_pieces

__all__ = [
    "KeptCopy",
    "assemble",
    "complete",
    "damaged",
    "kept_copy",
    "mib",
    "size_bytes",
]

T = TypeVar("T")

_SUMMARY_BYTES = 1 << 20
"""etcd limits requests to 1.5 MiB. Of a larger result etcd keeps the values alone, if they are smaller."""
_KEPT_BYTES = 64 << 20
"""Larger values are not written as JSON; nor are reports that make the JSON larger."""
_KEPT_ELEMENTS = 1 << 20
"""Nor are values of more numbers: json blocks all threads, for half a second with so many numbers, and takes 60 times
the memory of an array."""


def complete(found: Sequence[TaskResult], tasks: int) -> bool:
    """Says whether these are the results of all tasks, of one (epoch, attempt)."""
    return sorted(r.task for r in found) == list(range(tasks)) and len({(r.epoch, r.attempt) for r in found}) == 1


def damaged(found: Sequence[TaskResult]) -> list[int]:
    """Returns the tasks whose values do not match their digests."""
    return [r.task for r in found if r.value is not None and not verify(r.value)]


def size_bytes(found: Sequence[TaskResult]) -> int:
    """Returns the encoded size of all values."""
    return sum(r.value.size_bytes for r in found if r.value is not None)


def assemble(
    name: str, found: Sequence[TaskResult], primaries: Iterable[Versioned[PrimaryRecord]], wall_s: float
) -> JobResult:
    """Makes the job's result from the complete results of its tasks."""
    log, last = ReportLog(), dict[int, PlainRows]()
    for part in found:
        if part.log:
            log.fold(ReportLog.unpacked(part.log))
        for row in part.reports:
            last.setdefault(row.epoch, {})[row.task] = row.numbers
    log.fold(dict(sorted(last.items())))  # the leader may not have added them
    reports = []
    for epoch, rows in log.rows():
        if len(rows) == 1:  # of millions of epochs, one dict less in each
            (numbers,) = rows.values()
        else:
            rows, numbers = dict(sorted(rows.items())), {}
            for task in reversed(rows):
                numbers.update(rows[task])
        reports.append(EpochReport(epoch, numbers, rows))
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
    """Writes a size in bytes for people."""
    return f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A result as JSON.

    Attributes:
        here: for this host; None: `not_here` says why not.
        in_etcd: for etcd, without reports if it is too large with them; None: `not_in_etcd` says why not.
    """

    here: str | None
    not_here: str
    in_etcd: str | None
    not_in_etcd: str


def kept_copy(result: JobResult, size: int, *, whole: bool = False) -> KeptCopy:
    """Makes the copy that is kept of a result, or says why there is none; never raises.

    Args:
        size: the encoded size of the values, in bytes.
        whole: no other process has the result: `here` has all reports, however many.
    """
    if size >= _KEPT_BYTES:
        return _no_copy(f"they take {mib(size)}, and less than {mib(_KEPT_BYTES)} is kept")
    try:
        if (many := _elements(result.values, _KEPT_ELEMENTS)) > _KEPT_ELEMENTS:
            least = f"{many:,} numbers or texts or more, and no more than {_KEPT_ELEMENTS:,} are kept"
            return _no_copy(f"they have {least}")
        text = _written(result, None if whole else _KEPT_BYTES)
        if text is not None:
            return KeptCopy(text, "", *_shortened(result, text))
        left_out = f"reports left out: they are more than {mib(_KEPT_BYTES)}, and no more is kept"
        text = _without_reports(result, left_out)
        return KeptCopy(text, "", *_small(text))
    except Exception as error:  # a user's type may raise anything
        return _no_copy(f"they cannot be written as JSON ({worded(error)})")


def _no_copy(why: str) -> KeptCopy:
    return KeptCopy(None, why, None, why)


def _elements(value: Any, limit: int) -> int:
    """Counts the numbers and texts in a value; returns some number above `limit` if there are more."""
    if (known := declared(value)) is not None:
        with contextlib.suppress(Exception):  # a codec may raise anything: its error is one text
            return _elements(known.encode(value), limit)
        return 1
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        count = 0
        for item in value:
            if (count := count + _elements(item, limit - count)) > limit:
                break
        return count
    if not hasattr(value, "tolist"):
        return 1
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else int(value.nbytes)  # torch's `size` is a method


def _written(result: JobResult, limit: int | None) -> str | None:
    """Writes a result as JSON, or returns None as soon as its reports take more than `limit` characters."""
    reports = json_pieces(result)
    pieces, written = [next(reports)], 0  # the values come first
    for piece in reports:
        pieces.append(piece)
        written += len(piece)
        if limit is not None and written > limit:
            return None
    return "".join(pieces)


def _without_reports(result: JobResult, why: str) -> str:
    bare = json.loads(dataclasses.replace(result, reports=()).to_json())
    return json.dumps({**bare, "left_out": why})


def _shortened(result: JobResult, text: str) -> tuple[str | None, str]:
    """Returns a result as JSON for etcd and "", or None and why its values alone are too large."""
    if len(text) < _SUMMARY_BYTES:  # it is ASCII
        return text, ""
    left_out = (
        f"reports left out: with them it was {mib(len(text))}, and less than {mib(_SUMMARY_BYTES)} is kept in etcd"
    )
    return _small(_without_reports(result, left_out) if result.reports else text)


def _small(text: str) -> tuple[str | None, str]:
    if len(text) < _SUMMARY_BYTES:
        return text, ""
    return None, f"as JSON they take {mib(len(text))}, and less than {mib(_SUMMARY_BYTES)} is kept in etcd"
