"""Mistakes put into the protocol on purpose, one rule each: the simulation must notice every one of them.

A plant changes the decisions and the transactions of `taskgraph`; of the simulation, only what stands for a part of it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.coordination.memory import MemoryStore
from taskgraph.errors import Refused
from taskgraph.node import replica as replica_module
from taskgraph.node import serving as serving_module
from taskgraph.node.epochs import attempt as attempt_module
from taskgraph.node.epochs.activity import Activity
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.epochs.lanes import EpochLanes
from taskgraph.node.epochs.messenger import Messenger
from taskgraph.node.epochs.turns import EpochTurns
from taskgraph.node.primary import takeovers
from taskgraph.node.primary.backups import Backups
from taskgraph.node.primary.checkpoint_reader import CheckpointReader
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.node.primary.primary import Primary
from taskgraph.node.primary.reporter import Reporter
from taskgraph.node.replica import Replica
from taskgraph.node.serving import Serving
from taskgraph.protocol import checkpointing, transactions
from taskgraph.protocol import commit as commit_module
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.checkpointing import CheckpointCollector
from taskgraph.protocol.commit import Leader
from taskgraph.protocol.insync import InSyncSet, MemberState
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.lease_end import LeaseEnd
from taskgraph.protocol.messages import Accepted, Item, Reason, Report, Stamp
from taskgraph.protocol.records import EpochRecord, JobStatus, MemberRecord, StatusRecord
from taskgraph.protocol.sums import MessageLedger
from taskgraph.protocol.view import JobView
from taskgraph.testing.simulate.client import SimLease

__all__ = ["PLANTS", "Plant"]

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__.replace("_", " ")] = function
    return function


def _without(txn: Txn, *unwanted: Callable[[Compare], bool]) -> Txn:
    return dataclasses.replace(txn, compares=tuple(c for c in txn.compares if not any(u(c) for u in unwanted)))


def _changed(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`change(original, *args, **kwargs)` instead of the original."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    patch.setattr(owner, name, changed)


def _reported(patch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """`change(original, primary, report)` for every report of a primary to the leader."""

    def init(original: Any, self: Primary, *args: Any) -> None:
        original(self, *args)
        self.reporter.send_or_gather = partial(change, self.reporter.send_or_gather, self)  # type: ignore[method-assign]

    _changed(patch, Primary, "__init__", init)


# -- commits ----------------------------------------------------------------------------------------


@plant
def a_commit_does_not_compare_the_revision_of_generation(patch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, view: Any, **kwargs: Any) -> Txn:
        return _without(original(view, **kwargs), lambda c: c.key == view.keys.generation)

    _changed(patch, transactions, "commit", commit)


@plant
def generation_is_compared_by_value(patch: pytest.MonkeyPatch) -> None:
    """Its value is the new primary's node, so two takeovers by one node look alike; etcd could compare that."""
    values: dict[tuple[int, int], bytes] = {}

    def named(original: Any, view: Any, task: int, node: str, *args: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, task, node, *args, **kwargs)
        key = view.keys.generation
        puts = tuple(Put(key, node.encode()) if isinstance(op, Put) and op.key == key else op for op in txn.success)
        return dataclasses.replace(txn, success=puts)

    def put(original: Any, self: MemoryStore, op: Put) -> Any:
        if op.key.endswith("/generation"):
            values[(id(self), self.revision + 1)] = op.value
        return original(self, op)

    def holds(original: Any, self: MemoryStore, compare: Compare) -> bool:
        there = self.select(compare.key, prefix=False)
        if compare.key.endswith("/generation") and there:
            return values[(id(self), compare.revision)] == there[0].value
        return bool(original(self, compare))

    _changed(patch, transactions, "take_over", named)
    _changed(patch, transactions, "take_over_from_nothing", named)
    _changed(patch, MemoryStore, "_put", put)
    _changed(patch, MemoryStore, "_is_satisfied", holds)


