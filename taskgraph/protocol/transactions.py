"""Builds all transactions of nodes, as data.

Rules:

1. Comparisons are of mod revisions that the writer's view read. A value may come back, a revision cannot.
2. A write below `tasks/t/` compares `tasks/t/primary` and the writer's own node key. So a primary of an old term, or a
   node without a lease, changes nothing.
3. A write of a primary also puts `generation`. The commit compares this key in place of all primaries.
4. `epoch` is written by the leader, fenced by its `primary`, and by the takeover of a task that lost all its members,
   which rolls the job back. A roll-back puts `checkpoint`, too, so an old leader cannot advance it.

Each function raises LookupError if its view shows that the transaction makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from taskgraph.protocol.kv import Compare, Delete, Get, Op, Put, Txn, TxnResult
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    JobStatus,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    StatusRecord,
)
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.view import JobView, Versioned

__all__ = [
    "TakeoverResult",
    "admit",
    "advance_checkpoint",
    "commit",
    "declare_absent_gone",
    "declare_gone",
    "decode_takeover",
    "evict",
    "fail",
    "give_results_up",
    "register",
    "remove_member",
    "restart",
    "resume_node",
    "roll_back",
    "take_over",
    "take_over_from_nothing",
]


def _put_generation(view: JobView, writer: str) -> Put:
    # Only the revision counts.
    return Put(view.keys.generation, writer.encode())


def _revision_of(record: object) -> int:
    return record.mod_revision if record is not None else 0  # type: ignore[attr-defined]


def _current_epoch(view: JobView) -> Versioned[EpochRecord]:
    if view.epoch is None:
        raise LookupError("the job was not submitted")
    return view.epoch


def register(view: JobView, node: str, record: NodeRecord) -> Txn:
    """Puts the key of a node that has none, if the run is still that of the view and the node is not declared gone."""
    return Txn(
        compares=(
            Compare(view.keys.node(node), 0),
            Compare(view.keys.spec, view.spec_revision),
            Compare(view.keys.gone(node), 0),
        ),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


def resume_node(view: JobView, node: str, record: NodeRecord) -> Txn:
    """Puts the key of a node again after a pause, if no primary changed since `view`.

    It compares the node's own key, too: etcd may still execute an earlier try whose answer was lost. After a later try,
    that would change the revision that all writes of the node compare.
    """
    return Txn(
        compares=(
            Compare(view.keys.spec, view.spec_revision),
            Compare(view.keys.gone(node), 0),
            Compare(view.keys.generation, view.generation_revision),
            Compare(view.keys.node(node), _revision_of(view.nodes.get(node))),
        ),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


def update_node(view: JobView, node: str, record: NodeRecord, node_revision: int) -> Txn:
    """Changes the record of a registered node, e.g. when it drains."""
    return Txn(
        compares=(Compare(view.keys.node(node), node_revision),),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


@dataclass(frozen=True, slots=True)
class TakeoverResult:
    """What a takeover read at `revision`, that of its writes. The new primary starts from that, not from its view.

    Attributes:
        members: node -> mod revision and record of its member key.
        lineage: see `EpochRecord`.
    """

    revision: int
    term: int
    epoch: int
    attempt: int
    members: dict[str, tuple[int, MemberRecord]]
    lineage: int = 0


def take_over(
    view: JobView, task: int, node: str, node_revision: int, *, stateful: bool, failure: bool, writer: str
) -> Txn:
    """Makes a member (or the primary itself) primary with the next term.

    Args:
        failure: the old primary failed; False for a hand-over. The record counts failures, for users.

    Raises:
        LookupError: the node is not a member in the view, or was evicted before the committed boundary.
    """
    keys = view.keys
    own = view.members_of(task).get(node)
    old = view.primaries.get(task)
    if own is None or view.epoch is None or old is None:
        raise LookupError(f"node {node} is no member of task {task}")
    compares = [
        Compare(keys.primary(task), old.mod_revision),
        Compare(keys.member(task, node), own.mod_revision),
        Compare(keys.node(node), node_revision),
    ]
    membership: tuple[Op, ...] = ()
    if own.record.until is not None:
        # Evicted, but it has the committed boundary: valid only while that is the committed one. Its key loses "until",
        # since the primary has all later boundaries; otherwise the task would count as lost without other members.
        if own.record.until != view.epoch.record.epoch or not view.holds(own.record):
            raise LookupError(f"node {node} was evicted from task {task} at boundary {own.record.until}")
        compares.append(Compare(keys.epoch, view.epoch.mod_revision))
        membership = (Put(keys.member(task, node), MemberRecord(writer=writer).to_bytes()),)
    record = PrimaryRecord(
        node=node,
        term=old.record.term + 1,
        stateful=stateful,
        failovers=old.record.failovers + (1 if failure else 0),
        shared=old.record.shared,
        writer=writer,
    )
    return Txn(
        compares=tuple(compares),
        success=(
            Put(keys.primary(task), record.to_bytes()),
            _put_generation(view, writer),
            *membership,
            *_takeover_reads(view, task),
        ),
    )


def take_over_from_nothing(
    view: JobView,
    task: int,
    node: str,
    node_revision: int,
    *,
    stateful: bool,
    writer: str,
    shared: tuple[str, ...] = (),
) -> Txn:
    """Makes a node the first primary of a new job, or of a task whose members are all gone.

    It compares all keys of the decision, so that no member can come back meanwhile.

    Args:
        stateful, shared: what the task's class declares, for its record (`PrimaryRecord`).

    Raises:
        LookupError: the state of the task is lost (epoch > 0) and not in the checkpoint: use `roll_back` or
        `fail_lost`.
    """
    epoch = _current_epoch(view).record.epoch
    needed = stateful or (bool(shared) and holds_state(view, task))
    if needed and epoch > 0 and not view.is_checkpointed:
        raise LookupError(f"task {task} has no members left, and its state of epoch {epoch} with them")
    return _take_over_without_members(view, task, node, node_revision, (stateful, shared), writer=writer, also=())


def roll_back(
    view: JobView,
    task: int,
    node: str,
    node_revision: int,
    *,
    to: CheckpointRecord,
    stateful: bool,
    writer: str,
    shared: tuple[str, ...] = (),
) -> Txn:
    """Rolls the job back to checkpoint `to`, with the next attempt, since a stateful task lost all its members.

    `node` becomes the task's primary. A finished job runs again, since its uncollected results are lost, too.

    Raises:
        LookupError: `to` is not earlier than the committed boundary, or the job failed or was cancelled.
    """
    if view.epoch is None or view.checkpoint is None or view.status is None:
        raise LookupError("there is no checkpoint")
    at = view.epoch.record
    if not 0 < to.epoch < at.epoch:
        raise LookupError(f"the job is at epoch {at.epoch}, the checkpoint at {to.epoch}")
    epoch = EpochRecord(epoch=to.epoch, attempt=at.attempt + 1, lineage=at.attempt + 1, base=to.epoch, writer=writer)
    if view.status.record.state not in (JobStatus.RUNNING, JobStatus.FINISHED):
        raise LookupError(f"the job {view.status.record.state}")
    also: tuple[Op, ...] = (Put(view.keys.epoch, epoch.to_bytes()), Put(view.keys.checkpoint, to.to_bytes()))
    if not view.running:
        also = (*also, Put(view.keys.status, StatusRecord(state=JobStatus.RUNNING, writer=writer).to_bytes()))
    txn = _take_over_without_members(view, task, node, node_revision, (stateful, shared), writer=writer, also=also)
    return replace(txn, compares=(*txn.compares, Compare(view.keys.collected, 0)))


def _take_over_without_members(
    view: JobView,
    task: int,
    node: str,
    node_revision: int,
    declared: tuple[bool, tuple[str, ...]],
    *,
    writer: str,
    also: tuple[Op, ...],
) -> Txn:
    """Makes a node the primary of a task without living members. `declared`: stateful, shared; `also`: more writes."""
    keys, (stateful, shared) = view.keys, declared
    if view.epoch is None or view.status is None:
        raise LookupError("the job was not submitted")
    old = view.primaries.get(task)
    members = view.members_of(task)
    record = PrimaryRecord(
        node=node,
        term=(old.record.term if old else 0) + 1,
        stateful=stateful,
        failovers=old.record.failovers if old else 0,  # no backup took over
        shared=shared,
        writer=writer,
    )
    return Txn(
        compares=(
            Compare(keys.primary(task), _revision_of(old)),
            Compare(keys.node(node), node_revision),
            *_compare_members_gone(view, task, node),
            Compare(keys.epoch, view.epoch.mod_revision),
            Compare(keys.checkpoint, _revision_of(view.checkpoint)),
            Compare(keys.status, view.status.mod_revision),
        ),
        success=(
            *also,
            *(Delete(keys.member(task, member)) for member in sorted(members) if member != node),
            Put(keys.primary(task), record.to_bytes()),
            Put(keys.member(task, node), MemberRecord(writer=writer).to_bytes()),
            _put_generation(view, writer),
            *_takeover_reads(view, task),
        ),
    )


def fail_lost(view: JobView, task: int, status: StatusRecord) -> Txn:
    """Fails the job: all members of a stateful task are gone, and there is no usable checkpoint.

    Raises:
        LookupError: the job has ended. After its results were collected, nodes leave and nothing is lost.
    """
    if not view.has_work:
        raise LookupError("the job has ended")
    keys = view.keys
    return Txn(
        compares=(
            Compare(keys.primary(task), _revision_of(view.primaries.get(task))),
            *_compare_members_gone(view, task, None),
            Compare(keys.epoch, _revision_of(view.epoch)),
            Compare(keys.checkpoint, _revision_of(view.checkpoint)),
            Compare(keys.status, _revision_of(view.status)),
            Compare(keys.collected, 0),
        ),
        success=(Put(keys.status, status.to_bytes()),),
    )


def _compare_members_gone(view: JobView, task: int, node: str | None) -> Iterable[Compare]:
    """Yields comparisons of all member keys, and of the absence of other nodes with the committed boundary."""
    holders = view.in_sync(task)
    for member, versioned in sorted(view.members_of(task).items()):
        yield Compare(view.keys.member(task, member), versioned.mod_revision)
        if member != node and member in holders:
            yield Compare(view.keys.node(member), 0)


def _takeover_reads(view: JobView, task: int) -> tuple[Op, ...]:
    """Builds the reads of a takeover, whose results `decode_takeover` decodes."""
    return (Get(view.keys.epoch), Get(view.keys.members(task), prefix=True), Get(view.keys.primary(task)))


def decode_takeover(result: TxnResult, view: JobView, task: int) -> TakeoverResult:
    """Decodes what a takeover that succeeded has read: the state from which the new primary starts."""
    epoch_reads, member_reads, primary_reads = result.reads
    epoch = EpochRecord.from_bytes(epoch_reads[0].value)
    primary = PrimaryRecord.from_bytes(primary_reads[0].value)
    prefix = view.keys.members(task)
    return TakeoverResult(
        revision=result.revision,
        term=primary.term,
        epoch=epoch.epoch,
        attempt=epoch.attempt,
        lineage=epoch.lineage,
        members={kv.key[len(prefix) :]: (kv.mod_revision, MemberRecord.from_bytes(kv.value)) for kv in member_reads},
    )


def reread_take_over(view: JobView, task: int) -> Txn:
    """Builds a read of the keys of a takeover whose outcome is unknown, for `decode_takeover`; writes nothing."""
    return Txn(success=_takeover_reads(view, task))


def _primary_fences(
    view: JobView, task: int, primary_revision: int, node: str, node_revision: int
) -> tuple[Compare, ...]:
    """Builds the comparisons that `node` is registered, and still the task's primary."""
    return (Compare(view.keys.primary(task), primary_revision), Compare(view.keys.node(node), node_revision))


