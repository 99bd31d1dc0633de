"""The reports of user code: they count once the total before them is stable."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from taskgraph.node.reports import ReportLog

__all__ = ["StableReports"]


class StableReports:
    """The reports of the steps of a run, in order.

    Args:
        counts: called each time that numbers of a step begin to count, with all that count of this step so far.
    """

    def __init__(self, counts: Callable[[int, dict[str, float]], None]) -> None:
        self._counts = counts
        self._log = ReportLog()
        self._waiting: list[tuple[int, int, dict[str, float]]] = []  # position, step and numbers
        self._stable = 0

    def add(self, position: int, step: int, numbers: dict[str, float]) -> None:
        """Takes the numbers of a step, which count once the totals below `position` are stable."""
        self._waiting.append((position, step, numbers))
        self.note_stable(self._stable)

    def note_stable(self, stable: int) -> None:
        """Lets the reports count that waited for the totals below this position to be stable."""
        self._stable = max(stable, self._stable)
        while self._waiting and self._waiting[0][0] <= self._stable:
            _, step, numbers = self._waiting.pop(0)
            whole = {**self._log.rows_of(step).get(0, {}), **numbers}
            self._log.add(step, {0: whole})
            self._counts(step, whole)

    def packed(self) -> tuple[bytes, ...]:
        """Returns the encoded reports that count, for newcomers, checkpoints and the job's result."""
        return tuple(self._log.packed())

    def continue_from(self, packed: Iterable[bytes], step: int) -> None:
        """Replaces all reports by those in `packed` of steps before `step`, with which this worker begins."""
        self._log = ReportLog.unpack(list(packed))
        self._log.cut(step)
        self._waiting.clear()
