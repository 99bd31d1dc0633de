"""The transport within one process, which passes messages as objects.

It keeps the promises of the interface, with its errors and losses. For tests a seed shuffles the order of deliveries,
nodes crash, and links are cut. There is no clock: equal seeds and equal callers give equal runs.
"""

from __future__ import annotations

import asyncio
import random

from taskgraph.errors import PeerGone, PeerLost, TransportError
from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Call, Pull, Reply
from taskgraph.transport.api import OnLost, Peer, Serve
from taskgraph.transport.calls import OwnedTasks, answer, answer_quietly, describe, unwrap

__all__ = ["MemoryNetwork", "MemoryTransport"]

#: With a seed, a delivery takes up to this many turns of the event loop.
_MAX_TURNS = 8


class MemoryNetwork:
    """Connects the transports of one process.

    Args:
        rng: shuffles the order of deliveries; None delivers in the order of sending.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._nodes: dict[str, MemoryTransport] = {}
        self._sessions: set[frozenset[str]] = set()  # pairs of nodes
        self._cut: set[frozenset[str]] = set()

    def crash(self, node: str) -> None:
        """Kills a node: its calls and handlers end, and its peers lose their sessions."""
        transport = self._nodes.pop(node, None)
        if transport is None:
            return
        transport._shut_down(f"node {node} crashed")
        for other in self._peers_of(node):
            self._break_session(node, other, f"node {node} crashed")

    def cut(self, one: str, other: str) -> None:
        """Cuts the link between two nodes: calls raise PeerLost until `heal`."""
        self._cut.add(frozenset((one, other)))
        self._break_session(one, other, f"the link between {one} and {other} is cut")

    def heal(self, one: str, other: str) -> None:
        """Mends a link that `cut` has cut. A new session begins with the next call."""
        self._cut.discard(frozenset((one, other)))

    # For transports.

    def _join(self, transport: MemoryTransport) -> None:
        if transport.node in self._nodes:
            raise TransportError(f"node {transport.node} exists")
        self._nodes[transport.node] = transport

    def _leave(self, transport: MemoryTransport) -> None:
        """Ends all sessions of a node in good order."""
        self._nodes.pop(transport.node, None)
        for other in self._peers_of(transport.node):
            self._end_session(transport.node, other, f"node {transport.node} said goodbye")

    def _find(self, caller: str, node: str) -> MemoryTransport:
        """Returns the transport of a node. Raises PeerLost if the link is cut, and PeerGone if the node is not
        there.
        """
        if frozenset((caller, node)) in self._cut:
            raise PeerLost(f"the link between {caller} and {node} is cut")
        transport = self._nodes.get(node)
        if transport is None:
            raise PeerGone(f"node {node} does not listen")
        return transport

    def _connect(self, one: str, other: str) -> None:
        self._sessions.add(frozenset((one, other)))

    def _peers_of(self, node: str) -> list[str]:
        return sorted(other for pair in self._sessions if node in pair for other in pair if other != node)

    def _end_session(self, one: str, other: str, why: str) -> None:
        """Ends the session of two nodes and every call in it."""
        self._sessions.discard(frozenset((one, other)))
        for here, there in ((one, other), (other, one)):
            if (transport := self._nodes.get(here)) is not None:
                transport._fail_calls(there, why)
                transport._cancel_served(there)

    def _break_session(self, one: str, other: str, why: str) -> None:
        """Ends the session of two nodes, if they have one; soon tells both that it was lost."""
        if frozenset((one, other)) not in self._sessions:
            return
        self._end_session(one, other, why)
        for here, there in ((one, other), (other, one)):
            if (transport := self._nodes.get(here)) is not None:
                self._report_loss_after(self._draw_turns(), transport, there)

    def _report_loss_after(self, turns: int, transport: MemoryTransport, lost: str) -> None:
        """After that many turns of the event loop, tells a transport that its session with node `lost` broke."""
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._report_loss_after, turns - 1, transport, lost)
        else:
            loop.call_soon(transport._on_session_lost, lost)

    def _draw_turns(self) -> int:
        return self._rng.randrange(_MAX_TURNS) if self._rng is not None else 0

    async def _delay_delivery(self) -> None:
        """With a seed, waits for some turns of the event loop, so that messages overtake each other."""
        for _ in range(self._draw_turns()):
            await asyncio.sleep(0)


class MemoryTransport:
    """Passes messages as objects; see `taskgraph.transport.api.Transport`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._tasks = OwnedTasks()
        self._serving: dict[asyncio.Task[None], str] = {}  # -> caller
        self._pending: dict[asyncio.Future[Reply], str] = {}  # -> callee
        self._serve: Serve | None = None
        self._on_lost: OnLost = lambda node: None
        self._down = "not started"  # why it is down, or ""
        self.node = ""

    @property
    def endpoints(self) -> tuple[str, ...]:
        return ("memory:",) if self.node else ()

    def allocate(self, nbytes: int) -> Block | None:
        return None  # values are passed as objects

    async def start(self, node: str, serve: Serve, on_lost: OnLost) -> None:
        """Joins the network.

        Raises:
            TransportError: the network has a node of that name.
        """
        if self.node:
            raise RuntimeError("the transport was started already")
        self.node, self._serve, self._on_lost = node, serve, on_lost
        self._network._join(self)
        self._down = ""

    async def close(self) -> None:
        if not self._down:
            self._network._leave(self)
            self._shut_down("this node's transport is closed")
        await self._tasks.close()

    # Calls.

    async def call(self, peer: Peer, message: Call, *, timeout_s: float | None = None) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(peer.node, message)
        except TimeoutError:
            raise PeerLost(f"no answer from node {peer.node} within {timeout_s} s to {describe(message)}") from None

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        if self._down:
            return None
        exchange = self._exchange(peer.node, message, quiet=quiet)
        return self._tasks.spawn(exchange, name=f"call {peer.node} from {self.node}")

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        calls = [self.call_now(peer, message.each(number)) for number in range(message.count)]
        return [call for call in calls if call is not None] or None  # None: the transport is closed

    async def _exchange(self, node: str, message: Call, *, quiet: bool = False) -> Reply:
        """Passes a call to the peer's transport, and waits for the reply."""
        target = self._find_peer(node)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[reply] = node
        task = target._accept(self.node, message, reply, quiet)
        try:
            return unwrap(await reply)
        finally:
            del self._pending[reply]
            if not quiet:
                task.cancel()

    def _find_peer(self, node: str) -> MemoryTransport:
        if self._down:
            raise PeerLost(self._down)
        target = self if node == self.node else self._network._find(self.node, node)
        if target is not self:
            self._network._connect(self.node, node)
        return target

    async def probe(self, peer: Peer, *, timeout_s: float) -> None:
        if self._down:
            raise PeerLost(self._down)
        if peer.node != self.node:
            await self._network._delay_delivery()
            self._network._find(self.node, peer.node)

    # Serving.

    def _accept(self, caller: str, message: Call, reply: asyncio.Future[Reply], quiet: bool) -> asyncio.Task[None]:
        """Starts to answer a call of another node; `reply` gets the reply."""
        task = self._tasks.spawn(self._answer(caller, message, reply, quiet), name=f"serve {caller} at {self.node}")
        self._serving[task] = caller
        task.add_done_callback(lambda done: self._serving.pop(done, None))
        return task

    async def _answer(self, caller: str, message: Call, reply: asyncio.Future[Reply], quiet: bool) -> None:
        assert self._serve is not None
        await self._network._delay_delivery()
        answered = await (answer_quietly if quiet else answer)(self._serve, caller, message)
        await self._network._delay_delivery()
        if answered is not None and not reply.done():
            reply.set_result(answered)

    # Endings.

    def _fail_calls(self, node: str, why: str) -> None:
        for reply, whose in self._pending.items():
            if whose == node and not reply.done():
                reply.set_exception(PeerLost(why))

    def _cancel_served(self, caller: str) -> None:
        for task, whose in list(self._serving.items()):
            if whose == caller:
                task.cancel()

    def _shut_down(self, why: str) -> None:
        """Fails the pending calls and cancels the served ones, since the node closes or crashed."""
        self._down = why
        for reply in self._pending:
            if not reply.done():
                reply.set_exception(PeerLost(why))
        for task in list(self._serving):
            task.cancel()

    def _on_session_lost(self, node: str) -> None:
        if not self._down:
            self._on_lost(node)