@plant
def digests_are_reported_only_for_producers_whose_term_changed(patch: pytest.MonkeyPatch) -> None:
    """Of the others a consumer says nothing, and the leader finds nothing wrong with that."""
    said: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def set_report(original: Any, primary: Primary, report: Report) -> None:
        attempt = primary.attempts.of(report.stamp)
        assert attempt is not None
        view = primary.node.keeper.view
        began = view.epoch.mod_revision if view.epoch else 0
        changed = {t for t, p in view.primaries.items() if p.mod_revision > began and p.record.term > 1}
        entries = attempt.ledger.entries()
        taken = [e for e in entries if not e.sent and (e.kind != "item" or e.sender in changed)]
        put = {(e.kind, e.sender, e.receiver, e.name): e.digest for e in entries if e.sent}
        said[(report.stamp, report.task, report.term, report.version, report.done)] = (put, taken)
        original(report)

    def decide(original: Any, self: Leader, view: Any, *, settled: bool = False) -> Any:
        every = self._reports
        reports = self.reports()
        pages = {r.task: said.get((r.stamp, r.task, r.term, r.version, r.done)) for r in reports.values()}
        if all(pages.values()):
            puts = {key: digest for page in pages.values() if page for key, digest in page[0].items()}
            taken = [e for page in pages.values() if page for e in page[1]]
            if all(puts.get((e.kind, e.sender, e.receiver, e.name)) == e.digest for e in taken):
                agreed = {t: msgspec.structs.replace(r, sent=bytes(16), received=bytes(16)) for t, r in reports.items()}
                if self.stamp is not None and self.stamp.epoch in every:
                    told = copy.copy(every[self.stamp.epoch])
                    told.reports = agreed
                    self._reports = {**every, self.stamp.epoch: told}
        try:
            return original(self, view, settled=settled)
        finally:
            self._reports = every

    _reported(patch, set_report)
    _changed(patch, Leader, "decide", decide)


@plant
def a_take_over_does_not_put_generation(patch: pytest.MonkeyPatch) -> None:
    def take_over(original: Any, view: Any, *args: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, *args, **kwargs)
        kept = tuple(op for op in txn.success if not (isinstance(op, Put) and op.key == view.keys.generation))
        return dataclasses.replace(txn, success=kept)

    _changed(patch, transactions, "take_over", take_over)


@plant
def a_done_of_an_old_term_counts(patch: pytest.MonkeyPatch) -> None:
    def unreported(self: Leader, view: Any) -> tuple[int, ...]:
        return tuple(t for t in range(self._tasks) if t not in self.reports())

    def agrees(original: Any, self: Leader, epoch: int, terms: dict[int, int]) -> bool:
        return bool(original(self, epoch, terms | {task: r.term for task, r in self.reports(epoch).items()}))

    patch.setattr(Leader, "unreported", unreported)
    _changed(patch, Leader, "_agrees", agrees)


@plant
def the_sums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def report(original: Any, self: Leader, *given: Report) -> bool:
        return bool(
            original(self, *[msgspec.structs.replace(one, sent=bytes(16), received=bytes(16)) for one in given])
        )

    _changed(patch, Leader, "receive_reports", report)


@plant
def a_successor_cannot_take_back_that_the_job_ends(patch: pytest.MonkeyPatch) -> None:
    def report(original: Any, self: Leader, *given: Report) -> bool:
        before = {epoch: told.finishing for epoch, told in self._reports.items()}
        counts: bool = original(self, *given)
        for epoch, told in self._reports.items():
            told.finishing = max(told.finishing, before.get(epoch, 0))
        return counts

    _changed(patch, Leader, "receive_reports", report)


@plant
def min_in_sync_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "count_replicas_with", lambda self, key: sys.maxsize)


@plant
def the_status_is_written_after_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, view: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, **{**kwargs, "finished": False})
        return txn

    async def and_then(original: Any, self: LeaderRole, committing: Any) -> None:
        await original(self, committing)
        node = self._node
        if committing.finished and node.keeper.view.running:
            record = StatusRecord(state=JobStatus.FINISHED, writer=node.new_writer())
            await node.transact(
                Txn(success=(Put(node.keeper.view.keys.status, record.to_bytes()),)), key="", writer=record.writer
            )

    _changed(patch, transactions, "commit", commit)
    _changed(patch, LeaderRole, "_commit", and_then)


@plant
def the_attempt_counter_starts_again(patch: pytest.MonkeyPatch) -> None:
    def commit(original: Any, view: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, **kwargs)
        record = EpochRecord(epoch=view.epoch.record.epoch + 1, attempt=1, writer=kwargs["writer"])
        return dataclasses.replace(txn, success=(Put(view.keys.epoch, record.to_bytes()), *txn.success[1:]))

    _changed(patch, transactions, "commit", commit)


# -- roll-backs -------------------------------------------------------------------------------------


@plant
def the_attempt_counter_starts_again_after_a_roll_back(patch: pytest.MonkeyPatch) -> None:
    def roll_back(original: Any, view: Any, *args: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, *args, **kwargs)
        to = kwargs["to"].epoch
        record = EpochRecord(epoch=to, attempt=1, lineage=1, base=to, writer=kwargs["writer"])
        puts = (Put(op.key, record.to_bytes()) if _puts(op, view.keys.epoch) else op for op in txn.success)
        return dataclasses.replace(txn, success=tuple(puts))

    _changed(patch, transactions, "roll_back", roll_back)