def admit(
    view: JobView,
    task: int,
    *,
    primary_revision: int,
    node: str,
    node_revision: int,
    candidate: str,
    writer: str,
) -> Txn:
    """Makes a candidate a member of the task: puts it into the in-sync set. `node` is the task's primary.

    Raises:
        LookupError: the candidate is not registered in the view. Comparing revision 0 would require its absence.
    """
    keys = view.keys
    if candidate not in view.nodes:
        raise LookupError(f"node {candidate} is not registered: it cannot be admitted to task {task}")
    current = view.members_of(task).get(candidate)
    return Txn(
        compares=(
            *_primary_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, candidate), _revision_of(current)),
            Compare(keys.node(candidate), view.nodes[candidate].mod_revision),
            Compare(keys.gone(candidate), 0),
        ),
        success=(Put(keys.member(task, candidate), MemberRecord(writer=writer).to_bytes()),),
    )


def evict(
    view: JobView,
    task: int,
    *,
    primary_revision: int,
    node: str,
    node_revision: int,
    member: str,
    writer: str,
) -> Txn:
    """Evicts a member: writes "until e" into its key, as it has the committed boundary e, and no later one."""
    keys, epoch = view.keys, _current_epoch(view)
    record = MemberRecord(until=epoch.record.epoch, attempt=epoch.record.attempt, writer=writer)
    return Txn(
        compares=(
            *_primary_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, member), _revision_of(view.members_of(task).get(member))),
            Compare(keys.epoch, epoch.mod_revision),
        ),
        success=(Put(keys.member(task, member), record.to_bytes()),),
    )


