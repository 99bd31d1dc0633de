"""One connection, from hello to goodbye.

A session carries calls in one direction and their replies in the other: whoever dialled it calls, whoever accepted it
serves. A node that wants to call back dials a session of its own. So call ids have one author, and no rule is
needed for who may speak first.

A session ends once, for one reason, which it keeps: `clean` says that a goodbye was said.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from taskgraph.errors import DecodeError, PeerLost, Refused
from taskgraph.protocol.messages import Call, Encoded, Reason, Refusal, Reply
from taskgraph.settings import Settings
from taskgraph.transport import wire
from taskgraph.transport._proto import frame_pb2
from taskgraph.transport.api import Serve
from taskgraph.transport.calls import OwnedTasks, answer, describe, unwrap
from taskgraph.transport.endpoints import tune_tcp
from taskgraph.transport.frames import (
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    FrameReader,
    Head,
    Incoming,
    Kind,
    Limits,
    OtherVersion,
)
from taskgraph.transport.hello import HELLO_LIMITS, Answering, Dialling, HelloRefused
from taskgraph.transport.outbox import Outbox

__all__ = ["AcceptedSession", "DialledSession", "Owner", "Session"]

log = logging.getLogger("taskgraph.transport")

#: Calls of one session that are being received or served at a time; more are refused as PAUSED.
MAX_CALLS = 1 << 17
#: High-water mark of the event loop's own buffer. Beyond the kernel's, so that a fast reader never finds us idle.
_WRITE_BUFFER_BYTES = 256 << 10


class Owner(Protocol):
    """What a session needs of the transport it belongs to."""

    tasks: OwnedTasks
    serve: Serve
    max_value_bytes: int

    def connected(self, session: Session) -> None:
        """The connection exists; nothing is proven."""

    def opened(self, session: Session) -> None:
        """The hello is done."""

    def ended(self, session: Session) -> None:
        """Called once after `connected`: no call will be made or served any more."""

    def disconnected(self, session: Session) -> None:
        """Called once after `ended`: the socket is closed."""

    async def verified(self, value: Encoded) -> bool:
        """Whether the digest fits."""


class Session(asyncio.BufferedProtocol):
    """What both directions share: hello, frames, the end.

    Attributes:
        peer: the node of the other side, once open.
        probe: only the hello was wanted.
        clean: a goodbye was said, by either side.
        why: what ended it, or "" while it lives.
        cut_off: it ended because the connection did, without a word from either side.
    """

    _opening_kind: ClassVar[Kind]

    def __init__(self, owner: Owner, hello: Dialling | Answering, *, hello_s: float) -> None:
        self._owner = owner
        self._hello = hello
        self._hello_s = hello_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = Outbox(self._write, self._loop.call_soon)
        self._reader = FrameReader(
            HELLO_LIMITS, on_open=self._on_open, on_complete=self._on_complete, on_control=self._on_control
        )
        self.where = ""
        self.clean = False
        self.why = ""
        self.cut_off = False

    @property
    def peer(self) -> str:
        return self._hello.peer

    @property
    def probe(self) -> bool:
        return self._hello.probe

    @property
    def open(self) -> bool:
        return self._hello.done and not self.why

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self.where = self.where or str(transport.get_extra_info("peername") or "a unix socket")
        self._timer = self._loop.call_later(self._hello_s, self._hello_late)
        self._owner.connected(self)
        if isinstance(self._hello, Dialling):
            self._send_hello(self._hello.open())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._reader.received(nbytes)
        except HelloRefused as refused:
            self._refused(refused)
        except OtherVersion as error:
            # A refusal is enough: its head tells our version.
            self._refused(HelloRefused(str(error), tell=not self._hello.done))
        except DecodeError as error:
            if self._hello.done:
                log.error("session with node %s: %s; closing it", self.peer, error)
            self.end(f"it sent what cannot be read: {error}")

    def eof_received(self) -> bool:
        self.cut_off = self.cut_off or not self.why
        self.end("its end closed the connection" + (" in the middle of a frame" if self._reader.mid_frame else ""))
        return False

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut_off = self.cut_off or not self.why
        self.end(f"the connection broke: {exc or 'closed'}")
        self._owner.disconnected(self)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    # Hello.

    def _hello_late(self) -> None:
        self.end(f"no hello within {self._hello_s:g} s")

    def _send_hello(self, frames: list[tuple[Kind, bytes]]) -> None:
        for kind, data in frames:
            self._outbox.send(kind, header=data)

    def _refused(self, refused: HelloRefused) -> None:
        if refused.tell:
            self._send_hello([(Kind.HELLO_REFUSE, frame_pb2.HelloRefuse(why=str(refused)).SerializeToString())])
        self.end(f"the hello failed: {refused}", flush=True)

    def _on_control(self, head: Head, header: bytes) -> None:
        if not self._hello.done:
            self._send_hello(self._hello.on_frame(head.kind, header))
            if self._hello.done:
                self._opened()
        elif head.kind is Kind.GOODBYE:
            self.clean = True
            self.end("it said goodbye")
        elif head.kind is Kind.CANCEL:
            self._on_cancel(head.call)
        else:
            raise DecodeError(f"a {head.kind.name} frame in an open session")

    def _opened(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._reader.limits = Limits(MAX_HEADER_BYTES, MAX_BUFFERS, self._owner.max_value_bytes)
        self._owner.opened(self)

    # Messages.

    def _on_open(self, head: Head, sizes: tuple[int, ...], header: bytes) -> Incoming | None:
        if not self._hello.done:
            raise DecodeError(f"a {head.kind.name} before the hello")
        if head.kind is not self._opening_kind:
            raise DecodeError(f"a {head.kind.name} in the wrong direction")
        parsed = wire.parse_header(header)
        if parsed.digest is None and (head.payload or sizes):
            raise DecodeError(f"a {parsed.cls.__name__} with a payload")
        if not self._admits(head, parsed):
            return None
        try:
            return Incoming(head, sizes, parsed)
        except MemoryError:
            self._no_memory(head)
            return None

    def _admits(self, head: Head, parsed: wire.ParsedHeader) -> bool:
        """Whether to receive this message (False: skip it). Raises DecodeError."""
        raise NotImplementedError

    def _no_memory(self, head: Head) -> None:
        raise NotImplementedError

    def _on_complete(self, incoming: Incoming) -> None:
        raise NotImplementedError

    def _on_cancel(self, call: int) -> None:
        raise DecodeError("a CANCEL in the wrong direction")

    async def _received(self, incoming: Incoming) -> Any:
        """The message that came. Ends the session and raises PeerLost where it is damaged."""
        parsed = incoming.parsed
        try:
            if parsed.digest is None:
                return parsed.message(None)
            value = Encoded(incoming.meta(), incoming.buffers(), parsed.digest)
            if not await self._owner.verified(value):
                raise DecodeError(
                    f"a corrupted value: the {value.size_bytes} bytes of a {parsed.cls.__name__} "
                    "do not have the digest they were sent with"
                )
            return parsed.message(value)
        except DecodeError as error:
            if not self.why:
                log.error("session with node %s: %s; closing it", self.peer, error)
                self.end(f"it sent {error}")
            raise PeerLost(f"node {self.peer} sent {error}") from error

    # The end.

    def end(self, why: str, *, flush: bool = False) -> None:
        """Ends the session. What the outbox holds is dropped; the socket's buffer is still sent if `flush`."""
        if self.why:
            return
        self.why = why
        if self._timer is not None:
            self._timer.cancel()
        self._reader.stop()
        self._outbox.close()
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
        self._release()
        if self._transport is not None:
            self._owner.ended(self)

    def goodbye(self) -> None:
        """Ends the session on purpose: the peer sees no loss."""
        if self.open:
            self._outbox.close()
            self._write(Head(Kind.GOODBYE, 0).pack())
            self.clean = True
        self.end("this node said goodbye", flush=True)

    def abort(self) -> None:
        """Closes the socket without waiting for the peer to read what was written."""
        self.end("this node closed it")
        if self._transport is not None:
            self._transport.abort()

    def tune(self, settings: Settings) -> None:
        """Sets the options of an accepted TCP socket."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            tune_tcp(sock, settings)

    def _release(self) -> None:
        """Lets go of everybody who waits for this session."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class _Pending:
    """A call that waits for its reply."""

    expected: type
    arrived: asyncio.Future[Incoming]