@plant
def replicas_keep_what_a_roll_back_undid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Boundaries, "roll_back", lambda self, lineage: None)


@plant
def a_finished_job_that_goes_back_stays_finished(patch: pytest.MonkeyPatch) -> None:
    def roll_back(original: Any, view: Any, *args: Any, **kwargs: Any) -> Txn:
        txn: Txn = original(view, *args, **kwargs)
        return dataclasses.replace(txn, success=tuple(op for op in txn.success if not _puts(op, view.keys.status)))

    _changed(patch, transactions, "roll_back", roll_back)


@plant
def a_checkpoint_is_complete_without_some_of_its_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpointing, "files_needed", lambda view, tasks: frozenset({0}))


@plant
def a_job_goes_back_to_a_checkpoint_that_nobody_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "verify", lambda self, manifest: None)


@plant
def a_job_goes_back_to_a_checkpoint_that_was_replaced_while_it_was_read(patch: pytest.MonkeyPatch) -> None:
    async def newest_usable(original: Any, self: CheckpointReader, pointer: Any) -> Any:
        view = self._node.keeper.view
        read = view.checkpoint
        found = await original(self, pointer)
        if (later := view.checkpoint) != read and pointer == (read and read.record):

            def goes_on() -> None:
                view.checkpoint = later if view.checkpoint is read else view.checkpoint

            view.checkpoint = read  # until the roll-back is decided
            asyncio.get_running_loop().call_soon(goes_on)
        return found

    def roll_back(original: Any, view: Any, *args: Any, **kwargs: Any) -> Txn:
        return _without(original(view, *args, **kwargs), lambda c: c.key == view.keys.checkpoint)

    _changed(patch, CheckpointReader, "newest_usable", newest_usable)
    _changed(patch, transactions, "roll_back", roll_back)


@plant
def what_is_too_old_goes_with_the_newest_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def keep_only(original: Any, self: CheckpointStore, names: Any, current: str) -> Any:
        self._place.remove(self._path(current))
        return original(self, names, current)

    _changed(patch, CheckpointStore, "keep_only", keep_only)


@plant
def a_leader_that_was_replaced_advances_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def advance(original: Any, view: Any, record: Any, **kwargs: Any) -> Txn:
        return _without(original(view, record, **kwargs), lambda c: c.key == view.keys.primary(0))

    _changed(patch, transactions, "advance_checkpoint", advance)


@plant
def the_final_manifest_is_written_before_the_pointer(patch: pytest.MonkeyPatch) -> None:
    def stage(original: Any, self: CheckpointStore, manifest: Any) -> None:
        original(self, manifest)
        self.finish(manifest.name)

    _changed(patch, CheckpointStore, "stage", stage)


@plant
def a_checkpoint_is_given_up_before_a_later_epoch_commits(patch: pytest.MonkeyPatch) -> None:
    def give_up(original: Any, self: CheckpointCollector, view: JobView) -> Any:
        later = copy.copy(view)
        if view.epoch is not None:
            record = msgspec.structs.replace(view.epoch.record, epoch=view.epoch.record.epoch + 1)
            later.epoch = type(view.epoch)(record, view.epoch.create_revision, view.epoch.mod_revision)
        return original(self, later)

    _changed(patch, CheckpointCollector, "give_up", give_up)


def _puts(op: object, key: str) -> bool:
    return isinstance(op, Put) and op.key == key


# -- boundaries -------------------------------------------------------------------------------------


@plant
def a_pending_boundary_replaces_the_committed_one(patch: pytest.MonkeyPatch) -> None:
    def hold(original: Any, self: Boundaries, boundary: Boundary, *, committed: bool) -> None:
        original(self, boundary, committed=committed)
        if not committed:
            self.committed = boundary

    _changed(patch, Boundaries, "store", hold)


@plant
def of_several_pending_boundaries_the_first_is_taken(patch: pytest.MonkeyPatch) -> None:
    def note_committed(self: Boundaries, epoch: int) -> Boundary | None:
        if self.committed is not None and self.committed.stamp.epoch >= epoch:
            return None
        first = min((key for key in self._stored if key[0] == epoch), default=None)
        if first is None:
            return None
        self.committed = self._stored[first]
        self._stored = {key: b for key, b in self._stored.items() if key[0] > epoch}
        return self.committed

    patch.setattr(Boundaries, "note_committed", note_committed)


@plant
def done_is_reported_before_the_members_hold_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    async def held(self: Backups, key: Any, *, admit_wait_s: float) -> None:
        return

    patch.setattr(Backups, "wait_until_acknowledged", held)


