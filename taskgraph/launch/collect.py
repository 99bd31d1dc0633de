"""Makes a job's result from the results of its tasks, and the copies of it that are kept as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taskgraph.errors import error_text
from taskgraph.graph.values import decode, verify
from taskgraph.launch.kept import KeptJob
from taskgraph.node.reports import PlainRows, ReportLog
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.records import PrimaryRecord
from taskgraph.protocol.view import Versioned
from taskgraph.results import SET_ASIDE, VALUE, EpochReport, Failed, JobResult, json_pieces, user_codec_of

__all__ = ["assemble", "damaged_tasks", "is_complete", "make_copies", "mib", "size_bytes"]

_HOST_BYTES = 64 << 20
_ETCD_BYTES = 1 << 20
"""etcd limits requests to 1.5 MiB."""
_NUMBERS = 1 << 20
"""Values of more numbers are not written as JSON: json blocks all threads, for half a second with so many numbers, and
takes 60 times the memory of an array."""


def is_complete(found: Sequence[TaskResult], tasks: int) -> bool:
    """True if these are the results of all tasks, of one (epoch, attempt)."""
    return sorted(r.task for r in found) == list(range(tasks)) and len({(r.epoch, r.attempt) for r in found}) == 1


def damaged_tasks(found: Sequence[TaskResult]) -> list[int]:
    """Returns the tasks whose values do not match their digests."""
    return [r.task for r in found if r.value is not None and not verify(r.value)]


def size_bytes(found: Sequence[TaskResult]) -> int:
    """Returns the encoded size of all values."""
    return sum(r.value.size_bytes for r in found if r.value is not None)


def assemble(
    name: str, found: Sequence[TaskResult], primaries: Iterable[Versioned[PrimaryRecord]], wall_s: float
) -> JobResult:
    """Makes the `JobResult`: merges the reports of all tasks, and keeps their values.

    Args:
        found: the results of all tasks, of one epoch and attempt (`is_complete`).
        primaries: the last ones; they count the failovers.
    """
    log, last = ReportLog(), dict[int, PlainRows]()
    for part in found:
        if part.log:
            log.fold(ReportLog.unpack(part.log))
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
    values, aside = dict[int, Any](), dict[str, tuple[Failed, ...]]()
    for part in sorted(found, key=lambda part: part.task):
        value = None if part.value is None else decode(part.value)
        if isinstance(value, dict) and SET_ASIDE in value:
            aside[value[SET_ASIDE]] = _failed(value["pieces"])
            if VALUE not in value:
                continue
            value = value[VALUE]
        if part.value is not None:
            values[part.task] = value
    return JobResult(
        name=name,
        values=values,
        set_aside=aside,
        reports=tuple(reports),
        epochs=found[0].epoch,
        failovers=sum(p.record.failovers for p in primaries),
        restarts=found[0].attempt - 1,
        wall_s=wall_s,
    )


def _failed(pieces: Iterable[tuple[int, int, str, str]]) -> tuple[Failed, ...]:
    """Makes the `Failed` objects of pieces that were set aside."""
    return tuple(Failed(piece, node, text, pass_number) for pass_number, piece, node, text in pieces)


def mib(size: int) -> str:
    """Formats a size in bytes, in MiB, for people."""
    return f"{size / (1 << 20):.1f} MiB"


def make_copies(result: JobResult, size: int) -> tuple[KeptJob, KeptJob]:
    """Makes the copies of a result for this host and for etcd; never raises.

    A copy without reports says in `not_kept` why; one without values, too.

    Args:
        size: the encoded size of the values, in bytes.
    """
    try:
        if size >= _HOST_BYTES:
            neither = f"they take {mib(size)}, and less than {mib(_HOST_BYTES)} is kept"
        elif (count := _count_elements(result.values, _NUMBERS)) > _NUMBERS:
            neither = f"they have {count:,} numbers or texts or more, and no more than {_NUMBERS:,} are kept"
        else:
            here = _copy_within(result, _HOST_BYTES, "this host")
            return here, here if _record_bytes(here.result) < _ETCD_BYTES else _copy_within(result, _ETCD_BYTES, "etcd")
    except Exception as error:  # a user's type may raise anything
        neither = f"they cannot be written as JSON ({error_text(error)})"
    return KeptJob(not_kept=neither), KeptJob(not_kept=neither)


def _copy_within(result: JobResult, limit: int, place: str) -> KeptJob:
    """Returns a result as JSON of less than `limit` bytes, if need be without reports; else only why it is not kept."""
    less = f"and {place} keeps less than {mib(limit)}"
    if (text := _json_within(result, limit)) is not None:
        return KeptJob(result=text)
    if (text := _json_within(dataclasses.replace(result, reports=()), limit)) is not None:
        return KeptJob(result=text, not_kept=f"reports left out: with them the result is larger, {less}")
    return KeptJob(not_kept=f"as JSON they are larger, {less}")


def _json_within(result: JobResult, limit: int) -> str | None:
    """Returns a result as JSON; None if that takes `limit` bytes or more."""
    pieces, size = [], 0
    for piece in json_pieces(result):
        pieces.append(piece)
        if (size := size + _record_bytes(piece)) >= limit:
            return None
    return "".join(pieces)


def _record_bytes(text: str) -> int:
    """Returns the bytes of ASCII text within a JSON string, which escapes its quotes and backslashes."""
    return len(text) + text.count('"') + text.count("\\")


def _count_elements(value: Any, limit: int) -> int:
    """Counts the numbers and texts in a value; returns some number above `limit` if there are more."""
    if (known := user_codec_of(value)) is not None:
        with contextlib.suppress(Exception):  # a codec may raise anything: its error is one text
            return _count_elements(known.encode(value), limit)
        return 1
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        count = 0
        for item in value:
            if (count := count + _count_elements(item, limit - count)) > limit:
                break
        return count
    if not hasattr(value, "tolist"):
        return 1
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else int(value.nbytes)  # torch's `size` is a method
