"""The interface of a transport.

Implementations: `stream.StreamTransport` (unix sockets on one host, TCP between hosts) and `memory.MemoryTransport`
(one process). A conformance suite runs on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Call, Pull, Reply

__all__ = ["CallFuture", "OnLost", "Peer", "PendingCount", "PendingReply", "Serve", "ServeAll", "ServeNow", "Transport"]


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a node.

    Attributes:
        node: its id, never used again. The hello of a session proves that this node answers.
        endpoints: in order of preference, each `unix:HOSTKEY:/path` (for processes with the same HOSTKEY) or
            `tcp:host:port`; `memory:` in one process.
    """

    node: str
    endpoints: tuple[str, ...]


Serve = Callable[[str, Call], Awaitable[Reply]]
"""(node of the caller, call) -> reply. The handler of calls.

It may wait without a limit: calls do not block each other. `errors.Refused` becomes a refusal; any other exception is
logged with its traceback, and becomes a refusal with BAD_MESSAGE. The handler is cancelled when the caller cancels its
call or the session breaks.

Attributes `answer_now` (a `ServeNow`) and `answer_all_now` (a `ServeAll`) may answer calls without a task."""


class PendingCount:
    """A count of pending replies (`PendingReply.counter`)."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class PendingReply:
    """A reply to come, with one listener. The handler settles it; the caller listens, awaits or cancels it.

    Unlike a future it calls its listener at once, without a turn of the event loop. A `Refusal` is a reply, too. To be
    used on the event loop.

    Attributes:
        reply: the reply, or None.
        done: the reply was settled or cancelled.
        counter: counts this reply until it is done; who sets it has added 1.
        listener: called with (number, reply) by `settle`; `number` was given to `listen`. May be set directly while
            there is no reply.
    """

    __slots__ = ("counter", "done", "listener", "number", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.done = False
        self.counter: PendingCount | None = None
        self.listener: Callable[[int, Reply], object] | None = None
        self.number = 0

    def settle(self, reply: Reply) -> None:
        """Sets the reply. Does nothing if it was settled or cancelled before."""
        if self.done:
            return
        self.reply = reply
        self.done = True
        if self.counter is not None:
            self.counter.count -= 1
        if self.listener is not None:
            self.listener(self.number, reply)

    def cancel(self) -> None:
        """Drops the listener, so that a later reply is ignored. The handler is not stopped."""
        if not self.done:
            self.listener = None
            self.done = True
            if self.counter is not None:
                self.counter.count -= 1

    def listen(self, listener: Callable[[int, Reply], object], number: int = 0) -> None:
        """Calls `listener(number, reply)` when the reply arrives, or now if it has; replaces an earlier listener.

        Args:
            listener: must not raise.
            number: passed on to the listener, which may serve several replies.
        """
        if self.reply is not None:
            listener(number, self.reply)
        else:
            self.listener, self.number = listener, number

    def __await__(self) -> Generator[Any, None, Reply]:
        if self.reply is None:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def settled(_: int, reply: Reply) -> None:
                if not arrived.done():
                    arrived.set_result(None)

            self.listen(settled)
            try:
                yield from arrived.__await__()
            except BaseException:
                self.cancel()
                raise
        assert self.reply is not None
        return self.reply


ServeNow = Callable[[str, Call], "Reply | PendingReply | None"]
"""(node of the caller, call) -> the reply, or a pending reply, or None: `Serve` has to be called. It raises as `Serve`
does. A pending reply is cancelled when `Serve` would be."""

ServeAll = Callable[[str, Pull], "list[Reply | PendingReply | None] | None"]
"""(node of the caller, a pull for several epochs) -> the results of `ServeNow` for each epoch, in order. None: call
`ServeNow` for each."""


class CallFuture(asyncio.Future[Reply]):
    """The future of a call, as `Transport.call_now` may return it.

    Attributes:
        listener: one faster done callback. A reply calls it at once, without a turn of the event loop; it must neither
            raise nor wait for the transport. Errors and cancellation call it soon, as they call other callbacks.
    """

    # The creator sets all attributes. Slots save a dictionary for each call.
    __slots__ = ("listener",)
    listener: Callable[[asyncio.Future[Reply]], object] | None


OnLost = Callable[[str], None]
"""(node): the last session with the node broke without a goodbye. Called on the event loop; must not block."""


class Transport(Protocol):
    """Calls between nodes of one job. Both sides of a session prove that they know the token of the job."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints of this node; known after `start`."""

    def allocate(self, nbytes: int) -> Block | None:
        """Allocates memory for a value that will be sent; None: use any memory. May be called in any thread."""

    async def start(self, node: str, serve: Serve, on_lost: OnLost) -> None:
        """Listens, and passes calls of other nodes to `serve`. To be called once."""

    async def call(self, peer: Peer, message: Call, *, timeout_s: float | None = None) -> Reply:
        """Makes a call and returns the reply. Dials if there is no session. A node may call itself.

        Raises:
            Refused: the peer refused the call.
            PeerGone: the port of the peer refuses connections: its process has ended.
            PeerLost: the session broke or could not be made, or `timeout_s` passed.
        """

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        """Begins a call without an asyncio task, and returns its future; None: there is no open session.

        The future ends as `call` does. To cancel it cancels the call. It is cancelled when the transport closes.

        A *quiet* call gets no reply if `ServeNow` accepts it at once, so its future may stay pending: the call was
        sent, and not refused so far. A refusal, a later reply and the loss of the peer end the future as usual. To
        cancel the future of a quiet call only forgets it: the peer does not learn of it, and its handler continues.

        Raises:
            Refused, PeerLost: the call cannot be sent.
        """

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        """Makes the `count` calls of a pull in one frame. Returns the future of each; None: use `call_now` for each."""

    async def probe(self, peer: Peer, *, timeout_s: float) -> None:
        """Checks that the peer answers the hello. Raises PeerGone or PeerLost if it does not."""

    async def close(self) -> None:
        """Says goodbye to all peers, so that they see no loss, and stops listening."""
