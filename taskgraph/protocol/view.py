"""A job as etcd tells it: a fold of a listing and then of watch events, in revision order.

Everything a node decides from etcd it decides from one `JobView`; every fence it puts into a transaction is a mod
revision that this view read. A view may be behind; it is never a mixture of revisions.
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
    ForgottenRecord,
    GoneRecord,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
    State,
    StatusRecord,
)

__all__ = ["JobView", "Versioned", "WentBack", "holds", "readable"]

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class WentBack(Exception):
    """The store holds less of a job than it has told: it has lost something; in words, what."""


@frozen
class Versioned(Generic[R]):
    """A record with the revisions it was read at."""

    record: R
    create_revision: int
    mod_revision: int


class JobView:
    """The state of one job's keys at `revision`.

    `absent` keys simply do not appear. Nodes of an earlier run of the same job name are left out.

    Args:
        one_run: it shows the run that it is first told of, and no other: once the job's name is submitted again it
            stays as it was, but for `revision` and `superseded`. So nothing that a node decides by it is written to
            another run: what is compared is of the revisions of its own.
    """

    def __init__(self, job: str, *, one_run: bool = False) -> None:
        self.keys = Keys(job)
        self.revision = 0
        self.superseded = False
        self._one_run = one_run
        self._run_at = 0  # the first `spec_revision`
        self.structure_revision = 0  # of the last change of anything but `epoch`, and events, which nobody asks it for
        self.spec: bytes | None = None
        self.spec_revision = 0
        self.epoch: Versioned[EpochRecord] | None = None
        self.stamp: Stamp | None = None
        """(attempt, epoch) at work, or None before the job was submitted."""
        self.attempt_revision = 0  # of the write that began the attempt at work, or one before it
        self.status: Versioned[StatusRecord] | None = None
        self.generation_revision = 0
        self.checkpoint: Versioned[CheckpointRecord] | None = None
        self.collected = False
        self.nodes: dict[str, Versioned[NodeRecord]] = {}
        # A thousand of them stay: what is looked at again and again must not go through all of them.
        self.gone: dict[str, Versioned[GoneRecord]] = {}
        self.gone_revision = 0  # of their last change
        self.forgotten: Versioned[ForgottenRecord] | None = None  # of those that were here, and are not any more
        self._deaths: list[tuple[float, str]] = []  # the last epoch that its code ran in, and the node; in that order
        self.primaries: dict[int, Versioned[PrimaryRecord]] = {}
        self.members: dict[int, dict[str, Versioned[MemberRecord]]] = {}

    # -- folding ----------------------------------------------------------------------------------

    def reset(self, revision: int, items: Iterable[KeyValue]) -> None:
        """Starts again from a listing of everything under the job's root at `revision`.

        Raises:
            WentBack: the listing is older than what this view knows, which stays as it is.
            DecodeError: a key holds something else, or is not there any more; see `apply`. The view stays as it is.
        """
        listed = JobView(self.keys.job)
        for kv in items:
            listed._put(kv)
        if why := self._lost_in(listed):
            raise WentBack(why)
        if self._is_another_run(listed.spec_revision):
            self._end(revision)
            return
        known, run, at = self.epoch, self.spec_revision, listed.epoch
        needed = [self.keys.epoch]
        if run and listed.spec_revision in (run, 0):  # else another run has begun, or nothing was read before
            needed += [self.keys.spec, *map(self.keys.primary, self.primaries)]
        listed._check_kept(needed)
        if at is not None and at.mod_revision != at.create_revision:  # it was written before, perhaps in this attempt
            same = known is not None and known.record.attempt == at.record.attempt
            listed.attempt_revision = self.attempt_revision if same else self.revision
        listed.revision = listed.structure_revision = listed.gone_revision = revision
        listed._one_run, listed._run_at = self._one_run, self._run_at or listed.spec_revision
        vars(self).update(vars(listed))

    def _is_another_run(self, spec_revision: int) -> bool:
        return self._one_run and 0 < self._run_at < spec_revision

    def _end(self, revision: int) -> None:
        """Another run was read of at `revision`."""
        self.superseded, self.revision = True, max(revision, self.revision)
        self.structure_revision = self.revision

    def _lost_in(self, listed: JobView) -> str:
        """What this view knows and a listing shows to be lost; "": nothing does.

        By what only grows, and not by revisions: those of a member of the cluster that differs from the others are
        behind, too, and a job outlives that.
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
        """Applies the events of complete revisions up to `revision`, in the order given.

        Raises:
            DecodeError: a key holds something else; or one is deleted that stays for as long as there is something to
                do for nodes, which would wait for ever for what it says.
        """
        deleted, ends = [], 0
        if self._one_run:
            events = tuple(events)
            specs = (e.kv.mod_revision for e in events if e.kind == "put" and e.kv.key == self.keys.spec)
            ends = self.revision if self.superseded else next(filter(self._is_another_run, specs), 0)
        for event in events:
            kv = event.kv
            if kv.mod_revision <= self.revision:
                continue  # a watch that was started again may repeat what a listing already held
            if ends and kv.mod_revision >= ends:
                self._end(max(revision, ends))
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
        if deleted:  # by another run that begins, unless it is later than this one's beginning
            self._check_kept(kv.key for kv in deleted if kv.mod_revision > self.spec_revision)

    def _check_kept(self, needed: Iterable[str]) -> None:
        """Raises DecodeError where one of these keys is missing, and the job is open and cannot do without it."""
        if not self.open:  # it was deleted as a whole, perhaps
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
        try:
            self._fold(kv)
        except (DecodeError, ValueError) as error:
            raise unreadable(kv, self.keys, error) from error

    def _fold(self, kv: KeyValue) -> None:
        if kv.key == self.keys.epoch:  # first, and not taken apart: one in every epoch, at every node
            record, before = EpochRecord.from_bytes(kv.value), self.stamp
            self.epoch = Versioned(record, kv.create_revision, kv.mod_revision)
            self.stamp = Stamp(record.attempt, record.epoch)
            if before is None or before.attempt != record.attempt:
                self.attempt_revision = kv.mod_revision
            return
        match self._split(kv.key):
            case ["spec"]:
                self.spec, self.spec_revision = kv.value, kv.mod_revision
                self._run_at = self._run_at or kv.mod_revision
            case ["status"]:
                self.status = _versioned(StatusRecord, kv)
            case ["generation"]:
                self.generation_revision = kv.mod_revision
            case ["checkpoint"]:
                self.checkpoint = _versioned(CheckpointRecord, kv)
            case ["collected"]:
                self.collected = True
            case ["forgotten"]:
                self.forgotten = _versioned(ForgottenRecord, kv)
            case ["nodes", node]:
                self.nodes[node] = _versioned(NodeRecord, kv)
            case ["gone", node]:
                self._forget_death(node)
                known = self.gone[node] = _versioned(GoneRecord, kv)
                if known.record.ran:
                    bisect.insort(self._deaths, (_last_epoch(known.record), node))
            case ["tasks", task, "primary"]:
                self.primaries[int(task)] = _versioned(PrimaryRecord, kv)
            case ["tasks", task, "members", node]:
                self.members.setdefault(int(task), {})[node] = _versioned(MemberRecord, kv)
            case _:
                pass  # events and results are not part of the protocol's state

    def _delete(self, key: str) -> None:
        match self._split(key):
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
            case ["forgotten"]:
                self.forgotten = None
            case ["nodes", node]:
                self.nodes.pop(node, None)
            case ["gone", node]:
                self._forget_death(node)
                self.gone.pop(node, None)
            case ["tasks", task, "primary"]:
                self.primaries.pop(int(task), None)
            case ["tasks", task, "members", node]:
                self.members.get(int(task), {}).pop(node, None)
            case _:
                pass

    def _forget_death(self, node: str) -> None:
        known = self.gone.get(node)
        if known is not None and known.record.ran:
            self._deaths.remove((_last_epoch(known.record), node))

    def _split(self, key: str) -> list[str]:
        return key[len(self.keys.root) :].split("/")

    # -- reading ----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.status is not None and self.status.record.state == State.RUNNING

    @property
    def finished(self) -> bool:
        """Whether its last epoch is committed. What is lost of its results is computed again."""
        return self.status is not None and self.status.record.state == State.FINISHED

    @property
    def open(self) -> bool:
        """Whether there is something to do for nodes: it runs, or has results that nobody has collected yet."""
        return self.running or (self.finished and not self.collected)

    def deaths_from(self, epoch: int) -> list[str]:
        """Nodes that are gone and whose code ran in this epoch or in a later one, or before any (`Ran.epoch` -1)."""
        return [node for _, node in self._deaths[bisect.bisect_left(self._deaths, (epoch, "")) :]]

    def term(self, task: int) -> int:
        """The task's current term, 0 before its first primary."""
        primary = self.primaries.get(task)
        return primary.record.term if primary else 0

    def primary_node(self, task: int) -> str | None:
        primary = self.primaries.get(task)
        return primary.record.node if primary else None

    def is_primary(self, task: int, node: str, term: int) -> bool:
        primary = self.primaries.get(task)
        return primary is not None and primary.record.node == node and primary.record.term == term

    def term_changed(self, *, in_attempt: bool = False) -> bool:
        """Whether some task's primary was replaced since the epoch at work began (a first primary replaces nobody).

        Args:
            in_attempt: since the attempt began, where tasks may have worked on this epoch before the one before it
                committed. Where that is not known, it says yes rather than no.
        """
        began = self.attempt_revision if in_attempt else self.epoch.mod_revision if self.epoch else 0
        return any(p.mod_revision > began and p.record.term > 1 for p in self.primaries.values())

    def members_of(self, task: int) -> Mapping[str, Versioned[MemberRecord]]:
        return self.members.get(task, {})

    def in_sync(self, task: int) -> list[str]:
        """Members that hold the committed boundary, in the order of their admission."""
        held = [(m.create_revision, node) for node, m in self.members_of(task).items() if self.holds(m.record)]
        return [node for _, node in sorted(held)]

    def staying(self, task: int) -> list[str]:
        """Members that nobody evicted, in the order of their admission: in sync, whatever the epoch is."""
        found = [(m.create_revision, node) for node, m in self.members_of(task).items() if m.record.until is None]
        return [node for _, node in sorted(found)]

    def holds(self, member: MemberRecord) -> bool:
        """Whether a member with this record holds the committed boundary."""
        return self.epoch is None or holds(member, self.epoch.record)

    @property
    def covered(self) -> bool:
        """Whether the committed boundary is that of the checkpoint, which counts as one that holds it."""
        return (
            self.epoch is not None
            and self.checkpoint is not None
            and self.checkpoint.record.epoch == self.epoch.record.epoch
        )

    def live_nodes(self, run: str) -> dict[str, NodeRecord]:
        """Registered nodes of this run that nobody declared gone."""
        return {node: v.record for node, v in self.nodes.items() if v.record.run == run and node not in self.gone}


