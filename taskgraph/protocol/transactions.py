"""Every transaction the protocol writes, as data.

Rules that hold for all of them:

- comparisons are by mod revision, as read by the writer's view; a revision never returns, a value may;
- a write under `tasks/t/` compares the mod revision of `tasks/t/primary` and the writer's own node key, so that a
  primary of a gone term, or a node whose lease is gone, changes nothing;
- whoever changes a primary also puts `generation`: the commit compares that one key instead of all primaries;
- `epoch` is only written by the leader, fenced by its own `primary`, and by the takeover of a task that lost all
  its members, which rolls the job back to the checkpoint; a roll-back puts `checkpoint`, too, so that a leader that
  does not know of it cannot advance that.
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
    ForgottenRecord,
    GoneRecord,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    State,
    StatusRecord,
)
from taskgraph.protocol.view import JobView, Versioned

__all__ = [
    "TakenOver",
    "admit",
    "advance_checkpoint",
    "commit",
    "declare_absent_gone",
    "declare_gone",
    "evict",
    "fail",
    "forget_gone",
    "give_results_up",
    "register",
    "remove_member",
    "restart",
    "resume",
    "roll_back",
    "take_over",
    "take_over_from_nothing",
    "taken_over",
]


def _generation(view: JobView, writer: str) -> Put:
    # The value is for people; only the revision counts.
    return Put(view.keys.generation, writer.encode())


def _mod(record: object) -> int:
    return record.mod_revision if record is not None else 0  # type: ignore[attr-defined]


def _epoch(view: JobView) -> Versioned[EpochRecord]:
    if view.epoch is None:
        raise LookupError("the job was not submitted")
    return view.epoch


def register(view: JobView, node: str, record: NodeRecord) -> Txn:
    """The node's own key appears; the job must still be the one that was read.

    It may have been there before, and been taken back: meanwhile nobody may have declared the node gone.
    """
    return Txn(
        compares=(
            Compare(view.keys.node(node), 0),
            Compare(view.keys.spec, view.spec_revision),
            *_not_gone(view, node),
        ),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


def resume(view: JobView, node: str, record: NodeRecord) -> Txn:
    """After a pause: proves that no primary changed since `view`, puts the node's key again.

    Every change of a primary puts `generation`: comparing it stands for comparing them all, however many there are.
    The node's own key is compared, too: an earlier try whose answer was lost may still be under way, and were it
    executed after a later one, the revision that all of the node's writes compare would be another one.
    """
    return Txn(
        compares=(
            Compare(view.keys.spec, view.spec_revision),
            *_not_gone(view, node),
            Compare(view.keys.generation, view.generation_revision),
            Compare(view.keys.node(node), _mod(view.nodes.get(node))),
        ),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


def _not_gone(view: JobView, node: str) -> Iterable[Compare]:
    """Nobody has declared it gone, nor was that said and deleted since `view`, which shows that it was not before."""
    yield Compare(view.keys.gone(node), 0)
    yield Compare(view.keys.forgotten, _mod(view.forgotten))


def update_node(view: JobView, node: str, record: NodeRecord, node_revision: int) -> Txn:
    """Changes what the node says of itself, e.g. that it drains."""
    return Txn(
        compares=(Compare(view.keys.node(node), node_revision),),
        success=(Put(view.keys.node(node), record.to_bytes(), record.lease),),
    )


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What a successful takeover read, at the very revision of its writes: the new primary starts from this.

    Attributes:
        members: node -> mod revision of its member key, and whether it was marked as evicted.
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
    """A member (or the primary itself) becomes primary with the next term.

    Args:
        failure: the old primary failed; False for a hand-over. Counted in the record, for people.

    Raises:
        LookupError: the node is no member as far as the view knows.
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
        # Evicted, but still a holder of that very boundary: only as long as it is the committed one. As primary it
        # holds every boundary that comes: were its key still to say "until", then once it is left alone the task would
        # pass for lost as soon as it is suspected.
        if own.record.until != view.epoch.record.epoch or not view.holds(own.record):
            raise LookupError(f"node {node} was evicted from task {task} at boundary {own.record.until}")
        compares.append(Compare(keys.epoch, view.epoch.mod_revision))
        membership = (Put(keys.member(task, node), MemberRecord(writer=writer).to_bytes()),)
    record = PrimaryRecord(
        node=node,
        term=old.record.term + 1,
        stateful=stateful,
        failovers=old.record.failovers + (1 if failure else 0),
        writer=writer,
    )
    return Txn(
        compares=tuple(compares),
        success=(
            Put(keys.primary(task), record.to_bytes()),
            _generation(view, writer),
            *membership,
            *_reads_of_take_over(view, task),
        ),
    )


