"""The contributions of a view to the position at work: when its total is complete.

1. A position is complete with the contributions of all workers of the view. Each has to cover the parts that the worker
   is *due* to contribute; a worker without parts sends an empty one.
2. Contributions carry a *tag*, a digest of all totals so far and of what user code asked for. A position whose tags
   differ is never complete: the next view is without the outvoted workers, and nobody holds their sums.
3. The workers of a view may add up together: by another communicator, or, if the sums are large, in slices. Each worker
   with parts then *owns* a range of the elements: it gets this slice of all sums, and sends the sum of the slice to all
   others. Such contributions carry no whole sums (`apart`): a worker holds its own sums only. Adding begins once all
   contributions are there. The position is complete for the workers that got the total; a view that comes first ends
   the attempt, and nothing of it is used in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from taskgraph.protocol.elastic.actions import Complete, Contribution, SumTogether, UnequalTags
from taskgraph.protocol.elastic.flush import FlushOutcome, deal_all
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View

__all__ = ["NOTHING_DUE", "DueContributions", "Exchange"]

_FEWEST_OWNERS = 3
"""Two workers send each other all sums: slices would be as many bytes, and one message later."""


class DueContributions(NamedTuple):
    """Which parts of the position at work each worker has to contribute: those it computes, and those it holds.

    Attributes:
        view: the number of the view.
        due: worker -> parts; {} until the parts are dealt.
    """

    view: int
    due: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, view: View, parts: int, outcome: FlushOutcome | None = None) -> DueContributions:
        """Deals the parts of a position to the workers of a view.

        Args:
            parts: their number.
            outcome: of the view's flush, if the flush ended at this position: then what workers hold stays theirs.
        """
        dealt = deal_all(view, parts) if outcome is None else outcome.deal(parts)
        due = {worker: set(dealt.get(worker, ())) for worker in view.workers}
        for span, worker in () if outcome is None else outcome.sources.items():
            due[worker].update(span.parts)
        return cls(view.number, {worker: frozenset(parts) for worker, parts in due.items()})

    @property
    def owners(self) -> tuple[str, ...]:
        """The workers that own a slice each, if sums are large; () if fewer than `_FEWEST_OWNERS` have parts."""
        owners = tuple(worker for worker, parts in self.due.items() if parts)
        return owners if len(owners) >= _FEWEST_OWNERS else ()


NOTHING_DUE = DueContributions(-1, {})


class Exchange:
    """The contributions of the workers of a view to one position.

    Attributes:
        received: worker -> the spans that it contributed in this view.
        tags: worker -> the tag of its contributions.
        outvoted: workers whose tags differ, as in `UnequalTags`.
        large: the sums are large enough for slices; stays so in later views.
        apart: contributions of this view have no whole sums.
        summing: the workers of this view add up together; `summed`: they have.
    """

    __slots__ = ("apart", "large", "outvoted", "received", "summed", "summing", "tags")

    def __init__(self) -> None:
        self.received: dict[str, set[Span]] = {}
        self.tags: dict[str, bytes] = {}
        self.outvoted: tuple[str, ...] = ()
        self.large = self.apart = self.summing = self.summed = False

    def end_view(self, tag: bytes) -> set[Span]:
        """Forgets the contributions of this view. Returns the spans whose whole sums this worker has received with its
        own tag, but not those that came with another tag, too: others may rest on a wrong state, or on another call.
        """
        whole, unlike = set[Span](), set[Span]()
        for worker, spans in self.received.items() if not self.apart else ():
            (whole if self.tags[worker] == tag else unlike).update(spans)
        self.received, self.tags, self.outvoted = {}, {}, ()
        self.apart = self.summing = self.summed = False
        return whole - unlike

    def receive(self, worker: str, contribution: Contribution) -> None:
        """Takes a contribution to this position, also the worker's own."""
        self.tags[worker] = contribution.tag
        self.large |= contribution.large
        self.apart |= contribution.apart
        self.received.setdefault(worker, set()).update(contribution.spans)

    def covered(self, worker: str, due: Mapping[str, frozenset[int]]) -> bool:
        """True if the spans received from the worker have all parts that it is due to contribute."""
        spans = self.received.get(worker)
        return spans is not None and due[worker].issubset({part for span in spans for part in span.parts})

    def decide(
        self, view: View, position: int, dealt: DueContributions, tag: bytes, *, together: bool
    ) -> Complete | SumTogether | UnequalTags | None:
        """Decides if the total can be made, all workers have to add up together, or tags differ; None: not yet.

        Tags are compared as soon as there is one of each worker: workers that differ may wait for different parts.

        Args:
            dealt: what is due in this view.
            tag: of this worker.
            together: another communicator makes the totals.
        """
        due = dealt.due
        if not due or self.outvoted or not self.tags.keys() >= due.keys():
            return None
        if any(other != tag for other in self.tags.values()):
            self.outvoted = _outvoted(view.workers, self.tags)
            return UnequalTags(position, self.outvoted)
        if not all(self.covered(worker, due) for worker in due):
            return None
        spans = tuple(sorted(span for spans in self.received.values() for span in spans))
        if not self.apart or self.summed:
            return Complete(position, spans)
        if self.summing:
            return None
        self.summing = True
        return SumTogether(view.number, position, spans, () if together else dealt.owners)


def _outvoted(workers: Sequence[str], tags: Mapping[str, bytes]) -> tuple[str, ...]:
    """Returns the workers without the tag that most have; see `UnequalTags`. `workers` is in order of seniority."""
    counts = Counter(tags[worker] for worker in workers)  # in the order of the most senior worker with each tag
    chosen = max(counts, key=counts.__getitem__)
    return tuple(worker for worker in workers if tags[worker] != chosen)