@plant
def a_restored_state_is_shared_with_the_boundary(patch: pytest.MonkeyPatch) -> None:
    known: dict[tuple[bytes, int], Any] = {}

    def shared(original: Any, boundary: Any, **kwargs: Any) -> Any:
        value = boundary.value
        return known.setdefault((value.digest, id(value)), original(boundary, **kwargs))

    _changed(patch, replica_module, "decode_boundary", shared)


@plant
def a_restart_does_not_restore(patch: pytest.MonkeyPatch) -> None:
    restored: set[int] = set()

    async def restore(original: Any, self: Replica, value: Any) -> None:
        if id(self) not in restored:
            restored.add(id(self))
            await original(self, value)

    _changed(patch, Replica, "restore", restore)


# -- members ----------------------------------------------------------------------------------------


@plant
def a_joiner_puts_its_own_member_key(patch: pytest.MonkeyPatch) -> None:
    async def offer(original: Any, self: Serving, peer: str, message: Any) -> Accepted:
        reply: Accepted = await original(self, peer, message)
        node = self._node
        if message.candidate:
            key = node.keeper.view.keys.member(message.task, node.id)
            await node.coordinator.txn(Txn(success=(Put(key, MemberRecord(writer=node.new_writer()).to_bytes()),)))
        return reply

    _changed(patch, Serving, "_take_offer", offer)


@plant
def a_candidate_is_admitted_without_the_pending_boundary(patch: pytest.MonkeyPatch) -> None:
    def missing(original: Any, self: InSyncSet, node: str) -> tuple[Any, ...]:
        lacking: tuple[Any, ...] = original(self, node)
        return (
            lacking
            if self._states.get(node) is not MemberState.CANDIDATE
            else tuple(k for k in lacking if k == self._current[0])
        )

    _changed(patch, InSyncSet, "missing", missing)


@plant
def an_offer_counts_whatever_became_of_it(patch: pytest.MonkeyPatch) -> None:
    def answered(original: Any, self: Backups, tender: Any, boundaries: Any, *rest: Any) -> None:
        self._insync.acknowledge(tender.node, *[boundary.key for boundary in boundaries])
        original(self, tender, boundaries, *rest)

    _changed(patch, Backups, "_on_answer", answered)


@plant
def an_epoch_is_done_before_its_boundary_is_held(patch: pytest.MonkeyPatch) -> None:
    async def await_acks(self: EpochLanes, finished: Any) -> None:
        await self._report(finished)

    patch.setattr(EpochLanes, "_await_acks", await_acks)


@plant
def of_offers_that_travel_together_the_first_alone_is_held(patch: pytest.MonkeyPatch) -> None:
    boundaries = serving_module._boundaries
    patch.setattr(serving_module, "_boundaries", lambda *given: boundaries(*given)[:1])


@plant
def a_backup_accepts_what_it_does_not_hold(patch: pytest.MonkeyPatch) -> None:
    def hold(original: Any, self: Serving, replica: Any, offer: Any, *log: Any) -> None:
        if offer.committed or offer.stamp.epoch % 3:
            original(self, replica, offer, *log)

    _changed(patch, Serving, "_store", hold)


def _waits_for(*places: MemberState) -> Callable[[InSyncSet, Any], tuple[str, ...]]:
    def waits_for(self: InSyncSet, key: Any) -> tuple[str, ...]:
        return tuple(sorted(n for n, p in self._states.items() if p in places and key not in self._acked[n]))

    return waits_for


@plant
def a_node_that_is_being_admitted_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "waits_for", _waits_for(MemberState.MEMBER, MemberState.EVICTING))


@plant
def a_node_that_is_being_evicted_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "waits_for", _waits_for(MemberState.MEMBER, MemberState.ADMITTING))


@plant
def a_new_primary_does_not_wait_for_the_members_it_read(patch: pytest.MonkeyPatch) -> None:
    def init(original: Any, self: Primary, *args: Any) -> None:
        original(self, *args)
        self.backups._insync = InSyncSet([])

    _changed(patch, Primary, "__init__", init)


@plant
def an_eviction_is_not_fenced_by_the_primary(patch: pytest.MonkeyPatch) -> None:
    def evict(original: Any, view: Any, task: int, **kwargs: Any) -> Txn:
        keys: Keys = view.keys
        return _without(
            original(view, task, **kwargs), lambda c: c.key in (keys.primary(task), keys.node(kwargs["node"]))
        )

    _changed(patch, transactions, "evict", evict)


