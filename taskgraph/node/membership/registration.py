"""A node's own key in etcd, under a lease.

    waiting ──► registered ◄──► paused          (paused: the lease cannot be proved, or the key is gone)
                    └──────► left

Leases detect, terms protect: the work of a paused node is safe anyway. It pauses so that others do not wait for a
node that may be replaced already, and so that its effects outside the job stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from taskgraph.coordination.api import Lease
from taskgraph.errors import CoordinationError, JobError, LeaseGone, PeerLost, TransportError
from taskgraph.node.membership.arithmetic import why_unlike
from taskgraph.node.router import peer_of
from taskgraph.protocol import transactions
from taskgraph.protocol.reach import can_use_unix_socket, describe_unreached, refusal_reason
from taskgraph.protocol.records import NodeRecord

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore
    from taskgraph.node.membership.suspicion import Suspicion

__all__ = ["Registration"]

_TICK_S = 0.1
"""How often the main loop shows that it is alive, and examines its lease."""
_RENEWALS = 5
"""Renewals of a lease per TTL."""
_REGRANTED_S = 2.0
"""Time beyond the TTL that a dead node's lease may last, since a new leader of etcd extends it."""
_LOOK_S = 0.5
"""How often a waiting node checks whether it may register."""


class Registration:
    """Registers one node, keeps its lease and key, and pauses the node while either cannot be proved.

    Args:
        reconcile: makes the roles here follow the view; called before a paused node puts its key back, in a transaction
            that names its primaries.
    """

    def __init__(self, node: NodeCore, *, suspicion: Suspicion, reconcile: Callable[[], None]) -> None:
        self._node = node
        self._record: NodeRecord
        self._suspicion = suspicion
        self._reconcile = reconcile
        self._spec_revision = 0  # as read when registration began
        self._lease: Lease | None = None
        self._paused_for = ""  # why the pause began
        self._why_paused = ""  # the last logged reason
        self._writing = ""  # the writer of a change of the key that is not answered yet
        node.announce = self.announce
        self._answering: set[str] = set()  # nodes that have answered; ids are never reused

    def _make_record(self) -> NodeRecord:
        """Makes the key's value for one write: several may be under way, each with a record of its own."""
        assert self._lease is not None
        return msgspec.structs.replace(
            self._record,
            lease=self._lease.id,
            draining=self._node.draining,
            writer=self._node.new_writer(),
        )

    async def register(self, record: NodeRecord) -> None:
        """Grants the lease and puts the key, unless the node is asked to leave first.

        Args:
            record: the part of the key that never changes.

        Raises:
            JobError: another job has that name by now, or a member and this node cannot reach each other.
        """
        keeper = self._node.keeper
        self._record, self._spec_revision = record, keeper.view.spec_revision
        while True:
            await self._wait_until_reachable()
            if self._node.draining:
                return
            while (revision := await self._put_first_key()) is None:
                await self._node.retry_until_answered(keeper.load)
                if self._node.draining:
                    return
                self._check_run()
                await self._node.short_pause()
            self._node.node_revision = revision
            self._node.set_paused(False)
            with self._ticking():
                await keeper.refresh()  # no watch runs yet
                await keeper.wait_for_revision(revision)
            if not await self._unreached_members():
                if why := why_unlike(self._record, self._earlier_members()):
                    self._node.events.emit("unlike", why)
                return
            # A member registered after this node had looked: this node takes its key back before it begins anything.
            self._node.set_paused(True)
            assert self._lease is not None
            await self._lease.close(revoke=True)
            self._node.node_revision = 0
            await keeper.refresh()

    def _check_run(self) -> None:
        """Raises JobError if the job's name has gone to another run since registration began."""
        view = self._node.keeper.view
        if view.superseded or view.spec_revision != self._spec_revision:
            raise JobError(f"job {view.keys.job!r} was submitted anew while this node started: start the node again")

    async def _wait_until_reachable(self) -> None:
        """Waits until each member that this node cannot reach is gone or reachable, or until the node is to leave.

        A living member renews its lease, so at least half of its TTL is always left: a member whose lease stays above
        that for long enough is alive. One reading proves nothing, since a new leader of etcd gives the leases of dead
        nodes their whole TTL again. The last try to reach the member decides.

        Raises:
            JobError: an unreachable member is alive; another run has the job's name; or this node was declared gone.
        """
        node, settings, emitted = self._node, self._node.settings, ""
        # A node whose main loop is stuck does not answer either, and renews its lease for `lease_stall_s`.
        enough_s = settings.lease_ttl_s + _REGRANTED_S + settings.lease_stall_s
        renewed: dict[str, float] = {}  # since when its lease looked renewed
        while not node.draining:
            tried_at = node.now()
            found = self._why_refused() or await self._unreached_members()
            if not found:
                return
            if (why := next(iter(found.values()))) != emitted:
                node.events.emit("refused", f"{node.name} may not register as long as this is so: {why}")
                emitted = why
            await asyncio.sleep(_LOOK_S)
            asked_at = node.now()
            await node.retry_until_answered(node.keeper.load)
            self._check_run()
            self._check_not_gone()
            renews = dict(zip(found, await asyncio.gather(*map(self._renews, found)), strict=True))
            now = node.now()
            if now - asked_at > settings.lease_ttl_s / _RENEWALS:
                renewed.clear()  # etcd was away
            renewed = {other: renewed.get(other, now) for other in found if renews[other]}
            for other, since in renewed.items():
                if tried_at - since > enough_s:
                    raise self._refused_error(found[other])

    async def _renews(self, other: str) -> bool:
        """Returns True if at least half of another node's TTL is left, as if the node renews its lease."""
        node = self._node
        known = node.keeper.view.nodes.get(other)
        if known is None:
            return False
        left_s = await node.retry_until_answered(lambda: node.coordinator.lease_left(known.record.lease))
        return left_s is not None and left_s >= node.settings.lease_ttl_s / 2

    async def _unreached_members(self) -> dict[str, str]:
        """Returns {node: reason} of members registered before this node that do not answer it."""
        node = self._node
        asked = {
            other: record
            for other, record in self._earlier_members().items()
            if other not in self._answering and not can_use_unix_socket(self._record, record)
        }
        if not asked:
            return {}
        why = dict(zip(asked, await asyncio.gather(*map(self._try_to_reach, asked, asked.values())), strict=True))
        self._answering.update(other for other in asked if why[other] is None)
        if not any(why.values()):
            return {}
        await node.keeper.refresh()  # some may have left, or be gone, by now
        there = self._earlier_members()
        return {
            n: describe_unreached(
                self._record, asked[n], str(error), connected=isinstance(error, PeerLost) and error.connected
            )
            for n, error in why.items()
            if error is not None and n in there
        }

    async def _try_to_reach(self, other: str, record: NodeRecord) -> TransportError | None:
        """Returns the error of a probe of another node; None: the node answers."""
        try:
            await self._node.transport.probe(peer_of(other, record), timeout_s=self._node.settings.connect_s)
        except TransportError as error:
            return error
        return None

    def check_reach(self) -> None:
        """Raises JobError if this node and a member that registered earlier cannot connect, by their addresses.

        To be called again once registered: of two nodes that register at once, the later one sees the other.
        """
        for why in self._why_refused().values():
            raise self._refused_error(why)

    def _refused_error(self, why: str) -> JobError:
        return JobError(f"this node cannot take part in job {self._node.spec.name!r}: {why}")

    def _why_refused(self) -> dict[str, str]:
        """Returns {node: reason} of members that registered earlier and, by the addresses, cannot be connected with
        this node.
        """
        before = self._earlier_members().items()
        return {other: why for other, record in before if (why := refusal_reason(self._record, record))}

    def _earlier_members(self) -> dict[str, NodeRecord]:
        """Returns the other members registered before this node; all members while it is not registered."""
        node, view = self._node, self._node.keeper.view
        live = view.live_nodes(node.spec.run)
        return {
            other: live[other]
            for other in sorted(live)
            if other != node.id
            and (not self._node.node_revision or view.nodes[other].mod_revision < self._node.node_revision)
        }

    async def _put_first_key(self) -> int | None:
        """Grants a lease and puts the node's first key. Returns its revision.

        None if another run has the job's name, the lease ended meanwhile, or the node is asked to leave.

        Raises:
            JobError: this node was declared gone, perhaps after an earlier try.
        """
        node, settings = self._node, self._node.settings
        lease = await node.retry_until_answered(
            lambda: node.coordinator.lease(settings.lease_ttl_s, stall_limit_s=settings.lease_stall_s)
        )
        if lease is None:
            return None
        self._lease = lease
        self._check_not_gone()
        view, record = node.keeper.view, self._make_record()
        txn = transactions.register(view, node.id, record)
        try:
            revision = await node.transact(txn, key=view.keys.node(node.id), writer=record.writer)
        except LeaseGone:
            revision = None
        if revision is None:
            await lease.close(revoke=True)
        return revision

    async def run(self) -> None:
        """Shows that the event loop is alive, and pauses and resumes the node, until cancelled."""
        while True:
            lease = self._lease
            assert lease is not None
            lease.tick()
            if not self._node.paused and (why := self._why_unproved(lease)):
                self._node.set_paused(True)
                self._paused_for = why
                self._suspicion.note_lease_unproved()
                self._node.events.emit("paused", f"{why}: serving stops, work is kept")
                self._node.keeper.notify_later()
            if self._node.paused:
                await self._resume(lease)
            await asyncio.sleep(_TICK_S)

    @property
    def waits(self) -> tuple[str, ...]:
        """Says why this node is paused, for `status`."""
        if not (self._node.paused and self._node.node_revision and self._lease is not None):
            return ()  # not registered yet, or not paused
        # A new lease without the key in etcd is a consequence of the pause, not its reason.
        why = self._why_unrenewed(self._lease) or self._why_paused or self._paused_for
        return (f"{self._node.name} is paused{f': {why}' if why else ''}",)

    @property
    def unproved(self) -> bool:
        """True if this node must prove its lease and key again: it is paused, or about to pause."""
        return self._lease is not None and bool(self._why_unproved(self._lease))

    def _why_unproved(self, lease: Lease) -> str:
        """Returns why this node must prove its lease and key again; "": it need not."""
        return self._why_unrenewed(lease) or self._why_key_differs()

    def _why_unrenewed(self, lease: Lease) -> str:
        """Returns why the lease was not renewed in time; "" if it was."""
        if not self._is_unrenewed(lease):
            return ""
        return f"the lease could not be renewed in time{f' ({lease.trouble()})' if lease.trouble() else ''}"

    def _why_key_differs(self) -> str:
        """Returns why the key in etcd is not the one that this node wrote last; "": it is.

        Without the key, others take this node for dead. With another revision of the key (an earlier write arrived
        after the key was deleted), etcd would refuse all fenced writes of this node.
        """
        node, view = self._node, self._node.keeper.view
        if not 0 < node.node_revision <= view.revision or view.spec is None or node.id in view.gone:
            return ""
        known = view.nodes.get(node.id)
        if known is None:
            return "somebody deleted this node's key in etcd"
        if known.mod_revision == node.node_revision or known.record.writer == self._writing:
            return ""
        return "this node's key in etcd was written again, and not by what it does now"

    def _is_unrenewed(self, lease: Lease) -> bool:
        """True if the lease is lost, or no renewal was answered for two thirds of its TTL."""
        return lease.lost() or self._node.coordinator.now() > lease.valid_until() - lease.ttl_s / 3

    async def _resume(self, lease: Lease) -> None:
        """Tries to renew the lease and put the key back, in a transaction that proves this node's primaries unchanged;
        then unpauses.
        """
        node = self._node
        try:
            if lease.lost() or node.coordinator.now() > lease.valid_until():
                await lease.close(revoke=False)
                lease = await node.coordinator.lease(
                    node.settings.lease_ttl_s, stall_limit_s=node.settings.lease_stall_s
                )
                self._lease = lease
            if self._is_unrenewed(lease):
                return
            with self._ticking():
                await node.keeper.load()
            self._reconcile()  # stale primaries step down now: the transaction names those that stay
            if node.id in node.keeper.view.gone:
                return  # `reconcile` ends the node
            txn = transactions.resume_node(node.keeper.view, node.id, self._make_record())
            result = await node.coordinator.txn(txn)
        except CoordinationError as error:
            if str(error) != self._why_paused:  # it may repeat ten times a second
                node.log.warning("paused: %s", error)
            self._why_paused = str(error)
            return
        if result.succeeded:
            self._node.node_revision = result.revision
            with self._ticking():
                await node.keeper.wait_for_revision(result.revision)
            if self._is_unrenewed(lease):
                return
            self._node.set_paused(False)
            self._why_paused = ""
            self._suspicion.note_lease_proved()
            node.events.emit("resumed", "the lease is proved, and the key in etcd is there")
            node.keeper.notify_later()

    def _check_not_gone(self) -> None:
        """Raises JobError if this node was declared gone."""
        node = self._node
        if (gone := node.keeper.view.gone.get(node.id)) is not None:
            raise JobError(f"{node.name} was declared gone: {gone.record.reason}")

    @contextlib.contextmanager
    def _ticking(self) -> Iterator[None]:
        """Keeps the lease renewed within a block that waits: listing a large job over a slow link takes long."""
        loop, lease = asyncio.get_running_loop(), self._lease
        assert lease is not None
        timer: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal timer
            lease.tick()
            timer = loop.call_later(_TICK_S, tick)

        tick()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    async def announce(self) -> None:
        """Writes to this node's key in etcd that the node drains; repeats the write until etcd has it."""
        while True:
            await self._node.wait_while_paused()
            view, record = self._node.keeper.view, self._make_record()
            self._writing = record.writer
            txn = transactions.update_node(view, self._node.id, record, self._node.node_revision)
            try:
                revision = await self._node.transact(txn, key=view.keys.node(self._node.id), writer=record.writer)
            except LeaseGone:
                revision = None  # the node pauses, and resumes with another lease
            if revision is not None:
                self._node.node_revision = max(self._node.node_revision, revision)  # a later resume may have set it
                self._writing = ""
                await self._node.keeper.wait_for_revision(revision)
                return
            await self._node.short_pause()

    async def leave(self) -> None:
        """Declares this node gone, and revokes its lease; etcd deletes the key with the lease."""
        if self._lease is None:
            return
        node = self._node
        try:
            async with asyncio.timeout(node.settings.call_s):
                try:
                    await self._declare_gone()
                except CoordinationError as error:  # the node may still be able to end its own lease
                    node.log.info("this node could not be declared gone: %s", error)
                await self._lease.close(revoke=True)
        except (CoordinationError, TimeoutError) as error:
            node.log.info("the lease could not be revoked, it will expire: %s", str(error) or "no answer")

    async def _declare_gone(self) -> None:
        """Declares this node gone before its key goes, so that others do not wait for it."""
        node = self._node
        gone = node.gone_record()
        if node.keeper.view.spec is not None:  # otherwise a user deleted the job
            await node.coordinator.txn(transactions.declare_gone(node.keeper.view, node.id, gone))
