"""Messages of other workers: their values are kept, and the core hears of them.

Messages of an older view change nothing. Those of a newer one, which this worker has not read, wait here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.elastic_jobs.adding import Total
from taskgraph.elastic_jobs.contributions import Contributions
from taskgraph.graph.sums import decode_sums
from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.messages import (
    Call,
    ComparedPart,
    GroupKey,
    HoldsTotals,
    PartSums,
    SliceSum,
    Totals,
    WorkerReport,
)

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.together import GroupSums

__all__ = ["Inbox"]


class Inbox:
    """Takes messages for one worker.

    Args:
        hold: called with a position and its total, which the donor of a view sent.
    """

    def __init__(
        self,
        core: Worker,
        contributions: Contributions,
        together: GroupSums | None,
        hold: Callable[[int, Total], None],
    ) -> None:
        self._core = core
        self._contributions = contributions
        self._together = together
        self._hold = hold
        self._early: list[tuple[str, Call]] = []  # messages of a view that this worker has not read
        self._compared_parts: dict[int, tuple[str, ComparedPart]] = {}  # by position: a worker, its message

    def receive(self, worker: str, message: Call) -> None:
        """Takes a message; one that is too early is kept until `take_early`."""
        if not self._take(worker, message):
            self._early.append((worker, message))

    def take_early(self) -> bool:
        """Tries again to take the messages that came too early. Returns True if some were taken."""
        early, self._early = self._early, []
        self._early += [(worker, message) for worker, message in early if not self._take(worker, message)]
        return len(self._early) < len(early)

    def take_compared_part(self, position: int, tag: bytes) -> tuple[str, ComparedPart] | None:
        """Removes and returns a worker and its message about a part of this position; None: none came, or it is of
        another call (`tag`).
        """
        found = self._compared_parts.pop(position, None)
        return found if found is not None and found[1].tag == tag else None

    def _take(self, worker: str, message: Call) -> bool:
        """Keeps a message's values, and tells the core. Returns False if it came too early: to be tried again."""
        core = self._core
        match message:
            case WorkerReport():
                view = View(message.number, message.lineage, tuple(ViewEntry(*entry) for entry in message.workers))
                held = tuple(Span(*span) for span in message.held)
                return core.receive_report(
                    worker, view, FlushReport(message.position, message.whole, held, message.begun)
                )
            case PartSums():
                return core.receive_contribution(worker, self._contributions.receive(worker, message))
            case SliceSum():
                self._contributions.receive_slice(worker, message)
            case Totals():
                return self._take_totals(message)
            case HoldsTotals():
                return core.receive_holds_totals(worker, message.view, message.position)
            case ComparedPart():
                if message.view > core.number:
                    return False
                self._compared_parts[message.position] = worker, message
            case GroupKey():
                if self._together is not None and message.view >= core.number:
                    return self._together.put_key(message.view, message.key, message.content)
            case _:
                raise TypeError(f"no message of an elastic job: {message!r}")
        return True

    def _take_totals(self, message: Totals) -> bool:
        """Keeps the totals that this worker lacks. Returns False if it came too early: the flush has not ended here."""
        core = self._core
        if message.view > core.number or core.phase == Phase.FLUSHING:
            return False
        for position, total in enumerate(decode_sums(message.value), message.position):
            before = core.position
            core.receive_total(message.view, position)
            if core.position > before:
                self._hold(position, Total.of(total))
        return True