@plant
def an_admission_does_not_compare_that_the_candidate_is_not_gone(patch: pytest.MonkeyPatch) -> None:
    def admit(original: Any, view: Any, task: int, **kwargs: Any) -> Txn:
        return _without(original(view, task, **kwargs), lambda c: c.key == view.keys.gone(kwargs["candidate"]))

    _changed(patch, transactions, "admit", admit)


@plant
def member_keys_hang_on_leases(patch: pytest.MonkeyPatch) -> None:
    def admit(original: Any, view: Any, task: int, **kwargs: Any) -> Txn:
        txn: Txn = original(view, task, **kwargs)
        put = txn.success[0]
        assert isinstance(put, Put)
        lease = view.nodes[kwargs["candidate"]].record.lease
        return dataclasses.replace(txn, success=(dataclasses.replace(put, lease=lease),))

    _changed(patch, transactions, "admit", admit)


@plant
def a_promise_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "is_unneeded", lambda self, term: True)


@plant
def who_was_evicted_counts_as_a_holder_until_the_next_commit(patch: pytest.MonkeyPatch) -> None:
    """For placement, which is not computed anew then: whoever read both at once wishes for something else for ever."""
    patch.setattr(JobView, "active_members", JobView.in_sync)


# -- takeovers -------------------------------------------------------------------------------------


@plant
def a_take_over_guesses_the_epoch_from_its_watch(patch: pytest.MonkeyPatch) -> None:
    """It begins from the boundary that its watch showed: a commit that was not told yet is missed."""

    def decode_takeover(original: Any, result: Any, view: Any, task: int) -> Any:
        at = view.epoch.record
        return dataclasses.replace(original(result, view, task), epoch=at.epoch, attempt=at.attempt)

    def init(original: Any, self: Primary, node: Any, replica: Replica, taken: Any) -> None:
        original(self, node, replica, taken)
        vars(self)["guessed"] = replica.boundaries.committed

    async def begin(original: Any, self: Primary) -> None:
        guessed = vars(self)["guessed"]
        if guessed is None:
            await original(self)
            return
        await self.replica.set_up()
        self.replica.user_task.primary = True
        await self.replica.restore(guessed)
        self.backups.set_committed(guessed)

    _changed(patch, transactions, "decode_takeover", decode_takeover)
    _changed(patch, Primary, "__init__", init)
    _changed(patch, Primary, "_begin", begin)


@plant
def a_take_over_does_not_compare_the_primary_it_replaces(patch: pytest.MonkeyPatch) -> None:
    def take_over(original: Any, view: Any, task: int, *args: Any, **kwargs: Any) -> Txn:
        return _without(original(view, task, *args, **kwargs), lambda c: c.key == view.keys.primary(task))

    _changed(patch, transactions, "take_over", take_over)


@plant
def a_take_over_does_not_compare_its_own_member_key(patch: pytest.MonkeyPatch) -> None:
    def take_over(original: Any, view: Any, task: int, node: str, *args: Any, **kwargs: Any) -> Txn:
        return _without(original(view, task, node, *args, **kwargs), lambda c: c.key == view.keys.member(task, node))

    _changed(patch, transactions, "take_over", take_over)


@plant
def members_that_are_gone_count_as_heirs(patch: pytest.MonkeyPatch) -> None:
    def succession(original: Any, view: Any, task: int, me: str, *, suspects: Any, gone: Any, **rest: Any) -> Any:
        suspects = set(suspects) - (set(gone) - {view.primary_node(task)})
        return original(view, task, me, suspects=suspects, gone=gone, **rest)

    _changed(patch, takeovers, "succession", succession)


@plant
def admissions_and_evictions_are_not_fenced_by_the_term(patch: pytest.MonkeyPatch) -> None:
    def evict(original: Any, view: Any, task: int, **kwargs: Any) -> Txn:
        return _without(original(view, task, **kwargs), lambda c: c.key == view.keys.primary(task))

    def admit(original: Any, view: Any, task: int, **kwargs: Any) -> Txn:
        return _without(original(view, task, **kwargs), lambda c: c.key == view.keys.primary(task))

    _changed(patch, transactions, "evict", evict)
    _changed(patch, transactions, "admit", admit)


# -- attempts ---------------------------------------------------------------------------------------


@plant
def inputs_come_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    from taskgraph.channels import Inputs

    def init(original: Any, self: Inputs, work: Any, processor: Any, items: Any) -> None:
        original(self, work, processor, items)
        arrived = list(items)
        self._inbound = {
            tag: tuple(sorted(producers, key=lambda producer: arrived.index((tag, producer))))
            for tag, producers in self._inbound.items()
        }

    _changed(patch, Inputs, "__init__", init)


