"""Simulates a network: implements `transport.api.Transport` on connections that may be slow, cut, reset or half-open.

As in `transport/stream.py`, each ordered pair of nodes has one connection, which the caller dials. If a connection
breaks, each end learns of it separately, or (half-open) only after `ping_timeout_s` without answers to keep-alives.
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
from taskgraph.testing.simulate.drawing import CallFaults
from taskgraph.testing.simulate.loop import Process, call_at_own_time, later, own_time
from taskgraph.testing.simulate.pace import MemoryShortage, SlowActors, SlowLink
from taskgraph.transport.api import OnLost, Peer, PendingReply, Serve
from taskgraph.transport.calls import OwnedTasks, answer, answer_all_now, answer_quietly, call_self, describe, unwrap

__all__ = ["SimNetwork", "SimTransport"]

_RETRANSMIT_S = 0.2
"""The longest time until TCP sends again after a cut healed."""

_CONNECT_CHECKS = 4


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection between two nodes, with its calls."""

    dialler: str
    acceptor: str
    open: dict[str, bool]  # node -> whether its end is open
    pending: dict[int, asyncio.Future[Reply]] = field(
        default_factory=dict
    )  # the dialler's calls that have no reply yet
    serving: dict[int, asyncio.Task[None] | PendingReply] = field(
        default_factory=dict
    )  # the same calls at the acceptor
    last_at: dict[str, float] = field(default_factory=dict)  # receiver -> when the last message arrives there
    half_open: bool = False
    probe: bool = False

    def other_end(self, node: str) -> str:
        """Returns the node at the end that is not that of `node`."""
        return self.acceptor if node == self.dialler else self.dialler


