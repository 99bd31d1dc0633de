"""Builds the view of a job: a fold of a listing of etcd, and then of watch events, in revision order.

A node decides from one `JobView`, and all fences of its transactions are mod revisions of this view. A view may be
behind, but is never a mixture of revisions.

The caller calls `reset` with a listing of all keys of the job, then `apply` with the events of complete revisions in
order. After a gap in the events it calls `reset` again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from taskgraph.errors import DecodeError
from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    JobStatus,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
    StatusRecord,
    WorkersRecord,
)

__all__ = ["JobView", "Versioned", "WritesLost", "decode_key", "holds"]

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class WritesLost(Exception):
    """etcd has lost data: a listing of its keys is older than the view. The text says what was lost."""


@frozen
class Versioned(Generic[R]):
    """A record with its revisions."""

    record: R
    create_revision: int
    mod_revision: int


class JobView:
    """A node's picture of one job: its keys in etcd at `revision`.

    Args:
        one_run: the view shows the first run only. Once the job is submitted again, only `revision`, `superseded` and
            `structure_revision` change. So a node's decisions never change another run: they compare old revisions.
    """

    def __init__(self, job: str, *, one_run: bool = False) -> None:
        self.keys = Keys(job)
        self.revision = 0
        self.superseded = False
        self._one_run = one_run
        self._first_spec_revision = 0  # the first `spec_revision`
        self.structure_revision = 0  # revision of the last change, except changes of `epoch` and events
        self.spec: bytes | None = None
        self.spec_revision = 0
        self.epoch: Versioned[EpochRecord] | None = None
        self.stamp: Stamp | None = None
        """The attempt and epoch at work; None before the job was submitted."""
        self.attempt_revision = 0  # revision of the write that began the attempt, or an earlier one
        self.status: Versioned[StatusRecord] | None = None
        self.generation_revision = 0
        self.checkpoint: Versioned[CheckpointRecord] | None = None
        self.collected = False
        self.workers: Versioned[WorkersRecord] | None = None
        """The view of an elastic job; None: there is none yet, or the job is a task graph."""
        self.nodes: dict[str, Versioned[NodeRecord]] = {}
        # Records stay for the life of the run, so frequent checks must not iterate over them.
        self.gone: dict[str, Versioned[GoneRecord]] = {}
        self.gone_revision = 0  # revision of the last change of `gone`
        self._deaths: list[tuple[float, str]] = []  # sorted: last epoch in which its code ran, node
        self.primaries: dict[int, Versioned[PrimaryRecord]] = {}
        self.members: dict[int, dict[str, Versioned[MemberRecord]]] = {}

    # -- folding ----------------------------------------------------------------------------------

    def reset(self, revision: int, items: Iterable[KeyValue]) -> None:
        """Replaces the view by a listing of all keys of the job at `revision`. After an error the view is unchanged.

        Raises:
            WritesLost: the listing has an earlier run, stamp or term than this view.
            DecodeError: a key cannot be read, or is missing; see `apply`.
        """
        listed = JobView(self.keys.job)
        for kv in items:
            listed._put(kv)
        if why := self._describe_loss(listed):
            raise WritesLost(why)
        if self._is_another_run(listed.spec_revision):
            self._supersede(revision)
            return
        known, run, at = self.epoch, self.spec_revision, listed.epoch
        needed = [self.keys.epoch]
        if run and listed.spec_revision in (run, 0):  # else a new run, or the first listing
            needed += [self.keys.spec, *map(self.keys.primary, self.primaries)]
        listed._check_present(needed)
        if at is not None and at.mod_revision != at.create_revision:  # the attempt may have begun before
            same = known is not None and known.record.attempt == at.record.attempt
            listed.attempt_revision = self.attempt_revision if same else self.revision
        listed.revision = listed.structure_revision = listed.gone_revision = revision
        listed._one_run, listed._first_spec_revision = self._one_run, self._first_spec_revision or listed.spec_revision
        vars(self).update(vars(listed))

    def _is_another_run(self, spec_revision: int) -> bool:
        """True if the spec is that of a later run, which a view of one run does not show."""
        return self._one_run and 0 < self._first_spec_revision < spec_revision

    def _supersede(self, revision: int) -> None:
        """Freezes the view, since another run began at `revision`."""
        self.superseded, self.revision = True, max(revision, self.revision)
        self.structure_revision = self.revision

    def _describe_loss(self, listed: JobView) -> str:
        """Describes what a listing has lost compared with this view; "" if nothing.

        It compares stamps and terms, which only grow, but not revisions: those of an inconsistent etcd member may be
        behind, and the job survives that.
        """
        job, keys = f"job {self.keys.job!r}", listed.keys
        if not (self.spec_revision and listed.spec_revision):
            return ""
        if listed.spec != self.spec:
            return f"the run of {job} is one before" if listed.spec_revision < self.spec_revision else ""
        if self.stamp is not None and listed.stamp is not None and listed.stamp < self.stamp:
            was, now = self.stamp, listed.stamp
            at = f"epoch {now.epoch}, attempt {now.attempt}"
            return f"{job} was in epoch {was.epoch}, attempt {was.attempt}, and is in {at}, now"
        for task in self.primaries.keys() & listed.primaries.keys():
            if listed.term(task) < self.term(task):
                return f"{keys.primary(task)} was of term {self.term(task)}, and is of {listed.term(task)} now"
        return ""

    def apply(self, revision: int, events: Iterable[KeyEvent]) -> None:
        """Applies all events up to `revision`, in order, except those that the view has already.

        Raises:
            DecodeError: a key cannot be read, or a key was deleted without which nodes would wait for ever.
        """
        deleted, ends = [], 0
        if self._one_run:
            events = tuple(events)
            specs = (e.kv.mod_revision for e in events if e.kind == "put" and e.kv.key == self.keys.spec)
            ends = self.revision if self.superseded else next(filter(self._is_another_run, specs), 0)
        for event in events:
            kv = event.kv
            if kv.mod_revision <= self.revision:
                continue  # a restarted watch may repeat events of the listing
            if ends and kv.mod_revision >= ends:
                self._supersede(max(revision, ends))
                return
            if event.kind == "put":
                self._put(kv)
            else:
                self._delete(kv.key)
                deleted.append(kv)
            if kv.key != self.keys.epoch and not kv.key.startswith(self.keys.events):
                self.structure_revision = kv.mod_revision
                if kv.key.startswith(self.keys.gone_nodes):
                    self.gone_revision = kv.mod_revision
        if revision > self.revision:
            self.revision = revision
        if deleted:  # a new run deletes keys, too, before its `spec`
            self._check_present(kv.key for kv in deleted if kv.mod_revision > self.spec_revision)

    def _check_present(self, needed: Iterable[str]) -> None:
        """Raises DecodeError if one of these keys is missing, the job needs it, and it has work left."""
        if not self.has_work:  # the whole job may have been deleted
            return
        always = {self.keys.spec: self.spec, self.keys.epoch: self.epoch}
        there = {self.keys.primary(task) for task in self.primaries}
        for key in needed:
            missing = always[key] is None if key in always else key.endswith("/primary") and key not in there
            if missing:
                raise DecodeError(
                    f"the key {key} in etcd was deleted, and job {self.keys.job!r} cannot go on without it. "
                    f"`etcdctl del --prefix {self.keys.root}` removes what is left of the job; one that left a "
                    f"checkpoint goes on from there with --resume"
                )

    def _put(self, kv: KeyValue) -> None:
        """Takes a key's new value. Raises DecodeError, with advice, if it cannot be read."""
        try:
            self._fold(kv)
        except (DecodeError, ValueError) as error:
            raise undecodable_key(kv, self.keys, error) from error

    def _fold(self, kv: KeyValue) -> None:
        """Decodes a key's new value into the field of this view that has it."""
        if kv.key == self.keys.epoch:  # first, since every node reads it in every epoch
            record, before = EpochRecord.from_bytes(kv.value), self.stamp
            self.epoch = Versioned(record, kv.create_revision, kv.mod_revision)
            self.stamp = Stamp(record.attempt, record.epoch)
            if before is None or before.attempt != record.attempt:
                self.attempt_revision = kv.mod_revision
            return
        match self._split_key(kv.key):
            case ["spec"]:
                self.spec, self.spec_revision = kv.value, kv.mod_revision
                self._first_spec_revision = self._first_spec_revision or kv.mod_revision
            case ["status"]:
                self.status = _decode_versioned(StatusRecord, kv)
            case ["generation"]:
                self.generation_revision = kv.mod_revision
            case ["checkpoint"]:
                self.checkpoint = _decode_versioned(CheckpointRecord, kv)
            case ["collected"]:
                self.collected = True
            case ["workers"]:
                self.workers = _decode_versioned(WorkersRecord, kv)
            case ["nodes", node]:
                self.nodes[node] = _decode_versioned(NodeRecord, kv)
            case ["gone", node]:
                self._remove_death(node)
                known = self.gone[node] = _decode_versioned(GoneRecord, kv)
                if known.record.running_code:
                    bisect.insort(self._deaths, (_last_running_epoch(known.record), node))
            case ["tasks", task, "primary"]:
                self.primaries[int(task)] = _decode_versioned(PrimaryRecord, kv)
            case ["tasks", task, "members", node]:
                self.members.setdefault(int(task), {})[node] = _decode_versioned(MemberRecord, kv)
            case _:
                pass  # events are not needed here

    def _delete(self, key: str) -> None:
        """Clears the field of a key that was deleted."""
        match self._split_key(key):
            case ["spec"]:
                self.spec, self.spec_revision = None, 0
            case ["epoch"]:
                self.epoch = self.stamp = None
            case ["status"]:
                self.status = None
            case ["generation"]:
                self.generation_revision = 0
            case ["checkpoint"]:
                self.checkpoint = None
            case ["collected"]:
                self.collected = False
            case ["workers"]:
                self.workers = None
            case ["nodes", node]:
                self.nodes.pop(node, None)
            case ["gone", node]:
                self._remove_death(node)
                self.gone.pop(node, None)
            case ["tasks", task, "primary"]:
                self.primaries.pop(int(task), None)
            case ["tasks", task, "members", node]:
                self.members.get(int(task), {}).pop(node, None)
            case _:
                pass

    def _remove_death(self, node: str) -> None:
        """Removes a node from `_deaths`, before its record changes."""
        known = self.gone.get(node)
        if known is not None and known.record.running_code:
            del self._deaths[bisect.bisect_left(self._deaths, (_last_running_epoch(known.record), node))]

    def _split_key(self, key: str) -> list[str]:
        """Splits a key below the job's root at its slashes."""
        return key[len(self.keys.root) :].split("/")

    # -- reading ----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.status is not None and self.status.record.state == JobStatus.RUNNING

    @property
    def finished(self) -> bool:
        """True if the last epoch is committed. A roll-back, if results are lost, makes the job run again."""
        return self.status is not None and self.status.record.state == JobStatus.FINISHED

    @property
    def has_work(self) -> bool:
        """True if nodes have work: the job runs, or it finished and its results are not collected."""
        return self.running or (self.finished and not self.collected)

    def deaths_from(self, epoch: int) -> list[str]:
        """Returns the gone nodes during whose end user code ran in this epoch or later, or in no epoch (-1)."""
        return [node for _, node in self._deaths[bisect.bisect_left(self._deaths, (epoch, "")) :]]

    def term(self, task: int) -> int:
        """Returns the task's current term; 0 before its first primary."""
        primary = self.primaries.get(task)
        return primary.record.term if primary else 0

    def primary_node(self, task: int) -> str | None:
        primary = self.primaries.get(task)
        return primary.record.node if primary else None

    @property
    def leading_node(self) -> str | None:
        """The node that reports commits: task 0's primary, or the most senior living worker, which reports steps."""
        return self.primary_node(0) if self.workers is None else self.result_holders().get(0)

    def result_holders(self) -> dict[int, str]:
        """Returns task -> the node that gives its result: its primary. In an elastic job: 0 -> the most senior living
        worker."""
        if self.workers is not None:
            there = [node for node, _ in self.workers.record.workers if node in self.nodes and node not in self.gone]
            return dict(enumerate(there[:1]))
        return {task: primary.record.node for task, primary in self.primaries.items()}

    def is_primary(self, task: int, node: str, term: int) -> bool:
        primary = self.primaries.get(task)
        return primary is not None and primary.record.node == node and primary.record.term == term

    def term_changed(self, *, in_attempt: bool = False) -> bool:
        """True if a primary was replaced since the epoch at work began. First primaries do not count.

        Args:
            in_attempt: since the attempt began, as tasks may have worked ahead; also True if that is not known.
        """
        began = self.attempt_revision if in_attempt else self.epoch.mod_revision if self.epoch else 0
        return any(p.mod_revision > began and p.record.term > 1 for p in self.primaries.values())

    def members_of(self, task: int) -> Mapping[str, Versioned[MemberRecord]]:
        return self.members.get(task, {})

    def in_sync(self, task: int) -> list[str]:
        """Returns the members with the committed boundary, also evicted ones that have it, in order of admission."""
        held = [(m.create_revision, node) for node, m in self.members_of(task).items() if self.holds(m.record)]
        return [node for _, node in sorted(held)]

    def active_members(self, task: int) -> list[str]:
        """Returns the members that are not evicted, in the order of admission."""
        found = [(m.create_revision, node) for node, m in self.members_of(task).items() if m.record.until is None]
        return [node for _, node in sorted(found)]

    def holds(self, member: MemberRecord) -> bool:
        """True if a member with this record has the committed boundary."""
        return self.epoch is None or holds(member, self.epoch.record)

    @property
    def is_checkpointed(self) -> bool:
        """True if the checkpoint is of the committed boundary."""
        return (
            self.epoch is not None
            and self.checkpoint is not None
            and self.checkpoint.record.epoch == self.epoch.record.epoch
        )

    def live_nodes(self, run: str) -> dict[str, NodeRecord]:
        """Returns the registered nodes of a run that are not gone."""
        return {node: v.record for node, v in self.nodes.items() if v.record.run == run and node not in self.gone}


