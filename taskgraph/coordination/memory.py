"""Implements a coordinator within one process, with etcd's semantics.

`MemoryStore` is the cluster: revisions, keys, leases, history. `MemoryCoordinator` is one node's handle on it, so nodes
that share a store share a cluster. It serves `nodes=0` and tests; a conformance suite compares it with a real etcd.

Time is the event loop's (`loop.time()`), so virtual time works for leases, too. Nothing runs in the background: a lease
computes on demand which renewals a thread would have sent by now, and the store has one timer, for the next expiry.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Final

from taskgraph.coordination.api import Listing, WatchBatch, WatchCompacted
from taskgraph.coordination.refusals import check_key, check_txn
from taskgraph.errors import CoordinationError, LeaseGone, Unavailable
from taskgraph.protocol.kv import Compare, Delete, Get, KeyEvent, KeyValue, Put, Txn, TxnResult

__all__ = ["MemoryCoordinator", "MemoryLease", "MemoryStore", "StoredLease"]

#: As in etcd: the shortest TTL, and the shortest time between the end of a lease and the deletion of its keys.
MIN_TTL_S = 2.0
EXPIRY_SLACK_S = 0.1
#: Revisions of history; older ones are compacted, as in the embedded etcd.
HISTORY_REVISIONS = 100_000
_RENEWALS_PER_TTL = 5


@dataclass(slots=True)
class StoredLease:
    """The store's record of a lease. `renewals()` returns the time of the last renewal; None: nothing renews it."""

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
    """The cluster's state, shared by all nodes of one process. Belongs to one event loop at a time."""

    def __init__(self) -> None:
        self.revision = 1  # like an empty etcd
        self.compacted = 0  # history before this revision is gone
        self._keys: dict[str, KeyValue] = {}
        self._history: dict[int, tuple[KeyEvent, ...]] = {}
        self._leases: dict[int, StoredLease] = {}
        self._last_lease = 0
        self._watchers: dict[asyncio.Event, None] = {}  # in order of subscription, so that schedules repeat
        self._timer: asyncio.TimerHandle | None = None

    # Reads and transactions.

    def select(self, key: str, *, prefix: bool) -> tuple[KeyValue, ...]:
        """Returns the key, or with `prefix` all keys that begin with it, in the order of their bytes."""
        if not prefix:
            check_key(key)
            return (self._keys[key],) if key in self._keys else ()
        found = [kv for name, kv in self._keys.items() if name.startswith(key)]
        return tuple(sorted(found, key=lambda kv: kv.key.encode()))

    def execute(self, txn: Txn) -> TxnResult:
        """Executes a transaction. If it raises an error, nothing was done."""
        check_txn(txn)
        succeeded = all(self._is_satisfied(compare) for compare in txn.compares)
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

    def _is_satisfied(self, compare: Compare) -> bool:
        """Returns True if a comparison holds."""
        kv = self._keys.get(compare.key)
        if kv is None:
            return compare.revision == 0
        return compare.revision == (kv.mod_revision if compare.target == "mod" else kv.create_revision)

    def _put(self, op: Put) -> KeyEvent:
        """Writes a key, and returns the event; `_publish` then makes the revision."""
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
        """Deletes a key, and returns the event; `_publish` then makes the revision."""
        before = self._keys.pop(key)
        if before.lease:
            self._leases[before.lease].keys.discard(key)
        return KeyEvent("delete", KeyValue(key, b"", 0, self.revision + 1))

    def _publish(self, events: list[KeyEvent]) -> None:
        """Publishes changes as the next revision. Without changes there is no new revision."""
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
        """Sets `changed` whenever there are new events, until `unsubscribe`."""
        self._watchers[changed] = None

    def unsubscribe(self, changed: asyncio.Event) -> None:
        self._watchers.pop(changed, None)

    def wake(self) -> None:
        """Wakes every watch, to look for new events and for the close of its handle."""
        for changed in self._watchers:
            changed.set()

    # Leases.

    def grant(self, ttl_s: float) -> int:
        """Grants a lease. The caller then calls `set_renewals`."""
        self._last_lease += 1
        granted_s = max(MIN_TTL_S, float(math.ceil(ttl_s)))
        self._leases[self._last_lease] = StoredLease(self._last_lease, granted_s, _now(), None)
        self._set_timer()
        return self._last_lease

    def ttl_s(self, lease_id: int) -> float:
        """Returns the TTL that was granted for a lease."""
        return self._leases[lease_id].ttl_s

    def set_renewals(self, lease_id: int, renewals: Callable[[], float] | None) -> None:
        """Sets the function that returns the time of the lease's last renewal. None ends renewal."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.ends_at()  # counts the renewals so far
            lease.renewals = renewals
            self._set_timer()

    def has_lease(self, lease_id: int) -> bool:
        """True if the store has the lease. It may have expired since the last `expire`."""
        return lease_id in self._leases

    def alive(self, lease_id: int) -> bool:
        """True if the lease exists now. Ended leases are revoked first."""
        self.expire()
        return lease_id in self._leases

    def seconds_left(self, lease_id: int) -> int | None:
        """Returns the remaining seconds of any lease, rounded down; None if the lease is gone."""
        lease = self._leases.get(lease_id)
        return max(0, math.floor(lease.ends_at() - _now())) if lease is not None else None

    def revoke(self, lease_id: int) -> None:
        """Deletes a lease and its keys, at one revision. A lease that does not exist is no error."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            deleted = [self._delete(key) for key in sorted(lease.keys, key=str.encode)]
            del self._leases[lease_id]  # before a watch delivers it
            self._publish(deleted)
            self._set_timer()

    def expire(self) -> None:
        """Revokes every lease that has ended."""
        now = _now()
        for lease in sorted(self._leases.values(), key=self._deleted_at):
            if self._deleted_at(lease) > now:
                break
            self.revoke(lease.id)

    def _deleted_at(self, lease: StoredLease) -> float:
        """Returns when the store deletes the keys of a lease if it is not renewed: soon after its end, as etcd does."""
        return lease.ends_at() + EXPIRY_SLACK_S

    def _set_timer(self) -> None:
        """Sets the timer for the next expiry of a lease, in place of an earlier timer; none without leases."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            first = min(self._deleted_at(lease) for lease in self._leases.values())
            self._timer = asyncio.get_running_loop().call_at(first, self._on_timer)

    def _on_timer(self) -> None:
        """Revokes leases that have ended, and sets the timer again."""
        self._timer = None
        self.expire()
        self._set_timer()


class MemoryLease:
    """A lease in memory: implements `coordination.api.Lease`. The times of renewals are computed on demand."""

    def __init__(self, owner: MemoryCoordinator, lease_id: int, stall_limit_s: float) -> None:
        self._owner = owner
        self._store = owner.store
        self.id: Final = lease_id
        self.ttl_s: Final = self._store.ttl_s(lease_id)
        self._stall_limit_s = stall_limit_s
        self._renewed_at = self._ticked_at = _now()
        self._renewing = True
        self._lost = False
        self._store.set_renewals(lease_id, self._last_renewal_at)

    def valid_until(self) -> float:
        """Returns the loop's time until which the lease is certainly alive."""
        return self._last_renewal_at() + self.ttl_s

    def lost(self) -> bool:
        """True if a renewal found no such lease."""
        if self._renewing and not self._store.alive(self.id):
            self.stop()
            self._lost = True
        return self._lost

    def trouble(self) -> str:
        """Returns "": within a process renewals do not fail."""
        return ""

    def tick(self) -> None:
        """Notes that the main loop is alive. An expired lease stays expired."""
        if self._renewing and not self.lost():
            self._last_renewal_at()
            self._ticked_at = _now()

    async def close(self, *, revoke: bool) -> None:
        """Stops renewing; with `revoke`, deletes the lease and every key on it."""
        self.stop()
        self._owner.forget(self)
        if revoke and not self._owner.gone:
            self._store.revoke(self.id)

    def stop(self) -> None:
        """Stops renewing, so that the lease expires, as if the process had been killed."""
        if self._renewing:
            self._last_renewal_at()
            self._renewing = False
            self._store.set_renewals(self.id, None)

    def _last_renewal_at(self) -> float:
        """Returns the time of the last renewal: one each fifth of the TTL, if ticks are recent and the lease exists."""
        if self._renewing and self._store.has_lease(self.id):
            interval_s = self.ttl_s / _RENEWALS_PER_TTL
            until = min(_now(), self._ticked_at + self._stall_limit_s)
            if until - self._renewed_at >= interval_s:
                self._renewed_at += math.floor((until - self._renewed_at) / interval_s) * interval_s
        return self._renewed_at