class SimNetwork:
    """Connects the transports of one simulation.

    Args:
        in_order: share of messages that keep their order on a connection; the others may overtake.
        on_message: called with (sender, receiver, message) when a call or a reply arrives.
        on_call: called with (sender, receiver, message) before a call is sent.
        call_faults: draws slow probes and lost reports.
        slow_actors: adds delays to messages.
        memory: draws which nodes have no memory for a message.
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
        call_faults: CallFaults | None = None,
        slow_actors: SlowActors | None = None,
        memory: MemoryShortage | None = None,
        links: SlowLink | None = None,
    ) -> None:
        self.rng = rng
        self.settings = settings
        self.delay_s = delay_s
        self._in_order = in_order
        self.on_message = on_message
        self.on_call = on_call
        self._call_faults = call_faults
        self._slow_actors = slow_actors
        self._memory = memory
        self._links = links
        self.transports: dict[str, SimTransport] = {}
        self._dead_hosts: set[str] = set()  # nodes whose hosts died: they refuse no connection
        self._connections: dict[_Connection, None] = {}
        self._cut: dict[tuple[str, str], int] = {}  # (from, to) -> number of the cut
        self._cuts = 0
        self._waiting_messages: dict[tuple[str, str], list[Callable[[], None]]] = {}

    # -- faults -----------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> int:
        """Cuts the link from `one` to `other`. Returns a number for `heal`."""
        self._cuts += 1
        self._cut[(one, other)] = self._cuts
        for connection in self._connections:
            if {one, other} == {connection.dialler, connection.acceptor}:
                self._end_if_still_cut(connection, one, other, self._cuts)
        return self._cuts

    def heal(self, one: str, other: str, number: int | None = None) -> None:
        """Ends the cut of this number; None: any. Messages sent meanwhile arrive if their connection is still open."""
        link = (one, other)
        if link not in self._cut or (number is not None and self._cut[link] != number):
            return
        del self._cut[link]
        for again in self._waiting_messages.pop(link, []):
            self.later(self.rng.uniform(0.0, _RETRANSMIT_S), again)

    def heal_all(self) -> None:
        for one, other in list(self._cut):
            self.heal(one, other)

    def reset(self, one: str, other: str) -> None:
        """Resets the connections between two nodes. Each end learns of the reset separately."""
        for connection in [c for c in self._connections if {c.dialler, c.acceptor} == {one, other}]:
            for node in (one, other):
                self.send_end(connection, node, f"the connection between {one} and {other} was reset")

    def half_open(self, one: str, other: str) -> None:
        """Makes the connections between two nodes half-open, as if a router forgot them: nothing arrives."""
        for connection in self._connections:
            if {connection.dialler, connection.acceptor} == {one, other} and not connection.half_open:
                connection.half_open = True
                for node in (one, other):
                    self._end_later(connection, node, self.settings.ping_timeout_s, "no keep-alive came back")

    def crash(self, node: str, *, host: bool) -> None:
        """Ends a node's process. If its host dies, too, peers get no reset, and new connections get no answer."""
        transport = self.transports.pop(node, None)
        if transport is None:
            return
        transport.stop(f"node {node} crashed")
        if host:
            self._dead_hosts.add(node)
        for connection in [c for c in self._connections if node in (c.dialler, c.acceptor)]:
            self._end(connection, node, "this process is dead", clean=True)
            if host:
                self._end_later(
                    connection, connection.other_end(node), self.settings.ping_timeout_s, "no keep-alive came back"
                )
            else:
                self.send_end(connection, connection.other_end(node), f"node {node} crashed")

    # -- links ------------------------------------------------------------------------------------

    def delay(self, one: str, other: str) -> float:
        """Draws the seconds that a message takes between two nodes, without slow actors."""
        slow = 30.0 if self.rng.random() < 0.01 else 1.0
        usual_s = self.delay_s * slow * self.rng.uniform(0.2, 1.5)
        return usual_s if self._links is None else self._links.delay_s(one, other, usual_s, self.settings.connect_s)

    async def delay_probe(self) -> None:
        """Waits for the extra duration of a slow probe."""
        if self._call_faults is not None and (slow_s := self._call_faults.probe_s(self.settings.connect_s)):
            await asyncio.sleep(slow_s)

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Calls the function after a delay, outside of all processes."""
        later(delay_s, function)

    def is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self._cut

    def has_dead_host(self, node: str) -> bool:
        """True if a node's host died, so that connection attempts get no answer."""
        return node in self._dead_hosts

    def _late_s(self, sender: str, to: str, kind: str) -> float:
        """Draws the delay that slow actors add to a message."""
        if self._slow_actors is None:
            return 0.0
        return self._slow_actors.late_s(
            f"what {sender} sends", f"what {to} is sent", f"what {sender} sends {to}", kind, f"{kind} to {to}"
        )

    def draw_loss(self, message: object) -> bool:
        """Draws whether a message is lost. Only reports are, since they have no acknowledgement."""
        return (
            isinstance(message, Report | Reports)
            and self._call_faults is not None
            and self._call_faults.draw_report_loss()
        )

    def reply_or_refusal(self, to: str, reply: Reply) -> Reply:
        """Returns the reply; if the receiver has no memory for it, a refusal in its place."""
        if self._memory is None or not self._memory.draw_shortage(to, reply):
            return reply
        return Refusal(Reason.NO_MEMORY, f"{name_of(to)} has no memory for a reply")

    def transmit(self, connection: _Connection, sender: str, deliver: Callable[[], None], kind: str = "") -> None:
        """Sends a message: runs `deliver` in the receiver's process after the delay, or later if the link is cut.

        A message on a closed or half-open connection does not arrive.
        """
        to = connection.other_end(sender)
        if connection.half_open or not connection.open[sender]:
            return
        if self.is_cut(sender, to):
            self._waiting_messages.setdefault((sender, to), []).append(
                lambda: self.transmit(connection, sender, deliver, kind)
            )
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

        call_at_own_time(at, arrive, context=transport.process.context)

    def add_connection(self, dialler: str, acceptor: str, *, probe: bool) -> _Connection:
        connection = _Connection(dialler, acceptor, {dialler: True, acceptor: True}, probe=probe)
        self._connections[connection] = None
        return connection

    def _end_if_still_cut(self, connection: _Connection, one: str, other: str, number: int) -> None:
        """Ends the connection at both ends if the cut of this number outlasts the timeout of keep-alives."""

        def check() -> None:
            if self._cut.get((one, other)) == number:
                for node in (one, other):
                    self._end_later(connection, node, 0.0, "no keep-alive came back")

        self.later(self.settings.ping_timeout_s, check)

    def send_end(self, connection: _Connection, node: str, why: str, *, clean: bool = False) -> None:
        """Sends a FIN (`clean`) or RST to the end of a connection at `node`."""
        other = connection.other_end(node)
        if connection.half_open:
            return
        if self.is_cut(other, node):
            again = self._waiting_messages.setdefault((other, node), [])
            again.append(lambda: self.send_end(connection, node, why, clean=clean))
            return
        self._end_later(connection, node, self.delay(other, node), why, clean=clean)

    def _end_later(self, connection: _Connection, node: str, delay_s: float, why: str, *, clean: bool = False) -> None:
        """Closes one end of a connection after a delay, in the process there."""
        transport = self.transports.get(node)
        if transport is not None:
            if self._slow_actors is not None:
                delay_s += self._slow_actors.late_s("ends of connections", f"ends of connections at {node}")
            asyncio.get_running_loop().call_later(
                delay_s, lambda: self._end(connection, node, why, clean=clean), context=transport.process.context
            )

    def _end(self, connection: _Connection, node: str, why: str, *, clean: bool) -> None:
        """Closes one end of a connection, and informs the transport there."""
        if not connection.open[node]:
            return
        connection.open[node] = False
        if not any(connection.open.values()):
            self._connections.pop(connection, None)
        transport = self.transports.get(node)
        if transport is not None:
            transport.on_connection_end(connection, why, clean=clean)

    def close_end(self, connection: _Connection, node: str, why: str) -> None:
        """Closes one end of a connection, and sends the other end a FIN."""
        if connection.open[node]:
            self.send_end(connection, connection.other_end(node), why, clean=True)
            self._end(connection, node, why, clean=True)