class DialledSession(Session):
    """The calling side."""

    _opening_kind = Kind.REPLY

    def __init__(self, owner: Owner, hello: Dialling, *, wanted: str, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        self.wanted = wanted  # the node that was meant; another may listen there now
        self._pending: dict[int, _Pending] = {}
        self._last_call = 0
        self.hello_done: asyncio.Future[None] = self._loop.create_future()

    def _opened(self) -> None:
        super()._opened()
        if not self.hello_done.done():
            self.hello_done.set_result(None)

    async def call(self, message: Call) -> Reply:
        """Sends a call and waits for its reply; cancelling this cancels the handler at the peer."""
        if not self.open:
            raise PeerLost(f"node {self.peer}: {self.why or 'no hello yet'}")
        header = wire.to_header(message)  # raises ValueError or TypeError: the caller's mistake
        value = wire.value_of(message)
        if value is not None and value.size_bytes > self._owner.max_value_bytes:
            raise Refused(
                Reason.BAD_MESSAGE,
                f"{describe(message)}: {value.size_bytes} bytes; max_value_bytes is {self._owner.max_value_bytes}",
            )
        self._last_call = number = self._last_call + 1
        pending = _Pending(wire.REPLY_OF[type(message)], self._loop.create_future())
        self._pending[number] = pending
        self._outbox.send(Kind.CALL, number, header, value)
        try:
            incoming = await pending.arrived
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        return unwrap(await self._received(incoming))

    def _give_up(self, number: int) -> None:
        if self._pending.pop(number, None) is None or self.why:
            return
        self._reader.drop(Kind.REPLY, number)
        if self._outbox.drop(number):
            self._outbox.send(Kind.CANCEL, number)

    def _admits(self, head: Head, parsed: wire.ParsedHeader) -> bool:
        if not 0 < head.call <= self._last_call:
            raise DecodeError(f"a reply to call {head.call}, which was never made")
        pending = self._pending.get(head.call)
        if pending is None:
            return False  # it was cancelled meanwhile
        if parsed.cls not in (pending.expected, Refusal):
            raise DecodeError(f"a {parsed.cls.__name__} where a {pending.expected.__name__} was expected")
        return True

    def _no_memory(self, head: Head) -> None:
        pending = self._pending.pop(head.call)
        if not pending.arrived.done():
            text = f"no memory for a reply of {head.payload} bytes"
            pending.arrived.set_exception(Refused(Reason.BAD_MESSAGE, text))

    def _on_complete(self, incoming: Incoming) -> None:
        pending = self._pending.pop(incoming.head.call, None)
        if pending is not None and not pending.arrived.done():
            pending.arrived.set_result(incoming)

    def _release(self) -> None:
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            if not pending.arrived.done():
                pending.arrived.set_exception(PeerLost(f"node {self.peer}: {self.why}"))
        if not self.hello_done.done():
            self.hello_done.set_exception(PeerLost(self.why))
            self.hello_done.exception()  # seen, even if the dial was given up


class AcceptedSession(Session):
    """The serving side."""

    _opening_kind = Kind.CALL

    def __init__(self, owner: Owner, hello: Answering, *, hello_s: float) -> None:
        super().__init__(owner, hello, hello_s=hello_s)
        self._calls: dict[int, asyncio.Task[None] | None] = {}  # None: still being received

    def _admits(self, head: Head, parsed: wire.ParsedHeader) -> bool:
        if self.probe:
            raise DecodeError("a call in a session that was dialled as a probe")
        if parsed.cls not in wire.CALLS:
            raise DecodeError(f"a {parsed.cls.__name__} as a call")
        if head.call in self._calls:
            raise DecodeError(f"call {head.call} is made twice")
        if len(self._calls) >= MAX_CALLS:
            self._reply(head.call, Refusal(Reason.PAUSED, f"{MAX_CALLS} calls of this session are being served"))
            return False
        self._calls[head.call] = None
        return True

    def _no_memory(self, head: Head) -> None:
        del self._calls[head.call]
        log.error("no memory for a call of %d bytes from node %s", head.payload, self.peer)
        self._reply(head.call, Refusal(Reason.BAD_MESSAGE, f"no memory for a call of {head.payload} bytes"))

    def _on_complete(self, incoming: Incoming) -> None:
        number = incoming.head.call
        task = self._owner.tasks.spawn(self._serve(incoming), name=f"serve {self.peer} {number}")
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _serve(self, incoming: Incoming) -> None:
        number = incoming.head.call
        call = await self._received(incoming)
        del incoming  # the handler alone decides how long a value lives
        reply = await answer(self._owner.serve, self.peer, call)
        if number in self._calls:  # else it was cancelled, and the handler went on regardless
            self._reply(number, reply)

    def _reply(self, number: int, reply: Reply) -> None:
        value = wire.value_of(reply)
        limit = self._owner.max_value_bytes
        if value is not None and value.size_bytes > limit:
            log.error("a reply of %d bytes; max_value_bytes is %d", value.size_bytes, limit)
            text = f"the reply has {value.size_bytes} bytes; max_value_bytes is {limit}"
            reply, value = Refusal(Reason.BAD_MESSAGE, text), None
        try:
            header = wire.to_header(reply)
        except (TypeError, ValueError) as error:
            log.exception("a %s cannot travel", type(reply).__name__)
            text = f"the reply cannot travel: {error}"
            header, value = wire.to_header(Refusal(Reason.BAD_MESSAGE, text)), None
        self._outbox.send(Kind.REPLY, number, header, value)

    def _on_cancel(self, call: int) -> None:
        self._reader.drop(Kind.CALL, call)
        self._outbox.drop(call)
        task = self._calls.pop(call, None)
        if task is not None:
            task.cancel()

    def _release(self) -> None:
        calls, self._calls = self._calls, {}
        for task in calls.values():
            if task is not None:
                task.cancel()
