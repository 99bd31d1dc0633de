"""Brings the failure detector its evidence, and carries out what follows.

Probes ports, reads the view and the leases of others, emits who was lost, found or gone, and declares nodes gone. What
follows from the evidence is decided in `protocol/failure_detector.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError, PeerGone, TransportError
from taskgraph.node.membership.lease_poll import LeasePoll
from taskgraph.protocol import transactions
from taskgraph.protocol.failure_detector import FailureDetector
from taskgraph.protocol.records import GoneRecord, name_of

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["Suspicion"]

_GRACE = 0.2
"""Share of the TTL that absent nodes have to come back after this node itself was paused."""
_DOUBT_S = 0.1
"""Pause before a node that refused a call is probed: mostly its sessions break meanwhile, and no probe is needed."""
_PROBES = 5
"""The most probes of a node that neither refuses nor answers; after them its lease decides."""


class Suspicion:
    """Finds out for one node which others it suspects, and which are gone; sets its `suspects` and `gone`.

    Args:
        also_named: returns further nodes to watch, besides nodes that have tasks.
        unproved: as `Registration.unproved`: what this node sees of others then proves nothing.
        changed: called after changes that the view does not show.

    Attributes:
        detector: decides, by the evidence, which nodes are suspected, and which are gone.
    """

    def __init__(
        self,
        node: NodeCore,
        also_named: Callable[[], Iterable[str]],
        *,
        unproved: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._node = node
        self._also_named = also_named
        self._unproved = unproved
        self._changed = changed
        self.detector = FailureDetector(node.settings.lease_ttl_s)
        self.lease_poll = LeasePoll(node, self._lease_changed)
        self._grace: asyncio.Task[None] | None = None
        self._doubted: set[str] = set()  # nodes whose port refused a call
        self._probing: set[str] = set()
        self._emitted_lost: set[str] = set()  # nodes whose loss was emitted for a refusing port
        self._emitted: set[str] | None = None

    def note_port_refused(self, node: str) -> None:
        """Suspects a node at once, since a probe found that all its endpoints refuse connections: its process has died.

        No other process listens there under its id. The suspicion ends if the node answers a probe, takes a task back,
        or is still registered when a lease that is not renewed would have expired.
        """
        if self.detector.is_refusal_news(node) and node != self._node.id:
            self.detector.port_refused(node, self._node.now())
            view = self._node.keeper.view
            if node in view.nodes and node not in view.gone:
                self._emitted_lost.add(node)
                self._node.events.emit(
                    "lost",
                    f"{name_of(node)} died: its port refuses connections",
                    fields={"lost": node},
                    transient=not view.running,  # nodes leave at the end of a job
                )
            self.update()
            self._changed()

    def _lease_changed(self, node: str, lease: int, ended: bool) -> None:
        """Notes that another node's lease has ended, so that the node is suspected, or that it lasts after all."""
        self.detector.lease_changed(node, lease, ended)
        if ended:
            text = f"{name_of(node)} does not answer: its lease ended (the node is frozen or cut off)"
            self._node.events.emit("lost", text, fields={"lost": node, "lease": lease})
        self.update()
        self._changed()

    def note_connection_lost(self, node: str) -> None:
        """Notes that a connection to a node broke, and probes whether the node still listens.

        A draining node, which may have left in good order with its goodbye unread, is probed only a moment later.
        """
        self.detector.connection_lost(node)
        known = self._node.keeper.view.nodes.get(node)
        if known is not None and known.record.draining:
            self.note_call_refused(node)
        else:
            self._probe_unless_refused(node)

    def note_call_refused(self, node: str) -> None:
        """Notes that a node's port refused a call, and soon probes the node, unless its end is known by then."""
        if self.detector.is_refusal_news(node) and node not in self._doubted:
            self._doubted.add(node)
            self._node.own(self._probe_if_registered(node), f"doubt {node}")

    async def _probe_if_registered(self, node: str) -> None:
        """Starts a probe after a moment, if the node is still registered and no evidence has come meanwhile."""
        try:
            await asyncio.sleep(_DOUBT_S)
            if self.detector.refusing_port(node) is None:
                await self._node.keeper.refresh()  # it may have left in good order, which the view does not show yet
                view = self._node.keeper.view
                if node in view.nodes and node not in view.gone:
                    self._probe_unless_refused(node)
        finally:
            self._doubted.discard(node)

    def _probe_unless_refused(self, node: str) -> None:
        if self.detector.refusing_port(node) is None:
            self._probe_soon(node)

    def _probe_soon(self, node: str) -> None:
        """Starts a probe of a node, unless one is under way."""
        if node not in self._probing:
            self._probing.add(node)
            self._node.own(self._probe(node), f"probe {node}")

    async def _probe(self, node: str) -> None:
        """Probes a node a few times, until it answers or its port refuses, and notes which."""
        try:
            for _ in range(_PROBES):
                peer = self._node.router.peer(node)
                if peer is None:
                    return
                try:
                    await self._node.transport.probe(peer, timeout_s=self._node.settings.connect_s)
                except PeerGone:
                    self.note_port_refused(node)
                    return
                except TransportError:
                    await self._node.short_pause()
                else:
                    self._note_alive(node, "it answers", trusted=False)
                    return
        finally:
            self._probing.discard(node)

    def note_lease_unproved(self) -> None:
        """Notes that this node's own lease cannot be proved: perhaps no lease can, so absence proves nothing."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self.detector.pause()

    def note_lease_proved(self) -> None:
        """Notes that this node's lease is proved again, and gives the other nodes a moment to prove theirs."""
        self.detector.restart_times(self._node.now())
        self._grace = self._node.own(self._wait_for_others(), "others come back")

    async def _wait_for_others(self) -> None:
        """After a pause of this node, suspects no absent node until it has had time to come back."""
        await asyncio.sleep(_GRACE * self._node.settings.lease_ttl_s)
        self._grace = None
        self.detector.resume()
        self.update()
        self._changed()

    def update(self) -> None:
        """Sets `suspects` and `gone` by the view and all evidence."""
        node, detector, view = self._node, self.detector, self._node.keeper.view
        if not detector.paused and self._unproved():
            self.note_lease_unproved()  # a pause is coming: nodes that become absent now are not suspected yet
            self.note_lease_proved()
        for taker, task in detector.nodes_that_took_back(view).items():
            self._note_alive(taker, f"it took task {task} back", trusted=True)
        named = self._nodes_with_tasks()
        if detector.read_view(view, named, node.now()):
            node.gone = detector.gone
            self._emit_deaths()
            self._emitted_lost -= node.gone
            node.router.keep_only(named | view.nodes.keys())
        node.suspects = detector.suspects

    def _nodes_with_tasks(self) -> set[str]:
        """Returns the other nodes that have tasks, or are invited to, and absent ones until they are back or gone."""
        view = self._node.keeper.view
        named = {p.record.node for p in view.primaries.values()}
        named.update(node for members in view.members.values() for node in members)
        named.update(self._also_named())
        named.update(self.detector.absent - view.gone.keys())
        named.discard(self._node.id)
        return named

    def _emit_deaths(self) -> None:
        """Emits how nodes died, as their launchers recorded, if this node is the one that emits."""
        view = self._node.keeper.view
        if self._emitted is None:
            self._emitted = set(view.gone)
        for node in sorted(view.gone.keys() - self._emitted):
            self._emitted.add(node)
            record = view.gone[node].record
            if not (view.running and self._node.emits_for_all()):
                continue
            name = name_of(node)
            if (record.running and not record.intended) or record.task is not None or record.ended_itself:
                self._node.events.emit("gone", f"{name} {record.how_it_ended}", fields={"lost": node})
            elif record.died and node not in self._emitted_lost:  # its launcher reported first
                self._node.events.emit("lost", f"{name} died: {record.reason}", fields={"lost": node})

    def _note_alive(self, node: str, why: str, *, trusted: bool) -> None:
        """Notes proof that a node lives; if it was suspected for its port, emits an event and ends the suspicion."""
        if self.detector.proved_alive(node, trusted=trusted):
            text = f"{name_of(node)} is there, though its port refused: {why}"
            self._node.events.emit("found", text, fields={"found": node})
            self.update()
            self._changed()

    async def declare_absent_gone(self) -> None:
        """Declares nodes gone in etcd whose key was absent for `lost_after_s` on this node's clock, without its pauses.

        Also looks again at nodes whose port refused. Runs until cancelled.
        """
        while True:
            await asyncio.sleep(min(1.0, self._node.settings.lost_after_s / 4))
            me = self._node
            if me.paused or self._unproved():
                self.detector.restart_times(me.now())  # a frozen node may come here before it sees that it has to pause
                continue
            probed, alive = self.detector.split_refusing(me.keeper.view, me.now())
            for node in alive:
                self._note_alive(node, "it renews its lease", trusted=True)
            for node in probed:
                self._probe_soon(node)
            limit = me.settings.lost_after_s
            # All values as of now: after a pause between two declarations the later ones would be unfounded.
            view, revision, now = me.keeper.view, me.node_revision, me.now()
            for node in self.detector.overdue(view, now, limit):
                record = GoneRecord(reason=f"its key was absent for {limit:g} s", writer=me.new_writer())
                txn = transactions.declare_absent_gone(view, node, record, by=me.id, by_revision=revision)
                try:
                    declared = (await me.coordinator.txn(txn)).succeeded
                except CoordinationError as error:
                    me.log.info("%s could not be declared gone yet: %s", node, error)
                    break  # these absences were seen before that
                if declared:
                    me.events.emit("gone", f"{name_of(node)}: {record.reason}", fields={"lost": node})