class SimTransport:
    """One node's transport on the simulated network: implements `taskgraph.transport.api.Transport`."""

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
            self.stop("this node's transport is closed")
        await self._tasks.close()

    def stop(self, why: str) -> None:
        """Stops sending and receiving, and fails calls, with this reason. Other nodes are not informed."""
        self._down = why
        for connection in [c for connections in self._open.values() for c in connections]:
            self._fail_calls(connection, why)

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
        return self._tasks.spawn(self._call_in_task(peer, message, quiet), name=f"call {peer.node} from {self.node}")

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        connection = self._dialled.get(peer.node)
        if self._down or connection is None or not connection.open[self.node]:
            return None
        first, self._calls = self._calls + 1, self._calls + message.count
        target = self.network.transports.get(connection.acceptor)
        begun: list[asyncio.Future[Reply]] = []
        for number in range(first, first + message.count):
            reply = connection.pending[number] = _BatchedReply(loop=asyncio.get_running_loop())
            reply.add_done_callback(partial(self._on_batched_reply, connection, number, target))
            begun.append(reply)
        if target is not None:
            arrives = partial(target._accept_all, connection, first, message)
            self.network.transmit(connection, self.node, arrives, type(message).__name__)
        return begun

    def _on_batched_reply(
        self, connection: _Connection, number: int, target: SimTransport | None, reply: asyncio.Future[Reply]
    ) -> None:
        """Called when a reply to `calls_now` is done. If its future was cancelled, cancels the call at the peer."""
        connection.pending.pop(number, None)
        if reply.cancelled() and target is not None:
            self.network.transmit(connection, self.node, partial(target._cancel, connection, number))

    async def _call_in_task(self, peer: Peer, message: Call, quiet: bool) -> Reply:
        """The asyncio task of `call_now`: sends the call, and waits for its reply."""
        if peer.node == self.node or not quiet:
            return await self.call(peer, message)
        if self._down:
            raise PeerLost(self._down)
        return unwrap(await self._exchange(await self._connection(peer.node), message, quiet=True))

    async def _call_self(self, message: Call) -> Reply:
        """Serves a call of this node to itself."""
        assert self._serve is not None
        self.network.on_message(self.node, self.node, message)
        return await call_self(self._tasks, self._serve, self.node, message)

    async def _exchange(self, connection: _Connection, message: Call, *, quiet: bool = False) -> Reply:
        """Sends a call, and waits for its reply. A cancelled call is cancelled at the peer, too, if not `quiet`."""
        self._calls += 1
        number = self._calls
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if not connection.open[self.node]:
            raise PeerLost("the connection broke")
        connection.pending[number] = reply
        self.network.on_call(self.node, connection.acceptor, message)
        target = self.network.transports.get(connection.acceptor)
        if target is not None and not (quiet and self.network.draw_loss(message)):
            arrives = partial(target._accept, connection, number, message, quiet)
            self.network.transmit(connection, self.node, arrives, type(message).__name__)
        try:
            return await reply
        finally:
            connection.pending.pop(number, None)
            if reply.cancelled() and target is not None and not quiet:
                self.network.transmit(connection, self.node, lambda: target._cancel(connection, number))

    async def _connection(self, node: str) -> _Connection:
        """Returns the connection for calls to `node`. Concurrent callers share one dial."""
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
        connection = await self._open_connection(node, probe=False)
        self._dialled[node] = connection
        self._open.setdefault(node, {})[connection] = None
        return connection

    async def _open_connection(self, node: str, *, probe: bool) -> _Connection:
        """Opens a connection to a node, and waits until the node has answered a hello on it.

        Raises:
            PeerGone: no process listens there.
            PeerLost: the node did not answer within `connect_s`.
        """
        network = self.network
        try:
            async with asyncio.timeout(network.settings.connect_s):
                await self._wait_for_link(node)
                await asyncio.sleep(network.delay(self.node, node))
                target = network.transports.get(node)
                if target is None:
                    if network.has_dead_host(node):
                        await asyncio.Event().wait()
                    raise PeerGone(f"node {node}: no process listens")
                connection = network.add_connection(self.node, node, probe=probe)
                greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                network.transmit(connection, self.node, lambda: target._on_hello(connection, greeted))
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

    async def _wait_for_link(self, node: str) -> None:
        """Waits until the link is not cut, as TCP's retries do. Raises TimeoutError after `connect_s`."""
        network = self.network
        for _ in range(_CONNECT_CHECKS):
            cut = network.is_cut(self.node, node) or network.is_cut(node, self.node)
            if not cut and not network.has_dead_host(node):
                return
            await asyncio.sleep(network.settings.connect_s / _CONNECT_CHECKS)
        raise TimeoutError

    def _on_hello(self, connection: _Connection, greeted: asyncio.Future[None]) -> None:
        """Handles a hello at the acceptor: answers it, which completes `greeted` at the dialler."""
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
                await self.network.delay_probe()
                connection = await self._open_connection(peer.node, probe=True)
        except TimeoutError:
            raise PeerLost(f"node {peer.node} did not answer a hello within {timeout_s} s") from None
        self.network.close_end(connection, self.node, "a probe")

    # -- serving ----------------------------------------------------------------------------------

    def _accept(self, connection: _Connection, number: int, message: Call, quiet: bool) -> None:
        """Handles an arriving call."""
        if self._down:
            return
        self.network.on_message(connection.dialler, self.node, message)
        if self._down or not connection.open[self.node]:
            return  # killed at this very moment
        self._serve_in_task(connection, number, self._answer(connection, number, message, quiet))

    def _accept_all(self, connection: _Connection, first: int, pull: Pull) -> None:
        """Handles an arriving pull of several epochs."""
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
                reply.listen(partial(self._on_pending_reply, connection), number)
            elif reply is None:
                self._serve_in_task(connection, number, self._answer(connection, number, pull.each(nth), quiet=False))
            else:
                self._reply(connection, number, reply)

    def _on_pending_reply(self, connection: _Connection, number: int, reply: Reply) -> None:
        if connection.serving.pop(number, None) is not None:
            self._reply(connection, number, reply)

    def _serve_in_task(self, connection: _Connection, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work for a call in a task, which `_cancel` may cancel."""
        task = self._tasks.spawn(work, name=f"serve {connection.dialler} at {self.node}")
        connection.serving[number] = task
        task.add_done_callback(lambda _: connection.serving.pop(number, None))

    def _cancel(self, connection: _Connection, number: int) -> None:
        """Cancels a call that this node serves: its caller waits no longer."""
        task = connection.serving.get(number)
        if task is not None:
            task.cancel()

    async def _answer(self, connection: _Connection, number: int, message: Call, quiet: bool) -> None:
        """Serves a call, and sends its reply; none if a quiet call was accepted at once."""
        assert self._serve is not None
        answered = await (answer_quietly if quiet else answer)(self._serve, connection.dialler, message)
        if answered is not None:
            self._reply(connection, number, answered)

    def _reply(self, connection: _Connection, number: int, answered: Reply) -> None:
        """Sends the reply to a call of this number."""

        def deliver() -> None:
            taken = self.network.reply_or_refusal(connection.dialler, answered)
            self.network.on_message(self.node, connection.dialler, taken)
            reply = connection.pending.get(number)
            if reply is not None and not reply.done():
                reply.set_result(taken)

        self.network.transmit(connection, self.node, deliver, type(answered).__name__)

    # -- endings ----------------------------------------------------------------------------------

    def on_connection_end(self, connection: _Connection, why: str, *, clean: bool) -> None:
        """Handles the end of a connection at this end. If it was the last one to the peer, and not closed cleanly,
        informs the node that the peer is lost."""
        node = connection.other_end(self.node)
        if self._dialled.get(node) is connection:
            del self._dialled[node]
        self._fail_calls(connection, why)
        known = self._open.get(node)
        if known is None or connection not in known:
            return
        del known[connection]
        if not known:
            del self._open[node]
            if not clean and not self._down:
                self._on_lost(node)

    def _fail_calls(self, connection: _Connection, why: str) -> None:
        """Fails this node's calls on a connection with PeerLost, and cancels the calls that it serves."""
        mine: dict[int, Any] = connection.pending if connection.dialler == self.node else {}
        for reply in list(mine.values()):
            if not reply.done():
                reply.set_exception(PeerLost(why))
        if connection.acceptor == self.node:
            for task in list(connection.serving.values()):
                task.cancel()


class _BatchedReply(asyncio.Future[Reply]):
    """The reply to one call of `calls_now`. Turns a refusal into the error `Refused`: no asyncio task does it there."""

    def set_result(self, reply: Reply, /) -> None:
        if isinstance(reply, Refusal):
            self.set_exception(Refused(reply.reason, reply.text))
        else:
            super().set_result(reply)

    def set_exception(self, error: type | BaseException, /) -> None:
        super().set_exception(error)
        self.exception()  # marks the exception as retrieved
