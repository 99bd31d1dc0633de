"""A network between simulated nodes: `transport.api.Transport` on connections that are slow, stalled, cut and reset.

Each ordered pair of nodes that talk has one connection, as in `transport/stream.py`: the caller dials it. If it breaks,
each side learns of that by itself, later, or (half-open) only after `ping_timeout_s` without answers to keep-alives.
Messages sent into a cut wait, as with TCP, and arrive if the cut heals before that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from taskgraph.errors import PeerGone, PeerLost, Refused, TransportError
from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Call, Pull, Reason, Refusal, Reply, Report, Reports
from taskgraph.protocol.records import name_of
from taskgraph.settings import Settings
from taskgraph.testing.simulate.drawing import Slips
from taskgraph.testing.simulate.loop import Process, later, own_time, plan
from taskgraph.testing.simulate.pace import Memory, SlowLink, Starving
from taskgraph.transport.api import OnLost, Peer, PendingReply, Serve
from taskgraph.transport.calls import OwnedTasks, answer, answer_all_now, answer_quietly, call_self, describe, unwrap

__all__ = ["SimNetwork", "SimTransport"]

_RETRANSMIT_S = 0.2
"""How long TCP takes to notice that a cut healed, at most."""

_KNOCKS = 4


@dataclass(eq=False, slots=True)
class _Connection:
    dialler: str
    acceptor: str
    open: dict[str, bool]  # node -> whether its end is open
    pending: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)  # calls of the dialler
    serving: dict[int, asyncio.Task[None] | PendingReply] = field(default_factory=dict)  # the same at the acceptor
    last_at: dict[str, float] = field(default_factory=dict)  # to -> when the last message arrives there
    half_open: bool = False
    probe: bool = False

    def other(self, node: str) -> str:
        return self.acceptor if node == self.dialler else self.dialler


class SimNetwork:
    """Connects the transports of one simulation.

    Args:
        in_order: share of messages that keep their order on a connection; the others may overtake.
        on_message: (from, to, message): called when a call or a reply arrives.
        on_call: (from, to, message): called when a call is about to leave.
        slips: how long probes take, and which reports are lost.
        starving: actors that come last for a while.
        memory: nodes without memory for some messages.
        links: the slow link.
    """

    def __init__(
        self,
        rng: random.Random,
        settings: Settings,
        *,
        delay_s: float,
        in_order: float,
        on_message: Callable[[str, str, object], None],
        on_call: Callable[[str, str, object], None],
        slips: Slips | None = None,
        starving: Starving | None = None,
        memory: Memory | None = None,
        links: SlowLink | None = None,
    ) -> None:
        self.rng = rng
        self.settings = settings
        self.delay_s = delay_s
        self._in_order = in_order
        self.on_message = on_message
        self.on_call = on_call
        self._slips = slips
        self._starving = starving
        self._memory = memory
        self._links = links
        self.transports: dict[str, SimTransport] = {}
        self._vanished: set[str] = set()  # nodes whose host died: no port there refuses connections
        self._connections: dict[_Connection, None] = {}
        self._cut: dict[tuple[str, str], int] = {}  # (from, to) -> number of the cut
        self._cuts = 0
        self._stalled: dict[tuple[str, str], list[Callable[[], None]]] = {}

    # -- faults -----------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> int:
        """Cuts the link from `one` to `other`. Returns a number for `heal`."""
        self._cuts += 1
        self._cut[(one, other)] = self._cuts
        for connection in self._connections:
            if {one, other} == {connection.dialler, connection.acceptor}:
                self._keep_alive(connection, one, other, self._cuts)
        return self._cuts

    def heal(self, one: str, other: str, number: int | None = None) -> None:
        """Ends a cut. Messages sent meanwhile arrive if their connection still stands."""
        link = (one, other)
        if link not in self._cut or (number is not None and self._cut[link] != number):
            return
        del self._cut[link]
        for again in self._stalled.pop(link, []):
            self.later(self.rng.uniform(0.0, _RETRANSMIT_S), again)

    def heal_all(self) -> None:
        for one, other in list(self._cut):
            self.heal(one, other)

    def reset(self, one: str, other: str) -> None:
        """Resets the connections between two nodes; each end learns of it by itself."""
        for connection in [c for c in self._connections if {c.dialler, c.acceptor} == {one, other}]:
            self._reset(connection, f"the connection between {one} and {other} was reset")

    def half_open(self, one: str, other: str) -> None:
        """A router forgets the connections between two nodes: no bytes arrive, and no error either."""
        for connection in self._connections:
            if {connection.dialler, connection.acceptor} == {one, other} and not connection.half_open:
                connection.half_open = True
                for node in (one, other):
                    self._at(connection, node, self.settings.ping_timeout_s, "no keep-alive came back")

    def crash(self, node: str, *, host: bool) -> None:
        """Lets a process die. If its host dies too, no port refuses and no connection is reset: there is silence."""
        transport = self.transports.pop(node, None)
        if transport is None:
            return
        transport.vanish(f"node {node} crashed")
        if host:
            self._vanished.add(node)
        for connection in [c for c in self._connections if node in (c.dialler, c.acceptor)]:
            self._end(connection, node, "this process is dead", clean=True)
            if host:
                self._at(connection, connection.other(node), self.settings.ping_timeout_s, "no keep-alive came back")
            else:
                self.tell_end(connection, connection.other(node), f"node {node} crashed")

    # -- links ------------------------------------------------------------------------------------

    def delay(self, one: str, other: str) -> float:
        slow = 30.0 if self.rng.random() < 0.01 else 1.0
        usual_s = self.delay_s * slow * self.rng.uniform(0.2, 1.5)
        return usual_s if self._links is None else self._links.delay_s(one, other, usual_s, self.settings.connect_s)

    async def hold_up_probe(self) -> None:
        """Takes the time that a probe takes beside its messages."""
        if self._slips is not None and (slow_s := self._slips.probe_s(self.settings.connect_s)):
            await asyncio.sleep(slow_s)

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Calls the function later, outside of all processes."""
        later(delay_s, function)

    def is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self._cut

    def dead_end(self, node: str) -> bool:
        """True if a connection attempt gets no answer at all."""
        return node in self._vanished

    def _late_s(self, sender: str, to: str, kind: str) -> float:
        """The delay of a message by actors that come last."""
        if self._starving is None:
            return 0.0
        return self._starving.late_s(
            f"what {sender} sends", f"what {to} is sent", f"what {sender} sends {to}", kind, f"{kind} to {to}"
        )

    def loses(self, message: object) -> bool:
        """True if a report is lost: these messages get no acknowledgement."""
        return isinstance(message, Report | Reports) and self._slips is not None and self._slips.report()

    def arrived(self, to: str, reply: Reply) -> Reply:
        """The reply as `to` receives it: a refusal if `to` has no memory for it."""
        if self._memory is None or not self._memory.lacks(to, reply):
            return reply
        return Refusal(Reason.NO_MEMORY, f"{name_of(to)} has no memory for a reply")

    def transmit(self, connection: _Connection, sender: str, deliver: Callable[[], None], kind: str = "") -> None:
        """Runs `deliver` in the other end's process, if both ends are still open then."""
        to = connection.other(sender)
        if connection.half_open or not connection.open[sender]:
            return
        if self.is_cut(sender, to):
            self._stalled.setdefault((sender, to), []).append(lambda: self.transmit(connection, sender, deliver, kind))
            return
        transport = self.transports.get(to)
        if transport is None:
            return
        at = own_time() + self.delay(sender, to) + self._late_s(sender, to, kind or "hello")
        if self.rng.random() < self._in_order:
            at = max(at, connection.last_at.get(to, 0.0))
        connection.last_at[to] = max(at, connection.last_at.get(to, 0.0))

        def arrive() -> None:
            if connection.open[to] and not connection.half_open:
                deliver()

        plan(at, arrive, context=transport.process.context)

    def connect(self, dialler: str, acceptor: str, *, probe: bool) -> _Connection:
        connection = _Connection(dialler, acceptor, {dialler: True, acceptor: True}, probe=probe)
        self._connections[connection] = None
        return connection

    def _keep_alive(self, connection: _Connection, one: str, other: str, number: int) -> None:
        """Ends the connection at both ends if the cut lasts."""

        def look() -> None:
            if self._cut.get((one, other)) == number:
                for node in (one, other):
                    self._at(connection, node, 0.0, "no keep-alive came back")

        self.later(self.settings.ping_timeout_s, look)

    def _reset(self, connection: _Connection, why: str) -> None:
        for node in (connection.dialler, connection.acceptor):
            self.tell_end(connection, node, why)

    def tell_end(self, connection: _Connection, node: str, why: str, *, clean: bool = False) -> None:
        """Sends a FIN or RST to that end."""
        other = connection.other(node)
        if connection.half_open:
            return
        if self.is_cut(other, node):
            again = self._stalled.setdefault((other, node), [])
            again.append(lambda: self.tell_end(connection, node, why, clean=clean))
            return
        self._at(connection, node, self.delay(other, node), why, clean=clean)

    def _at(self, connection: _Connection, node: str, delay_s: float, why: str, *, clean: bool = False) -> None:
        transport = self.transports.get(node)
        if transport is not None:
            if self._starving is not None:
                delay_s += self._starving.late_s("ends of connections", f"ends of connections at {node}")
            asyncio.get_running_loop().call_later(
                delay_s, lambda: self._end(connection, node, why, clean=clean), context=transport.process.context
            )

    def _end(self, connection: _Connection, node: str, why: str, *, clean: bool) -> None:
        """Ends one end of a connection."""
        if not connection.open[node]:
            return
        connection.open[node] = False
        if not any(connection.open.values()):
            self._connections.pop(connection, None)
        transport = self.transports.get(node)
        if transport is not None:
            transport.ended(connection, why, clean=clean)

    def close_end(self, connection: _Connection, node: str, why: str) -> None:
        """Closes an end, which tells the other end."""
        if connection.open[node]:
            self.tell_end(connection, connection.other(node), why, clean=True)
            self._end(connection, node, why, clean=True)


