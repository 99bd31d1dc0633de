"""Calls to whoever is a task's primary at the moment.

The one place that decides what a failed call means: a lost peer or a "not primary" leads to another try as soon as
the view says something new (or a moment later), until the caller is cancelled because its attempt is over. What
cannot change by trying again is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import Refused, TransportError
from taskgraph.protocol.messages import Call, Reason, Reply
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView
from taskgraph.transport.api import Peer, Transport

__all__ = ["Router", "peer_of"]

# Answers that another try may change: the view is behind, here or there, or the node is busy with itself.
_TRY_AGAIN = frozenset(
    {
        Reason.NOT_PRIMARY,
        Reason.NOT_HERE,
        Reason.STALE,
        Reason.ATTEMPT_GONE,
        Reason.PAUSED,
        Reason.CLOSING,
        Reason.USER_ERROR,
    }
)


def peer_of(node: str, record: NodeRecord) -> Peer:
    return Peer(node, record.endpoints)


class Router:
    """Delivers calls to tasks."""

    def __init__(self, transport: Transport, keeper: ViewKeeper, *, retry_s: float) -> None:
        self._transport = transport
        self._keeper = keeper
        self._retry_s = retry_s
        self._addresses: dict[str, Peer] = {}
        self._looked_at = -1
        self._in_flight: dict[tuple[int, int, asyncio.Timeout], None] = {}  # a set that keeps its order
        keeper.on_change(self._abandon)

    def _abandon(self) -> None:
        """Calls to a primary that was replaced end at once: a frozen process neither answers nor breaks its session."""
        view = self._keeper.view
        if view.structure_revision == self._looked_at:
            return
        self._looked_at = view.structure_revision
        now = asyncio.get_running_loop().time()
        for entry in [e for e in self._in_flight if _revision(view, e[0]) != e[1]]:
            del self._in_flight[entry]  # each is told once: a timeout that expires cannot be moved again
            entry[2].reschedule(now)

    def peer(self, node: str) -> Peer | None:
        """How to reach a node; also one whose key is absent just now, if it was ever seen."""
        registered = self._keeper.view.nodes.get(node)
        if registered is not None:
            self._addresses[node] = peer_of(node, registered.record)
        return self._addresses.get(node)

    async def to_primary(self, task: int, message: Callable[[], Call], *, timeout_s: float | None = None) -> Reply:
        """Calls the primary of `task` until it answers. `message()` is made anew for every try.

        Raises:
            Refused: an answer that trying again cannot change.
        """
        while True:
            view = self._keeper.view
            primary = view.primaries.get(task)
            peer = self.peer(primary.record.node) if primary else None
            if primary is None or peer is None:
                await self._keeper.wait_until(lambda v: _revision(v, task) > 0 and self._reachable(v, task))
                continue
            try:
                return await self._call(peer, task, primary.mod_revision, message(), timeout_s)
            except Refused as refused:
                if refused.reason not in _TRY_AGAIN:
                    raise
            except (TransportError, TimeoutError):
                pass  # the node may be dead or replaced: its successor is, or will be, in the view
            await self._next_try(task, primary.mod_revision)

    async def _call(self, peer: Peer, task: int, revision: int, message: Call, timeout_s: float | None) -> Reply:
        """One try; raises TimeoutError as soon as the view shows another primary."""
        async with asyncio.timeout(None) as scope:
            entry = (task, revision, scope)
            self._in_flight[entry] = None
            try:
                return await self._transport.call(peer, message, timeout_s=timeout_s)
            finally:
                self._in_flight.pop(entry, None)

    async def to_node(self, node: str, message: Call, *, timeout_s: float | None) -> Reply:
        """One try, to one node. Raises TransportError."""
        peer = self.peer(node)
        if peer is None:
            raise Refused(Reason.NOT_HERE, f"node {node} is not registered")
        return await self._transport.call(peer, message, timeout_s=timeout_s)

    def _reachable(self, view: JobView, task: int) -> bool:
        node = view.primary_node(task)
        return node is not None and self.peer(node) is not None

    async def _next_try(self, task: int, known: int) -> None:
        """Waits for another primary of the task, or a moment."""
        try:
            async with asyncio.timeout(self._retry_s):
                await self._keeper.wait_until(lambda view: _revision(view, task) != known)
        except TimeoutError:
            pass


def _revision(view: JobView, task: int) -> int:
    primary = view.primaries.get(task)
    return primary.mod_revision if primary else 0
