"""Decides which nodes are suspected dead, and which are gone.

    alive ──► suspected: its port refuses, its lease ended, or its key is absent ──► gone
      ▲            │
      └────────────┘ it answers, its lease is renewed, its key is back, or it takes a task back

- A refusing port shows within milliseconds that a process was killed. If the node proves alive after all (a firewall
  was reloaded), its port no longer counts.
- A suspicion allows others to take over from the node, to evict it, or to give it up as a candidate.
- Only "gone" changes placement: the node's launcher saw it end, or its key stayed absent for `lost_after_s`.
- If this node lost its own lease as well, etcd was away or this host stood still: the others get a moment to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError, PeerGone, TransportError
from taskgraph.node.membership.ended_leases import EndedLeases
from taskgraph.protocol import transactions
from taskgraph.protocol.records import GoneRecord, name_of

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["Suspicion"]

_EXPIRY_S = 2.0
"""Time after the TTL in which etcd deletes the keys of an ended lease, and all nodes read that."""
_GRACE = 0.2
"""Share of the TTL that absent nodes have to come back after this node itself was paused."""
_DOUBT_S = 0.1
"""Pause before a node that refused a call is probed: mostly its sessions break meanwhile, and no probe is needed."""
_PROBES = 5
"""The most probes of a node that neither refuses nor answers; after them its lease decides."""


@dataclass(eq=False, slots=True)
class Refusal:
    """A port that refuses connections.

    Attributes:
        since: when the port first refused, while this node was not paused.
        taken: task -> the revision of a takeover that rests on this refusal.
    """

    since: float
    taken: dict[int, int] = field(default_factory=dict)


class Suspicion:
    """Decides for one node which others it suspects, and which are gone; sets its `suspects` and `gone`.

    Args:
        primaries: the primaries on this node.
        unproved: True if this node is paused or about to pause.
        changed: called after changes that the view does not show.
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
        self._refused: dict[str, Refusal] = {}
        self._proved_alive: set[str] = set()  # nodes that proved alive although their port refuses
        self.ended_leases = EndedLeases(node, self._lease_changed)
        self._absent_since: dict[str, float] = {}
        self._absent_before: frozenset[str] | None = None  # absent nodes when this node paused; None: that is long ago
        self._grace: asyncio.Task[None] | None = None
        self._doubted: set[str] = set()  # nodes whose port refused a call
        self._probing: set[str] = set()
        self._gone_revision = -1  # of the view's `gone` that was used last
        self._emitted_lost: set[str] = set()  # nodes whose loss was emitted for a refusing port
        self._emitted: set[str] | None = None

    def port_refused(self, node: str) -> None:
        """Suspects a node at once, since a probe found that all its endpoints refuse connections: its process has died.

        No other process listens there under its id. The suspicion ends if the node answers a probe, takes a task back,
        or is still registered when a lease that is not renewed would have expired.
        """
        if node not in self._refused and node not in self._proved_alive and node != self._node.id:
            self._refused[node] = Refusal(self._node.now())
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

    def refusal(self, node: str | None) -> Refusal | None:
        """Returns the refusal for which a node is suspected, if any."""
        return None if node is None else self._refused.get(node)

    def _lease_changed(self, node: str, lease: int, ended: bool) -> None:
        """Handles the end of a node's lease, or its return: a new leader of etcd extends every lease."""
        if ended:
            text = f"{name_of(node)} does not answer: its lease ended (the node is frozen or cut off)"
            self._node.events.emit("lost", text, fields={"lost": node, "lease": lease})
        self.update()
        self._changed()

    def connection_lost(self, node: str) -> None:
        """Probes whether a node still listens, since a connection to it broke."""
        self._proved_alive.discard(node)
        self._probe_unless_refused(node)

    def call_refused(self, node: str) -> None:
        """Probes a node whose port refused a call, unless its end is known by then."""
        if node not in self._refused and node not in self._proved_alive and node not in self._doubted:
            self._doubted.add(node)
            self._node.own(self._probe_if_registered(node), f"doubt {node}")

    async def _probe_if_registered(self, node: str) -> None:
        try:
            await asyncio.sleep(_DOUBT_S)
            if node not in self._refused:
                await self._node.keeper.refresh()  # it may have left in good order, which the view does not show yet
                view = self._node.keeper.view
                if node in view.nodes and node not in view.gone:
                    self._probe_unless_refused(node)
        finally:
            self._doubted.discard(node)

    def _probe_unless_refused(self, node: str) -> None:
        if node not in self._refused:
            self._probe_soon(node)

    def _probe_soon(self, node: str) -> None:
        if node not in self._probing:
            self._probing.add(node)
            self._node.own(self._probe(node), f"probe {node}")

    async def _probe(self, node: str) -> None:
        try:
            for _ in range(_PROBES):
                peer = self._node.router.peer(node)
                if peer is None:
                    return
                try:
                    await self._node.transport.probe(peer, timeout_s=self._node.settings.connect_s)
                except PeerGone:
                    self.port_refused(node)
                    return
                except TransportError:
                    await self._node.short_pause()
                else:
                    self._proved_alive.discard(node)
                    self._clear_suspicion(node, "it answers")
                    return
        finally:
            self._probing.discard(node)

    def lease_unproved(self) -> None:
        """Notes that this node's own lease cannot be proved; perhaps no lease can."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        elif self._absent_before is None:
            self._absent_before = frozenset(self._absent_since)

    def lease_proved(self) -> None:
        """Notes that this node's lease is proved again, and gives the other nodes a moment to prove theirs."""
        self._restart_absences()
        self._grace = self._node.own(self._wait_for_others(), "others come back")

    def _restart_absences(self) -> None:
        """Counts all absences from now on: this node was frozen or cut off, and could not see the others."""
        now = self._node.now()
        self._absent_since = dict.fromkeys(self._absent_since, now)
        for refusal in self._refused.values():
            refusal.since = now

    async def _wait_for_others(self) -> None:
        await asyncio.sleep(_GRACE * self._node.settings.lease_ttl_s)
        self._absent_before = self._grace = None
        self.update()
        self._changed()

    def update(self) -> None:
        """Sets `suspects` and `gone` by the view and the refusals."""
        if self._absent_before is None and self._unproved():
            self.lease_unproved()  # a pause is coming: nodes that become absent now are not suspected yet
            self.lease_proved()
        view = self._node.keeper.view
        self._clear_takers_back()
        named = self._nodes_with_tasks()
        now = self._node.now()
        absent = {node for node in named if node not in view.nodes}
        # Sorted, since nodes are declared gone in this order, and sets differ between processes.
        self._absent_since = {node: self._absent_since.get(node, now) for node in sorted(absent)}
        if self._gone_revision != view.gone_revision:
            self._gone_revision = view.gone_revision
            self._node.gone = frozenset(view.gone)
            self._emit_deaths()
            self._forget(named)
        if self._absent_before is not None:
            absent &= self._absent_before
        self._node.suspects = frozenset(
            absent | self._refused.keys() | (self._node.gone & named) | self.ended_leases.nodes
        )

    def _nodes_with_tasks(self) -> set[str]:
        """Returns the nodes that have tasks, or are invited to. An absent node counts until it is back or gone."""
        view = self._node.keeper.view
        named = {p.record.node for p in view.primaries.values()}
        named.update(node for members in view.members.values() for node in members)
        named.update(self._also_named())
        named.update(node for node in self._absent_since if node not in view.gone)
        named.discard(self._node.id)
        return named

    def _forget(self, named: set[str]) -> None:
        """Drops all notes about nodes that are neither registered nor in `named`."""
        kept = named | self._node.keeper.view.nodes.keys()
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in kept}
        self._proved_alive &= kept
        self._emitted_lost -= self._node.gone
        self._node.router.keep_only(kept)

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

    def _check_refused(self) -> None:
        """Probes nodes that refused and are still registered; after a TTL, being registered proves a renewed lease."""
        view, since = self._node.keeper.view, self._node.now() - self._node.settings.lease_ttl_s - _EXPIRY_S
        for node, refusal in list(self._refused.items()):
            if node in view.nodes and node not in view.gone:
                if refusal.since < since:
                    self._proved_alive.add(node)
                    self._clear_suspicion(node, "it renews its lease")
                else:
                    self._probe_soon(node)

    def _clear_takers_back(self) -> None:
        """Clears the suspicion of a node that took a task back from this node: it lived after its port refused.

        Otherwise two nodes that refuse each other would take over from each other as fast as etcd answers.
        """
        view = self._node.keeper.view
        for node, refusal in list(self._refused.items()):
            for task, revision in refusal.taken.items():
                primary = view.primaries.get(task)
                if primary is not None and primary.record.node == node and primary.mod_revision > revision:
                    self._proved_alive.add(node)
                    self._clear_suspicion(node, f"it took task {task} back")
                    break

    def _clear_suspicion(self, node: str, why: str) -> None:
        if self._refused.pop(node, None) is not None:
            text = f"{name_of(node)} is there, though its port refused: {why}"
            self._node.events.emit("found", text, fields={"found": node})
            self.update()
            self._changed()

    async def watch_absent(self) -> None:
        """Declares nodes gone that stayed absent for `lost_after_s`, on this node's clock without its pauses."""
        while True:
            await asyncio.sleep(min(1.0, self._node.settings.lost_after_s / 4))
            me = self._node
            if me.paused or self._unproved():
                self._restart_absences()  # a node that was frozen may come here before it sees that it has to pause
                continue
            self._check_refused()
            limit = me.settings.lost_after_s
            # All values as of now: after a pause between two declarations the later ones would be unfounded.
            view, revision, now = me.keeper.view, me.node_revision, me.now()
            overdue = [n for n, since in self._absent_since.items() if now - since >= limit and n not in view.gone]
            for node in overdue:
                record = GoneRecord(reason=f"its key was absent for {limit:g} s", writer=me.writer())
                txn = transactions.declare_absent_gone(view, node, record, by=me.id, by_revision=revision)
                try:
                    declared = (await me.coordinator.txn(txn)).succeeded
                except CoordinationError as error:
                    me.log.info("%s could not be declared gone yet: %s", node, error)
                    break  # these absences were seen before that
                if declared:
                    me.events.emit("gone", f"{name_of(node)}: {record.reason}", fields={"lost": node})