def take_over_from_nothing(
    view: JobView, task: int, node: str, node_revision: int, *, stateful: bool, writer: str
) -> Txn:
    """The first primary of a fresh job, or of a task all of whose members are gone.

    Compares everything that the decision rests on: no member may come back meanwhile.

    Raises:
        LookupError: a stateful task's boundary is lost (epoch > 0), and it is not that of the checkpoint: the job must
            be rolled back, see `roll_back`, or fail, see `fail_lost`.
    """
    epoch = _epoch(view).record.epoch
    if stateful and epoch > 0 and not view.covered:
        raise LookupError(f"task {task} has no members left, and its state of epoch {epoch} with them")
    return _from_nothing(view, task, node, node_revision, stateful=stateful, writer=writer, also=())


def roll_back(
    view: JobView, task: int, node: str, node_revision: int, *, to: CheckpointRecord, stateful: bool, writer: str
) -> Txn:
    """A stateful task lost all its members: the job goes back to a checkpoint, with the next attempt.

    A job that had finished runs again then, unless its results were collected: they went with the members.

    Raises:
        LookupError: there is nothing to go back to, or nothing to go back from.
    """
    if view.epoch is None or view.checkpoint is None or view.status is None:
        raise LookupError("there is no checkpoint")
    at = view.epoch.record
    if not 0 < to.epoch < at.epoch:
        raise LookupError(f"the job is at epoch {at.epoch}, the checkpoint at {to.epoch}")
    epoch = EpochRecord(epoch=to.epoch, attempt=at.attempt + 1, lineage=at.attempt + 1, base=to.epoch, writer=writer)
    if view.status.record.state not in (State.RUNNING, State.FINISHED):
        raise LookupError(f"the job {view.status.record.state}")
    also: tuple[Op, ...] = (Put(view.keys.epoch, epoch.to_bytes()), Put(view.keys.checkpoint, to.to_bytes()))
    if not view.running:
        also = (*also, Put(view.keys.status, StatusRecord(state=State.RUNNING, writer=writer).to_bytes()))
    txn = _from_nothing(view, task, node, node_revision, stateful=stateful, writer=writer, also=also)
    return replace(txn, compares=(*txn.compares, Compare(view.keys.collected, 0)))


def _from_nothing(
    view: JobView, task: int, node: str, node_revision: int, *, stateful: bool, writer: str, also: tuple[Op, ...]
) -> Txn:
    keys = view.keys
    if view.epoch is None or view.status is None:
        raise LookupError("the job was not submitted")
    old = view.primaries.get(task)
    members = view.members_of(task)
    record = PrimaryRecord(
        node=node,
        term=(old.record.term if old else 0) + 1,
        stateful=stateful,
        failovers=old.record.failovers if old else 0,  # nobody's backup took over
        writer=writer,
    )
    return Txn(
        compares=(
            Compare(keys.primary(task), _mod(old)),
            Compare(keys.node(node), node_revision),
            *_members_gone(view, task, node),
            Compare(keys.epoch, view.epoch.mod_revision),
            Compare(keys.checkpoint, _mod(view.checkpoint)),
            Compare(keys.status, view.status.mod_revision),
        ),
        success=(
            *also,
            *(Delete(keys.member(task, member)) for member in sorted(members) if member != node),
            Put(keys.primary(task), record.to_bytes()),
            Put(keys.member(task, node), MemberRecord(writer=writer).to_bytes()),
            _generation(view, writer),
            *_reads_of_take_over(view, task),
        ),
    )


