"""The totals that a worker keeps: until they are stable and user code has got them, and longer for newcomers.

    held ──stable, and got by user code──► dropped, unless a registered newcomer lacks it
                                                 └──the newcomer has entered, is gone, or needs too much──► dropped

A newcomer asks all workers to keep what it lacks (`keep_for`) and fetches it in pages. Together these totals take
`max_totals_bytes` at most: a newcomer that needs earlier ones copies the state anew.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from taskgraph.elastic_jobs.adding import Total
from taskgraph.graph.sums import Sums
from taskgraph.protocol.elastic.worker import Worker

__all__ = ["KeptTotals"]

_PAGE_BYTES = 64 << 20
"""Totals for a newcomer go in messages of about this size."""


class KeptTotals:
    """The totals of one worker.

    Args:
        most_bytes: the memory that totals for newcomers may take.
    """

    def __init__(self, core: Worker, most_bytes: int) -> None:
        self._core = core
        self._most_bytes = most_bytes
        self._totals: dict[int, Total] = {}
        self._keep_from: dict[str, tuple[int, int]] = {}  # newcomer -> the first total that it lacks, the view then

    def keep(self, position: int, total: Total) -> None:
        """Keeps the total of a position."""
        self._totals[position] = total

    def __getitem__(self, position: int) -> Total:
        return self._totals[position]

    @property
    def first(self) -> int:
        """The first position whose total is kept."""
        return min(self._totals, default=self._core.position)

    def sums(self, first: int, end: int) -> list[Sums]:
        """Returns the totals `first` to `end - 1`."""
        return [self._totals[position].sums() for position in range(first, end)]

    def page(self, position: int) -> tuple[int, list[Sums]]:
        """Returns the first position that is kept, and stable totals from `position` on that fit into a message.

        Returns no totals if the first one is not kept any longer.
        """
        first, size, page = self.first, 0, list[Sums]()
        for number in range(position, self._core.stable) if position >= first else ():
            size += self._totals[number].nbytes
            if page and size > _PAGE_BYTES:
                break
            page.append(self._totals[number].sums())
        return first, page

    def keep_for(self, newcomer: str, position: int) -> None:
        """Keeps totals from a position on, until the newcomer holds them in a view, or is gone, or memory runs out."""
        self._keep_from[newcomer] = position, self._core.number

    def drop_newcomers(self, there: Container[str]) -> None:
        """Stops keeping totals for newcomers that are neither in `there` nor in the view that this worker has read."""
        inside = self._workers
        self._keep_from = {n: kept for n, kept in self._keep_from.items() if n in there or n in inside}

    def drop_entered(self) -> None:
        """Called when more totals are stable: stops keeping totals for newcomers in the view, which hold these now."""
        for worker in self._workers:
            if worker in self._keep_from and self._keep_from[worker][1] < self._core.number:
                del self._keep_from[worker]

    @property
    def _workers(self) -> Sequence[str]:
        return () if self._core.view is None else self._core.view.workers

    def forget(self, user_position: int) -> None:
        """Drops stable totals below `user_position`, but not those that newcomers lack while memory suffices."""
        needed = min(self._core.stable, user_position)
        kept = min([needed, *(first for first, _ in self._keep_from.values())])
        if kept < needed and (late := self._newest_over_limit(kept, needed)) is not None:
            self._keep_from = {n: (first, view) for n, (first, view) in self._keep_from.items() if first > late}
            kept = late + 1
        self._totals = {position: total for position, total in self._totals.items() if position >= kept}

    def _newest_over_limit(self, kept: int, needed: int) -> int | None:
        """Returns the newest position that, with all later ones, exceeds the memory for newcomers; None: all fit."""
        room = self._most_bytes
        for position in sorted((at for at in self._totals if kept <= at < needed), reverse=True):
            room -= self._totals[position].nbytes
            if room < 0:
                return position
        return None
