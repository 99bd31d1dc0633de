"""A coordinator inside one process, with etcd's semantics.

`MemoryStore` is the cluster: revisions, keys, leases, history. `MemoryCoordinator` is one node's handle on it; several
handles on one store are several nodes. For `nodes=0` and for tests; the conformance suite compares it with a real etcd.

Time is the event loop's (`loop.time()`), so a loop with virtual time drives leases too. Nothing runs in the background:
when asked, a lease computes which renewals a thread would have made by now, and the store keeps one timer for the lease
that expires next.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from taskgraph.coordination.api import Listing, WatchBatch, WatchCompacted
from taskgraph.errors import CoordinationError, LeaseGone, Unavailable
from taskgraph.protocol.kv import Compare, Delete, Get, KeyEvent, KeyValue, Put, Txn, TxnResult

__all__ = ["MemoryCoordinator", "MemoryLease", "MemoryStore", "StoredLease"]

#: As etcd: its floor for a TTL, and how long after its TTL a lease's keys go at the earliest.
MIN_TTL_S = 2.0
EXPIRY_SLACK_S = 0.1
#: As etcd's defaults for `--max-txn-ops` and `--max-request-bytes`.
MAX_TXN_OPS = 128
MAX_REQUEST_BYTES = 3 * 512 * 1024
#: As the embedded etcd: older history is compacted.
HISTORY_REVISIONS = 100_000
_RENEWALS_PER_TTL = 5


@dataclass(slots=True)
class StoredLease:
    """A lease as the cluster knows it. `renewals()` returns the time of its last renewal."""

    id: int
    ttl_s: float
    renewed_at: float
    renewals: Callable[[], float] | None
    keys: set[str] = field(default_factory=set)

    def ends_at(self) -> float:
        """Returns when the lease expires without another renewal."""
        if self.renewals is not None:
            self.renewed_at = max(self.renewed_at, self.renewals())
        return self.renewed_at + self.ttl_s


class MemoryStore:
    """The state that all nodes of one process share. Belongs to one event loop at a time."""

    def __init__(self) -> None:
        self.revision = 1  # like an empty etcd
        self.compacted = 0  # history before this revision is gone
        self._keys: dict[str, KeyValue] = {}
        self._history: dict[int, tuple[KeyEvent, ...]] = {}
        self._leases: dict[int, StoredLease] = {}
        self._last_lease = 0
        self._watchers: dict[asyncio.Event, None] = {}  # woken in the order they came, so that a schedule repeats
        self._timer: asyncio.TimerHandle | None = None

    # Reads and transactions.

    def select(self, key: str, *, prefix: bool) -> tuple[KeyValue, ...]:
        """The present keys that `key` names, in the order of their bytes, as in etcd."""
        if not prefix:
            _check_key(key)
            return (self._keys[key],) if key in self._keys else ()
        found = [kv for name, kv in self._keys.items() if name.startswith(key)]
        return tuple(sorted(found, key=lambda kv: kv.key.encode()))

    def execute(self, txn: Txn) -> TxnResult:
        """Executes a transaction, wholly or (with an error) not at all."""
        _check(txn)
        succeeded = all(self._holds(compare) for compare in txn.compares)
        branch = txn.success if succeeded else txn.failure
        for op in branch:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise LeaseGone(f"put of {op.key!r}: the lease does not exist; take a new one")
        events: list[KeyEvent] = []
        reads = []
        for op in branch:
            match op:
                case Put():
                    events.append(self._put(op))
                case Delete():
                    events.extend(self._delete(kv.key) for kv in self.select(op.key, prefix=op.prefix))
                case Get():
                    reads.append(self.select(op.key, prefix=op.prefix))
        self._publish(events)
        return TxnResult(succeeded, self.revision, tuple(reads))

    def _holds(self, compare: Compare) -> bool:
        kv = self._keys.get(compare.key)
        if kv is None:
            return compare.revision == 0
        return compare.revision == (kv.mod_revision if compare.target == "mod" else kv.create_revision)

    def _put(self, op: Put) -> KeyEvent:
        revision = self.revision + 1
        before = self._keys.get(op.key)
        created = before.create_revision if before else revision
        if before is not None and before.lease:
            self._leases[before.lease].keys.discard(op.key)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        kv = self._keys[op.key] = KeyValue(op.key, bytes(op.value), created, revision, op.lease)
        return KeyEvent("put", kv)

    def _delete(self, key: str) -> KeyEvent:
        before = self._keys.pop(key)
        if before.lease:
            self._leases[before.lease].keys.discard(key)
        return KeyEvent("delete", KeyValue(key, b"", 0, self.revision + 1))

    def _publish(self, events: list[KeyEvent]) -> None:
        """Makes these changes the next revision. No changes make no revision."""
        if not events:
            return
        self.revision += 1
        self._history[self.revision] = tuple(events)
        if len(self._history) > HISTORY_REVISIONS:
            self.compact(self.revision - HISTORY_REVISIONS // 2)
        self.wake()

    def compact(self, revision: int) -> None:
        """Drops the history before `revision`."""
        if revision <= self.compacted:
            raise CoordinationError(f"etcd refused compaction at {revision}: it has been compacted already")
        if revision > self.revision:
            raise CoordinationError(f"etcd refused compaction at {revision}: it is a future revision")
        for old in range(self.compacted, revision):
            self._history.pop(old, None)
        self.compacted = revision
        self.wake()

    # Watches.

    def events_from(self, revision: int, prefix: str) -> tuple[KeyEvent, ...]:
        """Returns all events under `prefix` from `revision` up to now."""
        if revision < self.compacted:
            raise WatchCompacted(
                f"watch of {prefix!r}: revision {revision} was compacted away (up to {self.compacted}); list again"
            )
        return tuple(
            event
            for made in range(revision, self.revision + 1)
            for event in self._history.get(made, ())
            if event.kv.key.startswith(prefix)
        )

    def subscribe(self, changed: asyncio.Event) -> None:
        self._watchers[changed] = None

    def unsubscribe(self, changed: asyncio.Event) -> None:
        self._watchers.pop(changed, None)

    def wake(self) -> None:
        """Wakes every watch: it looks for new events, and whether its handle was closed."""
        for changed in self._watchers:
            changed.set()

    # Leases.

    def grant(self, ttl_s: float) -> int:
        """Grants a lease. The caller then says how it is renewed, with `renew_by`."""
        self._last_lease += 1
        granted_s = max(MIN_TTL_S, float(math.ceil(ttl_s)))
        self._leases[self._last_lease] = StoredLease(self._last_lease, granted_s, _now(), None)
        self._schedule()
        return self._last_lease

    def ttl_s(self, lease_id: int) -> float:
        return self._leases[lease_id].ttl_s

    def renew_by(self, lease_id: int, renewals: Callable[[], float] | None) -> None:
        """Sets how to get the time of the last renewal: by `renewals()`. None: renewal stops."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.ends_at()  # takes over the renewals so far
            lease.renewals = renewals
            self._schedule()

    def holds(self, lease_id: int) -> bool:
        """True if the lease was neither revoked nor found expired so far."""
        return lease_id in self._leases

    def alive(self, lease_id: int) -> bool:
        """True if the lease exists now; expires it first if its time is over."""
        self.expire()
        return lease_id in self._leases

    def left(self, lease_id: int) -> int | None:
        """See `coordination.api.Coordinator.lease_left`."""
        lease = self._leases.get(lease_id)
        return max(0, math.floor(lease.ends_at() - _now())) if lease is not None else None

    def revoke(self, lease_id: int) -> None:
        """Deletes a lease and its keys, at one revision. A lease that does not exist is no error."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            deleted = [self._delete(key) for key in sorted(lease.keys, key=str.encode)]
            del self._leases[lease_id]  # before a watch delivers it
            self._publish(deleted)
            self._schedule()

    def expire(self) -> None:
        """Revokes every lease whose time is over."""
        now = _now()
        for lease in sorted(self._leases.values(), key=self._deleted_at):
            if self._deleted_at(lease) > now:
                break
            self.revoke(lease.id)

    def _deleted_at(self, lease: StoredLease) -> float:
        """Returns when the keys of a lease that expires are deleted."""
        return lease.ends_at() + EXPIRY_SLACK_S

    def _schedule(self) -> None:
        """Sets the timer for the lease that would expire next without a renewal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            first = min(self._deleted_at(lease) for lease in self._leases.values())
            self._timer = asyncio.get_running_loop().call_at(first, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._schedule()


class MemoryLease:
    """See `coordination.api.Lease`. No thread renews: the times of the renewals are computed on demand."""

    def __init__(self, owner: MemoryCoordinator, lease_id: int, stall_limit_s: float) -> None:
        self._owner = owner
        self._store = owner.store
        self.id: Final = lease_id
        self.ttl_s: Final = self._store.ttl_s(lease_id)
        self._stall_limit_s = stall_limit_s
        self._renewed_at = self._ticked_at = _now()
        self._renewing = True
        self._lost = False
        self._store.renew_by(lease_id, self._renewals)

    def valid_until(self) -> float:
        """The loop's time until which the lease is certainly alive."""
        return self._renewals() + self.ttl_s

    def lost(self) -> bool:
        """True if a renewal found no such lease."""
        if self._renewing and not self._store.alive(self.id):
            self.stop()
            self._lost = True
        return self._lost

    def trouble(self) -> str:
        """Always "": within a process renewals do not fail."""
        return ""

    def tick(self) -> None:
        """Says that the main loop is alive. A lease that has expired does not come back."""
        if self._renewing and not self.lost():
            self._renewals()
            self._ticked_at = _now()

    async def close(self, *, revoke: bool) -> None:
        """Stops renewing; with `revoke`, deletes the lease and every key on it."""
        self.stop()
        self._owner.forget(self)
        if revoke and not self._owner.gone:
            self._store.revoke(self.id)

    def stop(self) -> None:
        """Stops renewing and leaves the lease to expire, as when the process is killed."""
        if self._renewing:
            self._renewals()
            self._renewing = False
            self._store.renew_by(self.id, None)

    def _renewals(self) -> float:
        """The time of the last renewal: one every fifth of the TTL, while ticks are recent and the lease exists."""
        if self._renewing and self._store.holds(self.id):
            interval_s = self.ttl_s / _RENEWALS_PER_TTL
            until = min(_now(), self._ticked_at + self._stall_limit_s)
            if until - self._renewed_at >= interval_s:
                self._renewed_at += math.floor((until - self._renewed_at) / interval_s) * interval_s
        return self._renewed_at


class MemoryCoordinator:
    """One node's handle on a store.

    Args:
        store: shared by all nodes.
        rng: delays each batch of each watch by a random time, as a network does; None: no delay.
        max_lag_s: the longest delay.
        endless: a loop that stands still loses no lease, however long.
    """

    def __init__(
        self, store: MemoryStore, *, rng: random.Random | None = None, max_lag_s: float = 0.05, endless: bool = False
    ) -> None:
        self.store = store
        self._rng = rng
        self._max_lag_s = max_lag_s
        self._endless = endless
        self._leases: set[MemoryLease] = set()
        self._gone = ""

    @property
    def gone(self) -> bool:
        """True if this handle was closed, or crashed."""
        return bool(self._gone)

    def now(self) -> float:
        """The clock of `Lease.valid_until`: the loop's."""
        return _now()

    async def get(self, key: str) -> KeyValue | None:
        """A linearizable read."""
        await self._travel()
        found = self.store.select(key, prefix=False)
        return found[0] if found else None

    async def list(self, prefix: str) -> Listing:
        """A linearizable read of all keys under `prefix`, at one revision."""
        await self._travel()
        return Listing(self.store.revision, self.store.select(prefix, prefix=True))

    async def txn(self, txn: Txn) -> TxnResult:
        """Executes `txn` at one revision. Raises as `etcd.EtcdCoordinator.txn`, but never `OutcomeUnknown`."""
        await self._travel()
        return self.store.execute(txn)

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        """See `coordination.api.Coordinator.watch`."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return self._watch(prefix, start_revision)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> MemoryLease:
        """Grants a lease of at least 2 s and starts renewing it."""
        await self._travel()
        lease = MemoryLease(self, self.store.grant(ttl_s), math.inf if self._endless else stall_limit_s)
        self._leases.add(lease)
        return lease

    async def revoke(self, lease_id: int) -> None:
        """Revokes any lease. A lease that does not exist is no error."""
        await self._travel()
        self.store.revoke(lease_id)

    async def lease_left(self, lease_id: int) -> int | None:
        """See `coordination.api.Coordinator.lease_left`."""
        await self._travel()
        return self.store.left(lease_id)

    async def compact(self, revision: int) -> None:
        """Drops the history before `revision`, for all handles."""
        await self._travel()
        self.store.compact(revision)

    async def close(self) -> None:
        """Ends every watch and renewal of this handle. Leases are not revoked."""
        self._end("this handle was closed")

    def crash(self) -> None:
        """Simulates a kill of the process: later calls fail, renewals stop, nothing is revoked."""
        self._end("this node crashed")

    def forget(self, lease: MemoryLease) -> None:
        """The lease was closed."""
        self._leases.discard(lease)

    def _end(self, why: str) -> None:
        self._gone = self._gone or why
        for lease in tuple(self._leases):
            lease.stop()
        self._leases.clear()
        self.store.wake()

    async def _travel(self) -> None:
        """Lets other asyncio tasks run first, as a call over a network does."""
        self._check()
        await asyncio.sleep(0)
        self._check()
        self.store.expire()

    def _check(self) -> None:
        if self._gone:
            raise Unavailable(f"the coordinator in memory cannot be used: {self._gone}")

    async def _watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        changed = asyncio.Event()
        self.store.subscribe(changed)
        position = start_revision
        try:
            while True:
                self._check()
                changed.clear()
                events = self.store.events_from(position, prefix)
                position = max(position, self.store.revision + 1)
                if events:
                    if self._rng is not None:  # events are old when they arrive
                        await asyncio.sleep(self._rng.uniform(0.0, self._max_lag_s))
                        self._check()
                    yield WatchBatch(events[-1].kv.mod_revision, events)
                else:
                    await changed.wait()
        finally:
            self.store.unsubscribe(changed)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _check_key(key: str) -> None:
    if not key:
        raise CoordinationError("a key cannot be empty")


def _check(txn: Txn) -> None:
    """Refuses a transaction that etcd refuses before it executes anything: too large, or a key written twice."""
    if max(len(txn.compares), len(txn.success), len(txn.failure)) > MAX_TXN_OPS:
        raise CoordinationError(f"etcd refuses more than {MAX_TXN_OPS} operations in a transaction")
    for compare in txn.compares:
        _check_key(compare.key)
    size = 0
    for branch in (txn.success, txn.failure):
        put: set[str] = set()
        deletes: list[Delete] = []
        for op in branch:
            if isinstance(op, Put):
                _check_key(op.key)
                if op.key in put:
                    raise CoordinationError(f"duplicate key given in txn request: {op.key!r} is put twice")
                put.add(op.key)
                size += len(op.key.encode()) + len(op.value)
            elif isinstance(op, Delete):
                if not op.prefix:
                    _check_key(op.key)
                deletes.append(op)
        for delete in deletes:
            for key in put:
                if key == delete.key or (delete.prefix and key.startswith(delete.key)):
                    raise CoordinationError(f"duplicate key given in txn request: {key!r} is put and deleted")
    if size > MAX_REQUEST_BYTES:
        raise CoordinationError(f"etcd refuses a request of more than {MAX_REQUEST_BYTES} bytes")
