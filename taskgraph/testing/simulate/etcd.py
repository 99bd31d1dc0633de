"""An etcd that is slow, paused, restarted, cut off, and that loses requests and answers.

`SimStore` is `MemoryStore` with a clock that can stand still. `SimEtcd` is the server around it: requests arrive when
they arrive, and watches receive events later. The server runs outside of all processes.
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
from taskgraph.testing.simulate.loop import later, own_time, plan

__all__ = ["SimEtcd", "SimStore", "Stream"]

_LOOKS_EVERY_S = 0.5


class SimStore(MemoryStore):
    """The state of the cluster. `on_write` sees every write before any node does."""

    def __init__(self, on_write: Callable[[int, tuple[KeyEvent, ...]], None]) -> None:
        super().__init__()
        self.stopped = False
        self._on_write = on_write
        self._revived: set[int] = set()

    def _publish(self, events: list[KeyEvent]) -> None:
        super()._publish(events)
        if events:
            self._on_write(self.revision, tuple(events))

    def would_succeed(self, txn: Txn) -> bool:
        """True if the transaction would succeed now."""
        return all(map(self._holds, txn.compares))

    def expire(self) -> None:
        if not self.stopped:
            super().expire()

    def _on_timer(self) -> None:
        if not self.stopped:
            super()._on_timer()

    def _deleted_at(self, lease: StoredLease) -> float:
        """Returns when etcd deletes a lease's keys: it looks for ended leases twice a second."""
        return math.ceil(super()._deleted_at(lease) / _LOOKS_EVERY_S) * _LOOKS_EVERY_S

    def renew(self, lease_id: int) -> bool:
        """Renews a lease. False: there is no such lease, or it has ended."""
        self.expire()
        lease, now = self._leases.get(lease_id), asyncio.get_running_loop().time()
        if lease is None:
            return False
        if lease.ends_at() < now:  # it would wait for the deletion
            self.revoke(lease_id)
            return False
        lease.renewed_at = now
        return True

    def reset_ttls(self) -> None:
        """A new leader gives every lease its whole TTL again."""
        now = asyncio.get_running_loop().time()
        self._revived.update(lease.id for lease in self._leases.values() if lease.ends_at() <= now)
        for lease in self._leases.values():
            lease.renewed_at = now
        self._schedule()

    def ended(self, lease_id: int, within_s: float) -> bool:
        """True if the TTL of a lease is over, was over at any time, or will be after the given time."""
        lease = self._leases.get(lease_id)
        return lease is None or lease_id in self._revived or lease.ends_at() <= own_time() + within_s

    def go_on(self) -> None:
        self.stopped = False
        self._schedule()


class Client(Protocol):
    """A client's connection as the server sees it."""

    @property
    def hears(self) -> bool:
        """True if messages of the server arrive."""

    @property
    def lag(self) -> float:
        """A factor for the delay of its watches."""

    def late_s(self, what: str) -> float:
        """The delay of an event by actors that come last."""


class Stream:
    """One watch as the server sees it. Batches sent on a broken stream do not arrive."""

    def __init__(
        self, etcd: SimEtcd, client: Client, prefix: str, start: int, context: contextvars.Context | None
    ) -> None:
        self._etcd = etcd
        self._client = client
        self._prefix = prefix
        self._context = context
        self._next = start  # the first revision not sent yet
        self.delivered = start  # the first revision the client does not have
        self._life = 0
        self._last_at = 0.0
        self._asked = False
        self._reopened = False  # and the client does not know it yet
        self.batches: list[WatchBatch | WatchCompacted] = []
        self.arrived = asyncio.Event()

    def poke(self) -> None:
        """Sends what there is a little later, so that batches grow."""
        if not self._asked:
            self._asked = True
            self._etcd.later(self._etcd.lag() * self._client.lag, self._pump)

    def broken(self) -> None:
        """Breaks the connection. It is made again, and some events come twice."""
        self._life += 1
        self._reopened = True
        etcd = self._etcd
        again = etcd.rng.randrange(3) if etcd.rng.random() < 0.5 else 0
        # What was compacted away does not come again; where some of it was never delivered, the watch must say so.
        self._next = max(1, min(self.delivered, max(self.delivered - again, etcd.store.compacted)))
        self.poke()

    def _pump(self) -> None:
        self._asked = False
        etcd = self._etcd
        if not etcd.serving or not self._client.hears:
            return  # poked again when it may go on
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
            self._next = max(self._next, upto + 1)  # it may start in the future
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
        self._next = upto + 1
        self._deliver_later(what, upto)

    def _deliver_later(self, what: WatchBatch | WatchCompacted, upto: int) -> None:
        self._last_at = max(
            self._last_at + 1e-6, self._etcd.now() + self._etcd.delay() + self._client.late_s("watches")
        )
        plan(self._last_at, self._deliver, self._life, what, upto, context=self._context)

    def _deliver(self, life: int, what: WatchBatch | WatchCompacted, upto: int) -> None:
        if life == self._life:
            self.delivered = max(self.delivered, upto + 1)
            self.batches.append(what)
            self.arrived.set()