def holds(member: MemberRecord, at: EpochRecord) -> bool:
    """True if a member with this record has the committed boundary of `at`.

    A member that was evicted "until e" has boundary e of that lineage. After a roll-back, number e is another boundary.
    """
    return member.until is None or (member.until >= at.epoch and member.attempt >= at.lineage)


def _last_running_epoch(record: GoneRecord) -> float:
    """Returns the last epoch in which code ran that this record names; infinity if some code ran in no epoch (-1)."""
    epochs = [ran.epoch for ran in record.running_code]
    return math.inf if min(epochs) < 0 else max(epochs)


def undecodable_key(kv: KeyValue, keys: Keys, error: Exception) -> DecodeError:
    """Returns the error for a key whose value cannot be decoded, with advice."""
    return DecodeError(
        f"the key {kv.key} in etcd cannot be read: {error}. Another version, or another program, wrote it; "
        f"`etcdctl del --prefix {keys.root}` removes it, with all else that is there of job {keys.job!r}"
    )


def decode_key(read: Callable[[bytes], T], kv: KeyValue, keys: Keys) -> T:
    """Decodes the value of one key by `read`.

    Raises:
        DecodeError: the value cannot be decoded.
    """
    try:
        return read(kv.value)
    except DecodeError as error:
        raise undecodable_key(kv, keys, error) from error


def _decode_versioned(cls: type[R], kv: KeyValue) -> Versioned[R]:
    return Versioned(cls.from_bytes(kv.value), kv.create_revision, kv.mod_revision)