def remove_member(
    view: JobView, task: int, *, primary_revision: int, node: str, node_revision: int, member: str
) -> Txn:
    """Deletes the key of a member that was evicted before the committed boundary, and is gone.

    The key of a living node must stay: an admission with a lost answer may still be executed, and compares that the key
    is absent and the node is not gone.

    Raises:
        LookupError: the node is not gone.
    """
    if member not in view.gone:
        raise LookupError(f"node {member} is not gone: its key of task {task} must stay")
    keys = view.keys
    return Txn(
        compares=(
            *_primary_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, member), _revision_of(view.members_of(task).get(member))),
        ),
        success=(Delete(keys.member(task, member)),),
    )


def commit(view: JobView, *, primary_revision: int, finished: bool, writer: str, epochs: int = 1) -> Txn:
    """Commits `epochs` epochs, from the one at work on. With `finished`, `status` is put in the same transaction.

    Fails if since the view was read any task got a new primary, or another write changed the epoch.
    """
    keys = view.keys
    if view.epoch is None or view.status is None:
        raise LookupError("the job was not submitted")
    at = view.epoch.record
    puts: list[Op] = [Put(keys.epoch, structs.replace(at, epoch=at.epoch + epochs, writer=writer).to_bytes())]
    compares = [
        Compare(keys.primary(0), primary_revision),
        Compare(keys.generation, view.generation_revision),
        Compare(keys.epoch, view.epoch.mod_revision),
    ]
    if finished:
        compares.append(Compare(keys.status, view.status.mod_revision))
        puts.append(Put(keys.status, StatusRecord(state=JobStatus.FINISHED, writer=writer).to_bytes()))
    return Txn(compares=tuple(compares), success=tuple(puts))


