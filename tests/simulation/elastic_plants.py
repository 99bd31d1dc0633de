"""Mistakes put into elastic jobs on purpose, one rule each: the simulation must notice every one of them.

A plant changes the decisions (`taskgraph.protocol.elastic`), what carries them out (the engine and its parts), or the
node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from taskgraph.elastic_jobs import view_changes
from taskgraph.elastic_jobs.checkpoints import Checkpoints
from taskgraph.elastic_jobs.contributions import Contributions
from taskgraph.elastic_jobs.engine import Engine
from taskgraph.elastic_jobs.inbox import Inbox
from taskgraph.elastic_jobs.outbox import WorkerOutbox
from taskgraph.elastic_jobs.reports import StableReports
from taskgraph.elastic_jobs.slices import Slices
from taskgraph.elastic_jobs.totals import KeptTotals
from taskgraph.elastic_jobs.usercall import UserCall
from taskgraph.elastic_jobs.view_changes import ViewChanger
from taskgraph.graph import sums as sums_module
from taskgraph.graph.sums import Sums
from taskgraph.protocol.elastic import flush, transactions
from taskgraph.protocol.elastic import worker as worker_module
from taskgraph.protocol.elastic.actions import TotalsStable
from taskgraph.protocol.elastic.exchange import Exchange
from taskgraph.protocol.elastic.flush import FlushOutcome, FlushReport
from taskgraph.protocol.elastic.round import PositionAtWork
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.kv import Txn
from taskgraph.protocol.messages import Call, PartSums, StateCopy

__all__ = ["PLANTS", "Plant"]

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__.replace("_", " ")] = function
    return function


def _changed(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`change(original, *args, **kwargs)` instead of the original."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    patch.setattr(owner, name, changed)


# -- the core -------------------------------------------------------------------------------------


@plant
def a_total_is_completed_without_a_worker(patch: pytest.MonkeyPatch) -> None:
    _changed(patch, Exchange, "covered", lambda covered, self, w, due: w != max(due) or covered(self, w, due))


@plant
def a_flush_ends_without_all_reports(patch: pytest.MonkeyPatch) -> None:
    def hear(heard: Callable[..., None], self: Worker, name: str, report: FlushReport) -> None:
        heard(self, name, report)
        assert self.view is not None
        if self.phase == Phase.FLUSHING and len(self._reports) * 2 > len(self.view.workers):
            for other in self.view.workers:
                self._reports.setdefault(other, FlushReport(self.position, False))
            heard(self, name, report)

    _changed(patch, Worker, "_take_report", hear)


@plant
def a_partial_of_an_old_view_is_taken(patch: pytest.MonkeyPatch) -> None:
    def take(taken: Callable[..., bool], self: Inbox, worker: str, message: Call) -> bool:
        if isinstance(message, PartSums) and message.view < self._core.number:
            message = structs.replace(message, view=self._core.number)
        return taken(self, worker, message)

    _changed(patch, Inbox, "_take", take)


@plant
def parts_of_other_sources_are_kept(patch: pytest.MonkeyPatch) -> None:
    def keep(kept: Callable[..., Any], self: PositionAtWork, outcome: FlushOutcome) -> tuple[Span, ...]:
        own = set(self.own)
        kept(self, outcome)
        self.own = own
        return ()

    _changed(patch, PositionAtWork, "keep", keep)


@plant
def held_parts_are_dealt_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlushOutcome, "deal", lambda self, parts: flush._deal_ranges(range(parts), self.dealt_to))


@plant
def a_newcomer_counts_as_a_survivor(patch: pytest.MonkeyPatch) -> None:
    def anyone(settle: Callable[..., Any], view: View, reports: dict[str, FlushReport]) -> FlushOutcome | None:
        every = {w: FlushReport(r.position, True, r.held, r.begun) for w, r in reports.items()}
        return settle(view, every)  # type: ignore[no-any-return]

    _changed(patch, worker_module, "decide_flush", anyone)


@plant
def a_total_is_stable_once_one_worker_holds_it(patch: pytest.MonkeyPatch) -> None:
    def note(noted: Callable[..., None], self: Worker) -> None:
        if self._outcome is not None and self.position > self.stable:
            self._stability.position = self.position
            self._actions.append(TotalsStable(self.position))

    _changed(patch, Worker, "_note_stable", note)


@plant
def the_position_is_the_lowest_one(patch: pytest.MonkeyPatch) -> None:
    def settled(settle: Callable[..., Any], view: View, reports: dict[str, FlushReport]) -> FlushOutcome | None:
        outcome = settle(view, reports)
        if outcome is None or len(view.workers) < 2:
            return outcome  # type: ignore[no-any-return]
        lowest = min(reports[w].position for w in view.workers if reports[w].whole)
        at = [w for w in view.workers if reports[w].position == lowest]
        return FlushOutcome(lowest, at[0], {}, {}, {}, outcome.dealt_to)

    _changed(patch, worker_module, "decide_flush", settled)


@plant
def contributions_to_a_later_position_survive_a_view(patch: pytest.MonkeyPatch) -> None:
    def read_view(read: Callable[..., None], self: Worker, view: View) -> None:
        early = self._early
        read(self, view)
        self._early = early

    _changed(patch, Worker, "read_view", read_view)


@plant
def tags_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def complete(completed: Callable[..., None], self: Worker) -> None:
        exchange = self._round.exchange
        exchange.tags = dict.fromkeys(exchange.tags, self._round.tag)
        completed(self)

    _changed(patch, Worker, "_act_on_contributions", complete)
    _changed(patch, UserCall, "give_state", _with_a_wrong_state)


def _with_a_wrong_state(give: Callable[..., None], self: UserCall, step: int, *args: Any) -> None:
    give(self, step + 1, *args)


@plant
def parts_given_out_ahead_stay_given_out(patch: pytest.MonkeyPatch) -> None:
    def begin(began: Callable[..., None], self: Worker, parts: int, tag: bytes) -> None:
        self._round.ahead = parts
        began(self, parts, tag)

    _changed(patch, Worker, "begin", begin)


# -- the engine -----------------------------------------------------------------------------------


@plant
def a_range_is_summed_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def added(held: dict[Span, Sums], span: Span, allocate: Any = None) -> Sums:
        if span in held:
            return held[span]
        pieces = [held[known] for known in sorted(held)]
        total = pieces[0]
        for piece in pieces[1:]:
            total = total.add_consuming(piece)
        return total

    patch.setattr(sums_module, "add_up", added)


@plant
def a_total_is_dropped_when_it_is_complete(patch: pytest.MonkeyPatch) -> None:
    def forget(forgot: Callable[..., None], self: KeptTotals, user_position: int) -> None:
        self._totals = {at: total for at, total in self._totals.items() if at >= user_position}

    _changed(patch, KeptTotals, "forget", forget)

    def answer(answered: Callable[..., bool], self: Engine) -> bool:
        was = answered(self)
        if was:
            kept = self.totals._totals
            self.totals._totals = {at: total for at, total in kept.items() if at > self.user_position}
        return bool(was)

    _changed(patch, Engine, "_answer", answer)


@plant
def early_messages_are_lost(patch: pytest.MonkeyPatch) -> None:
    def receive(received: Callable[..., None], self: Inbox, worker: str, message: Call) -> None:
        self._take(worker, message)

    _changed(patch, Inbox, "receive", receive)


@plant
def a_message_is_sent_once(patch: pytest.MonkeyPatch) -> None:
    async def sent(self: WorkerOutbox, message: Call) -> bool:
        await _sent(self, message)
        return True

    _sent = WorkerOutbox._send_once
    patch.setattr(WorkerOutbox, "_send_once", sent)


@plant
def messages_without_a_reply_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    def start_task(started: Callable[..., None], self: WorkerOutbox) -> None:
        self._unconfirmed.clear()
        started(self)

    _changed(patch, WorkerOutbox, "_start_task", start_task)


@plant
def slice_sums_survive_a_view(patch: pytest.MonkeyPatch) -> None:
    def drop(dropped: Callable[..., None], self: Slices, view: int, position: int) -> None:
        self._found = {(max(of, view), at, owner): sums for (of, at, owner), sums in self._found.items()}
        dropped(self, view, position)

    _changed(patch, Slices, "drop", drop)


@plant
def slices_of_an_old_view_are_added(patch: pytest.MonkeyPatch) -> None:
    def adopt(adopted: Callable[..., None], self: Contributions, view: View, report: FlushReport) -> None:
        old = {(view.number, at, span): sums for (_, at, span), sums in self._received.items()}
        adopted(self, view, report)
        self._received = old | self._received

    _changed(patch, Contributions, "begin_view", adopt)


@plant
def slices_count_as_whole_sums(patch: pytest.MonkeyPatch) -> None:
    def stop(stopped: Callable[..., Any], self: Exchange, tag: bytes) -> Any:
        self.apart = False
        return stopped(self, tag)

    _changed(patch, Exchange, "end_view", stop)


@plant
def a_slice_is_added_to_the_own_sum(patch: pytest.MonkeyPatch) -> None:
    def sliced(slice_: Callable[..., Sums], self: Sums, index: int, count: int) -> Sums:
        writeable = [array.flags.writeable for array in self.arrays]
        found = slice_(self, index, count)
        for array, part, so in zip(self.arrays, found.arrays, writeable, strict=True):
            array.flags.writeable = part.flags.writeable = so
        return found

    _changed(patch, Sums, "slice", sliced)


# -- the node -------------------------------------------------------------------------------------


@plant
def a_report_counts_before_its_step_is_stable(patch: pytest.MonkeyPatch) -> None:
    def add(added: Callable[..., None], self: StableReports, position: int, step: int, numbers: Any) -> None:
        self._log.add(step, {0: numbers})

    _changed(patch, StableReports, "add", add)


@plant
def a_view_does_not_compare_the_one_before(patch: pytest.MonkeyPatch) -> None:
    def propose(proposed: Callable[..., Txn], job: Any, *args: Any, **kwargs: Any) -> Txn:
        txn = proposed(job, *args, **kwargs)
        return dataclasses.replace(txn, compares=tuple(c for c in txn.compares if c.key != job.keys.workers))

    _changed(patch, transactions, "propose", propose)


@plant
def a_newcomer_enters_before_its_state(patch: pytest.MonkeyPatch) -> None:
    def begin_with(begun: Callable[..., None], self: UserCall, copy: StateCopy) -> None:
        self._engine.catch_up(copy.position, [])
        self._start.set_result(None)

    _changed(patch, UserCall, "let_code_begin_with", begin_with)


@plant
def a_newcomer_begins_one_step_later_than_its_state(patch: pytest.MonkeyPatch) -> None:
    def begin_with(begun: Callable[..., None], self: UserCall, copy: StateCopy) -> None:
        begun(self, StateCopy(copy.step + 1, copy.position, copy.tag, copy.value, copy.reports))

    _changed(patch, UserCall, "let_code_begin_with", begin_with)


@plant
def a_newcomer_returns_while_workers_live(patch: pytest.MonkeyPatch) -> None:
    def must_return(must: Callable[..., bool], self: ViewChanger) -> bool:
        node = self._node
        gone, node.gone = node.gone, node.gone | node.suspects
        try:
            return must(self)
        finally:
            node.gone = gone

    _changed(patch, ViewChanger, "_must_go_on_alone", must_return)
    _changed(
        patch, transactions, "return_alone", lambda put, job, view, gone, *who, **how: put(job, view, (), *who, **how)
    )


@plant
def a_worker_is_waited_for_although_nobody_has_its_totals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "behind", property(lambda self: frozenset(), lambda self, workers: None), raising=False)


@plant
def a_checkpoint_has_a_state_that_is_not_stable(patch: pytest.MonkeyPatch) -> None:
    def given(gave: Callable[..., None], self: UserCall, copy: StateCopy) -> None:
        for newcomer, awaited in self._wanted:
            if not newcomer and not awaited.done():
                awaited.set_result(copy)
        gave(self, copy)

    _changed(patch, UserCall, "_keep_copy", given)


@plant
def a_checkpoint_is_read_without_its_reports(patch: pytest.MonkeyPatch) -> None:
    async def read(self: Checkpoints) -> StateCopy | None:
        copy = await _read(self)
        return None if copy is None else structs.replace(copy, reports=())

    _read = Checkpoints.read
    patch.setattr(Checkpoints, "read", read)


@plant
def a_return_begins_at_the_first_step(patch: pytest.MonkeyPatch) -> None:
    async def read(self: Checkpoints) -> StateCopy | None:
        return None

    patch.setattr(Checkpoints, "read", read)


@plant
def an_excluded_worker_goes_on_with_its_state(patch: pytest.MonkeyPatch) -> None:
    def excluded(_: Callable[..., None], self: ViewChanger) -> None:
        core = self._node.engine.core
        assert core.view is not None
        core.note_entry(core.view.number + 1)

    _changed(patch, ViewChanger, "handle_exclusion", excluded)


@plant
def a_worker_that_is_lost_stays_in_the_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(view_changes, "next_view", lambda *_, **__: None)
