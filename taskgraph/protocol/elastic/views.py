"""The views of an elastic job: numbered lists of its workers.

Each view follows another by one transaction (`transactions.py`). A worker that left a view never comes back under its
name and entry: a view that names it with another entry number means another entry, which it has not asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.records import WorkersRecord

__all__ = ["View", "ViewEntry"]


class ViewEntry(NamedTuple):
    """A worker of a view.

    Attributes:
        worker: its node id.
        since: the number of the view by which it entered.
    """

    worker: str
    since: int


@frozen
class View:
    """A numbered list of workers, the most senior one first.

    Attributes:
        number: grows by one with each view of a job.
        lineage: the number of the lineage's first view: 0, or of the last return to a checkpoint.
    """

    number: int
    lineage: int
    entries: tuple[ViewEntry, ...]

    @classmethod
    def of(cls, record: WorkersRecord) -> View:
        return cls(record.number, record.lineage, tuple(ViewEntry(*entry) for entry in record.workers))

    def record(self, writer: str) -> WorkersRecord:
        """Returns the view as the value of its key."""
        return WorkersRecord(number=self.number, lineage=self.lineage, workers=self.entries, writer=writer)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(entry.worker for entry in self.entries)

    def since(self, worker: str) -> int | None:
        """Returns the number of the view by which the worker entered; None if it is not in this view."""
        return next((entry.since for entry in self.entries if entry.worker == worker), None)

    def without(self, lost: frozenset[str] | set[str]) -> View:
        """Returns the next view if these workers are excluded."""
        kept = tuple(entry for entry in self.entries if entry.worker not in lost)
        return View(self.number + 1, self.lineage, kept)

    def joined_by(self, worker: str) -> View:
        """Returns the next view if this worker enters, as the most junior one."""
        return View(self.number + 1, self.lineage, (*self.entries, ViewEntry(worker, self.number + 1)))
