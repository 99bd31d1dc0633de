"""One worker of an elastic job, without values, clock or messages' transport.

    outside ──enter, then a view that lists it──► flushing ──reports of all──► lacking ──totals──► working
       ▲                                             ▲  └──────────────────────────────────────────►│
       └──────────── a view without it ──────────────┴──────────── a new view ──────────────────────┘

    state      it takes
    outside    the totals of a donor; views
    flushing   reports of its view; it completes nothing, and keeps the parts that user code finishes
    lacking    totals of its view
    working    contributions of its view

1. A worker sends the sums of the spans that it is the source of, once user code has reached the position, and an empty
   contribution if there are none. A position is complete with the contributions of all workers of the view.
2. Messages name their view. Those of an older view change nothing; the caller answers them with the newer view. The
   caller keeps those of a newer view until this worker has read it.
3. Contributions carry a *tag*, a digest of all totals so far and of what user code asked for. A position whose tags
   differ is never complete: the next view is without the outvoted workers.
4. A total is *stable* for a worker that knows from every worker of its view that it holds the total: by a contribution
   to a later position, a report, or an answer after the last one. Only stable totals may count outside.
5. The workers of a view may add up together: by another communicator (`together`), or, if the sums are large, in
   slices. Each worker with parts then *owns* a range of the elements: it gets this slice of all sums, and sends the sum
   of the slice to all others. Such contributions carry no whole sums (`apart`): a worker holds its own sums only.
   Adding begins once all contributions are there. The position is complete for the workers that got the total; a view
   that comes first ends the attempt, and nothing of it is used in the next one.
6. Parts of the next position may be given out together with a total (`parts_ahead`). Reports name them as begun.

The caller calls a method for each event, and then carries `take()` out, in order. It keeps the value of each held span
and of each total until an action drops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from taskgraph.protocol.elastic.flush import Outcome, Report, deal_all, settle
from taskgraph.protocol.elastic.tree import Span, cover, halves, parent
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.frozen import frozen

__all__ = [
    "Action",
    "Complete",
    "Contribute",
    "Contribution",
    "Dealt",
    "Differ",
    "Drop",
    "GiveTotals",
    "Holds",
    "Merge",
    "NoneWhole",
    "Outside",
    "Phase",
    "SendReport",
    "Stable",
    "SumTogether",
    "Worker",
]


class Phase(StrEnum):
    OUTSIDE = "outside"
    FLUSHING = "flushing"
    LACKING = "lacking"
    WORKING = "working"


@frozen
class Contribution:
    """A message: the sums of these spans of a position, which the sender is the source of.

    Attributes:
        tag: a digest of all totals so far and of what user code asks for.
        large: the sums are large enough to be added up in slices.
        apart: the message has no whole sums: the workers of the view add up together.
    """

    view: int
    position: int
    spans: tuple[Span, ...]
    tag: bytes
    large: bool = False
    apart: bool = False


@frozen
class SendReport:
    """Send the report to all other workers of the view, with the view: a worker that has not read it reads it so.

    Hold the sums that the report names, also those that were received, and drop all others of the position at work.
    """

    view: View
    report: Report


@frozen
class Contribute:
    """Send the contribution to all other workers of the view, with the sums.

    Attributes:
        owners: if the sums are added up in slices, the workers that own one each: send each of them its slice.
    """

    contribution: Contribution
    owners: tuple[str, ...] = ()


@frozen
class Merge:
    """Replace the sums of both halves by their sum."""

    span: Span


@frozen
class Drop:
    """Drop the held sums of these spans of the position at work."""

    spans: tuple[Span, ...]


@frozen
class Complete:
    """Add the held spans of this position, along the tree: that is the total. Keep it until it is stable."""

    position: int
    spans: tuple[Span, ...]


@frozen
class SumTogether:
    """Add up what this worker contributed with what all others did, in the same way on all workers; then call `summed`.

    Attributes:
        spans: of all workers; together they have all parts.
        owners: the workers that own a slice each; none with another communicator.
    """

    view: int
    position: int
    spans: tuple[Span, ...]
    owners: tuple[str, ...]


@frozen
class GiveTotals:
    """Send the totals `first` to `end - 1` to a worker that lacks them."""

    view: int
    to: str
    first: int
    end: int


@frozen
class Stable:
    """All workers of the view hold the totals below `position`; said again once `all_whole` is true."""

    position: int


@frozen
class Holds:
    """Tell all other workers of the view that this one holds the totals below `position`."""

    view: int
    position: int


@frozen
class Differ:
    """The tags of the workers differ at this position: their totals do, their state, or what their user code asks for.

    Attributes:
        outvoted: the workers to exclude: all but the largest group of equal tags; of several, the one with the most
            senior worker stays.
    """

    position: int
    outvoted: tuple[str, ...]


@frozen
class Outside:
    """This worker is in no view: compute nothing more, and keep the state whose last total was stable."""


@frozen
class NoneWhole:
    """No whole worker is left in this view: only a return to a checkpoint can go on."""

    view: int


Action = (
    SendReport
    | Contribute
    | Merge
    | Drop
    | SumTogether
    | Complete
    | GiveTotals
    | Holds
    | Stable
    | Differ
    | Outside
    | NoneWhole
)


_FEWEST_OWNERS = 3
"""Two workers send each other all sums: slices would be as many bytes, and one message later."""


class Dealt(NamedTuple):
    """Which parts of the position at work the contributions of each worker have to cover.

    Attributes:
        view: the number of the view.
        due: worker -> parts; empty until the parts are dealt.
    """

    view: int
    due: Mapping[str, frozenset[int]]

    @property
    def owners(self) -> tuple[str, ...]:
        """The workers that own a slice each, if sums are large; none if there are too few."""
        owners = tuple(worker for worker, parts in self.due.items() if parts)
        return owners if len(owners) >= _FEWEST_OWNERS else ()


_NOT_DEALT = Dealt(-1, {})


class _Round:
    """What a worker knows of the position at work.

    Attributes:
        parts: the number of parts; 0 until user code has reached the position.
        tag: see `Contribution`.
        own: spans of which this worker holds the sum, other than those received in this view.
        begun: parts that user code has begun to compute, or finished, or will as soon as it is there.
        parts_before: the number of parts of the position before; 0: unknown.
        ahead: the number of parts with which some were given out before user code was there; 0: none were.
        dealt: in this view.
        foreseen: what will be dealt, if parts were given out before user code was there.
        waiting: parts dealt to this worker that user code has not begun, in order.
        targets: spans that this worker contributes.
        received: worker -> the spans that it contributed in this view, in the order of arrival.
        tags: worker -> the tag of its contributions.
        large: the sums are large enough for slices.
        apart: contributions of this view have no whole sums.
        summing: the workers of this view add up together; `summed`: they have.
        outvoted: workers whose tags differ; what they contribute is dropped.
    """

    __slots__ = (
        *(
            "ahead",
            "apart",
            "begun",
            "dealt",
            "foreseen",
            "large",
            "outvoted",
            "own",
            "parts",
            "parts_before",
            "received",
        ),
        *("summed", "summing", "tag", "tags", "targets", "waiting"),
    )

    def __init__(self, parts_before: int = 0) -> None:
        self.parts = self.ahead = 0
        self.parts_before = parts_before
        self.tag = b""
        self.own: set[Span] = set()
        self.begun: set[int] = set()
        self.dealt = self.foreseen = _NOT_DEALT
        self.waiting: list[int] = []
        self.targets: tuple[Span, ...] = ()
        self.received: dict[str, list[Span]] = {}
        self.tags: dict[str, bytes] = {}
        self.large = self.apart = self.summing = self.summed = False
        self.outvoted: tuple[str, ...] = ()

    @property
    def due(self) -> Mapping[str, frozenset[int]]:
        return self.dealt.due

    def stop(self) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        """Ends the exchange of a view. Returns the spans held, and the parts begun that are not among them."""
        if not self.apart:
            self.own.update(span for spans in self.received.values() for span in spans)
        self.received, self.tags, self.outvoted = {}, {}, ()
        self.apart = self.summing = self.summed = False
        self.dealt = self.foreseen = _NOT_DEALT
        self.waiting, self.targets = [], ()
        held = {part for span in self.own for part in span.parts}
        return tuple(sorted(self.own)), tuple(sorted(self.begun - held))

    def keep(self, outcome: Outcome, me: str) -> tuple[Span, ...]:
        """Keeps the spans that this worker is the source of. Returns the others."""
        kept = {
            span
            for span in self.own
            if outcome.sources.get(span) == me or all(outcome.begun.get(part) == me for part in span.parts)
        }
        dropped = tuple(sorted(self.own - kept))
        self.own = kept
        self.begun &= {part for part, worker in outcome.begun.items() if worker == me}
        self.begun.difference_update(part for span in dropped for part in span.parts)
        return dropped

    def deal(self, dealt: Dealt, me: str) -> None:
        """Notes which parts each worker contributes."""
        self.dealt = dealt
        self.targets = cover(dealt.due[me], self.parts)
        held = {part for span in self.own for part in span.parts}
        self.waiting = sorted(dealt.due[me] - held - self.begun)

    def compute_again(self, span: Span, me: str) -> None:
        """Drops a span of which some parts have another source: this worker computes the others anew."""
        self.begun.difference_update(span.parts)
        self.waiting = sorted({*self.waiting, *(self.due[me] & {*span.parts})})

    def add(self, span: Span) -> list[Span]:
        """Holds a span. Returns the spans that its sum completes, each after its halves."""
        self.own.add(span)
        merged: list[Span] = []
        while span not in self.targets:
            above = parent(span, self.parts)
            if above is None or not self.own.issuperset(halves(above)):
                break
            self.own.difference_update(halves(above))
            self.own.add(above)
            merged.append(above)
            span = above
        return merged

    def covered(self, worker: str) -> bool:
        """True if the worker contributed all that it has to."""
        spans = self.received.get(worker)
        return spans is not None and self.due[worker].issubset({part for span in spans for part in span.parts})


def _outvoted(workers: Sequence[str], tags: Mapping[str, bytes]) -> tuple[str, ...]:
    """Returns the workers without the tag that most workers have; see `Differ`. `workers` is in order of seniority."""
    counts = Counter(tags[worker] for worker in workers)  # in the order of the most senior worker with each tag
    chosen = max(counts, key=counts.__getitem__)
    return tuple(worker for worker in workers if tags[worker] != chosen)


class Worker:
    """The state of one worker.

    Args:
        me: its node id.
        position: the number of totals that its state rests on.
        whole: it is of the first view of its lineage.
        together: another communicator makes the totals.

    Attributes:
        view: the newest view that it has read; None: none.
        phase: see the module.
        position: the number of totals that it holds.
        whole: see `flush`.
        stable: all workers of the view are known to hold the totals below this position.
    """

    def __init__(self, me: str, *, position: int = 0, whole: bool = False, together: bool = False) -> None:
        self.view: View | None = None
        self.phase = Phase.OUTSIDE
        self.position = position
        self.whole = whole
        self.stable = 0
        self._me = me
        self._together = together
        self._since = -1
        self._reports: dict[str, Report] = {}
        self._outcome: Outcome | None = None
        self._known: dict[str, int] = {}  # worker of the view -> the position that it is known to have reached
        self._at_work: set[str] = set()  # workers known to have heard all reports of this view
        self._round = _Round()
        self._early: list[tuple[str, Contribution]] = []  # to the next position
        self._ended = False  # user code has returned
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Returns the actions since the last call."""
        taken, self._actions = self._actions, []
        return taken

    @property
    def awaited(self) -> tuple[str, ...]:
        """The other workers of the view that this one waits for: their reports, totals or contributions."""
        if self.view is None or self.phase == Phase.OUTSIDE:
            return ()
        if self.phase == Phase.FLUSHING:
            return tuple(w for w in self.view.workers if w not in self._reports)
        if self.phase == Phase.LACKING:
            return () if self._outcome is None else (self._outcome.donor,)
        return tuple(w for w in self._round.due if w != self._me and not self._round.covered(w))

    @property
    def dealt(self) -> Dealt:
        """The parts of the position at work, as they are dealt in this view, or will be. May be read in any thread."""
        known = self._round
        return known.dealt if known.dealt.due else known.foreseen

    @property
    def all_whole(self) -> bool:
        """True once all workers of the view are known to be whole, and to hold what its flush ended with.

        A newcomer that holds all totals is not whole before it has heard all reports, which its messages then show.
        """
        if self.phase != Phase.WORKING or self._outcome is None or self.stable < self._outcome.position:
            return False
        return all(report.whole or worker in self._at_work for worker, report in self._reports.items())

    # -- views ------------------------------------------------------------------------------------

    def enter(self, number: int) -> None:
        """This worker is about to propose the view of this number, by which it enters, or is of the first view."""
        self._since = number

    def read_view(self, view: View) -> None:
        """Stops, and reports. Call it for each view that is read, from etcd or from a report."""
        known = -1 if self.view is None else self.view.number
        if view.number < known or (view.number == known and self.phase != Phase.OUTSIDE):
            return
        self.view = view
        if view.since(self._me) != self._since:
            if self.phase != Phase.OUTSIDE:
                self.phase = Phase.OUTSIDE
                self._actions.append(Outside())
            return
        self.phase = Phase.FLUSHING
        held, begun = self._round.stop()
        self._reports, self._outcome, self._known, self._at_work, self._early = {}, None, {}, set(), []
        report = Report(self.position, self.whole, held, begun)
        self._actions.append(SendReport(view, report))
        self._hear(self._me, report)

    def report(self, worker: str, view: View, report: Report) -> bool:
        """Takes the report of another worker, which names its view. Returns False if this worker may be about to enter
        by that view: keep the report until then."""
        self.read_view(view)
        if self.view == view and self.phase == Phase.FLUSHING:
            self._hear(worker, report)
        return not (self.view == view and self.phase == Phase.OUTSIDE and self._me in view.workers)

    def _hear(self, worker: str, report: Report) -> None:
        assert self.view is not None
        self._reports.setdefault(worker, report)
        if not self._reports.keys() >= set(self.view.workers):
            return
        outcome = settle(self.view, self._reports)
        if outcome is None:
            self._actions.append(NoneWhole(self.view.number))
            return
        self._outcome = outcome
        self._known = {w: max(self._reports[w].position, self._known.get(w, 0)) for w in self.view.workers}
        if outcome.donor == self._me:
            self._actions += [
                GiveTotals(self.view.number, w, first, outcome.position) for w, first in outcome.lacking.items()
            ]
        if self.position == outcome.position:
            if dropped := self._round.keep(outcome, self._me):
                self._actions.append(Drop(dropped))
            self._begin_work()
        else:
            self.phase = Phase.LACKING
        self._note_stable()

    def _begin_work(self) -> None:
        self.phase, self.whole = Phase.WORKING, True
        self._at_work.add(self._me)
        if self._ended:
            self._say_holds()
        self._deal()

    # -- totals -----------------------------------------------------------------------------------

    def total(self, view: int, position: int) -> bool:
        """Takes a total that this worker lacks, from the donor of its view. Returns False if it is too early: keep it
        until this worker has read that view, and the flush has ended."""
        if self.view is None or view > self.view.number or (view == self.view.number and self.phase == Phase.FLUSHING):
            return False
        if view == self.view.number and self.phase == Phase.LACKING and position == self.position:
            assert self._outcome is not None
            self._next()
            if self.position == self._outcome.position:
                self._begin_work()
        return True

    def catch_up(self, position: int) -> None:
        """This worker is outside, and has the stable totals below a position."""
        assert self.phase == Phase.OUTSIDE
        if position > self.position:
            self.position = position
            self._round = _Round()  # user code may have begun the earlier one

    def _next(self) -> None:
        """This worker holds the total of the position at work."""
        self.position += 1
        self._round = _Round(self._round.parts)
        early, self._early = self._early, []
        for worker, contribution in early:
            self._receive(worker, contribution)
        self._knows(self._me, self.position)

    def holds(self, worker: str, view: int, position: int) -> bool:
        """Takes the message that a worker of the view holds all totals below a position. Returns False if it is of a
        view that this worker has not read: keep it until then."""
        if self.view is None or view > self.view.number:
            return False
        if view == self.view.number and self.phase != Phase.OUTSIDE:
            self._knows(worker, position, at_work=True)
        return True

    def _knows(self, worker: str, position: int, at_work: bool = False) -> None:
        self._known[worker] = max(position, self._known.get(worker, 0))
        heard_first = at_work and worker not in self._at_work
        if heard_first:
            self._at_work.add(worker)
        self._note_stable()
        if heard_first and self.all_whole:
            self._actions.append(Stable(self.stable))

    def _note_stable(self) -> None:
        if self._outcome is None:
            return  # not all workers of the view have reported
        stable = min(self._known.values())
        if stable > self.stable:
            self.stable = stable
            self._actions.append(Stable(stable))

    # -- parts ------------------------------------------------------------------------------------

    def parts_ahead(self) -> tuple[int, tuple[int, ...]]:
        """Gives out parts of the position at work before user code is there: it may have as many as the one before.

        Returns that number, and the parts; 0 if they are not known. If there are others, `begin` takes them back.
        """
        known = self._round
        if (
            self.phase != Phase.WORKING
            or known.parts
            or self._outcome is None
            or self.position <= self._outcome.position
        ):
            return 0, ()
        assert self.view is not None
        dealt = deal_all(self.view, known.parts_before)
        known.foreseen = Dealt(self.view.number, {w: frozenset(parts) for w, parts in dealt.items()})
        known.ahead, ahead = known.parts_before, dealt[self._me]
        known.begun.update(ahead)
        return known.ahead, ahead

    def begin(self, parts: int, tag: bytes) -> None:
        """User code has reached the position at work, which has this number of parts."""
        if self._round.ahead != parts:
            self._round.begun.clear()
        self._round.parts, self._round.tag = parts, tag
        self._deal()

    def _deal(self) -> None:
        if self.phase != Phase.WORKING or not self._round.parts or self._round.due:
            return
        assert self.view is not None and self._outcome is not None
        if self.position == self._outcome.position:
            dealt = self._outcome.deal(self._round.parts)
        else:
            dealt = deal_all(self.view, self._round.parts)
        due = {w: set(dealt.get(w, ())) for w in self.view.workers}
        if self.position == self._outcome.position:
            for span, worker in self._outcome.sources.items():
                due[worker].update(span.parts)
        self._round.deal(Dealt(self.view.number, {w: frozenset(parts) for w, parts in due.items()}), self._me)
        for span in sorted(self._round.own):
            if span in self._round.own:  # not merged meanwhile
                self._merge(span)
        self._contribute(self._round.targets)

    def take_parts(self, most: int | None = None) -> list[int]:
        """Returns parts that user code is to compute; they stay with this worker. None are there for now if it is
        empty."""
        taken = self._round.waiting[:most]
        del self._round.waiting[:most]
        self._round.begun.update(taken)
        return taken

    def computed(self, position: int, spans: Iterable[Span], *, large: bool = False) -> None:
        """User code has finished the parts of these spans, and added each span up.

        Args:
            large: see `Contribution`.
        """
        known = self._round
        if position != self.position or self.phase == Phase.OUTSIDE:
            return
        known.large |= large
        finished: set[int] = set()
        for span in spans:
            if not known.due:
                known.own.add(span)  # the outcome of the flush says whether it is kept
            elif known.due[self._me].issuperset(span.parts):
                known.waiting = [part for part in known.waiting if part not in span.parts]  # dealt again meanwhile
                self._merge(span)
                finished.update(span.parts)
            else:
                known.compute_again(span, self._me)
                self._actions.append(Drop((span,)))
        if finished:
            self._contribute([target for target in known.targets if not finished.isdisjoint(target.parts)])

    def _merge(self, span: Span) -> None:
        self._actions += [Merge(merged) for merged in self._round.add(span)]

    def _contribute(self, targets: Iterable[Span]) -> None:
        """Sends those targets that are complete; an empty contribution if this worker has no targets at all."""
        ready = tuple(target for target in targets if target in self._round.own)
        if not ready and self._round.targets:
            return
        assert self.view is not None
        large, owners = self._round.large, self._round.dealt.owners
        if self._together or not large:
            owners = ()
        apart = self._together or bool(owners)
        contribution = Contribution(self.view.number, self.position, ready, self._round.tag, large, apart)
        self._actions.append(Contribute(contribution, owners))
        self._receive(self._me, contribution)
        self._complete()

    def contribution(self, worker: str, contribution: Contribution) -> bool:
        """Takes a contribution. Returns False if it is of a view that this worker has not read: keep it until then."""
        if self.view is None or contribution.view > self.view.number:
            return False
        if contribution.view == self.view.number and self.phase != Phase.OUTSIDE:
            self._receive(worker, contribution)
            self._knows(worker, contribution.position, at_work=True)
            self._complete()
        return True

    def _receive(self, worker: str, contribution: Contribution) -> None:
        if contribution.position > self.position:
            self._early.append((worker, contribution))
        elif contribution.position == self.position and worker not in self._round.outvoted:
            self._round.tags[worker] = contribution.tag
            self._round.large |= contribution.large
            self._round.apart |= contribution.apart
            spans = self._round.received.setdefault(worker, [])
            spans += [span for span in contribution.spans if span not in spans]

    def _complete(self) -> None:
        """Completes the position at work if all workers of the view contributed all that they have to.

        Tags are compared as soon as there is one of each worker: workers that differ may wait for different parts.
        """
        known = self._round
        if self.phase != Phase.WORKING or not known.due or known.outvoted or not known.tags.keys() >= known.due.keys():
            return
        assert self.view is not None
        if any(tag != known.tag for tag in known.tags.values()):
            known.outvoted = _outvoted(self.view.workers, known.tags)
            for worker in known.outvoted:  # what they sent may rest on a wrong state: the next view does not hold it
                del known.received[worker]
            self._actions.append(Differ(self.position, known.outvoted))
            return
        if not all(map(known.covered, known.due)):
            return
        spans = tuple(sorted(span for spans in known.received.values() for span in spans))
        if known.apart and not known.summed:
            if not known.summing:
                known.summing = True
                owners = () if self._together else known.dealt.owners
                self._actions.append(SumTogether(self.view.number, self.position, spans, owners))
            return
        self._actions.append(Complete(self.position, spans))
        self._next()

    def summed(self, view: int, position: int) -> None:
        """The workers of a view have added up together; this one has the total."""
        if self.phase == Phase.WORKING and (view, position) == (getattr(self.view, "number", -1), self.position):
            self._round.summed = True
            self._complete()

    def ended(self) -> None:
        """User code has returned: it reaches no later position."""
        self._ended = True
        if self.phase == Phase.WORKING:
            self._say_holds()

    def _say_holds(self) -> None:
        assert self.view is not None
        self._actions.append(Holds(self.view.number, self.position))
