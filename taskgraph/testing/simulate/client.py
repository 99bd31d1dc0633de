"""Connects one process to the simulated etcd: `coordination.api.Coordinator` and its leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from taskgraph.coordination.api import Listing, WatchBatch, WatchCompacted
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.protocol.kv import Delete, KeyValue, Put, Txn, TxnResult
from taskgraph.testing.simulate.drawing import CallFaults
from taskgraph.testing.simulate.etcd import SimEtcd, WatchStream
from taskgraph.testing.simulate.loop import Process
from taskgraph.testing.simulate.pace import SlowActors

__all__ = ["SimCoordinator", "SimLease"]

T = TypeVar("T")

_RENEWALS_PER_TTL = 5
_RETRY_S = 0.05
_REVOKE_S = 2.0


class SimCoordinator:
    """One process's connection to the simulated etcd: implements `coordination.api.Coordinator`.

    Args:
        process, threads: the simulated main loop, and the simulated lease threads, which run while the main loop is
            stuck, but not while the process is frozen.
        on_txn: called twice for every transaction: with "sending", and with "before", when the server executes it.
        timeout_s: the time limit of a call with its retries.
        lag: a factor for the delay of watches.
        call_faults: draws which reads and transactions are lost or late.
        slow_actors: adds delays to calls and watches.
    """

    def __init__(
        self,
        etcd: SimEtcd,
        process: Process,
        threads: Process,
        *,
        on_txn: Callable[[Process, Txn, str], None],
        timeout_s: float,
        lag: float = 1.0,
        call_faults: CallFaults | None = None,
        slow_actors: SlowActors | None = None,
    ) -> None:
        self.etcd = etcd
        self.process = process
        self.threads = threads
        self._on_txn = on_txn
        self._timeout_s = timeout_s
        self.lag = lag
        self._call_faults = call_faults
        self._slow_actors = slow_actors
        self._end_reason = ""
        self._streams: dict[WatchStream, None] = {}
        self._leases: dict[SimLease, None] = {}
        self.can_send = True  # messages of this process arrive at the server
        self._can_receive = True  # messages of the server arrive at this process
        self._stalled = False  # watches get no events
        self.answer_s = 0.0  # the most that answers are delayed by a fault
        self.lose_next = 0  # the number of next transactions that fail with an unknown outcome
        self.hold_next: Callable[[Callable[[], None]], None] | None = None  # delivers the next transaction

    @property
    def gets_events(self) -> bool:
        """True if watches get events."""
        return self._can_receive and not self._stalled

    @property
    def gets_answers(self) -> bool:
        """True if answers to calls arrive. Watches may be stalled nevertheless."""
        return self._can_receive

    def late_s(self, what: str) -> float:
        """Draws the delay that slow actors add to a kind of message between the server and this process."""
        actors = self._slow_actors
        return actors.late_s(what, f"{what} of {self.process.name}") if actors is not None else 0.0

    def answer_delay_s(self) -> float:
        """Draws the delay of an answer from the server to this process."""
        return (
            self.etcd.delay()
            + self.late_s("answers of etcd")
            + (self.answer_s * self.etcd.rng.random() if self.answer_s else 0.0)
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- calls ------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        found = await self._read(f"get {key!r}", lambda: self.etcd.store.select(key, prefix=False))
        return found[0] if found else None

    async def list(self, prefix: str) -> Listing:
        store = self.etcd.store
        return await self._read(f"list {prefix!r}", lambda: Listing(store.revision, store.select(prefix, prefix=True)))

    async def txn(self, txn: Txn) -> TxnResult:
        def execute() -> TxnResult:
            self._on_txn(self.process, txn, "before")
            result = self.etcd.store.execute(txn)
            return result

        self._on_txn(self.process, txn, "sending")
        if not any(isinstance(op, Put | Delete) for op in (*txn.success, *txn.failure)):
            return await self._read("a reading transaction", execute)
        return await self._call("a transaction", execute, writes=True)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> SimLease:
        sent_at = self.now()
        store = self.etcd.store

        def grant() -> tuple[int, float]:
            made = store.grant(ttl_s)
            return made, store.ttl_s(made)

        lease_id, granted_s = await self._read("grant of a lease", grant)
        lease = SimLease(self, lease_id, granted_s, sent_at, stall_limit_s)
        self._leases[lease] = None
        return lease

    async def revoke(self, lease_id: int) -> None:
        await self._read("revocation of a lease", lambda: self.etcd.store.revoke(lease_id))

    async def lease_left(self, lease_id: int) -> int | None:
        return await self._read("TTL of a lease", lambda: self.etcd.store.seconds_left(lease_id))

    async def compact(self, revision: int) -> None:
        """Drops the history before `revision` on the server."""
        await self._read(f"compaction at {revision}", lambda: self.etcd.store.compact(revision))

    async def _read(self, what: str, execute: Callable[[], T]) -> T:
        """Calls the server with retries until the timeout: the server may execute a read twice."""
        deadline = self.now() + self._timeout_s
        while True:
            try:
                return await self._call(what, execute, writes=False, timeout_s=deadline - self.now())
            except (Unavailable, OutcomeUnknown) as error:
                if self._end_reason or self.now() + _RETRY_S >= deadline:
                    raise Unavailable(f"{what}: {error}") from error
            await asyncio.sleep(_RETRY_S)

    async def _call(self, what: str, execute: Callable[[], T], *, writes: bool, timeout_s: float | None = None) -> T:
        """Sends one request, which the server executes, and waits for the answer. Draws faults of the request.

        Raises:
            Unavailable: the server did not execute the request, or it was a read that got no answer in time.
            OutcomeUnknown: the connection broke, or a write got no answer in time.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._check_usable()
        etcd, rng = self.etcd, self.etcd.rng
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def reply(value: T | None, error: Exception | None) -> None:
            if self._can_receive and not self._end_reason:
                loop.call_later(self.answer_delay_s() + late_s, settle, value, error, context=self.process.context)

        def run() -> None:
            etcd.store.expire()
            try:
                value = execute()
            except CoordinationError as error:
                reply(None, error)
                return
            if lost == "answer":
                reply(None, OutcomeUnknown(f"{what}: the connection broke"))
            else:
                reply(value, None)

        def arrive() -> None:
            if etcd.down:
                reply(None, Unavailable(f"{what}: failed to connect to all addresses"))
            elif lost == "request":
                reply(None, OutcomeUnknown(f"{what}: the connection broke"))
            elif lost == "refused":
                reply(None, Unavailable(f"{what}: etcdserver: no leader"))
            elif lost == "late":  # the server executes it after the connection broke
                reply(None, OutcomeUnknown(f"{what}: the connection broke"))
                etcd.later(rng.choice((0.1, 0.3, 3.0)) * rng.random(), etcd.arrive, run)
            else:
                etcd.arrive(run)

        lost, late_s = "", 0.0
        if not writes and self._call_faults is not None and (lost := self._call_faults.draw_read()) == "late":
            lost, late_s = "", self._call_faults.late_read_s()
        if writes and self.lose_next:
            self.lose_next -= 1
            lost = rng.choice(("answer", "answer", "request", "refused", "late"))
        elif writes and self._call_faults is not None:
            lost = self._call_faults.draw_write()
        if self.can_send:
            if writes and self.hold_next is not None:
                hold, self.hold_next = self.hold_next, None
                hold(arrive)
            else:
                etcd.later(etcd.delay() + self.late_s("transactions" if writes else "reads"), arrive)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            if writes:
                raise OutcomeUnknown(f"{what}: no answer within {timeout_s:g} s") from None
            raise Unavailable(f"{what}: no answer within {timeout_s:g} s") from None

    # -- watches ----------------------------------------------------------------------------------

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return self._watch(prefix, start_revision)

    async def _watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        self._check_usable()
        stream = WatchStream(self.etcd, self, prefix, start_revision, self.process.context)
        self._streams[stream] = None
        self.etcd.open(stream)
        try:
            while True:
                await stream.arrived.wait()
                stream.arrived.clear()
                self._check_usable()
                while stream.batches:
                    batch = stream.batches.pop(0)
                    if isinstance(batch, WatchCompacted):
                        raise batch
                    yield batch
        finally:
            self._streams.pop(stream, None)
            self.etcd.close(stream)

    # -- faults -----------------------------------------------------------------------------------

    def cut(self, *, can_send: bool, can_receive: bool) -> None:
        """Sets which directions between this process and the server work from now on."""
        received, self.can_send, self._can_receive = self._can_receive, can_send, can_receive
        if can_receive and not received:
            self.break_streams()

    def stall(self, stalled: bool) -> None:
        """Stops events of watches, or resumes them. Calls work meanwhile."""
        self._stalled = stalled
        for stream in self._streams:
            stream.schedule_send()

    def break_streams(self) -> None:
        """Breaks the connections of all watches, which reconnect."""
        for stream in self._streams:
            stream.break_connection()

    # -- endings ----------------------------------------------------------------------------------

    async def close(self) -> None:
        self._end("this handle was closed")

    def crash(self) -> None:
        """Acts as if the process died. Requests that were sent may still arrive."""
        self._end("this process is dead")

    def forget_lease(self, lease: SimLease) -> None:
        self._leases.pop(lease, None)

    def lease_valid_until(self, lease_id: int) -> float:
        """Returns the time, by the host's clock, until which this process relies on a lease; 0.0 if on none."""
        return max(
            (lease.valid_until() for lease in self._leases if lease.id == lease_id and lease.running), default=0.0
        )

    @property
    def ended(self) -> bool:
        """True once the handle is closed, or its process died."""
        return bool(self._end_reason)

    def _end(self, why: str) -> None:
        """Ends the leases' renewals and the watches; calls fail with this reason from now on."""
        self._end_reason = self._end_reason or why
        for lease in tuple(self._leases):
            lease.stop()
        for stream in self._streams:
            self.etcd.close(stream)
            stream.arrived.set()

    def _check_usable(self) -> None:
        """Raises Unavailable once the handle is closed, or its process died."""
        if self._end_reason:
            raise Unavailable(f"etcd cannot be used: {self._end_reason}")


