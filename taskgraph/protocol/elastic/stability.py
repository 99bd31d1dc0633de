"""Which totals are stable: what one worker knows of the others of its view.

A total is *stable* for a worker that knows from every worker of its view that it holds the total: by a contribution to
a later position, a report, or an answer after the last total. Only stable totals may count outside of the workers.

A newcomer that holds all totals is not whole (`flush`) before it has the reports of all workers: its messages of the
view then show that it has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from taskgraph.protocol.elastic.flush import FlushReport

__all__ = ["Stability"]


class Stability:
    """What a worker knows of the workers of its view.

    Attributes:
        position: all workers of the view are known to hold the totals below this position.
    """

    __slots__ = ("_known", "_working", "position")

    def __init__(self) -> None:
        self.position = 0
        self._known: dict[str, int] = {}  # worker -> the position that it is known to have reached
        self._working: set[str] = set()  # workers known to have the reports of all

    def begin_view(self) -> None:
        """Forgets what was known of the workers of the view before."""
        self._known, self._working = {}, set()

    def end_flush(self, reports: Mapping[str, FlushReport]) -> None:
        """Takes the positions in the reports of all workers of the view."""
        self._known = {w: max(report.position, self._known.get(w, 0)) for w, report in reports.items()}

    def note_has_reports(self, worker: str) -> bool:
        """Notes that a worker is in phase "working" of the view: it has all reports. Returns True if that is news."""
        was_known = worker in self._working
        self._working.add(worker)
        return not was_known

    def note_position(self, worker: str, position: int) -> None:
        """Notes that a worker holds the totals below a position."""
        self._known[worker] = max(position, self._known.get(worker, 0))

    def grow(self) -> bool:
        """Raises `position` to the lowest one of the workers. Returns True if it grew. Call it after the flush."""
        lowest = min(self._known.values())
        grows = lowest > self.position
        self.position = max(lowest, self.position)
        return grows

    def are_whole(self, reports: Mapping[str, FlushReport]) -> bool:
        """True if all workers are known to be whole: by their reports, or since they have the reports of all."""
        return all(report.whole or worker in self._working for worker, report in reports.items())