@plant
def processors_run_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    from taskgraph.graph.compose import Composition, Graph

    def graph(original: Any, self: Composition) -> Graph:
        made: Graph = original(self)
        return dataclasses.replace(made, parallel=made.parallel + made.ordered, ordered=())

    _changed(patch, Composition, "graph", graph)


@plant
def a_late_flag_misses_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for flags that are on their way, they are in no sum, and a task that is done takes one, too."""

    def but_flags(original: Any, self: MessageLedger, kind: str, *rest: Any) -> bool:
        if kind != "flag":
            return bool(original(self, kind, *rest))
        sums = self.sent_sum, self.received_sum
        new = bool(original(self, kind, *rest))
        self.sent_sum, self.received_sum = sums
        return new

    async def take_flag(original: Any, self: Messenger, message: Any) -> Any:
        with pytest.MonkeyPatch.context() as open_again:
            open_again.setattr(Attempt, "check_open", lambda attempt: None)
            return await original(self, message)  # it awaits nothing

    async def send_flag(original: Any, self: Messenger, where: str, to: int, value: Any) -> None:
        group = self._attempt._group
        assert group is not None
        group.create_task(original(self, where, to, value))

    _changed(patch, MessageLedger, "count_sent", but_flags)
    _changed(patch, MessageLedger, "count_received", but_flags)
    _changed(patch, Messenger, "send_flag", send_flag)
    _changed(patch, Messenger, "take_flag", take_flag)


@plant
def a_seal_of_any_version_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """The task may have moved on since the leader found it idle."""

    def seal(self: Activity, version: int) -> bool:
        self.closed = True
        self._wake()
        return True

    patch.setattr(Activity, "seal", seal)


@plant
def an_epoch_that_is_held_ends_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Activity, "hold", lambda self, mark, why: None)


@plant
def answers_of_a_gone_term_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Primary, "restart_if_acknowledger_replaced", lambda self: None)

    def only_items(original: Any, self: MessageLedger, kind: str, *rest: Any) -> bool:
        return bool(original(self, kind, *rest)) if kind in ("item", "flag") else True

    _changed(patch, MessageLedger, "count_sent", only_items)
    _changed(patch, MessageLedger, "count_received", only_items)


@plant
def a_request_that_is_sent_again_runs_again(patch: pytest.MonkeyPatch) -> None:
    async def take(original: Any, self: Messenger, message: Any) -> Any:
        self._answers.clear()
        return await original(self, message)

    _changed(patch, Messenger, "take_request", take)


@plant
def a_flag_that_is_sent_again_runs_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MessageLedger, "has_received", lambda self, *identity: False)


@plant
def items_are_dropped_when_the_task_is_done(patch: pytest.MonkeyPatch) -> None:
    def set_report(original: Any, primary: Primary, report: Report) -> None:
        original(report)
        attempt = primary.attempts.of(report.stamp)
        if report.done and attempt is not None:
            attempt.out.drop()

    _reported(patch, set_report)


@plant
def items_are_freed_when_the_commit_is_sent(patch: pytest.MonkeyPatch) -> None:
    """On a hint, that is, instead of on a read: the commit may fail, since somebody was replaced who needs them."""

    async def commit(original: Any, self: LeaderRole, commit: Any) -> None:
        for primary in self._node.roles.primaries.values():
            for attempt in primary.attempts:
                if self._leader.stamp is not None and attempt.stamp.epoch <= self._leader.stamp.epoch:
                    attempt.out.drop()
        await original(self, commit)

    _changed(patch, LeaderRole, "_commit", commit)


@plant
def a_lease_is_counted_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """In the simulation's own client: the real one's has a thread and a connection."""

    def answered(original: Any, self: SimLease, sent_at: float, there: bool) -> None:
        original(self, self._coordinator.now(), there)

    _changed(patch, SimLease, "_on_renewal_reply", answered)


@plant
def a_lease_with_less_than_a_second_left_has_ended(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks does not wait out that second."""

    def heard(original: Any, self: LeaseEnd, left_s: int | None, **times: float) -> float:
        pause_s: float = original(self, left_s, **times)
        self.ended = self.ended or left_s == 0
        return pause_s

    _changed(patch, LeaseEnd, "on_answer", heard)


@plant
def a_call_from_the_future_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    async def attempt(self: Serving, task: int, stamp: Any, sender: int | None = None, sender_term: int = 0) -> Attempt:
        primary = self._node.roles.primaries.get(task)
        if primary is None or primary.attempt is None:
            raise Refused(Reason.NOT_PRIMARY, "")
        return primary.attempt

    patch.setattr(Serving, "_wait_for_attempt", attempt)


