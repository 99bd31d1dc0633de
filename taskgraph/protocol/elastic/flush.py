"""The flush of a view: what its workers hold, and what follows from that.

All workers of the view report to all others, once. Everything here is a pure function of the view and all reports, so
every worker comes to the same outcome.

1. The position M of the view is the highest that a *whole* worker reported. A worker is whole if it has once held all
   totals that a flush ended with. Newcomers are not, until then: a total that only a newcomer knows of may be undone.
2. Workers below M get the totals that they lack from the *donor*, the most senior whole worker at M.
3. A span of M's parts that a worker at M holds has one source: the most senior of those who hold the largest span with
   these parts. All others drop theirs, so that a part has one instance in the view.
4. A part that a worker had begun to compute stays with that worker. All other parts are dealt in contiguous ranges, to
   workers that were in the view before; a worker that enters with the view gets parts from M + 1 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.frozen import frozen

__all__ = ["FlushOutcome", "FlushReport", "deal_all", "decide_flush"]


@frozen
class FlushReport:
    """What a worker held when it stopped.

    Attributes:
        position: the number of totals that it holds.
        whole: see the module.
        held: spans of the parts of `position` of which it holds the sum.
        begun: parts of `position` that it is computing.
    """

    position: int
    whole: bool
    held: tuple[Span, ...] = ()
    begun: tuple[int, ...] = ()


@frozen
class FlushOutcome:
    """The decisions of a flush, which every worker of the view makes alike from all reports.

    Attributes:
        position: of the view (M in the module).
        donor: gives totals to those that lack some.
        lacking: worker below M -> its position.
        sources: span of M's parts -> the worker that sends its sum.
        begun: part of M -> the worker that computes it already.
        dealt_to: the workers that compute the other parts of M.
    """

    position: int
    donor: str
    lacking: dict[str, int]
    sources: dict[Span, str]
    begun: dict[int, str]
    dealt_to: tuple[str, ...]

    def deal(self, parts: int) -> dict[str, tuple[int, ...]]:
        """Returns worker -> the parts of M, not in `sources`, that it computes, if M has this number of parts."""
        there = {part for span in self.sources for part in span.parts} | self.begun.keys()
        dealt = _deal_ranges([part for part in range(parts) if part not in there], self.dealt_to)
        for part, worker in self.begun.items():
            if part >= parts:
                continue  # it was begun ahead, with another number of parts
            dealt[worker] = tuple(sorted({*dealt.get(worker, ()), part}))
        return dealt


def deal_all(view: View, parts: int) -> dict[str, tuple[int, ...]]:
    """Returns worker -> the parts that it computes of a position that begins in this view."""
    return _deal_ranges(range(parts), view.workers)


def _deal_ranges(parts: Sequence[int], workers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Deals parts in contiguous ranges of nearly equal size, by seniority."""
    count, share = len(workers), len(parts)
    return {w: tuple(parts[i * share // count : (i + 1) * share // count]) for i, w in enumerate(workers)}


def decide_flush(view: View, reports: Mapping[str, FlushReport]) -> FlushOutcome | None:
    """Decides, from the reports of all workers of a view, where the view goes on, and who sends or computes what.

    Returns None if no worker is whole.
    """
    if not any(reports[w].whole for w in view.workers):
        return None
    position = max(reports[w].position for w in view.workers if reports[w].whole)
    at = [w for w in view.workers if reports[w].position == position]
    sources = _sources([(span, w) for w in at for span in reports[w].held])
    there = {part for span in sources for part in span.parts}
    begun: dict[int, str] = {}
    for worker in at:
        for part in reports[worker].begun:
            if part not in there:
                begun.setdefault(part, worker)
    before = tuple(entry.worker for entry in view.entries if entry.since < view.number)
    return FlushOutcome(
        position=position,
        donor=next(w for w in at if reports[w].whole),
        lacking={w: reports[w].position for w in view.workers if reports[w].position < position},
        sources=sources,
        begun=begun,
        dealt_to=before or view.workers,
    )


def _sources(held: Iterable[tuple[Span, str]]) -> dict[Span, str]:
    """Returns span -> the worker to send its sum: the largest spans in `held`, each with its most senior holder.

    `held` is in order of seniority. Any two spans of the tree are disjoint, or one contains the other.
    """
    chosen: dict[Span, str] = {}
    for span, worker in sorted(held, key=lambda pair: (pair[0].first - pair[0].end, pair[0].first)):
        if not any(span.overlaps(other) for other in chosen):
            chosen[span] = worker
    return chosen