def holds(member: MemberRecord, at: EpochRecord) -> bool:
    """Whether a member with this record holds boundary `at`.

    One that was evicted "until e" holds boundary e of the lineage it was evicted in: after a roll-back the number may
    come again, and is another boundary then.
    """
    return member.until is None or (member.until >= at.epoch and member.attempt >= at.lineage)


def _last_epoch(record: GoneRecord) -> float:
    epochs = [ran.epoch for ran in record.ran]
    return math.inf if min(epochs) < 0 else max(epochs)


def unreadable(kv: KeyValue, keys: Keys, error: Exception) -> DecodeError:
    """The error for a key that holds something else, with its name and the way out."""
    return DecodeError(
        f"the key {kv.key} in etcd cannot be read: {error}. Another version, or another program, wrote it; "
        f"`etcdctl del --prefix {keys.root}` removes it, with all else that is there of job {keys.job!r}"
    )


def readable(read: Callable[[bytes], T], kv: KeyValue, keys: Keys) -> T:
    """What is in a key that was read by itself.

    Raises:
        DecodeError: something else is.
    """
    try:
        return read(kv.value)
    except DecodeError as error:
        raise unreadable(kv, keys, error) from error


def _versioned(cls: type[R], kv: KeyValue) -> Versioned[R]:
    return Versioned(cls.from_bytes(kv.value), kv.create_revision, kv.mod_revision)