def restart(view: JobView, *, primary_revision: int, writer: str) -> Txn:
    """Starts the epoch at work again, with the next attempt. The counter never goes back."""
    keys, epoch = view.keys, _current_epoch(view)
    record = structs.replace(epoch.record, attempt=epoch.record.attempt + 1, writer=writer)
    return Txn(
        compares=(Compare(keys.primary(0), primary_revision), Compare(keys.epoch, epoch.mod_revision)),
        success=(Put(keys.epoch, record.to_bytes()),),
    )


def advance_checkpoint(view: JobView, record: CheckpointRecord, *, primary_revision: int) -> Txn:
    """Makes a complete checkpoint the job's checkpoint.

    It compares `checkpoint`, which a roll-back puts: so the boundary was not undone since `view`.

    Raises:
        LookupError: the boundary is not committed, was undone, or is not later than the current checkpoint.
    """
    at, before = _current_epoch(view).record, view.checkpoint
    if record.epoch > at.epoch or record.attempt < at.lineage or (before and record.epoch <= before.record.epoch):
        raise LookupError(f"boundary {record.epoch} of attempt {record.attempt} cannot be the checkpoint")
    return Txn(
        compares=(
            Compare(view.keys.primary(0), primary_revision),
            Compare(view.keys.checkpoint, _revision_of(before)),
        ),
        success=(Put(view.keys.checkpoint, record.to_bytes()),),
    )


def fail(view: JobView, status: StatusRecord, fences: Iterable[Compare] = ()) -> Txn:
    """Fails the job, unless it has ended or a fence fails."""
    return Txn(
        compares=(Compare(view.keys.status, _revision_of(view.status)), *fences),
        success=(Put(view.keys.status, status.to_bytes()),),
    )


def give_results_up(view: JobView, why: str, *, by: str, writer: str) -> Txn:
    """Gives up the uncollected results of a finished job: puts `collected`, with `why`, before its nodes leave.

    Otherwise the other nodes would take the state of the first leaving node for lost, and fail the job or roll it back.
    """
    keys = view.keys
    value = json.dumps({"by": by, "not_kept": why, "writer": writer})
    return Txn(
        compares=(
            Compare(keys.spec, view.spec_revision),
            Compare(keys.status, _revision_of(view.status)),
            Compare(keys.collected, 0),
        ),
        success=(Put(keys.collected, value.encode()),),
    )


def declare_gone(view: JobView, node: str, record: GoneRecord) -> Txn:
    """Declares a node gone, unless it is gone already, or another run began since `view`."""
    return Txn(
        compares=(Compare(view.keys.gone(node), 0), Compare(view.keys.spec, view.spec_revision)),
        success=(Put(view.keys.gone(node), record.to_bytes()),),
    )


def declare_absent_gone(view: JobView, node: str, record: GoneRecord, *, by: str, by_revision: int) -> Txn:
    """Declares a node gone whose key was absent for too long, as node `by` observed.

    It compares that the key is still absent, and that `by` is registered: an observer that was stopped, or without
    etcd, may have missed that the node came back.
    """
    txn = declare_gone(view, node, record)
    keys = view.keys
    return replace(txn, compares=(*txn.compares, Compare(keys.node(node), 0), Compare(keys.node(by), by_revision)))
