"""Calls to the current primary of a task.

This is the only place that decides what a failed call means. After a broken connection or "not primary", the call is
repeated when the view changes, or after a backoff, until the caller is cancelled because its attempt is over. Errors
that a retry cannot change are raised. A call is *in vain* once the view shows that its receiver cannot answer it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import PeerGone, PeerLost, Refused, TransportError
from taskgraph.node.backoff import Backoff
from taskgraph.protocol.messages import Call, Pull, Reason, Reply
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView
from taskgraph.transport.api import Peer, Transport

__all__ = ["Router", "peer_of"]

# Refusals that a retry may change: the caller's or the node's view is stale, or the node is busy.
_RETRIED = frozenset(
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


_SWEEP_AT = 64
"""The number of calls in `_groups` at which ended ones are removed."""


_FORGET_S = 20.0
"""Failures to reach a node further apart than this are unrelated. One try may take `connect_s` (5 s) per address."""


class _FailedCalls(NamedTuple):
    """Failed calls to one node: the times of the first and the last failure, and the last error."""

    since: float
    last: float
    why: str


def peer_of(node: str, record: NodeRecord) -> Peer:
    return Peer(node, record.endpoints)


class Router:
    """Delivers calls to tasks.

    Attributes:
        allocate: allocates the transport's memory for values that will travel.
        on_call_refused: called with every registered node whose port refused a call.
    """

    def __init__(self, transport: Transport, keeper: ViewKeeper) -> None:
        self.allocate = transport.allocate
        self.on_call_refused: Callable[[str], None] = lambda node: None
        self._transport = transport
        self._keeper = keeper
        self._addresses: dict[str, tuple[NodeRecord, Peer]] = {}
        self._seen_revision = -1
        self._in_flight: dict[asyncio.Timeout, Callable[[JobView], bool]] = {}
        self._sweep_at = _SWEEP_AT
        self._failing: dict[str, _FailedCalls] = {}
        # Calls in flight without an asyncio task, grouped by when they began. Weak references, since only the caller
        # may keep a reply's value alive.
        self._groups: list[tuple[list[weakref.ref[asyncio.Future[Reply]]], Callable[[JobView], bool]]] = []
        keeper.on_change(self._cancel_vain_calls, structure=True)

    def _cancel_vain_calls(self) -> None:
        """Cancels calls that are in vain: a frozen process neither answers nor breaks its connection."""
        view = self._keeper.view
        if view.structure_revision == self._seen_revision:
            return
        self._seen_revision = view.structure_revision
        now = asyncio.get_running_loop().time()
        for scope in [scope for scope, in_vain in self._in_flight.items() if in_vain(view)]:
            del self._in_flight[scope]  # each once: a timeout that expires cannot be moved again
            scope.reschedule(now)
        self._drop_ended_calls()
        for calls, in_vain in tuple(self._groups):
            if in_vain(view):
                for reply in [known() for known in calls]:
                    if reply is not None:
                        reply.cancel()

    def peer(self, node: str) -> Peer | None:
        """Returns the address of a node: without its key in etcd, its last address. None: it is unknown, or `keep_only`
        dropped it.
        """
        registered, known = self._keeper.view.nodes.get(node), self._addresses.get(node)
        if registered is not None and (known is None or known[0] is not registered.record):
            known = self._addresses[node] = registered.record, peer_of(node, registered.record)
        return None if known is None else known[1]

    def keep_only(self, nodes: set[str]) -> None:
        """Drops the addresses of all nodes but these: others get no more calls unless they register."""
        self._addresses = {node: known for node, known in self._addresses.items() if node in nodes}

    async def to_primary(self, task: int, message: Callable[[], Call], *, timeout_s: float | None = None) -> Reply:
        """Calls the primary of `task`, with retries, until it answers. Each try sends a new `message()`.

        Raises:
            Refused: a retry cannot change the answer.
        """
        backoff = Backoff()
        while True:
            view = self._keeper.view
            primary = view.primaries.get(task)
            peer = self.peer(primary.record.node) if primary else None
            if primary is None or peer is None:
                await self._keeper.wait_until(lambda v: _revision(v, task) > 0 and self._has_reachable_primary(v, task))
                continue
            revision = primary.mod_revision
            try:
                return await self._call(peer, message(), timeout_s, partial(_is_replaced, task, revision))
            except Refused as refused:
                if refused.reason not in _RETRIED:
                    raise
            except (TransportError, TimeoutError):
                pass  # the node may be dead or replaced: the view shows its successor, now or soon
            await self._wait_for_next_try(task, revision, backoff.next_pause_s())

    def begin(self, task: int, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        """Calls the primary of `task` once, if that needs no waiting; otherwise returns None.

        Args:
            quiet: the call gets no reply if it is accepted at once (see `Transport.call_now`).

        The future fails as the transport's does, and is cancelled if the call is in vain: then use `to_primary`.
        """
        primary = self._keeper.view.primaries.get(task)
        peer = self.peer(primary.record.node) if primary else None
        if primary is None or peer is None:
            return None
        try:
            return self._begin(peer, message, partial(_is_replaced, task, primary.mod_revision), quiet=quiet)
        except TransportError:
            return None

    def begin_all(self, task: int, pull: Pull) -> list[asyncio.Future[Reply]] | None:
        """Does as `begin` for each epoch of a pull, in one frame. None: it needs waiting, or the transport cannot."""
        primary = self._keeper.view.primaries.get(task)
        peer = self.peer(primary.record.node) if primary else None
        if primary is None or peer is None:
            return None
        try:
            calls = self._transport.calls_now(peer, pull)
        except TransportError:
            return None
        if calls:
            self._groups.append(([*map(weakref.ref, calls)], partial(_is_replaced, task, primary.mod_revision)))
            if len(self._groups) >= self._sweep_at:
                self._drop_ended_calls()
        return calls

    def begin_at(self, node: str, message: Call) -> asyncio.Future[Reply] | None:
        """Calls a node once, if that needs no waiting; else returns None. The end of its lease cancels the call."""
        peer = self.peer(node)
        if peer is None or node not in self._keeper.view.nodes:
            return None
        try:
            return self._begin(peer, message, partial(_is_unregistered, node))
        except TransportError:
            return None

    def _begin(
        self, peer: Peer, message: Call, in_vain: Callable[[JobView], bool], *, quiet: bool = False
    ) -> asyncio.Future[Reply] | None:
        """Begins a call, which is cancelled once it is in vain; None if it cannot begin without waiting."""
        reply = self._transport.call_now(peer, message, quiet=quiet)
        if reply is not None and not reply.done():
            self._groups.append(([weakref.ref(reply)], in_vain))
            if len(self._groups) >= self._sweep_at:
                self._drop_ended_calls()
        return reply

    def _drop_ended_calls(self) -> None:
        """Drops groups of calls that have all ended, so that `_cancel_vain_calls` looks at fewer."""
        kept = []
        for calls, in_vain in self._groups:
            for known in calls:
                if (reply := known()) is not None and not reply.done():
                    kept.append((calls, in_vain))
                    break
        self._groups = kept
        self._sweep_at = _SWEEP_AT + 2 * len(kept)

    def unreachable_nodes(self, for_s: float) -> dict[str, str]:
        """Returns {node: last error} of registered nodes that all calls of the last `for_s` failed to reach."""
        now = asyncio.get_running_loop().time()
        self._failing = {
            node: known
            for node, known in self._failing.items()
            if node in self._keeper.view.nodes and now - known.last <= _FORGET_S
        }
        return {node: known.why for node, known in self._failing.items() if known.last - known.since >= for_s}

    def _note_failure(self, node: str, error: TransportError) -> None:
        """Notes that a node could not be reached; calls `on_call_refused` if its port refused."""
        now, known = asyncio.get_running_loop().time(), self._failing.get(node)
        since = now if known is None or now - known.last > _FORGET_S else known.since
        self._failing[node] = _FailedCalls(since, now, str(error))
        if isinstance(error, PeerGone):
            self.on_call_refused(node)

    async def _call(
        self, peer: Peer, message: Call, timeout_s: float | None, in_vain: Callable[[JobView], bool]
    ) -> Reply:
        """Calls a node once, and notes whether it could be reached. Raises TimeoutError once the call is in vain."""
        try:
            reply = await self._send_once(peer, message, timeout_s, in_vain)
        except Refused:
            self._failing.pop(peer.node, None)  # it answers
            raise
        except TransportError as error:
            self._note_failure(peer.node, error)
            raise
        self._failing.pop(peer.node, None)
        return reply

    async def _send_once(
        self, peer: Peer, message: Call, timeout_s: float | None, in_vain: Callable[[JobView], bool]
    ) -> Reply:
        """Sends a call once, without waiting if possible, and returns its reply."""
        reply = self._begin(peer, message, in_vain)
        if reply is not None:
            return await self._await_reply(reply, timeout_s)
        async with asyncio.timeout(None) as scope:
            self._in_flight[scope] = in_vain
            try:
                return await self._transport.call(peer, message, timeout_s=timeout_s)
            finally:
                self._in_flight.pop(scope, None)

    async def _await_reply(self, reply: asyncio.Future[Reply], timeout_s: float | None) -> Reply:
        """Waits for a reply. Raises TimeoutError after `timeout_s`, or once the call is in vain."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, reply.cancel)
        try:
            return await reply
        except asyncio.CancelledError:
            if task.cancelling() > before:
                raise
            raise TimeoutError("no answer in time, or in vain") from None  # the future was cancelled, not the caller
        finally:
            if timer is not None:
                timer.cancel()

    async def to_node(self, node: str, message: Call, *, timeout_s: float | None, task: int | None = None) -> Reply:
        """Tries once to call one node.

        Args:
            task: the task whose primary is called: the call is in vain once another node is its primary.

        Raises:
            TransportError: the node did not answer in time, or its lease ended.
        """
        peer = self.peer(node)
        if peer is None:
            raise Refused(Reason.NOT_HERE, f"node {node} is not registered")
        view = self._keeper.view
        if node not in view.nodes:  # it may come back
            return await self._transport.call(peer, message, timeout_s=timeout_s)
        revision = 0 if task is None else _revision(view, task)
        try:
            return await self._call(
                peer,
                message,
                timeout_s,
                lambda view: node not in view.nodes or (task is not None and _is_replaced(task, revision, view)),
            )
        except TimeoutError:
            other = "" if task is None else f", or another is primary of task {task}"
            raise PeerLost(f"node {node} did not answer in time, its lease ended{other}") from None

    def _has_reachable_primary(self, view: JobView, task: int) -> bool:
        node = view.primary_node(task)
        return node is not None and self.peer(node) is not None

    async def _wait_for_next_try(self, task: int, known: int, pause_s: float) -> None:
        """Waits until the task has another primary, `pause_s` at most."""
        try:
            async with asyncio.timeout(pause_s):
                await self._keeper.wait_until(lambda view: _revision(view, task) != known)
        except TimeoutError:
            pass


def _is_unregistered(node: str, view: JobView) -> bool:
    return node not in view.nodes


def _is_replaced(task: int, revision: int, view: JobView) -> bool:
    """True if the task's primary is not the one of this revision in etcd, or there is none: calls to it are over."""
    return _revision(view, task) != revision


def _revision(view: JobView, task: int) -> int:
    """Returns the revision of a task's primary in the view; 0: it has none."""
    primary = view.primaries.get(task)
    return primary.mod_revision if primary else 0
