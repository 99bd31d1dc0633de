"""Finds nodes whose lease has ended although their key is still there: frozen, or cut off from etcd.

While epochs commit, no lease is examined. After a fifth of the TTL without a commit, this node asks etcd for the leases
of the nodes that share a task with it: rarely at first, often towards the end of a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError
from taskgraph.protocol.lease_end import LeaseEnd

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["LeasePoll"]

_LEAST_TTL_S = 2.0
"""etcd grants no shorter lease."""


class _LeaseQuery:
    """The lease of one other node, and when to ask etcd about it next."""

    def __init__(self, lease: int, ttl_s: float) -> None:
        self.lease = lease
        self.end = LeaseEnd(max(ttl_s, _LEAST_TTL_S))
        self.next_at = 0.0


class LeasePoll:
    """Asks etcd, while no epoch commits, for the leases of nodes that share a task with this one. Records nothing.

    Args:
        changed: called with a node, its lease, and whether the lease has ended.
    """

    def __init__(self, node: NodeCore, changed: Callable[[str, int, bool], None]) -> None:
        self._node = node
        self._changed = changed
        self._queries: dict[str, _LeaseQuery] = {}
        self._epoch = -1
        self._progress_at = 0.0

    async def run(self) -> None:
        """Asks etcd again and again about the leases of nodes that share a task with this one, until cancelled."""
        node, beat_s = self._node, self._node.settings.lease_ttl_s / 5
        while True:
            next_at = min((asked.next_at for asked in self._queries.values()), default=node.coordinator.now() + beat_s)
            await asyncio.sleep(min(max(next_at - node.coordinator.now(), 0.0), beat_s))
            now = node.coordinator.now()
            at = node.keeper.view.stamp
            if (
                at is not None and at.epoch != self._epoch
            ):  # not the attempt: a restart does not prove that a node lives
                self._epoch, self._progress_at = at.epoch, now
            self._choose(missing=now - self._progress_at >= beat_s and not node.paused)
            for name, asked in list(self._queries.items()):
                if asked.next_at <= now:
                    await self._ask(name, asked)

    def _choose(self, *, missing: bool) -> None:
        """Chooses the leases to ask etcd about: ended ones whose key is still there; all if commits are `missing`."""
        view = self._node.keeper.view
        self._queries = {n: a for n, a in self._queries.items() if self._is_current(n, a) and (missing or a.end.ended)}
        if missing:
            for name in self._sharing_nodes():
                if name in view.nodes and name not in self._queries:
                    self._queries[name] = _LeaseQuery(view.nodes[name].record.lease, self._node.settings.lease_ttl_s)

    def _is_current(self, name: str, asked: _LeaseQuery) -> bool:
        """Returns True if a node's key still has the lease that was asked about."""
        known = self._node.keeper.view.nodes.get(name)
        return known is not None and known.record.lease == asked.lease

    def _sharing_nodes(self) -> list[str]:
        """Returns the nodes that share a task with this one: it may take over from them, or evict them."""
        view, me, found = self._node.keeper.view, self._node.id, dict[str, None]()
        for task, primary in view.primaries.items():
            holders = (primary.record.node, *view.in_sync(task))
            if me in holders:
                found.update(dict.fromkeys(holders))
        found.pop(me, None)
        return list(found)

    async def _ask(self, name: str, asked: _LeaseQuery) -> None:
        """Asks etcd how long a node's lease still lasts; calls `changed` if the lease has ended, or is alive again."""
        coordinator, before = self._node.coordinator, asked.end.ended
        sent_at = coordinator.now()
        try:
            left_s = await coordinator.lease_left(asked.lease)
        except CoordinationError as error:
            self._node.log.debug("lease of %s: %s", name, error)
            asked.next_at = coordinator.now() + self._node.settings.lease_ttl_s / 5
            return
        received_at = coordinator.now()
        asked.next_at = received_at + asked.end.on_answer(left_s, sent_at=sent_at, received_at=received_at)
        if asked.end.ended != before and self._is_current(name, asked):
            self._changed(name, asked.lease, asked.end.ended)
