"""The parts that a state of the model is made of, each kept once and known by a number.

A state of a job is a row of small numbers: etcd, what each node read of it, and what each node holds and knows of each
task. What a number stands for is real: a `JobView`, `Boundaries`, an `InSyncSet`. So a step that touches a few parts is
made once for these parts, by the code that nodes run, however many states have them.

Revisions are counted per key, from 1 on, instead of over the whole store. That merges histories in which independent
writes happened in another order, and loses nothing: whatever the steps decide, they compare a key's revision with an
earlier one of the same key, and a count that only grows (also over a delete) is equal exactly when the revision is.
Nothing here asks which of two keys is older: of the order of admission, which only ranks heirs, every order is tried;
`JobView.term_changed` is asked where sums differ, and here they never do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Generic, TypeVar

from protocol_kit import JOB

from taskgraph.coordination.memory import MemoryStore
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.insync import InSyncSet
from taskgraph.protocol.kv import KeyValue, Txn, TxnResult
from taskgraph.protocol.view import JobView

__all__ = ["Etcd", "Interned", "Key", "Role", "Slot", "Violation", "Write", "twin"]

Key = tuple[int, int, int]
"""A boundary's (epoch, attempt, term)."""

T = TypeVar("T")

_BEYOND = 1_000_000  # a store's revision that no key's count reaches


class Violation(AssertionError):
    """An invariant broke; the message ends with the steps that led there."""


class Etcd:
    """All keys of the job, with revisions per key; never changed once made."""

    def __init__(self, listing: tuple[KeyValue, ...], counts: dict[str, int]) -> None:
        self.listing = listing
        self.counts = counts  # also of keys that were deleted: a count never comes again
        self.view = JobView(JOB)
        self.view.reset(_BEYOND, listing)
        assert self.view.stamp is not None
        self.stamp = self.view.stamp

    @property
    def key(self) -> Hashable:
        """The same for stores that no transaction and no reader can tell apart."""
        return (self.listing, tuple(sorted(self.counts.items())))

    @staticmethod
    def of(store: MemoryStore) -> Etcd:
        """What a store holds as a job begins: every key as if it was put once."""
        return _counted({}, store.select(JobView(JOB).keys.root, prefix=True), since=-1)

    def execute(self, txn: Txn) -> tuple[TxnResult, Etcd]:
        """What etcd answers, with revisions per key, and what it holds then."""
        store = MemoryStore()
        store.revision = _BEYOND
        store._keys = {kv.key: kv for kv in self.listing}
        result = store.execute(txn)
        if store.revision == _BEYOND:
            return result, self
        after = _counted(self.counts, store.select(self.view.keys.root, prefix=True), since=_BEYOND)
        counted = {kv.key: kv for kv in after.listing}
        reads = tuple(tuple(counted[kv.key] for kv in read) for read in result.reads)
        return TxnResult(result.succeeded, result.revision, reads), after

    def without(self, key: str) -> Etcd:
        """The key's lease is revoked."""
        return Etcd(tuple(kv for kv in self.listing if kv.key != key), self.counts)


def _counted(before: dict[str, int], found: tuple[KeyValue, ...], since: int) -> Etcd:
    """What was found in a store, with one count more for each key that was put after revision `since`."""
    counts = dict(before)
    for kv in found:
        if kv.mod_revision > since:
            counts[kv.key] = counts.get(kv.key, 0) + 1
    return Etcd(tuple(KeyValue(kv.key, _unsigned(kv.value), 1, counts[kv.key]) for kv in found), counts)


@cache
def _unsigned(value: bytes) -> bytes:
    """A record without its writer: that is for writes whose answer was lost, and here every answer comes, if late."""
    if b'"writer"' not in value:
        return value
    return json.dumps(json.loads(value) | {"writer": ""}, separators=(",", ":")).encode()


@dataclass
class Write:
    """An admission or eviction: decided; executed, if `done`, and successful; not known to the primary yet.

    One that failed is known at once. Who does not know it yet behaves like one whose write has not been executed, and
    a write that fails would fail later, too: it compares counts that only grow.
    """

    kind: str
    decision: int
    done: bool = False


@dataclass
class Role:
    """What a primary knows, for one task and one term. `revision` is that of the key `primary` it put."""

    term: int
    revision: int
    insync: InSyncSet
    writes: dict[str, Write] = field(default_factory=dict)


@dataclass
class Slot:
    """What one node holds and knows of one task.

    Attributes:
        answers: nodes about which a primary of a gone term had a successful answer, where a planted bug keeps that.
    """

    boundaries: Boundaries
    role: Role | None = None
    answers: tuple[str, ...] = ()

    @property
    def key(self) -> Hashable:
        """The same for slots that differ in nothing a step could notice."""
        held, role = self.boundaries, self.role
        return (
            held.committed and held.committed.key,
            tuple(sorted(held._stored)),
            role and _role_key(role),
            self.answers,
        )

    def copy(self) -> Slot:
        """A twin, for a step to change."""
        role, held = self.role, twin(self.boundaries)
        held._stored = dict(held._stored)
        if role is not None:
            insync = twin(role.insync)
            insync._states = dict(insync._states)
            insync._acked = {node: set(acked) for node, acked in insync._acked.items()}
            insync._current = list(insync._current)
            writes = {node: replace(write) for node, write in role.writes.items()}
            role = Role(role.term, role.revision, insync, writes)
        return Slot(held, role, self.answers)


def twin(of: T) -> T:
    """As `copy.copy` makes it, only faster."""
    twin = object.__new__(type(of))
    twin.__dict__.update(of.__dict__)
    return twin


def _role_key(role: Role) -> Hashable:
    insync = role.insync
    return (
        role.term,
        role.revision,
        tuple((n, insync.state_of(n), insync.missing(n)) for n in insync.nodes),
        insync.current,
        tuple(sorted(insync._marked)),
        tuple((n, w.kind, None if w.done else w.decision) for n, w in sorted(role.writes.items())),
    )


class Interned(Generic[T]):
    """Parts of one kind: each distinct one once, with a number."""

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self._key = key
        self._numbers: dict[Hashable, int] = {}
        self.parts: list[T] = []

    def number(self, part: T) -> int:
        """The part's number; the part must not be changed from now on."""
        found = self._numbers.setdefault(self._key(part), len(self.parts))
        if found == len(self.parts):
            self.parts.append(part)
        return found

    def __getitem__(self, number: int) -> T:
        return self.parts[number]

    def __len__(self) -> int:
        return len(self.parts)
