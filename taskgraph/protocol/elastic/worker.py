"""One worker of an elastic job, without values, clock or messages' transport: what follows from each event.

    outside ─note_entry, a view that lists it───► flushing ──reports of all──► lacking ──totals──► working
       ▲                                             ▲  └──────────────────────────────────────────►│
       └──────────── a view without it ──────────────┴──────────── a new view ──────────────────────┘

    state      it takes
    outside    the totals of a donor; views
    flushing   reports of its view; it completes nothing, and keeps the parts that user code finishes
    lacking    totals of its view
    working    contributions of its view

Messages name their view. Those of an older view change nothing. A report of a newer view is read as that view: so its
workers get it also while etcd is away. The caller keeps other messages of a newer view until this worker has read it.

The parts of the position at work are in `round`, the contributions to it, and whether it is complete, in `exchange`,
and which totals all workers hold in `stability`. The caller calls a method for each event, and then carries out what
`take_actions()` returns, in order (`actions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from taskgraph.protocol.elastic.actions import (
    Action,
    Complete,
    Contribute,
    Contribution,
    Drop,
    Excluded,
    GiveTotals,
    NoWholeWorker,
    SendPosition,
    SendReport,
    TotalsStable,
)
from taskgraph.protocol.elastic.exchange import DueContributions
from taskgraph.protocol.elastic.flush import FlushOutcome, FlushReport, decide_flush
from taskgraph.protocol.elastic.round import PositionAtWork
from taskgraph.protocol.elastic.stability import Stability
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View

__all__ = ["Phase", "Worker"]


class Phase(StrEnum):
    OUTSIDE = "outside"
    FLUSHING = "flushing"
    LACKING = "lacking"
    WORKING = "working"


class Worker:
    """The state of one worker.

    Args:
        me: its node id.
        position: the number of totals that its state rests on.
        whole: it is in the first view of its lineage.
        together: another communicator makes the totals.

    Attributes:
        view: the newest view that it has read; None: it has read none.
        phase: its state, as in the module.
        position: the number of totals that it holds.
        whole: see `flush`.
    """

    def __init__(self, me: str, *, position: int = 0, whole: bool = False, together: bool = False) -> None:
        self.view: View | None = None
        self.phase = Phase.OUTSIDE
        self.position = position
        self.whole = whole
        self._me = me
        self._together = together
        self._since = -1
        self._reports: dict[str, FlushReport] = {}
        self._outcome: FlushOutcome | None = None
        self._stability = Stability()
        self._round = PositionAtWork(me)
        self._early: list[tuple[str, Contribution]] = []  # to the next position
        self._ended = False  # user code has returned
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Returns the actions that were added since the last call, in order."""
        taken, self._actions = self._actions, []
        return taken

    @property
    def me(self) -> str:
        """This worker's node id."""
        return self._me

    @property
    def has_contributions(self) -> bool:
        """True if another worker has contributed to the position at work in this view."""
        return any(worker != self._me for worker in self._round.exchange.received)

    @property
    def number(self) -> int:
        """The number of the view; -1: it has read none."""
        return -1 if self.view is None else self.view.number

    @property
    def stable(self) -> int:
        """The position below which all workers of the view are known to hold all totals."""
        return self._stability.position

    @property
    def awaited(self) -> tuple[str, ...]:
        """The other workers of the view that this one waits for: their reports, totals or contributions."""
        if self.view is None or self.phase == Phase.OUTSIDE:
            return ()
        if self.phase == Phase.FLUSHING:
            return tuple(w for w in self.view.workers if w not in self._reports)
        if self.phase == Phase.LACKING:
            return () if self._outcome is None else (self._outcome.donor,)
        due, exchange = self._round.due, self._round.exchange
        return tuple(w for w in due if w != self._me and not exchange.covered(w, due))

    @property
    def dealt(self) -> DueContributions:
        """The parts of the position at work, as they are dealt in this view, or will be. May be read in any thread."""
        known = self._round
        return known.dealt if known.dealt.due else known.foreseen

    @property
    def all_whole(self) -> bool:
        """True once all workers of the view are known to be whole, and to hold what its flush ended with."""
        if self.phase != Phase.WORKING or self._outcome is None or self.stable < self._outcome.position:
            return False
        return self._stability.are_whole(self._reports)

    # -- views ------------------------------------------------------------------------------------

    def note_entry(self, number: int) -> None:
        """Notes the number of the view by which this worker is about to enter; in other entries it is outside."""
        self._since = number

    def read_view(self, view: View) -> None:
        """Takes a view, from etcd or a report. If it is newer, this worker stops and reports; or is outside now, if the
        view does not list its entry."""
        if view.number < self.number or (view.number == self.number and self.phase != Phase.OUTSIDE):
            return
        self.view = view
        if view.since(self._me) != self._since:
            if self.phase != Phase.OUTSIDE:
                self.phase = Phase.OUTSIDE
                self._actions.append(Excluded())
            return
        self.phase = Phase.FLUSHING
        held, begun = self._round.end_view()
        self._reports, self._outcome, self._early = {}, None, []
        self._stability.begin_view()
        report = FlushReport(self.position, self.whole, held, begun)
        self._actions.append(SendReport(view, report))
        self._take_report(self._me, report)

    def receive_report(self, worker: str, view: View, report: FlushReport) -> bool:
        """Takes the report of another worker, and the view that it names. Returns False if this worker may be about to
        enter by that view: then the caller keeps the report until it has."""
        self.read_view(view)
        if self.view == view and self.phase == Phase.FLUSHING:
            self._take_report(worker, report)
        return not (self.view == view and self.phase == Phase.OUTSIDE and self._me in view.workers)

    def _take_report(self, worker: str, report: FlushReport) -> None:
        """Keeps a report of this worker's view. The last one ends the flush: this worker works, or lacks totals."""
        assert self.view is not None
        self._reports.setdefault(worker, report)
        if not self._reports.keys() >= set(self.view.workers):
            return
        outcome = decide_flush(self.view, self._reports)
        if outcome is None:
            self._actions.append(NoWholeWorker(self.view.number))
            return
        self._outcome = outcome
        self._stability.end_flush({worker: self._reports[worker] for worker in self.view.workers})
        if outcome.donor == self._me:
            self._actions += [
                GiveTotals(self.view.number, w, first, outcome.position) for w, first in outcome.lacking.items()
            ]
        if self.position == outcome.position:
            if dropped := self._round.keep(outcome):
                self._actions.append(Drop(dropped))
            self._begin_work()
        else:
            self.phase = Phase.LACKING
        self._note_stable()

    def _begin_work(self) -> None:
        """Begins to work in the view: this worker holds all totals that the flush ended with."""
        self.phase, self.whole = Phase.WORKING, True
        self._stability.note_has_reports(self._me)
        if self._ended:
            self._send_position()
        self._deal()

    # -- totals -----------------------------------------------------------------------------------

    def receive_total(self, view: int, position: int) -> bool:
        """Notes the total of a position, which the donor of a view sent. Returns False if it is too early: then the
        caller keeps it until this worker has read that view, and the flush has ended."""
        if view > self.number or (view == self.number and self.phase == Phase.FLUSHING):
            return False
        if view == self.number and self.phase == Phase.LACKING and position == self.position:
            assert self._outcome is not None
            self._advance()
            if self.position == self._outcome.position:
                self._begin_work()
        return True

    def catch_up(self, position: int) -> None:
        """Moves a worker that is outside up to `position`, since it has got the stable totals below that."""
        assert self.phase == Phase.OUTSIDE
        if position > self.position:
            self.position = position
            self._round = PositionAtWork(self._me)  # user code may have begun the earlier one

    def _advance(self) -> None:
        """Moves on to the next position, since this worker holds the total of the one at work."""
        self.position += 1
        self._round = PositionAtWork(self._me, self._round.parts)
        early, self._early = self._early, []
        for worker, contribution in early:
            self._receive(worker, contribution)
        self._note_position(self._me, self.position)

    def receive_holds_totals(self, worker: str, view: int, position: int) -> bool:
        """Takes another worker's message that it holds all totals below a position. Returns False if its view has not
        been read here: then the caller keeps the message until it is."""
        if view > self.number:
            return False
        if view == self.number and self.phase != Phase.OUTSIDE:
            self._note_position(worker, position, has_all_reports=True)
        return True

    def _note_position(self, worker: str, position: int, has_all_reports: bool = False) -> None:
        """Notes that a worker holds the totals below a position; `has_all_reports`: and all reports of the view."""
        self._stability.note_position(worker, position)
        begins_work = has_all_reports and self._stability.note_has_reports(worker)
        self._note_stable()
        if begins_work and self.all_whole:
            self._actions.append(TotalsStable(self.stable))

    def _note_stable(self) -> None:
        """Adds an action `TotalsStable` if more totals are stable than before."""
        if self._outcome is not None and self._stability.grow():
            self._actions.append(TotalsStable(self.stable))

    # -- parts ------------------------------------------------------------------------------------

    def give_parts_ahead(self) -> tuple[int, tuple[int, ...]]:
        """Gives out this worker's parts of the position at work before user code has reached it.

        Assumes as many parts as the position before had; if that is wrong, `begin` takes them back. Returns that
        number, and the parts; (0, ()): none are given out for now.
        """
        if self.phase != Phase.WORKING or self._outcome is None or self.position <= self._outcome.position:
            return 0, ()
        assert self.view is not None
        return self._round.give_ahead(self.view)

    def begin(self, parts: int, tag: bytes) -> None:
        """Notes that user code has reached the position at work, which has this number of parts."""
        self._round.begin(parts, tag)
        self._deal()

    def _deal(self) -> None:
        """Deals the parts of the position at work, once user code is there, and sends the targets that are complete."""
        if self.phase != Phase.WORKING or not self._round.parts or self._round.due:
            return
        assert self.view is not None and self._outcome is not None
        outcome = self._outcome if self.position == self._outcome.position else None
        self._actions += self._round.deal(self.view, outcome)
        self._contribute(self._round.targets)

    def take_parts(self, most: int | None = None) -> list[int]:
        """Returns up to `most` parts (None: all) that user code has to compute; they stay with this worker. []: none
        for now."""
        return self._round.take_parts(most)

    def note_computed(self, position: int, spans: Iterable[Span], *, large: bool = False) -> None:
        """Notes that user code has finished the parts of these spans of a position, and that their sums are there.

        Args:
            large: see `Contribution`.
        """
        if position != self.position or self.phase == Phase.OUTSIDE:
            return
        self._round.exchange.large |= large
        changes, targets = self._round.finish(spans)
        self._actions += changes
        if targets:
            self._contribute(targets)

    def _contribute(self, targets: Iterable[Span]) -> None:
        """Sends those of `targets` that are complete; an empty contribution if this worker has no targets at all."""
        ready = tuple(target for target in targets if target in self._round.own)
        if not ready and self._round.targets:
            return
        large = self._round.exchange.large
        owners = self._round.dealt.owners if large and not self._together else ()
        apart = self._together or bool(owners)
        contribution = Contribution(self.number, self.position, ready, self._round.tag, large, apart)
        self._actions.append(Contribute(contribution, owners))
        self._receive(self._me, contribution)
        self._act_on_contributions()

    def receive_contribution(self, worker: str, contribution: Contribution) -> bool:
        """Takes a contribution. Returns False if its view has not been read here: the caller keeps it until it is."""
        if contribution.view > self.number:
            return False
        if contribution.view == self.number and self.phase != Phase.OUTSIDE:
            self._receive(worker, contribution)
            self._note_position(worker, contribution.position, has_all_reports=True)
            self._act_on_contributions()
        return True

    def _receive(self, worker: str, contribution: Contribution) -> None:
        """Takes a contribution to the position at work, keeps one to a later position, and drops one to an earlier."""
        if contribution.position > self.position:
            self._early.append((worker, contribution))
        elif contribution.position == self.position:
            self._round.exchange.receive(worker, contribution)

    def _act_on_contributions(self) -> None:
        """Adds the action that `Exchange.decide` returns, if any. Moves on if that completes the position."""
        if self.phase != Phase.WORKING:
            return
        assert self.view is not None
        known = self._round
        found = known.exchange.decide(self.view, self.position, known.dealt, known.tag, together=self._together)
        if found is not None:
            self._actions.append(found)
        if isinstance(found, Complete):
            self._advance()

    def note_summed(self, view: int, position: int) -> None:
        """Notes that this worker has the total that the workers of a view have added up together."""
        if self.phase == Phase.WORKING and (view, position) == (self.number, self.position):
            self._round.exchange.summed = True
            self._act_on_contributions()

    def note_ended(self) -> None:
        """Notes that user code has returned: it reaches no later position."""
        self._ended = True
        if self.phase == Phase.WORKING:
            self._send_position()

    def _send_position(self) -> None:
        """Tells the other workers that this one holds all totals below its position."""
        self._actions.append(SendPosition(self.number, self.position))