def fail_lost(view: JobView, task: int, status: StatusRecord) -> Txn:
    """Every member of a stateful task is gone and there is no usable checkpoint: the job fails, if that is still so.

    Once a finished job's results were collected its nodes leave, one after the other, and nothing is lost any more.

    Raises:
        LookupError: the job has ended.
    """
    if not view.open:
        raise LookupError("the job has ended, and keeps the reason it has")
    keys = view.keys
    return Txn(
        compares=(
            Compare(keys.primary(task), _mod(view.primaries.get(task))),
            *_members_gone(view, task, None),
            Compare(keys.epoch, _mod(view.epoch)),
            Compare(keys.checkpoint, _mod(view.checkpoint)),
            Compare(keys.status, _mod(view.status)),
            Compare(keys.collected, 0),
        ),
        success=(Put(keys.status, status.to_bytes()),),
    )


def _members_gone(view: JobView, task: int, node: str | None) -> Iterable[Compare]:
    """Every member key as read, and for those that hold the boundary the absence of the node's key."""
    holders = view.in_sync(task)
    for member, versioned in sorted(view.members_of(task).items()):
        yield Compare(view.keys.member(task, member), versioned.mod_revision)
        if member != node and member in holders:
            yield Compare(view.keys.node(member), 0)


def _reads_of_take_over(view: JobView, task: int) -> tuple[Op, ...]:
    return (Get(view.keys.epoch), Get(view.keys.members(task), prefix=True), Get(view.keys.primary(task)))


def taken_over(result: TxnResult, view: JobView, task: int) -> TakenOver:
    """Reads the success branch of a takeover."""
    epoch_reads, member_reads, primary_reads = result.reads
    epoch = EpochRecord.from_bytes(epoch_reads[0].value)
    primary = PrimaryRecord.from_bytes(primary_reads[0].value)
    prefix = view.keys.members(task)
    return TakenOver(
        revision=result.revision,
        term=primary.term,
        epoch=epoch.epoch,
        attempt=epoch.attempt,
        lineage=epoch.lineage,
        members={kv.key[len(prefix) :]: (kv.mod_revision, MemberRecord.from_bytes(kv.value)) for kv in member_reads},
    )


def reread_take_over(view: JobView, task: int) -> Txn:
    """Reads what a takeover with an unknown outcome would have read."""
    return Txn(success=_reads_of_take_over(view, task))


def _fences(view: JobView, task: int, primary_revision: int, node: str, node_revision: int) -> tuple[Compare, ...]:
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
    """The primary puts a candidate into the in-sync set; the candidate's process must still be registered.

    Raises:
        LookupError: in the view it is not. Compared with that, its key would have to be absent.
    """
    keys = view.keys
    if candidate not in view.nodes:
        raise LookupError(f"node {candidate} is not registered: it cannot be admitted to task {task}")
    current = view.members_of(task).get(candidate)
    return Txn(
        compares=(
            *_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, candidate), _mod(current)),
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
    """The primary writes "until e" into a member's key: it holds the committed boundary e, and nothing after it."""
    keys, epoch = view.keys, _epoch(view)
    record = MemberRecord(until=epoch.record.epoch, attempt=epoch.record.attempt, writer=writer)
    return Txn(
        compares=(
            *_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, member), _mod(view.members_of(task).get(member))),
            Compare(keys.epoch, epoch.mod_revision),
        ),
        success=(Put(keys.member(task, member), record.to_bytes()),),
    )


def remove_member(
    view: JobView, task: int, *, primary_revision: int, node: str, node_revision: int, member: str
) -> Txn:
    """Tidies away the key of a member that was evicted before the committed boundary, and that is gone for good.

    Of one that is not gone, the key must stay: an admission of this term whose answer was lost may still be under way,
    and an absent key is what it compares. It also compares that the node is not gone.

    Raises:
        LookupError: the node is not gone.
    """
    if member not in view.gone:
        raise LookupError(f"node {member} is not gone: its key of task {task} must stay")
    keys = view.keys
    return Txn(
        compares=(
            *_fences(view, task, primary_revision, node, node_revision),
            Compare(keys.member(task, member), _mod(view.members_of(task).get(member))),
        ),
        success=(Delete(keys.member(task, member)),),
    )