class MemoryCoordinator:
    """One node's handle on a store: implements `coordination.api.Coordinator`.

    Args:
        store: shared by all nodes.
        rng: delays each batch of each watch by a random time, as a network does; None: no delay.
        max_lag_s: the longest delay.
        endless: leases are renewed while the event loop is stuck, however long that is.
    """

    def __init__(
        self, store: MemoryStore, *, rng: random.Random | None = None, max_lag_s: float = 0.05, endless: bool = False
    ) -> None:
        self.store = store
        self._rng = rng
        self._max_lag_s = max_lag_s
        self._endless = endless
        self._leases: set[MemoryLease] = set()
        self._end_reason = ""

    @property
    def gone(self) -> bool:
        """True if this handle was closed or crashed."""
        return bool(self._end_reason)

    def now(self) -> float:
        """Returns the event loop's time."""
        return _now()

    async def get(self, key: str) -> KeyValue | None:
        """Reads a key, linearizably; None: it does not exist."""
        await self._begin_call()
        found = self.store.select(key, prefix=False)
        return found[0] if found else None

    async def list(self, prefix: str) -> Listing:
        """Reads all keys under `prefix`, linearizably, at one revision."""
        await self._begin_call()
        return Listing(self.store.revision, self.store.select(prefix, prefix=True))

    async def txn(self, txn: Txn) -> TxnResult:
        """Executes `txn` at one revision. Raises as `etcd.EtcdCoordinator.txn`, but never `OutcomeUnknown`."""
        await self._begin_call()
        return self.store.execute(txn)

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields the events under `prefix` from `start_revision` on, each once and in order."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return self._watch(prefix, start_revision)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> MemoryLease:
        """Grants a lease of at least 2 s and starts renewing it."""
        await self._begin_call()
        lease = MemoryLease(self, self.store.grant(ttl_s), math.inf if self._endless else stall_limit_s)
        self._leases.add(lease)
        return lease

    async def revoke(self, lease_id: int) -> None:
        """Revokes any lease. A lease that does not exist is no error."""
        await self._begin_call()
        self.store.revoke(lease_id)

    async def lease_left(self, lease_id: int) -> int | None:
        """Returns the remaining seconds of any lease, rounded down; None if the lease is gone."""
        await self._begin_call()
        return self.store.seconds_left(lease_id)

    async def compact(self, revision: int) -> None:
        """Drops the history before `revision`, for all handles."""
        await self._begin_call()
        self.store.compact(revision)

    async def close(self) -> None:
        """Ends every watch and renewal of this handle. Leases are not revoked."""
        self._end("this handle was closed")

    def crash(self) -> None:
        """Simulates a kill of the process: later calls fail, renewals stop, no lease is revoked."""
        self._end("this node crashed")

    def forget(self, lease: MemoryLease) -> None:
        """Removes a lease that was closed."""
        self._leases.discard(lease)

    def _end(self, why: str) -> None:
        """Ends this handle: its calls and watches fail with this reason, its leases are no longer renewed."""
        self._end_reason = self._end_reason or why
        for lease in tuple(self._leases):
            lease.stop()
        self._leases.clear()
        self.store.wake()

    async def _begin_call(self) -> None:
        """Lets other asyncio tasks run before a call, as a network does. Raises Unavailable if this handle ended."""
        self._check_not_ended()
        await asyncio.sleep(0)
        self._check_not_ended()
        self.store.expire()

    def _check_not_ended(self) -> None:
        """Raises Unavailable if this handle has ended."""
        if self._end_reason:
            raise Unavailable(f"the coordinator in memory cannot be used: {self._end_reason}")

    async def _watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields events as they come, each batch after a random delay."""
        changed = asyncio.Event()
        self.store.subscribe(changed)
        position = start_revision
        try:
            while True:
                self._check_not_ended()
                changed.clear()
                events = self.store.events_from(position, prefix)
                position = max(position, self.store.revision + 1)
                if events:
                    if self._rng is not None:  # the lag of a network
                        await asyncio.sleep(self._rng.uniform(0.0, self._max_lag_s))
                        self._check_not_ended()
                    yield WatchBatch(events[-1].kv.mod_revision, events)
                else:
                    await changed.wait()
        finally:
            self.store.unsubscribe(changed)


def _now() -> float:
    return asyncio.get_running_loop().time()