class SimLease:
    """A lease with a simulated thread that renews it, for a while even if the main loop is stuck."""

    def __init__(
        self, coordinator: SimCoordinator, lease_id: int, ttl_s: float, sent_at: float, stall_limit_s: float
    ) -> None:
        self._coordinator = coordinator
        self._id = lease_id
        self._ttl_s = ttl_s
        self._stall_limit_s = stall_limit_s
        self._valid_until = sent_at + ttl_s
        self._ticked_at = coordinator.now()
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        self.running = True
        self._schedule_renewal()

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def valid_until(self) -> float:
        return self._valid_until

    def lost(self) -> bool:
        return self._lost

    def trouble(self) -> str:
        return ""

    def tick(self) -> None:
        self._ticked_at = self._coordinator.now()

    async def close(self, *, revoke: bool) -> None:
        self.stop()
        self._coordinator.forget_lease(self)
        if revoke and not self._coordinator.ended:
            try:
                async with asyncio.timeout(_REVOKE_S):
                    await self._coordinator.revoke(self._id)
            except (TimeoutError, Unavailable):
                pass  # the lease expires anyway

    def stop(self) -> None:
        """Ends the renewals. The server keeps the lease until its TTL is over."""
        self.running = False
        if self._timer is not None:
            self._timer.cancel()

    def _schedule_renewal(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            self._ttl_s / _RENEWALS_PER_TTL, self._renew, context=self._coordinator.threads.context
        )

    def _renew(self) -> None:
        """Sends a renewal. Runs in the lease's thread."""
        if not self.running:
            return
        self._schedule_renewal()
        client, etcd, now = self._coordinator, self._coordinator.etcd, self._coordinator.now()
        if now - self._ticked_at > self._stall_limit_s or not client.can_send:
            return

        def execute() -> None:
            if etcd.down:
                return
            exists = etcd.store.renew(self._id)
            if client.gets_answers and not client.ended:
                loop = asyncio.get_running_loop()
                context = client.threads.context
                loop.call_later(client.answer_delay_s(), self._on_renewal_reply, now, exists, context=context)

        etcd.later(etcd.delay() + client.late_s("renewals"), etcd.arrive, execute)

    def _on_renewal_reply(self, sent_at: float, exists: bool) -> None:
        if not self.running:
            return
        if exists:
            self._valid_until = max(self._valid_until, sent_at + self._ttl_s)
        else:
            self._lost = True
            self.stop()
