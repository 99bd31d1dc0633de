"""The numbers that tasks report, epoch by epoch, kept by the replicas of task 0 until the job's result is made.

The numbers of epoch e come to the leader in the dones of e. They are kept in task 0's boundary e + 2, as the rows
that were added, so that boundaries stay small; until then every task has its own in its boundary e + 1, and tells
them to a new leader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from taskgraph.errors import DecodeError
from taskgraph.graph.values import decode, encode, value_end
from taskgraph.protocol.messages import Encoded

__all__ = ["ReportLog", "with_log"]

_BLOCK: Final = 64
"""Epochs packed together, once for all: a checkpoint of a long job must not cost what its history is long."""

Rows = dict[int, dict[str, float]]
"""task -> its numbers, of one epoch."""


class ReportLog:
    """Reports of committed epochs: epoch -> task -> numbers. Epochs without any are left out."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._packed: dict[int, bytes] = {}  # block -> its rows, as they were when it was not among the fresh
        self._fresh: set[int] = set()

    def add(self, epoch: int, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Adds rows; the same rows again change nothing."""
        for task, numbers in rows.items():
            if numbers:
                self._rows.setdefault(epoch, {})[task] = dict(numbers)
                self._fresh.add(epoch // _BLOCK)

    def of(self, epoch: int) -> Rows:
        return self._rows.get(epoch, {})

    def all(self) -> dict[int, Rows]:
        return self._rows

    def cut(self, epoch: int) -> None:
        """Forgets the rows from `epoch` on: those epochs were undone."""
        self._rows = {number: rows for number, rows in self._rows.items() if number < epoch}
        self._packed = {block: data for block, data in self._packed.items() if (block + 1) * _BLOCK <= epoch}
        self._fresh = {block for block in self._fresh if block * _BLOCK < epoch} | {epoch // _BLOCK}

    def packed(self) -> list[bytes]:
        """All of it; only what is new since the last time costs anything. Nothing of it changes later.

        The same bytes wherever the same rows are known, in whatever order they came: two primaries, one of them a
        zombie, may write the same file of a checkpoint, and either may come last.
        """
        last = b""
        for block in sorted(self._fresh):
            epochs = range(block * _BLOCK, (block + 1) * _BLOCK)
            rows = {e: {t: self._rows[e][t] for t in sorted(self._rows[e])} for e in epochs if e in self._rows}
            last = json.dumps(rows, separators=(",", ":")).encode()
            self._packed[block] = last
        newest = max(self._fresh, default=0)
        self._fresh &= {newest}  # more will come for it
        return [self._packed[block] for block in sorted(self._packed)]

    def fold(self, carried: Mapping[int, Mapping[int, Mapping[str, float]]] | Sequence[bytes]) -> None:
        """Takes what a boundary carried: rows, or all of them, packed.

        Raises:
            DecodeError: it is neither.
        """
        if isinstance(carried, Mapping):
            for epoch, by_task in carried.items():
                self.add(epoch, by_task)
            return
        try:
            for block in carried:
                for text, rows in json.loads(block).items():
                    self.add(int(text), {int(task): numbers for task, numbers in rows.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise DecodeError(f"these are no reports: {error!r}") from error


def with_log(value: Encoded, log: list[bytes] | dict[int, Rows]) -> Encoded:
    """A boundary of task 0 that carries these reports: all, or an epoch's. May be called in any thread."""
    raw: dict[str, Any] = decode(value)
    made = encode({**raw, "log": log}, what="snapshot of task 0", ordered=True)
    # Read on the host, the arrays that lived on a device did not come from one: the trailer still tells.
    trailer = value.meta[value_end(value.meta) :]
    return Encoded(made.meta[: value_end(made.meta)] + trailer, made.buffers, made.digest)
