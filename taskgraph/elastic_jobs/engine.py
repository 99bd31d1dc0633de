"""One worker at work: carries out what the core decides, and answers user code.

    user code ──ask──► Engine ──events──► core (`protocol.elastic.worker`)
        ▲                 │ ◄──actions──────┘
        └──part or total──┘ ──messages──► other workers

    messages in (`inbox`) ──► the sums of the position at work (`contributions`) ──► its total, kept (`totals`)
    messages out (`outbox`) ◄──────────┘

Everything here happens on the event loop; user code asks from its thread, and adds up there (`adding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from taskgraph.elastic_jobs.adding import FinishedParts, Total
from taskgraph.elastic_jobs.contributions import Contributions
from taskgraph.elastic_jobs.inbox import Inbox
from taskgraph.elastic_jobs.outbox import Outboxes
from taskgraph.elastic_jobs.totals import KeptTotals
from taskgraph.graph.sums import Sums, encode_sums
from taskgraph.protocol.elastic import actions
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.messages import Call, ComparedPart, GroupKey, HoldsTotals, Totals, WorkerReport
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.together import GroupSums
    from taskgraph.elastic_jobs.tracing import WorkerTrace
    from taskgraph.node.core import NodeCore
    from taskgraph.observe.queues import QueueStatus

__all__ = ["Engine", "TotalAndParts"]

_AWAITED = {Phase.FLUSHING: "reports", Phase.LACKING: "totals", Phase.WORKING: "parts"}


class TotalAndParts(NamedTuple):
    """The total of a position, and parts of the next one that user code may begin at once, without asking.

    Attributes:
        of: user code may begin `ahead` only if the next position has this number of parts.
        ahead: numbers of parts of the next position; (): none.
    """

    total: Total
    of: int
    ahead: tuple[int, ...]


class Engine:
    """The messages, values and user code of one worker.

    Args:
        refused: called with a worker whose port refuses connections.
        stable: called with the number of totals that all workers hold, when it grows.
        differ: called with a position and the workers whose totals or user code differ from those of the others.
        excluded: called when this worker has read a view without itself.
        together: makes the totals by process groups; None: workers send each other their sums.

    Attributes:
        core: decides; the engine carries the decisions out.
        contributions: the sums of the position at work.
        totals: the totals that are kept.
        user_position: the number of totals that user code has got.
        none_whole_in: the number of the last view of which no worker is whole; -1: none.
        compared_part_due: the next part of this worker is to be compared: it has entered, or has had some sums.
        behind: workers of the view that lack totals which this worker, their donor, does not keep any longer.
        heard: called after each message and view.
        queues: returns how far the pieces are that are dealt, for the node's status.
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
        together: GroupSums | None = None,
    ) -> None:
        self._node = node
        self._trace = trace
        self._stable = stable
        self._differ = differ
        self._excluded = excluded
        self.core = core
        self._outboxes = Outboxes(node, trace, core, refused)
        self.contributions = Contributions(node, core, self._outboxes, together, self._carry_out)
        self.totals = KeptTotals(core, node.settings.max_totals_bytes)
        self._inbox = Inbox(core, self.contributions, together, self._hold_total)
        self.none_whole_in = -1
        self.behind: frozenset[str] = frozenset()
        self.compared_part_due = False
        self.user_position = 0
        self.heard: Callable[[], None] = _hear_nothing
        self.queues: Callable[[], tuple[QueueStatus, ...]] = tuple
        self._begun = -1  # the last position that user code has begun
        self._asked: tuple[int, bytes, Any] | None = None  # position, tag and answer of user code that waits

    # -- events -----------------------------------------------------------------------------------

    def read_view(self, view: View) -> None:
        """Takes a view that was read from etcd, and carries out what the core decides then."""
        self.core.read_view(view)
        self.behind &= frozenset(() if self.core.view is None else self.core.view.workers)
        self._carry_out()
        self.heard()

    def receive(self, worker: str, message: Call) -> None:
        """Takes a message of another worker."""
        self._inbox.receive(worker, message)
        self._carry_out()
        self.heard()

    def ask(self, position: int, parts: int, tag: bytes, answer: Any) -> None:
        """Asks on behalf of user code, which is at this position: for some of its parts, or for its total.

        The future `answer` gets a list of parts; or a `TotalAndParts`, whose total may not be added up yet; or a
        part of another worker, to compare.
        """
        self._reach(position, parts, tag)
        self._asked = position, tag, answer
        self._carry_out()

    def _reach(self, position: int, parts: int, tag: bytes) -> None:
        """Notes the position that user code has reached. If it is the one at work, the core begins it, once."""
        self.user_position = position
        if self._begun < position == self.core.position:
            self._begun = position
            self.core.begin(parts, tag)

    def take_finished_parts(self, position: int, parts: int, tag: bytes, finished: FinishedParts) -> None:
        """Takes sums of parts that user code has finished, also of parts that it got ahead, without `ask`."""
        if not self._node.running:
            return
        self._reach(position, parts, tag)
        if position == self.core.position and self.core.phase != Phase.OUTSIDE:
            self.contributions.keep_own(finished)
        self.core.note_computed(position, finished.sums, large=self.contributions.are_large(finished.sums.values()))
        self._carry_out()

    def send_compared_part(self, position: int, tag: bytes, part: int, digest: bytes) -> None:
        """Sends the digest of a part of this worker to the most senior one, which computes that part, too."""
        core = self.core
        if core.view is None or core.view.workers[0] == self._node.id:
            return
        if core.phase == Phase.WORKING and position == core.position:
            message = ComparedPart(core.view.number, position, tag, part, digest)
            self._outboxes.to(core.view.workers[0]).put(core.view.number, message)

    def note_return(self, positions: int) -> None:
        """Tells the core that user code has returned, after this number of totals."""
        self.user_position = positions
        self.core.note_ended()
        self._carry_out()

    def catch_up(self, position: int, totals: Sequence[Sums]) -> None:
        """Takes stable totals, from `position` on, that this newcomer has got from a donor."""
        for number, total in enumerate(totals, position):
            self.totals.keep(number, Total.of(total))
        self.core.catch_up(position + len(totals))
        self._carry_out()
        self.heard()

    def send_key(self, view: int, key: str, value: bytes) -> None:
        """Sends a key of a process group to all other workers of a view, unless this worker has read a newer view."""
        if view == self.core.number:
            self._outboxes.put_all(view, GroupKey(view, key, value))

    def answer_with_error(self, error: BaseException) -> None:
        """Raises an error in user code if it waits for parts or a total."""
        if self._asked is not None:
            *_, answer = self._asked
            self._asked = None
            answer.set_exception(error)

    def withdraw_ask(self) -> None:
        """Drops the pending `ask`: nothing waits for its answer any longer."""
        self._asked = None

    # -- what follows -----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Carries out the core's actions, takes early messages and answers user code, until nothing is left."""
        while True:
            while taken := self.core.take_actions():
                for action in taken:
                    self._act(action)
            if not (self._inbox.take_early() or self.contributions.take_sliced() or self._answer()):
                break
        if self._trace.on:
            self._show_waits()

    def _show_waits(self) -> None:
        """Adds to the trace what user code waits for, and the end of a change of the view."""
        trace, view = self._trace, self.core.view
        trace.begin_wait_span((self.awaited or "the total") if self._asked is not None else "")
        if view is not None and self.core.phase == Phase.WORKING:
            trace.end_view_change(" ".join(map(name_of, view.workers)))

    @property
    def awaited(self) -> str:
        """Text: what this worker waits for, and from which workers; "": for nothing."""
        what, workers = _AWAITED.get(self.core.phase, ""), self.core.awaited
        if not workers:
            what, workers = "slices", self.contributions.awaited_slices
        return f"{what} of {', '.join(map(name_of, workers))}" if workers else ""

    def _answer(self) -> bool:
        """Answers the pending `ask` of user code, if parts or the total are there. Returns True if it was answered."""
        if self._asked is None:
            return False
        position, tag, answer = self._asked
        if position == self.core.position and (dealt := self.core.take_parts()):
            answer.set_result(dealt)
        elif (compared := self._inbox.take_compared_part(position, tag)) is not None:
            answer.set_result(compared)
        elif position < self.core.position:
            ahead = self.core.give_parts_ahead() if position + 1 == self.core.position else (0, ())
            answer.set_result(TotalAndParts(self.totals[position], *ahead))
        else:
            return False
        self._asked = None
        return True

    def _act(self, action: actions.Action) -> None:
        """Carries out one action of the core."""
        match action:
            case actions.SendReport():
                self._send_report(action)
            case actions.Contribute(contribution, owners):
                self.contributions.send(contribution, owners)
            case actions.Merge(span):
                self.contributions.merge(span)
            case actions.Drop(spans):
                self.contributions.drop(spans)
            case actions.SumTogether():
                self.contributions.sum_together(action)
            case actions.Complete(position, spans):
                self._hold_total(position, self.contributions.total(position, spans))
            case actions.GiveTotals():
                self._give_totals(action)
            case actions.SendPosition(number, position):
                self._outboxes.put_all(number, HoldsTotals(number, position))
            case actions.TotalsStable(position):
                self._note_stable(position)
            case actions.UnequalTags(position, outvoted):
                self._differ(position, outvoted)
            case actions.Excluded():
                self._excluded()
            case actions.NoWholeWorker(number):
                self.none_whole_in = number

    def _send_report(self, action: actions.SendReport) -> None:
        """Begins a view: sends this worker's report to all its workers, and drops sums that are not in the report."""
        view, report = action.view, action.report
        self._trace.begin_view_change(view.number)
        self.contributions.begin_view(view, report)
        entries = tuple((entry.worker, entry.since) for entry in view.entries)
        held = tuple((span.first, span.end) for span in report.held)
        message = WorkerReport(view.number, view.lineage, entries, report.position, report.whole, held, report.begun)
        self._outboxes.put_all(view.number, message)

    def _hold_total(self, position: int, total: Total) -> None:
        """Keeps the total of a position, and drops the sums that it is made of."""
        self.contributions.end_position(position)
        self.totals.keep(position, total)

    def _give_totals(self, action: actions.GiveTotals) -> None:
        """Sends totals to a worker that lacks them; if they are no longer kept, adds the worker to `behind`."""
        if action.first < self.totals.first:
            self.behind |= {action.to}
            return
        value = encode_sums(self.totals.sums(action.first, action.end))
        self._outboxes.to(action.to).put(action.view, Totals(action.view, action.first, value))

    def _note_stable(self, position: int) -> None:
        """Drops what was kept until the totals below `position` are stable, and tells the node."""
        self._outboxes.confirm(position)
        self.totals.drop_entered()
        self._stable(position)
        self.totals.forget(self.user_position)


def _hear_nothing() -> None:
    """Does nothing: no code waits for messages."""
