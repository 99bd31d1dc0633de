"""The round at work on one worker: which parts it computes, and which sums it holds.

    waiting ──taken by user code──► begun ──finished──► own ──added to its neighbours──► a target ──► contributed

1. A worker contributes the sums of the spans that it is the source of, once user code has reached the position. The
   flush of a view says what it is the source of; of a position that begins in the view, each worker has a range.
2. It adds up its spans along the tree, to the fewest spans that have its parts: its *targets*.
3. A part that user code has begun stays with this worker, also over a change of the view.
4. Parts of the next position may be given out together with a total (`give_ahead`), as if it had as many parts as the
   one before. Reports name them as begun.

What all workers contribute is in the round's `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from taskgraph.protocol.elastic.actions import Drop, Merge
from taskgraph.protocol.elastic.exchange import NOTHING_DUE, DueContributions, Exchange
from taskgraph.protocol.elastic.flush import FlushOutcome
from taskgraph.protocol.elastic.tree import Span, cover, halves, parent
from taskgraph.protocol.elastic.views import View

__all__ = ["PositionAtWork"]


class PositionAtWork:
    """What a worker knows of the position at work.

    Args:
        me: the worker's node id.
        parts_before: the number of parts of the position before; 0: unknown.

    Attributes:
        parts: the number of parts; 0 until user code has reached the position.
        tag: see `Contribution`.
        own: spans of which this worker holds the sum, other than those received in this view.
        begun: parts that user code has begun to compute, or finished, or that were given out ahead.
        ahead: the number of parts that was assumed when parts were given out ahead; 0: none were.
        dealt: what is due of each worker in this view.
        foreseen: what will be due, if parts were given out ahead.
        waiting: parts dealt to this worker that user code has not begun, in order.
        targets: spans that this worker contributes.
        exchange: the contributions of all workers of this view.
    """

    __slots__ = (
        *("_me", "ahead", "begun", "dealt", "exchange", "foreseen"),
        *("own", "parts", "parts_before", "tag", "targets", "waiting"),
    )

    def __init__(self, me: str, parts_before: int = 0) -> None:
        self._me = me
        self.parts_before = parts_before
        self.parts = self.ahead = 0
        self.tag = b""
        self.own: set[Span] = set()
        self.begun: set[int] = set()
        self.dealt = self.foreseen = NOTHING_DUE
        self.waiting: list[int] = []
        self.targets: tuple[Span, ...] = ()
        self.exchange = Exchange()

    @property
    def due(self) -> Mapping[str, frozenset[int]]:
        """worker -> the parts that it contributes in this view; {} until they are dealt."""
        return self.dealt.due

    # -- a change of the view ---------------------------------------------------------------------

    def end_view(self) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        """Ends the exchange of a view. Returns the spans held, also received ones, and the other parts begun.

        Received ones are held only if user code is at the position: before that this worker has no tag to compare.
        """
        received = self.exchange.end_view(self.tag)
        self.own.update(received if self.parts else ())
        self.dealt = self.foreseen = NOTHING_DUE
        self.waiting, self.targets = [], ()
        return tuple(sorted(self.own)), tuple(sorted(self.begun - self._held()))

    def keep(self, outcome: FlushOutcome) -> tuple[Span, ...]:
        """Keeps the spans that the flush left to this worker; drops the others, and returns them."""
        kept = {
            span
            for span in self.own
            if outcome.sources.get(span) == self._me or all(outcome.begun.get(part) == self._me for part in span.parts)
        }
        dropped = tuple(sorted(self.own - kept))
        self.own = kept
        self.begun &= {part for part, worker in outcome.begun.items() if worker == self._me}
        self.begun.difference_update(part for span in dropped for part in span.parts)
        return dropped

    def _held(self) -> set[int]:
        """Returns the parts whose sums this worker holds."""
        return {part for span in self.own for part in span.parts}

    # -- parts ------------------------------------------------------------------------------------

    def give_ahead(self, view: View) -> tuple[int, tuple[int, ...]]:
        """Gives out parts before user code has reached the position: it may have as many as the one before.

        Returns that number, and the parts of this worker; 0: user code is there already, or the number is unknown.
        """
        if self.parts:
            return 0, ()
        self.foreseen = DueContributions.of(view, self.parts_before)
        self.ahead, mine = self.parts_before, tuple(sorted(self.foreseen.due[self._me]))
        self.begun.update(mine)
        return self.ahead, mine

    def begin(self, parts: int, tag: bytes) -> None:
        """Notes that user code is at the position. Parts given out ahead are void if another number was assumed."""
        if self.ahead != parts:
            self.begun.clear()
        self.parts, self.tag = parts, tag

    def deal(self, view: View, outcome: FlushOutcome | None) -> list[Merge]:
        """Deals the parts in this view. Returns the additions that are possible with what this worker holds already.

        Args:
            outcome: of the view's flush, if the flush ended at this position.
        """
        self.dealt = DueContributions.of(view, self.parts, outcome)
        mine = self.due[self._me]
        self.targets = cover(mine, self.parts)
        self.waiting = sorted(mine - self._held() - self.begun)
        merged: list[Merge] = []
        for span in sorted(self.own):
            if span in self.own:  # not added to its neighbour meanwhile
                merged += self._add_span(span)
        return merged

    def take_parts(self, most: int | None) -> list[int]:
        """Returns waiting parts for user code, which begins them: at most this number, None: all."""
        taken = self.waiting[:most]
        del self.waiting[:most]
        self.begun.update(taken)
        return taken

    def finish(self, spans: Iterable[Span]) -> tuple[list[Merge | Drop], tuple[Span, ...]]:
        """Notes that user code has finished the parts of these spans.

        Returns which sums to merge or drop, and the targets, complete or not, that have some of these parts.
        """
        changes: list[Merge | Drop] = []
        finished: set[int] = set()
        for span in spans:
            if not self.due:
                self.own.add(span)  # the outcome of the flush says whether it is kept
            elif self.due[self._me].issuperset(span.parts):
                self.waiting = [part for part in self.waiting if part not in span.parts]  # dealt again meanwhile
                changes += self._add_span(span)
                finished.update(span.parts)
            else:  # some of its parts have another source: this worker computes the others anew
                self.begun.difference_update(span.parts)
                self.waiting = sorted({*self.waiting, *(self.due[self._me] & {*span.parts})})
                changes.append(Drop((span,)))
        return changes, tuple(target for target in self.targets if not finished.isdisjoint(target.parts))

    def _add_span(self, span: Span) -> list[Merge]:
        """Adds a span to `own`, and merges there what is possible now, up the tree to a target. Returns the merges."""
        self.own.add(span)
        merged: list[Merge] = []
        while span not in self.targets:
            above = parent(span, self.parts)
            if above is None or not self.own.issuperset(halves(above)):
                break
            self.own.difference_update(halves(above))
            self.own.add(above)
            merged.append(Merge(above))
            span = above
        return merged
