"""Messages to each worker, sent in order, until the worker has taken them or they are of an old view.

    waiting ──sent──► unconfirmed ──a reply, or what the worker sends shows that it has the message──► dropped
       ▲                  │
       └──the session broke, or the worker refused it: all that are unconfirmed are sent again──┘

Small messages get no reply: that halves the frames of a step. A worker takes a message twice without harm.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from taskgraph.errors import PeerGone, Refused, TransportError
from taskgraph.protocol.messages import (
    Call,
    ComparedPart,
    Encoded,
    GroupKey,
    HoldsTotals,
    PartSums,
    Reply,
    SliceSum,
    Totals,
    WorkerReport,
)
from taskgraph.protocol.records import name_of
from taskgraph.transport.api import CallFuture

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.tracing import SpanStart, WorkerTrace
    from taskgraph.node.core import NodeCore
    from taskgraph.protocol.elastic.worker import Worker

__all__ = ["Outboxes", "WorkerOutbox"]


_NAMES: Final = {
    PartSums: "parts",
    HoldsTotals: "holds totals",
    WorkerReport: "report",
    Totals: "totals",
    ComparedPart: "digest of a part",
    GroupKey: "address",
}


class _QueuedMessage(NamedTuple):
    """A message that is not sent yet."""

    view: int
    message: Call
    mark: SpanStart | None


class _SentMessage(NamedTuple):
    """A message that is sent, and unconfirmed."""

    call: asyncio.Future[Reply]
    what: _QueuedMessage


class WorkerOutbox:
    """Sends messages to one worker.

    Args:
        peer: the worker's node id.
        view: returns the number of the view that this node has read.
        refused: called when the worker's port refuses connections.
    """

    def __init__(
        self,
        node: NodeCore,
        trace: WorkerTrace,
        peer: str,
        view: Callable[[], int],
        refused: Callable[[str], None],
    ) -> None:
        self._node = node
        self._trace = trace
        self._peer = peer
        self._view = view
        self._refused = refused
        self._waiting: deque[_QueuedMessage] = deque()
        self._unconfirmed: list[_SentMessage] = []
        self._sending: asyncio.Task[None] | None = None  # sends what waits, one message after the other

    def put(self, view: int, message: Call) -> None:
        """Queues a message of a view, and begins to send it once all earlier ones are sent."""
        self._waiting.append(_QueuedMessage(view, message, self._trace.begin()))
        if self._sending is None:
            self._send_now()

    def confirm(self, stable: int) -> None:
        """Drops unconfirmed messages that are not needed: sums for positions below `stable`, and all of an old view."""
        left: list[_SentMessage] = []
        for sent in self._unconfirmed:
            view, message, _ = sent.what
            if view < self._view() or (isinstance(message, PartSums | SliceSum) and message.position < stable):
                _forget(sent.call)
            else:
                left.append(sent)
        self._unconfirmed = left

    def _send_now(self) -> None:
        """Sends all waiting messages at once; without a session, starts a task that sends them."""
        while self._waiting:
            first = self._waiting[0]
            if first.view >= self._view():
                value = getattr(first.message, "value", None)
                quiet = not (isinstance(value, Encoded) and value.buffers)  # a reply frees the memory of large sums
                if (call := self._call_now(first.message, quiet)) is None:
                    self._start_task()
                    return
                self._unconfirmed.append(_SentMessage(call, first))
                if quiet:
                    self._note_sent(first)
            self._waiting.popleft()

    def _call_now(self, message: Call, quiet: bool) -> asyncio.Future[Reply] | None:
        """Sends a message at once, and returns the future of its reply; None: no session, so it is not sent.

        Args:
            quiet: ask for no reply.
        """
        peer = self._node.router.peer(self._peer)
        if peer is None or self._node.injects_held:
            return None
        try:
            call = self._node.transport.call_now(peer, message, quiet=quiet)
        except (Refused, TransportError):
            return None
        if isinstance(call, CallFuture) and not call.done():
            call.listener = self._handle_reply
        elif call is not None:
            call.add_done_callback(self._handle_reply)
        return call

    def _handle_reply(self, call: asyncio.Future[Reply]) -> None:
        """Drops a message whose call got a reply. If the call failed, sends all unconfirmed messages again."""
        if call.cancelled() or not self._node.running:
            return  # it is forgotten, or the transport is closed
        sent = next((sent for sent in self._unconfirmed if sent.call is call), None)
        if sent is None:
            return  # it is sent again already
        if call.exception() is None:
            self._unconfirmed.remove(sent)
            self._note_sent(sent.what)
        else:
            self._start_task()

    def _start_task(self) -> None:
        """Starts a task that sends all unconfirmed messages again, and then those that wait."""
        again, self._unconfirmed = self._unconfirmed, []
        for sent in again:
            _forget(sent.call)
        self._waiting.extendleft(sent.what for sent in reversed(again))
        self._sending = task = self._node.own(self._send_all(), f"send to {self._peer}")
        task.add_done_callback(self._sending_ended)

    def _sending_ended(self, task: asyncio.Future[None]) -> None:
        """Called when the task of `_send_all` ends: sends what came meanwhile without a task."""
        self._sending = None
        if not task.cancelled() and self._node.running:
            self._send_now()

    async def _send_all(self) -> None:
        """Sends the waiting messages one after another, each until it is taken. Skips those of an old view."""
        while self._waiting:
            first = self._waiting[0]
            if first.view >= self._view():
                if not await self._send_once(first.message):
                    continue
                self._note_sent(first)
            self._waiting.popleft()

    def _note_sent(self, sent: _QueuedMessage) -> None:
        """Adds a span of the sent message to the trace."""
        if sent.mark is not None:
            value = getattr(sent.message, "value", None)
            size = value.size_bytes if isinstance(value, Encoded) else -1
            name, peer = _NAMES[type(sent.message)], name_of(self._peer)
            self._trace.keep(sent.mark, "send", f"{name} to {peer}", peer=peer, size_bytes=size)

    async def _send_once(self, message: Call) -> bool:
        """Sends a message. Returns True once it is taken; False, after a pause, if it must be sent again."""
        peer = self._node.router.peer(self._peer)
        if peer is not None:
            try:
                await self._inject_fault(message)
                await self._node.transport.call(peer, message)
                if isinstance(message, PartSums) and self._node.injects_held:
                    await self._node.point("sent", 0, message.position)
                return True
            except PeerGone:
                self._refused(self._peer)
            except (Refused, TransportError):
                pass  # it is paused or busy, or the connection broke
        await self._node.short_pause()
        return False

    async def _inject_fault(self, message: Call) -> None:
        """In a test, gives an injected fault the chance to act before the message is sent."""
        if self._node.injects_held and isinstance(message, PartSums | HoldsTotals | WorkerReport):
            stage = {PartSums: "part", HoldsTotals: "total", WorkerReport: "report"}[type(message)]
            await self._node.point(stage, 0, message.position)


def _forget(call: asyncio.Future[Reply]) -> None:
    """Cancels a call, so that no reply is handled."""
    if isinstance(call, CallFuture):
        call.listener = None
    call.cancel()


class Outboxes:
    """One outbox for each worker that this one has sent to.

    Args:
        refused: called with a worker whose port refuses connections.
    """

    def __init__(self, node: NodeCore, trace: WorkerTrace, core: Worker, refused: Callable[[str], None]) -> None:
        self._node = node
        self._trace = trace
        self._core = core
        self._refused = refused
        self._outboxes: dict[str, WorkerOutbox] = {}

    def to(self, worker: str) -> WorkerOutbox:
        """Returns the outbox for a worker."""
        if worker not in self._outboxes:
            self._outboxes[worker] = WorkerOutbox(self._node, self._trace, worker, self._view, self._refused)
        return self._outboxes[worker]

    def put_all(self, view: int, message: Call) -> None:
        """Sends a message of a view to all other workers of the view that this one has read."""
        assert self._core.view is not None
        for worker in self._core.view.workers:
            if worker != self._node.id:
                self.to(worker).put(view, message)

    def confirm(self, stable: int) -> None:
        """Drops unconfirmed messages that no worker needs: all workers of the view hold the totals below `stable`."""
        for outbox in self._outboxes.values():
            outbox.confirm(stable)

    def _view(self) -> int:
        return self._core.number