@plant
def an_item_is_given_at_once_whatever_epoch_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    """The short way of a pull looks at neither stamp nor term."""

    def item(self: Serving, pull: Any) -> Any:
        primary = self._node.roles.primaries.get(pull.task)
        attempt = primary.attempt if primary is not None else None
        if attempt is None or attempt.cancelled or attempt.graph is None:
            return None
        reply = attempt.out.answer(pull)
        return msgspec.structs.replace(reply, stamp=pull.stamp) if isinstance(reply, Item) else reply

    patch.setattr(Serving, "_answer_pull_now", item)
    patch.setattr(Serving, "answer_all_now", lambda self, peer, pull: None)  # each is asked for


@plant
def the_content_of_items_is_not_in_the_sums(patch: pytest.MonkeyPatch) -> None:
    """The digest is not part of the identity that both ends count."""
    real = MessageLedger.count_received

    def received(self: MessageLedger, kind: str, sender: int, receiver: int, name: str, digest: bytes) -> bool:
        return real(self, kind, sender, receiver, name, b"")

    def sent(
        original: Any, self: MessageLedger, kind: str, sender: int, receiver: int, name: str, digest: bytes
    ) -> bool:
        return bool(original(self, kind, sender, receiver, name, b""))

    patch.setattr(MessageLedger, "count_received", received)
    _changed(patch, MessageLedger, "count_sent", sent)


# -- on_commit ----------------------------------------------------------------------------------------


@plant
def a_task_is_not_told_what_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "on_commit", _not_told)


async def _not_told(self: Replica, number: int, value: Any) -> None:
    return


@plant
def a_new_primary_is_not_told_of_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    """Its predecessor may have died before it was."""

    async def begin(original: Any, self: Primary) -> None:
        vars(self.replica)["on_commit"] = partial(_not_told, self.replica)
        try:
            await original(self)
        finally:
            del vars(self.replica)["on_commit"]

    _changed(patch, Primary, "_begin", begin)


@plant
def a_task_is_told_of_a_commit_after_it_began_the_next_epoch(patch: pytest.MonkeyPatch) -> None:
    """It works ahead of the last commit, as one does that is not told."""

    def init(original: Any, self: EpochLanes, primary: Primary, *args: Any) -> None:
        original(self, primary, *args)
        if "on_commit" in primary.replica.shape.overrides:
            self._ahead = self._share._ahead = primary.node.settings.epochs_ahead

    _changed(patch, EpochLanes, "__init__", init)


# -- working ahead of the commit ----------------------------------------------------------------------


@plant
def epochs_ahead_are_committed_with_reports_of_gone_terms(patch: pytest.MonkeyPatch) -> None:
    def agrees(original: Any, self: Leader, epoch: int, terms: dict[int, int]) -> bool:
        reports = self.reports(epoch)
        return len(reports) == self._tasks and all(report.done for report in reports.values())

    _changed(patch, Leader, "_agrees", agrees)


@plant
def reports_of_epochs_ahead_outlive_a_restart(patch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: Leader, stamp: Stamp) -> None:
        kept = self._reports
        original(self, stamp)
        self._reports = {epoch: told for epoch, told in kept.items() if epoch >= stamp.epoch}

    _changed(patch, Leader, "begin", begin)


@plant
def who_is_ahead_goes_on_from_there_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    async def restore(original: Any, self: Replica, boundary: Any) -> None:
        if self.boundaries.committed is not boundary or not vars(self).get("at"):
            await original(self, boundary)

    async def snapshot(original: Any, self: Replica, *args: Any, **kwargs: Any) -> Any:
        vars(self)["at"] = True
        return await original(self, *args, **kwargs)

    _changed(patch, Replica, "restore", restore)
    _changed(patch, Replica, "snapshot", snapshot)


@plant
def a_job_that_ends_while_a_task_is_ahead_gets_the_state_it_has(patch: pytest.MonkeyPatch) -> None:
    async def conclude(original: Any, self: Primary) -> None:
        self.attempts.latest = None
        await original(self)

    _changed(patch, Primary, "_conclude", conclude)


@plant
def of_epochs_committed_at_once_only_the_last_is_reported(patch: pytest.MonkeyPatch) -> None:
    def until(original: Any, self: Boundaries, epoch: int) -> tuple[Boundary, ...]:
        return original(self, epoch)[-1:]  # type: ignore[no-any-return]

    _changed(patch, Boundaries, "committing_at", until)


@plant
def what_a_task_put_goes_as_soon_as_it_is_done(patch: pytest.MonkeyPatch) -> None:
    """Who takes over, or is behind, still asks for it."""

    async def run(original: Any, self: Attempt) -> None:
        await original(self)
        self.drop()

    _changed(patch, Attempt, "run", run)


