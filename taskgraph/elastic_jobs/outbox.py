"""Messages to one worker, sent in order, each until the worker has taken it or the message is of an old view."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskgraph.errors import PeerGone, Refused, TransportError
from taskgraph.protocol.messages import (
    Call,
    Encoded,
    FirstPart,
    GroupKey,
    HoldsTotals,
    PartSums,
    Reply,
    Totals,
    WorkerReport,
)
from taskgraph.protocol.records import name_of
from taskgraph.transport.api import CallFuture

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.tracing import Mark, WorkerTrace
    from taskgraph.node.core import NodeCore

__all__ = ["Outbox"]


_NAMES: Final = {
    PartSums: "parts",
    HoldsTotals: "holds totals",
    WorkerReport: "report",
    Totals: "totals",
    FirstPart: "digest of a part",
    GroupKey: "address",
}


class _Waiting(NamedTuple):
    view: int
    message: Call
    mark: Mark | None


class Outbox:
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
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Future[Any] | None = None  # a task, or the call that sends the first message

    def put(self, view: int, message: Call) -> None:
        """Sends a message of a view after all earlier ones."""
        self._waiting.append(_Waiting(view, message, self._trace.begin()))
        if self._sending is None:
            self._send_now()

    def _send_now(self) -> None:
        """Sends the first message without a task, if there is a session; else starts a task that sends all."""
        while self._waiting and self._waiting[0].view < self._view():
            self._waiting.popleft()
        if not self._waiting:
            return
        peer, call = self._node.router.peer(self._peer), None
        if peer is not None and not self._node.injects_held:
            with contextlib.suppress(Refused, TransportError):
                call = self._node.transport.call_now(peer, self._waiting[0].message)
        if call is None:
            self._start_task()
            return
        self._sending = call
        if isinstance(call, CallFuture) and not call.done():
            call.listener = self._replied
        else:
            call.add_done_callback(self._replied)

    def _replied(self, call: asyncio.Future[Reply]) -> None:
        if call.cancelled() or not self._node.running:
            return  # the transport is closed
        self._sending = None
        if call.exception() is None:
            self._note_sent(self._waiting.popleft())
            self._send_now()
        else:
            self._start_task()

    def _start_task(self) -> None:
        self._sending = task = self._node.own(self._send_all(), f"send to {self._peer}")
        task.add_done_callback(self._sent_all)

    def _sent_all(self, task: asyncio.Future[None]) -> None:
        self._sending = None
        if not task.cancelled() and self._node.running:
            self._send_now()

    async def _send_all(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if first.view >= self._view():
                if not await self._sent(first.message):
                    continue
                self._note_sent(first)
            self._waiting.popleft()

    def _note_sent(self, sent: _Waiting) -> None:
        if sent.mark is not None:
            value = getattr(sent.message, "value", None)
            size = value.size_bytes if isinstance(value, Encoded) else -1
            name, peer = _NAMES[type(sent.message)], name_of(self._peer)
            self._trace.keep(sent.mark, "send", f"{name} to {peer}", peer=peer, size_bytes=size)

    async def _sent(self, message: Call) -> bool:
        peer = self._node.router.peer(self._peer)
        if peer is not None:
            try:
                await self._inject(message)
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

    async def _inject(self, message: Call) -> None:
        if self._node.injects_held and isinstance(message, PartSums | HoldsTotals | WorkerReport):
            stage = {PartSums: "part", HoldsTotals: "total", WorkerReport: "report"}[type(message)]
            await self._node.point(stage, 0, message.position)
