"""What the rest of the framework sees of a transport.

Two implementations: `stream.StreamTransport` (unix sockets on one host, TCP between hosts) and
`memory.MemoryTransport` (one process). A conformance suite runs on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Call, Pull, Reply

__all__ = ["CallFuture", "Counted", "OnLost", "Peer", "PendingReply", "Serve", "ServeAll", "ServeNow", "Transport"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as others reach it.

    Attributes:
        node: its id, unique for ever; the session's hello proves that this node, and no other, answers.
        endpoints: in order of preference, each `unix:HOSTKEY:/path` (usable where HOSTKEY is one's own) or
            `tcp:host:port`; `memory:` in one process.
    """

    node: str
    endpoints: tuple[str, ...]


Serve = Callable[[str, Call], Awaitable[Reply]]
"""(node of the caller, call) -> reply. May wait as long as it likes: calls do not block each other. Raising
`errors.Refused` answers with that refusal; any other exception answers BAD_MESSAGE and is logged with its traceback.
It is cancelled when the caller cancels its call or its session breaks.

It may have an attribute `now`, a `ServeNow`: most calls of an epoch need no task of their own; and an
attribute `all_now`, a `ServeAll`."""


class Counted:
    """How many replies are still to be made."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class PendingReply:
    """A reply that is still to be made. Who makes it settles it; who wants it listens, awaits it, or cancels it.

    In place of a future: its one listener is called where it is settled, without a turn of the event loop in between,
    and a reply may be a `Refusal`. Lives on the event loop.

    Attributes:
        reply: None until there is one.
        done: it was settled or cancelled.
        among: one of these it is, until it is done.
        listener: called with (number, reply) where it is settled; to be set here only where there is no reply yet.
    """

    __slots__ = ("among", "done", "listener", "number", "reply")

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.done = False
        self.among: Counted | None = None
        self.listener: Callable[[int, Reply], object] | None = None
        self.number = 0

    def settle(self, reply: Reply) -> None:
        """This is the reply. Nothing happens where there is one, or nobody wants it any more."""
        if self.done:
            return
        self.reply = reply
        self.done = True
        if self.among is not None:
            self.among.count -= 1
        if self.listener is not None:
            self.listener(self.number, reply)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if not self.done:
            self.listener = None
            self.done = True
            if self.among is not None:
                self.among.count -= 1

    def listen(self, listener: Callable[[int, Reply], object], number: int = 0) -> None:
        """Calls `listener(number, reply)` once there is one, and at once where there is. It must not raise."""
        if self.reply is not None:
            listener(number, self.reply)
        else:
            self.listener, self.number = listener, number

    def __await__(self) -> Generator[Any, None, Reply]:
        if self.reply is None:
            there: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def settled(_: int, reply: Reply) -> None:
                if not there.done():
                    there.set_result(None)

            self.listen(settled)
            try:
                yield from there.__await__()
            except BaseException:
                self.cancel()
                raise
        assert self.reply is not None
        return self.reply


ServeNow = Callable[[str, Call], "Reply | PendingReply | None"]
"""(node of the caller, call) -> the reply, or one that is coming where that is all there is to wait for, or None:
`Serve` has to be asked. It raises as `Serve` does. What is coming is cancelled where `Serve` would be."""

ServeAll = Callable[[str, Pull], "list[Reply | PendingReply | None] | None"]
"""(node of the caller, a pull of several epochs) -> what `ServeNow` has for each of them, in order. None: it has to be
asked about each."""


class CallFuture(asyncio.Future[Reply]):
    """A call under way, as `Transport.call_now` may return it.

    Attributes:
        listener: in place of a done callback, of which there can be one: called with this once it is done. A reply it
            is told where that comes in, without a turn of the event loop in between: it must neither raise nor call
            anything that waits for the transport. The rest it is told as a done callback is.
    """

    # Whoever makes one sets all of them: without slots, each would have a dictionary of its own.
    __slots__ = ("listener",)
    listener: Callable[[asyncio.Future[Reply]], object] | None


OnLost = Callable[[str], None]
"""(node): the last session with that node broke without a goodbye. Called on the event loop, must not block."""


class Transport(Protocol):
    """Calls between nodes of one job. Every session proves the job's token on both sides."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where others reach this node; known after `start`."""

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for a large value that will travel; None: any memory is as good. May be called from every thread."""

    async def start(self, node: str, serve: Serve, on_lost: OnLost) -> None: ...

    async def call(self, peer: Peer, message: Call, *, timeout_s: float | None = None) -> Reply:
        """Delivers `message` and returns the reply. Connects where no session is open. A call to oneself is served too.

        Raises:
            Refused: the peer answered with a refusal.
            PeerGone: its port refuses: the process does not exist any more.
            PeerLost: the session broke or could not be made, or `timeout_s` passed.
        """

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        """The same without a task of its own, where a session is open; None where one has to be made first.

        The future ends as `call` does, or is cancelled where the transport is closed; cancelling it cancels the call.

        A *quiet* call is one whose caller learns in another way that it was heard, or does without: of an `Accepted`
        that is ready at once (out of `ServeNow`) nothing need come back. The future may stay open then; whoever holds
        it cancels it when it does not matter any more. That only forgets the call: the peer is told nothing, and a
        handler that still waits goes on. A refusal, an answer that took waiting, and the loss of the peer end the
        future as ever. So an open future means: sent, and nothing has been said against it.

        Raises:
            Refused, PeerLost: it cannot be sent.
        """

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        """As many calls as the pull's `count`, told to the peer at once: `call_now` for each of them.

        None also where nothing is saved by it.
        """

    async def probe(self, peer: Peer, *, timeout_s: float) -> None:
        """Returns if the peer's process listens and answers the hello; raises PeerGone or PeerLost."""

    async def close(self) -> None:
        """Says goodbye to every peer (they see no loss), stops listening, removes socket files."""
