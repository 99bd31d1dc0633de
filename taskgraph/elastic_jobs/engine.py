"""One worker at work: carries out what the core decides, and answers user code.

    user code ──ask──► Engine ──events──► core (`protocol.elastic.worker`)
        ▲                 │ ◄──actions──────┘
        └──part or total──┘ ──messages──► other workers

The engine keeps the values: the sums of held spans, what other workers sent, and the totals. Everything here happens on
the event loop; user code asks from its thread, and adds up there (`adding`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from taskgraph.elastic_jobs.adding import Finished, Outgoing, Total, add_up
from taskgraph.elastic_jobs.outbox import Outbox
from taskgraph.elastic_jobs.slices import Slices, encode_slices
from taskgraph.elastic_jobs.sums import Sums, decode_sums, encode_sums
from taskgraph.protocol.elastic import worker as actions
from taskgraph.protocol.elastic.flush import Report
from taskgraph.protocol.elastic.tree import Span, halves
from taskgraph.protocol.elastic.views import Entry, View
from taskgraph.protocol.elastic.worker import Contribution, Phase, Worker
from taskgraph.protocol.messages import (
    Call,
    Encoded,
    FirstPart,
    GroupKey,
    HoldsTotals,
    PartSums,
    SliceSum,
    Totals,
    WorkerReport,
)
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.together import Together
    from taskgraph.elastic_jobs.tracing import WorkerTrace
    from taskgraph.node.core import NodeCore

__all__ = ["Engine", "Summed", "chained"]

_AWAITED = {Phase.FLUSHING: "reports", Phase.LACKING: "totals", Phase.WORKING: "parts"}
_PAGE_BYTES = 64 << 20
"""Totals for a newcomer go in messages of about this size."""


def chained(tag: bytes, total: Sums) -> bytes:
    """Returns a digest of all totals so far, from that of the totals before this one."""
    digest = xxhash.xxh3_128(tag)
    digest.update(repr(total.layout).encode())
    for array in total.arrays:
        digest.update(array.data)
    for part, value in total.collected.items():
        digest.update(b"%d" % part + value.digest)
    return digest.digest()


class Summed(NamedTuple):
    """The total of a position, and parts of the next one that user code may begin at once, without asking.

    Attributes:
        of: the number of parts that the next position has to have for that.
    """

    total: Total
    of: int
    ahead: tuple[int, ...]


class Engine:
    """The values, messages and user code of one worker.

    Args:
        refused: called with a worker whose port refuses connections.
        stable: called with the number of totals that all workers hold, when it grows.
        differ: called with a position and the workers whose totals or user code differ from those of the others.
        excluded: called when this worker has read a view without itself.
        together: makes the totals of what the workers of a view hold; None: all workers send each other their sums.

    Attributes:
        core: the decisions.
        user_position: the number of totals that user code has got.
        none_whole_in: the number of the last view of which no worker is whole; -1: none.
        first_part_due: this worker has entered, and its first part is to be checked.
        behind: workers of the view that lack totals which this worker, their donor, does not keep any longer.
    """

    def __init__(
        self,
        node: NodeCore,
        core: Worker,
        trace: WorkerTrace,
        *,
        refused: Callable[[str], None],
        stable: Callable[[int], None],
        differ: Callable[[int, tuple[str, ...]], None],
        excluded: Callable[[], None],
        together: Together | None = None,
    ) -> None:
        self.core = core
        self._together = together
        self._node = node
        self._trace = trace
        self._refused = refused
        self._stable = stable
        self._differ = differ
        self._excluded = excluded
        self.none_whole_in = -1
        self.behind: frozenset[str] = frozenset()
        self._own: dict[Span, Sums] = {}
        self._summed: Total | None = None  # the workers of the view made it together
        self._slices = Slices(node, self._send, self._go)
        self._encoded: dict[tuple[Span, ...], Outgoing] = {}  # own sums that user code's thread has encoded
        self._received: dict[tuple[int, int, Span], Sums] = {}  # by view, position and span
        self._totals: dict[int, Total] = {}
        self._early: list[tuple[str, Call]] = []  # messages of a view that this worker has not read
        self._outboxes: dict[str, Outbox] = {}
        self._keep_from: dict[str, tuple[int, int]] = {}  # newcomer -> the first total that it lacks, the view then
        self.user_position = 0
        self._begun = -1  # the last position that user code has begun
        self.first_part_due = False
        self._first_parts: dict[int, tuple[str, FirstPart]] = {}  # position -> a newcomer, and its first part
        self._asked: tuple[int, Any] | None = None  # position and answer of user code that waits

    # -- events -----------------------------------------------------------------------------------

    def read_view(self, view: View) -> None:
        """Follows a view that was read from etcd."""
        self.core.read_view(view)
        self.behind &= frozenset(() if self.core.view is None else self.core.view.workers)
        self._go()

    def receive(self, worker: str, message: Call) -> None:
        """Takes a message of another worker."""
        if not self._take(worker, message):
            self._early.append((worker, message))
        self._go()

    def _take(self, worker: str, message: Call) -> bool:
        """Returns False if the message is of a view that this worker has not read."""
        core = self.core
        match message:
            case WorkerReport():
                view = View(message.number, message.lineage, tuple(Entry(*entry) for entry in message.workers))
                held = tuple(Span(*span) for span in message.held)
                return core.report(worker, view, Report(message.position, message.whole, held, message.begun))
            case PartSums():
                spans = tuple(Span(*span) for span in message.spans)
                if message.view >= self._view and message.position >= core.position:
                    for span, sums in zip(spans, decode_sums(message.value), strict=True):
                        self._received.setdefault((message.view, message.position, span), sums)
                return core.contribution(worker, self._contribution(message, spans))
            case SliceSum():
                if message.view >= self._view and message.position >= core.position:
                    [sums] = decode_sums(message.value)
                    self._slices.put(message.view, message.position, worker, sums)
            case Totals():
                if message.view > self._view or core.phase == Phase.FLUSHING:
                    return False
                for position, total in enumerate(decode_sums(message.value), message.position):
                    before = core.position
                    core.total(message.view, position)
                    if core.position > before:
                        self._hold_total(position, Total.of(total))
            case HoldsTotals():
                return core.holds(worker, message.view, message.position)
            case FirstPart():
                if message.view > self._view:
                    return False
                self._first_parts[message.position] = worker, message
            case GroupKey():
                if self._together is not None and message.view >= self._view:
                    return self._together.put_key(message.view, message.key, message.content)
            case _:
                raise TypeError(f"no message of an elastic job: {message!r}")
        return True

    def ask(self, position: int, parts: int, tag: bytes, answer: Any) -> None:
        """User code is at a position with this number of parts, and asks for some of them.

        The answer is a list of parts, or a `Summed`, whose total may not be added up.
        """
        self._reach(position, parts, tag)
        self._asked = position, answer
        self._go()

    def _reach(self, position: int, parts: int, tag: bytes) -> None:
        self.user_position = position
        if self._begun < position == self.core.position:
            self._begun = position
            self.core.begin(parts, tag)

    def computed(self, position: int, parts: int, tag: bytes, finished: Finished) -> None:
        """User code has finished parts of a position, which it may not have asked for."""
        if not self._node.running:
            return
        self._reach(position, parts, tag)
        if position == self.core.position and self.core.phase != Phase.OUTSIDE:
            self._own |= finished.sums
            if finished.encoded is not None and finished.encoded.view == self._view:
                self._encoded[tuple(finished.sums)] = finished.encoded
        self.core.computed(position, finished.sums, large=self._are_large(finished.sums.values()))
        self._go()

    def send_first_part(self, position: int, part: int, digest: bytes) -> None:
        """Sends the digest of this newcomer's first part to the most senior worker."""
        core = self.core
        self.first_part_due = False
        if core.view is None or core.view.workers[0] == self._node.id:
            return
        if core.phase == Phase.WORKING and position == core.position:
            message = FirstPart(core.view.number, position, part, digest)
            self._outbox(core.view.workers[0]).put(core.view.number, message)

    def ended(self, positions: int) -> None:
        """User code has returned after this number of totals."""
        self.user_position = positions
        self.core.ended()
        self._go()

    def catch_up(self, position: int, totals: Sequence[Sums]) -> None:
        """This worker is outside, and has got stable totals from a donor."""
        for number, total in enumerate(totals, position):
            self._totals[number] = Total.of(total)
        self.core.catch_up(position + len(totals))
        self._go()

    def kept_totals(self, position: int) -> tuple[int, list[Sums]]:
        """Returns the first total that is kept, and stable ones from a position on, as many as one message may have."""
        first, size, page = min(self._totals, default=self.core.position), 0, list[Sums]()
        for number in range(position, self.core.stable) if position >= first else ():
            size += self._totals[number].nbytes
            if page and size > _PAGE_BYTES:
                break
            page.append(self._totals[number].sums())
        return first, page

    def stop(self, error: BaseException) -> None:
        """Answers user code that waits with an error."""
        if self._asked is not None:
            _, answer = self._asked
            self._asked = None
            answer.set_exception(error)

    # -- what follows -----------------------------------------------------------------------------

    @property
    def _view(self) -> int:
        return -1 if self.core.view is None else self.core.view.number

    def _go(self) -> None:
        while True:
            while taken := self.core.take():
                for action in taken:
                    self._act(action)
            early, self._early = self._early, []
            self._early += [(worker, message) for worker, message in early if not self._take(worker, message)]
            if len(self._early) == len(early) and not self._take_sum() and not self._answer():
                break
        if self._trace.on:
            self._show_waits()

    def _show_waits(self) -> None:
        """Notes what user code waits for, and the end of a change of the view."""
        trace, view = self._trace, self.core.view
        trace.wait_for((self.awaited or "the total") if self._asked is not None else "")
        if view is not None and self.core.phase == Phase.WORKING:
            trace.end_change(" ".join(map(name_of, view.workers)))

    @property
    def awaited(self) -> str:
        """What this worker waits for from others; "": nothing."""
        what, workers = _AWAITED[self.core.phase], self.core.awaited
        if not workers and self._slices.awaited:
            what, workers = "slices", self._slices.awaited
        return f"{what} of {', '.join(map(name_of, workers))}" if workers else ""

    def _take_sum(self) -> bool:
        """Takes the total that was added up in slices, once it is there."""
        made = self._slices.take()
        if made is None:
            return False
        at, self._summed = made
        self.core.summed(at.view, at.position)
        return True

    def _answer(self) -> bool:
        """Answers user code, if there is something for it."""
        if self._asked is None:
            return False
        position, answer = self._asked
        if position == self.core.position and (dealt := self.core.take_parts()):
            answer.set_result(dealt)
        elif position in self._first_parts:
            answer.set_result(self._first_parts.pop(position))
        elif position < self.core.position:
            ahead = self.core.parts_ahead() if position + 1 == self.core.position else (0, ())
            answer.set_result(Summed(self._totals[position], *ahead))
        else:
            return False
        self._asked = None
        return True

    def _act(self, action: actions.Action) -> None:
        match action:
            case actions.SendReport(view, report):
                self._trace.change_view(view.number)
                self._adopt(view.number, report)
                if self._together is not None:
                    self._together.follow(view)
                entries = tuple((entry.worker, entry.since) for entry in view.entries)
                held = tuple((span.first, span.end) for span in report.held)
                message = WorkerReport(
                    view.number, view.lineage, entries, report.position, report.whole, held, report.begun
                )
                self._send(view.number, message)
            case actions.Contribute(contribution, owners):
                self._contribute(contribution, owners)
            case actions.Merge(span):
                first, second = halves(span)
                self._own[span] = self._own.pop(first).add(self._own.pop(second), self._node.router.allocate)
            case actions.Drop(spans):
                for span in spans:
                    self._own.pop(span, None)
            case actions.Complete(position, spans):
                if self._summed is not None:
                    total, self._summed = self._summed, None
                else:
                    there = self._there(position, spans)
                    add = partial(add_up, there, _whole(spans), self._node.router.allocate)
                    total = Total(add, sum(sums.nbytes for sums in there.values()))
                self._hold_total(position, total)
            case actions.GiveTotals(_, to, first, _) if first < min(self._totals, default=self.core.position):
                self.behind |= {to}
            case actions.SumTogether():
                self._sum(action)
            case actions.GiveTotals(number, to, first, end):
                value = encode_sums([self._totals[position].sums() for position in range(first, end)])
                self._outbox(to).put(number, Totals(number, first, value))
            case actions.Holds(number, position):
                self._send(number, HoldsTotals(number, position))
            case actions.Stable(position):
                for outbox in self._outboxes.values():
                    outbox.confirm(position)
                self._drop_entered()
                self._stable(position)
                self._forget()
            case actions.Differ(position, outvoted):
                self._differ(position, outvoted)
            case actions.Outside():
                self._excluded()
            case actions.NoneWhole(number):
                self.none_whole_in = number

    def _there(self, position: int, spans: Iterable[Span]) -> dict[Span, Sums]:
        """Returns what this worker and the others of the view contributed."""
        return {span: self._own.get(span) or self._received[self._view, position, span] for span in spans}

    def _contribution(self, message: PartSums, spans: tuple[Span, ...]) -> Contribution:
        there = (self._received.get((message.view, message.position, span)) for span in spans)
        large = self._together is None and (message.apart or self._are_large(filter(None, there)))
        return Contribution(message.view, message.position, spans, message.tag, large, message.apart)

    def _are_large(self, sums: Iterable[Sums]) -> bool:
        """True if sums are large enough to be added up in slices."""
        least = self._node.settings.sliced_bytes
        return any(sum(array.nbytes for array in each.arrays) >= least for each in sums)

    def encoded(self, sums: Sequence[Sums]) -> Outgoing | None:
        """Encodes large sums for the others of the view, in user code's thread. None: they are small, or not sent."""
        dealt = self.core.dealt
        if self._together is not None or not any(each.is_large for each in sums):
            return None
        others = [worker for worker in dealt.due if worker != self._node.id]
        return Outgoing(dealt.view, self._encode(sums, others, dealt.owners if self._are_large(sums) else ()))

    def _encode(self, sums: Sequence[Sums], others: Sequence[str], owners: Sequence[str]) -> dict[str, Encoded]:
        if owners or self._together is not None:
            return encode_slices(sums, owners, others, self._node.router.allocate)
        return dict.fromkeys(others, encode_sums(sums, self._node.router.allocate)) if others else {}

    def _contribute(self, contribution: Contribution, owners: tuple[str, ...]) -> None:
        assert self.core.view is not None
        spans = contribution.spans
        encoded = self._encoded.pop(spans, None)
        if encoded is None:
            others = [worker for worker in self.core.view.workers if worker != self._node.id]
            values = self._encode([self._own[span] for span in spans], others, owners)
        else:
            values = encoded.values
        view, position = contribution.view, contribution.position
        named = tuple((span.first, span.end) for span in spans)
        for worker, value in values.items():
            message = PartSums(view, position, named, contribution.tag, value, contribution.apart)
            self._outbox(worker).put(view, message)

    def send_key(self, view: int, key: str, value: bytes) -> None:
        """Sends a key of another communicator to all others of a view, if that is still this worker's."""
        if view == self._view:
            self._send(view, GroupKey(view, key, value))

    def _sum(self, action: actions.SumTogether) -> None:
        """Adds up what this worker contributed with what the others of the view did."""
        there = self._there(action.position, action.spans)
        whole = add_up({span: sums.without_arrays() for span, sums in there.items()}, _whole(action.spans))
        if whole.is_unlike:
            self._summed = Total.of(whole)
            self.core.summed(action.view, action.position)
        elif self._together is not None:
            self._node.own(self._sum_together(action, whole), "sum together")
        else:
            own = {span: sums for span, sums in there.items() if span in self._own}
            received = {span: sums for span, sums in there.items() if span not in own}
            self._slices.begin(action, own, received, whole)

    async def _sum_together(self, action: actions.SumTogether, whole: Sums) -> None:
        assert self._together is not None
        mine = [self._own[span].arrays for span in sorted(self._own)]
        arrays = await self._together.sum(action.view, Sums.zeros(whole.layout).arrays, mine)
        if arrays is not None and action.view == self._view:
            self._summed = Total.of(Sums(whole.layout, arrays, whole.collected))
            self.core.summed(action.view, action.position)
            self._go()

    def _adopt(self, number: int, report: Report) -> None:
        """Holds the spans of a report, also those that were received in the view before, and nothing else."""
        at = report.position
        before = {
            span: sums
            for (view, position, span), sums in sorted(self._received.items(), key=_by_view)
            if view < number and position == at
        }
        self._own = {span: self._own.get(span) or before[span] for span in report.held}
        self._summed = None
        self._encoded.clear()
        self._received = {key: sums for key, sums in self._received.items() if key[0] >= number}
        self._slices.drop(number, at)

    def _hold_total(self, position: int, total: Total) -> None:
        self._totals[position] = total
        self._own.clear()
        self._encoded.clear()
        self._received = {key: sums for key, sums in self._received.items() if key[1] > position}
        self._slices.drop(self._view, position + 1)

    def keep_totals_for(self, newcomer: str, position: int) -> None:
        """Keeps the totals from a position on, until the newcomer has entered and holds them, or is gone."""
        self._keep_from[newcomer] = position, self._view

    def drop_newcomers(self, there: Container[str]) -> None:
        """Keeps totals only for newcomers that are there, or in the view that this worker has read."""
        inside = () if self.core.view is None else self.core.view.workers
        self._keep_from = {n: kept for n, kept in self._keep_from.items() if n in there or n in inside}

    def _drop_entered(self) -> None:
        """Keeps no totals for newcomers in the view: more is stable since they entered, so they lack nothing below."""
        assert self.core.view is not None
        for worker in self.core.view.workers:
            if worker in self._keep_from and self._keep_from[worker][1] < self._view:
                del self._keep_from[worker]

    def _forget(self) -> None:
        needed = min(self.core.stable, self.user_position)
        kept = min([needed, *(first for first, _ in self._keep_from.values())])
        if kept < needed and (late := self._first_over_limit(kept, needed)) is not None:
            self._keep_from = {n: (first, view) for n, (first, view) in self._keep_from.items() if first > late}
            kept = late + 1
        self._totals = {position: total for position, total in self._totals.items() if position >= kept}

    def _first_over_limit(self, kept: int, needed: int) -> int | None:
        """Returns the newest total that is dropped: later ones take all the memory for newcomers."""
        room = self._node.settings.max_totals_bytes
        for position in sorted((at for at in self._totals if kept <= at < needed), reverse=True):
            room -= self._totals[position].nbytes
            if room < 0:
                return position
        return None

    def _send(self, view: int, message: Call) -> None:
        """Sends a message to all other workers of the view."""
        assert self.core.view is not None
        for worker in self.core.view.workers:
            if worker != self._node.id:
                self._outbox(worker).put(view, message)

    def _outbox(self, worker: str) -> Outbox:
        if worker not in self._outboxes:
            self._outboxes[worker] = Outbox(self._node, self._trace, worker, lambda: self._view, self._refused)
        return self._outboxes[worker]


def _whole(spans: Iterable[Span]) -> Span:
    return Span(0, max(span.end for span in spans))


def _by_view(item: tuple[tuple[int, int, Span], Sums]) -> int:
    return item[0][0]
