"""What `taskgraph shards` prints of the queues and maps of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from taskgraph.observe.format import counted, table
from taskgraph.observe.queues import QueueStatus
from taskgraph.protocol.dealing import PassCounts

__all__ = ["merge_queues", "set_aside_text", "shards_json", "shards_text"]

_NAMED: Final = 10
"""Pieces set aside that a line names, at most."""


def shards_text(queues: Sequence[QueueStatus]) -> str:
    """Formats the queues of a job for people."""
    lines: list[str] = []
    for queue in queues:
        passes = "endless passes" if queue.passes is None else f"{queue.passes:,} pass" + "es" * (queue.passes != 1)
        left = f"{queue.left:,} left" if queue.left else "done"
        lines.append(
            f"{queue.kind} {queue.name}: {counted(queue.pieces, 'piece')}, {passes}; {left}; "
            f"{queue.rows_per_s:,.0f} rows/s"
        )
        rows: list[tuple[str, ...]] = [("  pass", "done", "dealt", "open", "set aside", "rows")]
        rows += [(f"  {c.pass_number}", *(f"{n:,}" for n in c[1:])) for c in queue.counts]
        lines += table(rows)
        lines += [
            f"  slow: piece {one.piece} of pass {one.pass_number}, on {one.holder} for {one.seconds:.1f} s"
            for one in queue.slow
        ]
    return "\n".join(lines)


def shards_json(queues: Sequence[QueueStatus]) -> list[dict[str, Any]]:
    """Returns the queues of a job as plain JSON."""
    return [
        {
            **dataclasses.asdict(queue),
            "counts": [counts._asdict() for counts in queue.counts],
            "slow": [one._asdict() for one in queue.slow],
        }
        for queue in queues
    ]


def merge_queues(found: Iterable[QueueStatus]) -> list[QueueStatus]:
    """Returns each queue once, by kind and name, with the status that is furthest: several nodes may report it."""
    furthest: dict[tuple[str, str], QueueStatus] = {}
    for queue in found:
        known = furthest.get((queue.kind, queue.name))
        if known is None or _progress(queue) > _progress(known):
            furthest[queue.kind, queue.name] = queue
    return [furthest[key] for key in sorted(furthest)]


def _progress(queue: QueueStatus) -> tuple[int, int, int]:
    """Returns a sort key that grows as a queue gets on."""
    last = queue.counts[-1] if queue.counts else PassCounts(-1, 0, 0, 0, 0, 0)
    return last.pass_number, last.done + last.set_aside, last.dealt


def set_aside_text(found: Mapping[str, Sequence[int]]) -> str:
    """Returns a line for each queue that has set pieces aside; "": none has.

    Args:
        found: name of the queue -> the numbers of the pieces.
    """
    lines = []
    for name, pieces in found.items():
        numbers = ", ".join(map(str, sorted(pieces)[:_NAMED])) + ", ..." * (len(pieces) > _NAMED)
        lines.append(f"{counted(len(pieces), 'piece')} of {name} set aside: {numbers}; --json has the errors")
    return "\n".join(lines)
