"""Simulates an etcd server that may be slow, paused, restarted or cut off, and that loses requests and answers.

`SimStore` is a `MemoryStore` whose clock can stop. `SimEtcd` is the server around it, which delays requests and the
events of watches. The server runs outside of all simulated processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Callable
from typing import Any, Protocol

from taskgraph.coordination.api import WatchBatch, WatchCompacted
from taskgraph.coordination.memory import MemoryStore, StoredLease
from taskgraph.errors import CoordinationError
from taskgraph.protocol.kv import KeyEvent, Txn
from taskgraph.testing.simulate.loop import call_at_own_time, later, own_time

__all__ = ["SimEtcd", "SimStore", "WatchStream"]

_EXPIRY_CHECK_S = 0.5


class SimStore(MemoryStore):
    """The server's data. `on_write` is called with every write before any node learns of it."""

    def __init__(self, on_write: Callable[[int, tuple[KeyEvent, ...]], None]) -> None:
        super().__init__()
        self.stopped = False
        self._on_write = on_write
        self._revived: set[int] = set()  # leases whose TTL was over, and which got a new one from `reset_ttls`

    def _publish(self, events: list[KeyEvent]) -> None:
        super()._publish(events)
        if events:
            self._on_write(self.revision, tuple(events))

    def would_succeed(self, txn: Txn) -> bool:
        """True if the transaction would succeed now."""
        return all(map(self._is_satisfied, txn.compares))

    def expire(self) -> None:
        if not self.stopped:
            super().expire()

    def _on_timer(self) -> None:
        if not self.stopped:
            super()._on_timer()

    def _deleted_at(self, lease: StoredLease) -> float:
        """Returns when etcd deletes a lease's keys: it looks for ended leases twice a second."""
        return math.ceil(super()._deleted_at(lease) / _EXPIRY_CHECK_S) * _EXPIRY_CHECK_S

    def renew(self, lease_id: int) -> bool:
        """Renews a lease. Returns False if there is no such lease, or it has ended."""
        self.expire()
        lease, now = self._leases.get(lease_id), asyncio.get_running_loop().time()
        if lease is None:
            return False
        if lease.ends_at() < now:  # etcd has yet to delete it
            self.revoke(lease_id)
            return False
        lease.renewed_at = now
        return True

    def reset_ttls(self) -> None:
        """Gives every lease its whole TTL again, as a new leader does."""
        now = asyncio.get_running_loop().time()
        self._revived.update(lease.id for lease in self._leases.values() if lease.ends_at() <= now)
        for lease in self._leases.values():
            lease.renewed_at = now
        self._set_timer()

    def has_ended(self, lease_id: int, within_s: float) -> bool:
        """True if the TTL of a lease is over, was over at any time, or will be over within the given time."""
        lease = self._leases.get(lease_id)
        return lease is None or lease_id in self._revived or lease.ends_at() <= own_time() + within_s

    def restart_timers(self) -> None:
        """Lets the clock run again after it was stopped: leases expire."""
        self.stopped = False
        self._set_timer()


class EtcdClient(Protocol):
    """What the server uses of a client's connection (`SimCoordinator`)."""

    @property
    def gets_events(self) -> bool:
        """True if the client's watches get events."""

    @property
    def lag(self) -> float:
        """A factor for the delay of the client's watches."""

    def late_s(self, what: str) -> float:
        """Draws the delay that slow actors add to a kind of message."""


class WatchStream:
    """The server's side of one watch. Batches that were sent before a break of the connection do not arrive."""

    def __init__(
        self, etcd: SimEtcd, client: EtcdClient, prefix: str, start: int, context: contextvars.Context | None
    ) -> None:
        self._etcd = etcd
        self._client = client
        self._prefix = prefix
        self._context = context
        self._next = start  # the first revision that is not sent yet
        self.delivered = start  # the first revision that has not arrived at the client
        self._connection_number = 0
        self._last_at = 0.0
        self._send_scheduled = False
        self._reopened = False  # True: the client must learn that the connection broke
        self.batches: list[WatchBatch | WatchCompacted] = []
        self.arrived = asyncio.Event()

    def schedule_send(self) -> None:
        """Schedules to send new events a little later, so that batches grow."""
        if not self._send_scheduled:
            self._send_scheduled = True
            self._etcd.later(self._etcd.lag() * self._client.lag, self._send_events)

    def break_connection(self) -> None:
        """Breaks the connection, which is established again. Some events are sent twice."""
        self._connection_number += 1
        self._reopened = True
        etcd = self._etcd
        again = etcd.rng.randrange(3) if etcd.rng.random() < 0.5 else 0
        # Compacted events cannot be sent again. If one of them never arrived, the watch must fail.
        self._next = max(1, min(self.delivered, max(self.delivered - again, etcd.store.compacted)))
        self.schedule_send()

    def _send_events(self) -> None:
        """Sends all events since the last call, mostly in one batch; nothing while the client can get no events."""
        self._send_scheduled = False
        etcd = self._etcd
        if not etcd.serving or not self._client.gets_events:
            return  # scheduled again on recovery
        store = etcd.store
        if self._reopened:
            self._reopened = False
            self._deliver_later(WatchBatch(self.delivered - 1, (), reopened=True), self.delivered - 1)
        try:
            events = store.events_from(self._next, self._prefix)
        except WatchCompacted as error:
            self._send(error, store.revision)
            return
        upto = store.revision
        if not events:
            self._next = max(self._next, upto + 1)  # the watch may start in the future
            return
        if len(events) > 1 and etcd.rng.random() < 0.3:  # complete revisions in two messages
            cut = events[etcd.rng.randrange(len(events) - 1)].kv.mod_revision
            first = tuple(e for e in events if e.kv.mod_revision <= cut)
            self._send(WatchBatch(cut, first), cut)
            events = events[len(first) :]
        if events:
            self._send(WatchBatch(events[-1].kv.mod_revision, events), events[-1].kv.mod_revision)
        self._next = upto + 1

    def _send(self, what: WatchBatch | WatchCompacted, upto: int) -> None:
        """Sends a batch, or the error that ends the watch, which covers the events up to a revision."""
        self._next = upto + 1
        self._deliver_later(what, upto)

    def _deliver_later(self, what: WatchBatch | WatchCompacted, upto: int) -> None:
        self._last_at = max(
            self._last_at + 1e-6, self._etcd.now() + self._etcd.delay() + self._client.late_s("watches")
        )
        call_at_own_time(self._last_at, self._deliver, self._connection_number, what, upto, context=self._context)

    def _deliver(self, connection_number: int, what: WatchBatch | WatchCompacted, upto: int) -> None:
        """Hands a batch to the client, unless the connection broke after the batch was sent."""
        if connection_number == self._connection_number:
            self.delivered = max(self.delivered, upto + 1)
            self.batches.append(what)
            self.arrived.set()