def commit(view: JobView, *, primary_revision: int, finished: bool, writer: str, epochs: int = 1) -> Txn:
    """The leader's commit of the epoch at work and, with it, of those after it that are complete, `epochs` in all.

    `status` travels in the same transaction.
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
        puts.append(Put(keys.status, StatusRecord(state=State.FINISHED, writer=writer).to_bytes()))
    return Txn(compares=tuple(compares), success=tuple(puts))


def restart(view: JobView, *, primary_revision: int, writer: str) -> Txn:
    """The leader starts the epoch at work again, with the next attempt. The counter never goes back."""
    keys, epoch = view.keys, _epoch(view)
    record = structs.replace(epoch.record, attempt=epoch.record.attempt + 1, writer=writer)
    return Txn(
        compares=(Compare(keys.primary(0), primary_revision), Compare(keys.epoch, epoch.mod_revision)),
        success=(Put(keys.epoch, record.to_bytes()),),
    )


def advance_checkpoint(view: JobView, record: CheckpointRecord, *, primary_revision: int) -> Txn:
    """The leader's pointer: every file of this checkpoint is written, it is complete.

    A roll-back puts `checkpoint`: comparing it proves that the boundary was not undone since `view`.

    Raises:
        LookupError: the boundary is not committed, is of a lineage that was undone, or is no step forward.
    """
    at, before = _epoch(view).record, view.checkpoint
    if record.epoch > at.epoch or record.attempt < at.lineage or (before and record.epoch <= before.record.epoch):
        raise LookupError(f"boundary {record.epoch} of attempt {record.attempt} cannot be the checkpoint")
    return Txn(
        compares=(
            Compare(view.keys.primary(0), primary_revision),
            Compare(view.keys.checkpoint, _mod(before)),
        ),
        success=(Put(view.keys.checkpoint, record.to_bytes()),),
    )


def fail(view: JobView, status: StatusRecord, fences: Iterable[Compare] = ()) -> Txn:
    """The job fails, unless it already ended or a fence broke."""
    return Txn(
        compares=(Compare(view.keys.status, _mod(view.status)), *fences),
        success=(Put(view.keys.status, status.to_bytes()),),
    )


def give_results_up(view: JobView, why: str, *, by: str, writer: str) -> Txn:
    """Nobody collected the results of a job that finished, and its nodes leave: said before the first of them does.

    What it takes with it would pass for lost with the others: the job would fail after all, or be rolled back.
    """
    keys = view.keys
    value = json.dumps({"by": by, "not_kept": why, "writer": writer})
    return Txn(
        compares=(
            Compare(keys.spec, view.spec_revision),
            Compare(keys.status, _mod(view.status)),
            Compare(keys.collected, 0),
        ),
        success=(Put(keys.collected, value.encode()),),
    )


def declare_gone(view: JobView, node: str, record: GoneRecord) -> Txn:
    """Says that a node is gone for good, to the job that was read."""
    return Txn(
        compares=(Compare(view.keys.gone(node), 0), Compare(view.keys.spec, view.spec_revision)),
        success=(Put(view.keys.gone(node), record.to_bytes()),),
    )


def declare_absent_gone(view: JobView, node: str, record: GoneRecord, *, by: str, by_revision: int) -> Txn:
    """Says so since its key has been absent for long, as `by` saw it: the key still is, and that observer's is not.

    Whoever stood still itself, or wrote this while etcd was away, saw nothing of a node that came back.
    """
    txn = declare_gone(view, node, record)
    keys = view.keys
    return replace(txn, compares=(*txn.compares, Compare(keys.node(node), 0), Compare(keys.node(by), by_revision)))


def forget_gone(view: JobView, nodes: Iterable[str], *, primary_revision: int, writer: str) -> Txn:
    """The leader deletes what was said of nodes that are gone (`forgetting.forgettable`): it grows with each.

    As long as it is said, and there is no key of such a node, no key comes to name it: whoever would write one compares
    one of the two. Afterwards the node itself finds `forgotten`, if it is there after all.
    """
    keys = view.keys
    known = {node: view.gone[node].mod_revision for node in nodes}
    last = max(known.values(), default=0)
    if view.forgotten is not None:
        last = max(last, view.forgotten.record.revision)
    return Txn(
        compares=(
            Compare(keys.primary(0), primary_revision),
            Compare(keys.forgotten, _mod(view.forgotten)),
            *(Compare(keys.gone(node), revision) for node, revision in known.items()),
        ),
        success=(
            Put(keys.forgotten, ForgottenRecord(revision=last, writer=writer).to_bytes()),
            *(Delete(keys.gone(node)) for node in known),
        ),
    )