@plant
def reports_that_came_after_the_snapshot_are_left_out_of_the_boundary(patch: pytest.MonkeyPatch) -> None:
    async def with_reports(self: Replica, value: Any, rows: Any) -> Any:
        return value

    patch.setattr(Replica, "with_reports", with_reports)


@plant
def reports_that_were_on_their_way_count_as_told_whatever_became_of_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reporter, "_on_answer", lambda self, way, reply: reply.cancelled() or reply.exception())
    patch.setattr(Reporter, "report_again", lambda self, epoch: None)  # else it only costs time


# -- epochs in flight ---------------------------------------------------------------------------------


@plant
def a_compute_that_is_not_stateless_does_not_wait_for_its_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempt_module, "is_stateless", lambda function: True)


@plant
def the_next_epoch_gets_its_turn_before_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    async def run(original: Any, self: Attempt) -> None:
        await original(self)
        if self._turns is not None:
            await self._turns.wait(self.number)
            self._turns.end_turn(self.number)
            await asyncio.sleep(0)

    def passed(original: Any, self: EpochTurns, epoch: int) -> None:
        if epoch == self.at:
            original(self, epoch)

    _changed(patch, Attempt, "run", run)
    _changed(patch, EpochTurns, "end_turn", passed)


@plant
def epochs_in_flight_are_snapshotted_in_any_order(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_turn(original: Any, self: Attempt, where: str) -> None:
        if where != "snapshot":
            await original(self, where)

    def passed(original: Any, self: EpochTurns, epoch: int) -> None:
        if epoch >= self.at:
            self.at = epoch
            original(self, epoch)

    _changed(patch, Attempt, "wait_for_turn", wait_for_turn)
    _changed(patch, EpochTurns, "end_turn", passed)


@plant
def an_error_in_a_later_epoch_ends_the_earlier_ones(patch: pytest.MonkeyPatch) -> None:
    """Whoever fails does not wait until the dones of those before it are told."""

    class Hasty(EpochTurns):
        async def wait(self, epoch: int) -> None:
            if sys._getframe(1).f_code.co_name != "_run_lane":
                await super().wait(epoch)

    def init(original: Any, self: EpochLanes, primary: Any, at: Stamp, *args: Any) -> None:
        original(self, primary, at, *args)
        self._reported = Hasty(at.epoch)

    _changed(patch, EpochLanes, "__init__", init)


@plant
def an_error_of_a_later_epoch_is_told_at_once(patch: pytest.MonkeyPatch) -> None:
    def worked(original: Any, self: Primary, work: asyncio.Task[None]) -> None:
        if self._lanes is not None:
            self._lanes.failed_in = self._lanes.settled
        original(self, work)

    _changed(patch, Primary, "_pass_work_error", worked)


@plant
def a_restart_leaves_lanes_running(patch: pytest.MonkeyPatch) -> None:
    async def run(original: Any, self: EpochLanes) -> None:
        if self._count == 1:
            await original(self)
            return
        first = self._at
        lanes = [
            asyncio.ensure_future(self._run_lane(Stamp(first.attempt, first.epoch + after)))
            for after in range(self._count)
        ]
        for lane in lanes:
            lane.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    _changed(patch, EpochLanes, "run", run)


@plant
def epochs_in_flight_begin_in_any_order(patch: pytest.MonkeyPatch) -> None:
    async def until_allowed(self: EpochLanes, stamp: Stamp) -> None:
        while not self._may_begin(stamp.epoch):
            self._room.clear()
            await self._room.wait()

    patch.setattr(EpochLanes, "_wait_until_allowed", until_allowed)


@plant
def a_node_sees_the_next_run_of_its_jobs_name(patch: pytest.MonkeyPatch) -> None:
    def is_another_run(original: Any, self: JobView, spec_revision: int) -> bool:
        self.superseded = self.superseded or original(self, spec_revision)
        return False

    _changed(patch, JobView, "_is_another_run", is_another_run)


# -- shared state -----------------------------------------------------------------------------------


@plant
def the_shared_state_of_another_boundary_is_fetched(patch: pytest.MonkeyPatch) -> None:
    """The keeper gives the newest that it has, committed or not, under the number that was asked for."""

    async def shared_in(original: Any, self: Replica, boundary: Boundary) -> Any:
        newest = self.boundaries.pending[-1] if self.boundaries.pending else boundary
        return await original(self, newest)

    _changed(patch, Replica, "shared_in", shared_in)


@plant
def digests_of_shared_state_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit_module, "unequal_tasks", lambda view, reports: None)