class SimEtcd:
    """The simulated etcd server.

    Args:
        rng: draws every delay and every loss.
        delay_s: the usual delay of a message.
        lag_s: the longest delay of a watch.
    """

    def __init__(self, store: SimStore, rng: random.Random, *, delay_s: float, lag_s: float) -> None:
        self.store = store
        self.rng = rng
        self.delay_s, self.lag_s = delay_s, lag_s
        self.paused = False
        self.down = False
        self._backlog: list[Callable[[], None]] = []
        self._streams: dict[WatchStream, None] = {}

    @property
    def serving(self) -> bool:
        """True if the server neither is paused nor has ended."""
        return not (self.paused or self.down)

    def now(self) -> float:
        return own_time()

    def delay(self) -> float:
        """Draws the delay of one message to or from the server, mostly a short one."""
        slow = 20.0 if self.rng.random() < 0.02 else 1.0
        return self.delay_s * slow * self.rng.uniform(0.3, 1.5)

    def lag(self) -> float:
        """Draws the delay of a watch. Some watches are much slower than others, so that views differ."""
        return self.lag_s * self.rng.random() ** 3

    def later(self, delay_s: float, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function after a delay, outside of all processes."""
        later(delay_s, function, *args)

    # -- what clients send ------------------------------------------------------------------------

    def arrive(self, execute: Callable[[], None]) -> None:
        """Executes a request that arrives: now, or when the paused server resumes."""
        if self.paused:
            self._backlog.append(execute)
        else:
            execute()

    def open(self, stream: WatchStream) -> None:
        self._streams[stream] = None
        stream.schedule_send()

    def close(self, stream: WatchStream) -> None:
        self._streams.pop(stream, None)

    def wake(self) -> None:
        """Makes every watch send new events."""
        for stream in self._streams:
            stream.schedule_send()

    # -- faults -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stops the server like SIGSTOP: requests wait, leases do not expire, and watches get no events."""
        self.paused = self.store.stopped = True

    def resume(self) -> None:
        """Resumes the paused server. Leases that ended meanwhile expire before or after the waiting requests."""
        if not self.paused:
            return
        self.paused = False
        if self.rng.random() < 0.5:
            self.store.restart_timers()
            self.store.expire()
        self._execute_backlog()
        if self.store.stopped:
            self.store.restart_timers()
        self.wake()

    def stop(self) -> None:
        """Ends the server's process. Waiting requests are lost."""
        self.down = self.store.stopped = True
        self._backlog.clear()

    def start(self) -> None:
        """Starts the server again, with its data. Leases get their whole TTL again, and watches reconnect."""
        if not self.down:
            return  # the end of all faults started it before
        self.down = False
        self.store.restart_timers()
        self.store.reset_ttls()
        self.break_streams()

    def change_leader(self) -> None:
        """Simulates a new leader: leases get their whole TTL again, and watches reconnect."""
        self.store.reset_ttls()
        self.break_streams()

    def break_streams(self) -> None:
        for stream in list(self._streams):
            stream.break_connection()

    def compact(self) -> None:
        """Drops the history except the last few revisions."""
        revision = max(1, self.store.revision - self.rng.randrange(3))
        if revision > self.store.compacted:
            try:
                self.store.compact(revision)
            except CoordinationError:  # compacted further meanwhile
                return
        self.wake()

    def _execute_backlog(self) -> None:
        """Executes the requests that waited in a pause, in random order."""
        backlog, self._backlog = self._backlog, []
        self.rng.shuffle(backlog)
        for execute in backlog:
            execute()