class SimTransport:
    """See `taskgraph.transport.api.Transport`."""

    def __init__(self, network: SimNetwork, process: Process) -> None:
        self.network = network
        self.process = process
        self.node = ""
        self._tasks = OwnedTasks()
        self._serve: Serve | None = None
        self._on_lost: OnLost = lambda node: None
        self._down = "not started"
        self._dialled: dict[str, _Connection] = {}
        self._dials: dict[str, asyncio.Task[_Connection]] = {}
        self._open: dict[str, dict[_Connection, None]] = {}
        self._calls = 0

    @property
    def endpoints(self) -> tuple[str, ...]:
        return ("memory:",) if self.node else ()

    def allocate(self, nbytes: int) -> Block | None:
        return None

    async def start(self, node: str, serve: Serve, on_lost: OnLost) -> None:
        if node in self.network.transports:
            raise TransportError(f"there is a node {node} already")
        self.node, self._serve, self._on_lost = node, serve, on_lost
        self.network.transports[node] = self
        self._down = ""

    async def close(self) -> None:
        if not self._down:
            for connection in [c for connections in self._open.values() for c in connections]:
                self.network.close_end(connection, self.node, f"node {self.node} said goodbye")
            self.network.transports.pop(self.node, None)
            self.vanish("this node's transport is closed")
        await self._tasks.close()

    def vanish(self, why: str) -> None:
        """Stops sending and receiving."""
        self._down = why
        for connection in [c for connections in self._open.values() for c in connections]:
            self._fail(connection, why)

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, peer: Peer, message: Call, *, timeout_s: float | None = None) -> Reply:
        if self._down:
            raise PeerLost(self._down)
        try:
            async with asyncio.timeout(timeout_s):
                if peer.node == self.node:
                    return await self._call_self(message)
                return unwrap(await self._exchange(await self._connection(peer.node), message))
        except TimeoutError:
            raise PeerLost(f"no answer from node {peer.node} within {timeout_s} s to {describe(message)}") from None

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        if self._down or (peer.node != self.node and peer.node not in self._dialled):
            return None
        return self._tasks.spawn(self._begun(peer, message, quiet), name=f"call {peer.node} from {self.node}")

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        connection = self._dialled.get(peer.node)
        if self._down or connection is None or not connection.open[self.node]:
            return None
        first, self._calls = self._calls + 1, self._calls + message.count
        target = self.network.transports.get(connection.acceptor)
        begun: list[asyncio.Future[Reply]] = []
        for number in range(first, first + message.count):
            reply = connection.pending[number] = _OneOfSeveral(loop=asyncio.get_running_loop())
            reply.add_done_callback(partial(self._one_is_over, connection, number, target))
            begun.append(reply)
        if target is not None:
            arrives = partial(target._accept_all, connection, first, message)
            self.network.transmit(connection, self.node, arrives, type(message).__name__)
        return begun

    def _one_is_over(
        self, connection: _Connection, number: int, target: SimTransport | None, reply: asyncio.Future[Reply]
    ) -> None:
        connection.pending.pop(number, None)
        if reply.cancelled() and target is not None:
            self.network.transmit(connection, self.node, partial(target._cancel, connection, number))

    async def _begun(self, peer: Peer, message: Call, quiet: bool) -> Reply:
        if peer.node == self.node or not quiet:
            return await self.call(peer, message)
        if self._down:
            raise PeerLost(self._down)
        return unwrap(await self._exchange(await self._connection(peer.node), message, quiet=True))

    async def _call_self(self, message: Call) -> Reply:
        assert self._serve is not None
        self.network.on_message(self.node, self.node, message)
        return await call_self(self._tasks, self._serve, self.node, message)

    async def _exchange(self, connection: _Connection, message: Call, *, quiet: bool = False) -> Reply:
        self._calls += 1
        number = self._calls
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if not connection.open[self.node]:
            raise PeerLost("the connection broke")
        connection.pending[number] = reply
        self.network.on_call(self.node, connection.acceptor, message)
        target = self.network.transports.get(connection.acceptor)
        if target is not None and not (quiet and self.network.loses(message)):
            arrives = partial(target._accept, connection, number, message, quiet)
            self.network.transmit(connection, self.node, arrives, type(message).__name__)
        try:
            return await reply
        finally:
            connection.pending.pop(number, None)
            if reply.cancelled() and target is not None and not quiet:
                self.network.transmit(connection, self.node, lambda: target._cancel(connection, number))

    async def _connection(self, node: str) -> _Connection:
        """The connection that carries calls to `node`; callers that come while it is dialled share the dial."""
        known = self._dialled.get(node)
        if known is not None and known.open[self.node]:
            return known
        dial = self._dials.get(node)
        if dial is None:
            dial = self._dials[node] = self._tasks.spawn(self._dial(node), name=f"dial {node}")
            dial.add_done_callback(lambda _: self._dials.pop(node))
        await asyncio.wait((dial,))
        if dial.cancelled():
            raise PeerLost(f"dialling node {node} was given up")
        error = dial.exception()
        if isinstance(error, (PeerGone, PeerLost)):
            raise type(error)(str(error)) from error
        return dial.result()

    async def _dial(self, node: str) -> _Connection:
        connection = await self._hello(node, probe=False)
        self._dialled[node] = connection
        self._open.setdefault(node, {})[connection] = None
        return connection

    async def _hello(self, node: str, *, probe: bool) -> _Connection:
        """A connection whose two ends know each other."""
        network = self.network
        try:
            async with asyncio.timeout(network.settings.connect_s):
                await self._knock(node)
                await asyncio.sleep(network.delay(self.node, node))
                target = network.transports.get(node)
                if target is None:
                    if network.dead_end(node):
                        await asyncio.Event().wait()
                    raise PeerGone(f"node {node}: no process listens")
                connection = network.connect(self.node, node, probe=probe)
                greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                network.transmit(connection, self.node, lambda: target._greet(connection, greeted))
                connection.pending[0] = greeted  # type: ignore[assignment]
                try:
                    await greeted
                except BaseException:
                    network.close_end(connection, self.node, "the hello was given up")
                    raise
                finally:
                    connection.pending.pop(0, None)
                return connection
        except TimeoutError:
            raise PeerLost(f"node {node}: no connection within {network.settings.connect_s:g} s") from None

    async def _knock(self, node: str) -> None:
        """Waits, within the dialler's limit, until the link carries packets again: TCP retries."""
        network = self.network
        for _ in range(_KNOCKS):
            cut = network.is_cut(self.node, node) or network.is_cut(node, self.node)
            if not cut and not network.dead_end(node):
                return
            await asyncio.sleep(network.settings.connect_s / _KNOCKS)
        raise TimeoutError

    def _greet(self, connection: _Connection, greeted: asyncio.Future[None]) -> None:
        """Handles a hello, at the acceptor."""
        if not connection.probe:
            self._open.setdefault(connection.dialler, {})[connection] = None

        def done() -> None:
            if not greeted.done():
                greeted.set_result(None)

        self.network.transmit(connection, self.node, done)

    async def probe(self, peer: Peer, *, timeout_s: float) -> None:
        if self._down:
            raise PeerLost(self._down)
        if peer.node == self.node:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.network.hold_up_probe()
                connection = await self._hello(peer.node, probe=True)
        except TimeoutError:
            raise PeerLost(f"node {peer.node} did not answer a hello within {timeout_s} s") from None
        self.network.close_end(connection, self.node, "a probe")

    # -- serving ----------------------------------------------------------------------------------

    def _accept(self, connection: _Connection, number: int, message: Call, quiet: bool) -> None:
        """Handles a call that arrived in this process."""
        if self._down:
            return
        self.network.on_message(connection.dialler, self.node, message)
        if self._down or not connection.open[self.node]:
            return  # killed at this very moment
        self._begin(connection, number, self._answer(connection, number, message, quiet))

    def _accept_all(self, connection: _Connection, first: int, pull: Pull) -> None:
        """Handles a pull of several epochs that arrived."""
        if self._down:
            return
        self.network.on_message(connection.dialler, self.node, pull)
        if self._down or not connection.open[self.node]:
            return
        assert self._serve is not None
        for nth, reply in enumerate(answer_all_now(self._serve, connection.dialler, pull)):
            number = first + nth
            if isinstance(reply, PendingReply):
                connection.serving[number] = reply
                reply.listen(partial(self._came, connection), number)
            elif reply is None:
                self._begin(connection, number, self._answer(connection, number, pull.each(nth), quiet=False))
            else:
                self._reply(connection, number, reply)

    def _came(self, connection: _Connection, number: int, reply: Reply) -> None:
        if connection.serving.pop(number, None) is not None:
            self._reply(connection, number, reply)

    def _begin(self, connection: _Connection, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.spawn(work, name=f"serve {connection.dialler} at {self.node}")
        connection.serving[number] = task
        task.add_done_callback(lambda _: connection.serving.pop(number, None))

    def _cancel(self, connection: _Connection, number: int) -> None:
        task = connection.serving.get(number)
        if task is not None:
            task.cancel()

    async def _answer(self, connection: _Connection, number: int, message: Call, quiet: bool) -> None:
        assert self._serve is not None
        answered = await (answer_quietly if quiet else answer)(self._serve, connection.dialler, message)
        if answered is not None:
            self._reply(connection, number, answered)

    def _reply(self, connection: _Connection, number: int, answered: Reply) -> None:
        def deliver() -> None:
            taken = self.network.arrived(connection.dialler, answered)
            self.network.on_message(self.node, connection.dialler, taken)
            reply = connection.pending.get(number)
            if reply is not None and not reply.done():
                reply.set_result(taken)

        self.network.transmit(connection, self.node, deliver, type(answered).__name__)

    # -- endings ----------------------------------------------------------------------------------

    def ended(self, connection: _Connection, why: str, *, clean: bool) -> None:
        """The connection is over at this end."""
        node = connection.other(self.node)
        if self._dialled.get(node) is connection:
            del self._dialled[node]
        self._fail(connection, why)
        known = self._open.get(node)
        if known is None or connection not in known:
            return
        del known[connection]
        if not known:
            del self._open[node]
            if not clean and not self._down:
                self._on_lost(node)

    def _fail(self, connection: _Connection, why: str) -> None:
        mine: dict[int, Any] = connection.pending if connection.dialler == self.node else {}
        for reply in list(mine.values()):
            if not reply.done():
                reply.set_exception(PeerLost(why))
        if connection.acceptor == self.node:
            for task in list(connection.serving.values()):
                task.cancel()


class _OneOfSeveral(asyncio.Future[Reply]):
    """One call of several: no asyncio task of its caller waits for it alone."""

    def set_result(self, reply: Reply, /) -> None:
        if isinstance(reply, Refusal):
            self.set_exception(Refused(reply.reason, reply.text))
        else:
            super().set_result(reply)

    def set_exception(self, error: type | BaseException, /) -> None:
        super().set_exception(error)
        self.exception()  # marks it as retrieved, even if no code reads it
