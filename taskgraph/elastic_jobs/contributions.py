"""The sums of the position at work: what this worker computed, what the others sent, and the total made of both.

    user code ──sums of spans──► own ──encoded──► the other workers
                                  │
    other workers ──► received ──►├──added along the tree when user code wants it──► the total
                                  └──in slices (`slices`), or by another communicator (`together`)──► the total

The core decides which spans are held, sent, added up and dropped (`protocol.elastic.round`), and when the total is
complete (`protocol.elastic.exchange`); here are their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.elastic_jobs.adding import EncodedSums, FinishedParts, Total
from taskgraph.elastic_jobs.slices import Slices, encode_slices
from taskgraph.graph.sums import Sums, add_up, decode_sums, encode_sums
from taskgraph.protocol.elastic.actions import Contribution, SumTogether
from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.tree import Span, halves
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Worker
from taskgraph.protocol.messages import Encoded, PartSums, SliceSum
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.outbox import Outboxes
    from taskgraph.elastic_jobs.together import GroupSums
    from taskgraph.node.core import NodeCore

__all__ = ["Contributions"]


class Contributions:
    """The sums of one worker's position at work: its own, and those received from the other workers of the view.

    Args:
        together: makes the totals by process groups; None: workers send each other their sums.
        changed: called once a slice was added up in a thread, or a total by a process group.
    """

    def __init__(
        self, node: NodeCore, core: Worker, outboxes: Outboxes, together: GroupSums | None, changed: Callable[[], None]
    ) -> None:
        self._node = node
        self._core = core
        self._outboxes = outboxes
        self._together = together
        self._changed = changed
        self._own: dict[Span, Sums] = {}
        self._encoded: dict[tuple[Span, ...], EncodedSums] = {}  # own sums that user code's thread has encoded
        self._received: dict[tuple[int, int, Span], Sums] = {}  # by view, position and span
        self._slices = Slices(node, self._send_slice, changed)
        self._summed: Total | None = None  # the total that the workers of the view added up together

    # -- what this worker computed ----------------------------------------------------------------

    def encode_ahead(self, sums: Sequence[Sums]) -> EncodedSums | None:
        """Encodes large sums for the other workers, in user code's thread. None: they are small, or not sent whole."""
        dealt = self._core.dealt
        if self._together is not None or not any(each.is_large for each in sums):
            return None
        others = [worker for worker in dealt.due if worker != self._node.id]
        return EncodedSums(dealt.view, self._encode_for(others, sums, dealt.owners if self.are_large(sums) else ()))

    def keep_own(self, finished: FinishedParts) -> None:
        """Keeps the sums of parts that user code has finished, as this worker's own."""
        for sums in finished.sums.values():
            sums.workers = (self._node.name,)
        self._own |= finished.sums
        if finished.encoded is not None and finished.encoded.view == self._core.number:
            self._encoded[tuple(finished.sums)] = finished.encoded

    def are_large(self, sums: Iterable[Sums]) -> bool:
        """True if sums are large enough to be added up in slices."""
        least = self._node.settings.sliced_bytes
        return any(sum(array.nbytes for array in each.arrays) >= least for each in sums)

    def merge(self, span: Span) -> None:
        """Replaces the sums of both halves of a span by their sum."""
        first, second = halves(span)
        self._own[span] = self._own.pop(first).add_consuming(self._own.pop(second), self._node.router.allocate)

    def drop(self, spans: Iterable[Span]) -> None:
        """Deletes this worker's own sums of these spans, which do not count."""
        for span in spans:
            self._own.pop(span, None)

    def send(self, contribution: Contribution, owners: tuple[str, ...]) -> None:
        """Sends this worker's own sums of a contribution to all other workers of the view."""
        assert self._core.view is not None
        spans = contribution.spans
        encoded = self._encoded.pop(spans, None)
        if encoded is None:
            others = [worker for worker in self._core.view.workers if worker != self._node.id]
            values = self._encode_for(others, [self._own[span] for span in spans], owners)
        else:
            values = encoded.values
        view, position = contribution.view, contribution.position
        named = tuple((span.first, span.end) for span in spans)
        for worker, value in values.items():
            message = PartSums(view, position, named, contribution.tag, value, contribution.apart)
            self._outboxes.to(worker).put(view, message)

    def _encode_for(
        self, others: Sequence[str], sums: Sequence[Sums], slice_owners: Sequence[str]
    ) -> dict[str, Encoded]:
        """Returns worker -> what it is sent: all sums, if slices have no owners and no process group sums them; else an
        owner's slice, and other workers only layout and collected values."""
        if slice_owners or self._together is not None:
            return encode_slices(sums, slice_owners, others, self._node.router.allocate)
        return dict.fromkeys(others, encode_sums(sums, self._node.router.allocate)) if others else {}

    # -- what others sent -------------------------------------------------------------------------

    def receive(self, worker: str, message: PartSums) -> Contribution:
        """Keeps another worker's sums, unless of an old view or position. Returns its contribution, for the core."""
        spans = tuple(Span(*span) for span in message.spans)
        if message.view >= self._core.number and message.position >= self._core.position:
            for span, sums in zip(spans, decode_sums(message.value), strict=True):
                sums.workers = (name_of(worker),)
                self._received.setdefault((message.view, message.position, span), sums)
        there = (self._received.get((message.view, message.position, span)) for span in spans)
        large = self._together is None and (message.apart or self.are_large(filter(None, there)))
        return Contribution(message.view, message.position, spans, message.tag, large, message.apart)

    def receive_slice(self, worker: str, message: SliceSum) -> None:
        """Keeps the sum of the slice that another worker has added up, unless it is of an old view or position."""
        if message.view >= self._core.number and message.position >= self._core.position:
            [sums] = decode_sums(message.value)
            self._slices.put_sum(message.view, message.position, worker, sums)

    def _send_slice(self, view: int, message: SliceSum) -> None:
        """Sends the sum of this worker's slice to all others."""
        self._outboxes.put_all(view, message)

    # -- the total --------------------------------------------------------------------------------

    def total(self, position: int, spans: Iterable[Span]) -> Total:
        """Returns the total of a position: the one that was summed together, else one made of these spans' sums."""
        if self._summed is not None:
            total, self._summed = self._summed, None
            return total
        there = self._sums_of_all(position, spans)
        add = partial(add_up, there, _all_parts(spans), self._node.router.allocate)
        return Total(add, sum(sums.nbytes for sums in there.values()))

    def sum_together(self, action: SumTogether) -> None:
        """Begins to add up the contributions of all workers of the view, by a process group or in slices.

        Calls the core's `note_summed` once the total is there; at once if layouts differ: that total says so.
        """
        there = self._sums_of_all(action.position, action.spans)
        whole = add_up({span: sums.without_arrays() for span, sums in there.items()}, _all_parts(action.spans))
        if whole.has_unlike_layouts:
            self._summed = Total.of(whole)
            self._core.note_summed(action.view, action.position)
        elif self._together is not None:
            self._node.own(self._sum_by_group(self._together, action, whole), "sum together")
        else:
            own = {span: sums for span, sums in there.items() if span in self._own}
            received = {span: sums for span, sums in there.items() if span not in own}
            self._slices.begin(action, own, received, whole)

    async def _sum_by_group(self, together: GroupSums, action: SumTogether, whole: Sums) -> None:
        """Adds up by a process group, then calls the core's `note_summed`, unless the view has changed meanwhile."""
        mine = [self._own[span].arrays for span in sorted(self._own)]
        arrays = await together.sum(action.view, Sums.zeros(whole.layout).arrays, mine)
        if arrays is not None and action.view == self._core.number:
            self._summed = Total.of(Sums(whole.layout, arrays, whole.collected))
            self._core.note_summed(action.view, action.position)
            self._changed()

    def take_sliced(self) -> bool:
        """If the sums of all slices are there, keeps the total, and tells the core; else returns False."""
        made = self._slices.take_total()
        if made is None:
            return False
        at, self._summed = made
        self._core.note_summed(at.view, at.position)
        return True

    @property
    def awaited_slices(self) -> tuple[str, ...]:
        """The other workers whose sums of slices are missing here."""
        return self._slices.awaited

    def _sums_of_all(self, position: int, spans: Iterable[Span]) -> dict[Span, Sums]:
        """Returns span -> sums: what this worker and the others of the view contributed to a position."""
        return {span: self._own.get(span) or self._received[self._core.number, position, span] for span in spans}

    # -- what follows -----------------------------------------------------------------------------

    def begin_view(self, view: View, report: FlushReport) -> None:
        """Begins a view: keeps the sums that this worker reports as its own, and drops all others of earlier views.

        A reported sum may be one that another worker sent in an earlier view.
        """
        number, at = view.number, report.position
        before = {
            span: sums
            for (view_then, position, span), sums in sorted(self._received.items(), key=_by_view)
            if view_then < number and position == at
        }
        self._own = {span: self._own.get(span) or before[span] for span in report.held}
        self._summed = None
        self._encoded.clear()
        self._received = {key: sums for key, sums in self._received.items() if key[0] >= number}
        self._slices.drop(number, at)
        if self._together is not None:
            self._together.begin_view(view)

    def end_position(self, position: int) -> None:
        """Drops all sums of a position and those before it: this worker holds their totals."""
        self._own.clear()
        self._encoded.clear()
        self._received = {key: sums for key, sums in self._received.items() if key[1] > position}
        self._slices.drop(self._core.number, position + 1)


def _all_parts(spans: Iterable[Span]) -> Span:
    """Returns the span of all parts of a position, from the spans that its total is made of."""
    return Span(0, max(span.end for span in spans))


def _by_view(item: tuple[tuple[int, int, Span], Sums]) -> int:
    return item[0][0]
