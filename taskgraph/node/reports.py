"""The numbers that tasks report, epoch by epoch, kept by the replicas of task 0 until the job's result is made.

The numbers of epoch e come to the leader in the dones of e. They are kept in task 0's boundary e + 2, as the rows
that were added, so that boundaries stay small; until then every task has its own in its boundary e + 1, and tells
them to a new leader.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ReportLog"]

Rows = dict[int, dict[str, float]]
"""task -> its numbers, of one epoch."""


class ReportLog:
    """Reports of committed epochs: epoch -> task -> numbers. Epochs without any are left out."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}

    def add(self, epoch: int, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Adds rows; the same rows again change nothing."""
        for task, numbers in rows.items():
            if numbers:
                self._rows.setdefault(epoch, {})[task] = dict(numbers)

    def of(self, epoch: int) -> Rows:
        return self._rows.get(epoch, {})

    def delta(self, epoch: int) -> dict[int, Rows]:
        """What a boundary carries: the rows of one epoch."""
        return {epoch: self._rows[epoch]} if epoch in self._rows else {}

    def all(self) -> dict[int, Rows]:
        return self._rows

    def cut(self, epoch: int) -> None:
        """Forgets the rows from `epoch` on: those epochs were undone."""
        self._rows = {number: rows for number, rows in self._rows.items() if number < epoch}

    def fold(self, rows: Mapping[int, Mapping[int, Mapping[str, float]]]) -> None:
        """Takes what a boundary carried."""
        for epoch, by_task in rows.items():
            self.add(epoch, by_task)