class SimEtcd:
    """The server.

    Args:
        rng: decides every delay and every loss.
        moment: called for every transaction that arrives, before it is executed.
    """

    def __init__(self, store: SimStore, rng: random.Random, *, delay_s: float, lag_s: float) -> None:
        self.store = store
        self.rng = rng
        self.delay_s, self.lag_s = delay_s, lag_s
        self.paused = False
        self.down = False
        self._backlog: list[Callable[[], None]] = []
        self._streams: dict[Stream, None] = {}

    @property
    def serving(self) -> bool:
        return not (self.paused or self.down)

    def now(self) -> float:
        return own_time()

    def delay(self) -> float:
        """The delay of one way to the server or back: mostly short."""
        slow = 20.0 if self.rng.random() < 0.02 else 1.0
        return self.delay_s * slow * self.rng.uniform(0.3, 1.5)

    def lag(self) -> float:
        """The delay of a watch: some are much slower than others, so that views differ."""
        return self.lag_s * self.rng.random() ** 3

    def later(self, delay_s: float, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function later, outside of every process."""
        later(delay_s, function, *args)

    # -- what clients send ------------------------------------------------------------------------

    def arrive(self, execute: Callable[[], None]) -> None:
        """Executes a request: now, or when the server goes on."""
        if self.paused:
            self._backlog.append(execute)
        else:
            execute()

    def open(self, stream: Stream) -> None:
        self._streams[stream] = None
        stream.poke()

    def close(self, stream: Stream) -> None:
        self._streams.pop(stream, None)

    def wake(self) -> None:
        """Makes every watch look for new events."""
        for stream in self._streams:
            stream.poke()

    # -- faults -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stops the server like SIGSTOP: requests wait, leases do not expire, and watches get no events."""
        self.paused = self.store.stopped = True

    def resume(self) -> None:
        """Lets the server go on. Leases that ended meanwhile expire now, before or after the requests that waited."""
        if not self.paused:
            return
        self.paused = False
        if self.rng.random() < 0.5:
            self.store.go_on()
            self.store.expire()
        self._work_off()
        if self.store.stopped:
            self.store.go_on()
        self.wake()

    def stop(self) -> None:
        """The server's process ends, and requests that waited are lost."""
        self.down = self.store.stopped = True
        self._backlog.clear()

    def start(self) -> None:
        """Starts the server again, with its data. Leases get their whole TTL again, and watches reconnect."""
        if not self.down:
            return  # it was started before its time, as all failures ended
        self.down = False
        self.store.go_on()
        self.store.reset_ttls()
        self.break_streams()

    def change_leader(self) -> None:
        """Leases have their whole TTL again, watches are made again."""
        self.store.reset_ttls()
        self.break_streams()

    def break_streams(self) -> None:
        for stream in list(self._streams):
            stream.broken()

    def compact(self) -> None:
        """Drops all history but the last revisions."""
        revision = max(1, self.store.revision - self.rng.randrange(3))
        if revision > self.store.compacted:
            try:
                self.store.compact(revision)
            except CoordinationError:  # compacted further meanwhile
                return
        self.wake()

    def _work_off(self) -> None:
        backlog, self._backlog = self._backlog, []
        self.rng.shuffle(backlog)
        for execute in backlog:
            execute()
