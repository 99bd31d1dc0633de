"""A session: one connection between two nodes.

The node that dialled makes calls, and the node that accepted sends replies. To call back, a node dials a session of its
own. So call ids have one author.

    state       next                    by
    connected   open                    the hello succeeds
                ended                   the hello fails or takes longer than `hello_s`; the connection breaks
    open        ended, `clean` is True  either side says goodbye
                ended                   the connection breaks; a frame cannot be read; a value is damaged
    ended       -                       `why` keeps the first reason

It calls `SessionOwner.on_connected`, `on_opened`, `on_ended` and `on_disconnected` once each at most. `sides` has both
kinds of session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import DecodeError, PeerLost
from taskgraph.graph.blocks import Block
from taskgraph.network.tls import channel_binding
from taskgraph.protocol.messages import Encoded, Message
from taskgraph.settings import Settings
from taskgraph.transport import wire
from taskgraph.transport.api import Serve
from taskgraph.transport.calls import OwnedTasks
from taskgraph.transport.endpoints import peer_pid, tune_tcp
from taskgraph.transport.frames import (
    LENT,
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    FrameKind,
    Head,
    Limits,
    OtherVersion,
)
from taskgraph.transport.hello import HELLO_LIMITS, DiallerHello, HelloRefused, ListenerHello, refusal
from taskgraph.transport.incoming import Digesting, IncomingMessage
from taskgraph.transport.lending import Borrowing, Lending
from taskgraph.transport.mappings import CannotBorrow, Mappings, MemoryReference
from taskgraph.transport.outbox import Outbox
from taskgraph.transport.reader import FrameReader

__all__ = ["VERIFY_AT_ONCE_BYTES", "Session", "SessionOwner", "call_on_loop_soon", "split_buffers"]

log = logging.getLogger("taskgraph.transport")

T = TypeVar("T")
_FOR_GOOD = b"\x01"
_RETURN = FrameKind.RETURN  # a global: faster than a member of an enum
_OF_DEVICES = (FrameKind.RETURN_ON_DEVICE, FrameKind.DECLINE_ON_DEVICE)
#: High-water mark of the event loop's buffer. Larger than the kernel's buffer, so that a fast reader never waits.
_WRITE_BUFFER_BYTES = 256 << 10
#: Digests of larger values are checked in a thread: 4 MiB take 0.2 ms.
VERIFY_AT_ONCE_BYTES = 4 << 20


class SessionOwner(Protocol):
    """The transport of a session, as the session sees it."""

    tasks: OwnedTasks
    serve: Serve
    max_value_bytes: int
    mappings: Mappings
    digesting: Digesting | None
    returning: dict[str, Session]
    """Peer -> session that returns leases to it together with the next reply."""
    verify_now: Callable[[Encoded], bool]
    """Checks the digest of a value below `VERIFY_AT_ONCE_BYTES`, on the event loop."""

    async def copy_to_host(self, value: Encoded, *, but: Callable[[DeviceBuffer], bool]) -> Encoded:
        """Copies the bulk of a value to the host, except for the buffers that `but` selects."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread, where it may wait for a device, and returns its result."""

    def in_thread_soon(self, work: Callable[[], None]) -> None:
        """Starts `work` in a thread. Does nothing if the transport has ended."""

    def on_connected(self, session: Session) -> None:
        """Called when the connection exists. The peer has not proven who it is."""

    def on_opened(self, session: Session) -> None:
        """Called when the hello has succeeded."""

    def on_ended(self, session: Session) -> None:
        """Called once after `on_connected`: the session makes and serves no more calls."""

    def on_disconnected(self, session: Session) -> None:
        """Called once after `on_ended`: the socket is closed."""

    async def verify(self, value: Encoded) -> bool:
        """Returns True if a value has its digest; checks in a thread if it is large."""

    def allocate(self, nbytes: int) -> Block | None:
        """Allocates memory to receive into; None: use any."""


def call_on_loop_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Calls a function on the loop, soon. May be called in any thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed just now
        loop.call_soon_threadsafe(callback)


class Session(asyncio.BufferedProtocol):
    """The base of both kinds of session: hello, frames, the end.

    Attributes:
        open: the hello succeeded, and the session has not ended.
        peer: the node at the other end; known once open.
        probe: the dialler wants only the hello; known once open.
        where: the endpoint or address of the other end, for messages.
        clean: either side said goodbye.
        why: the reason of the end; "" before it.
        cut_off: the connection broke, and neither side gave a reason.
    """

    _opening_kinds: ClassVar[tuple[FrameKind, ...]]
    get_buffer: Callable[[int], memoryview]  # type: ignore[assignment]  # the argument has another name
    buffer_updated: Callable[[int], None]  # type: ignore[assignment]

    def __init__(self, owner: SessionOwner, hello: DiallerHello | ListenerHello, *, hello_s: float) -> None:
        self._owner = owner
        self._hello = hello
        self._hello_s = hello_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lending = Lending(self._loop.time)
        self._outbox = Outbox(
            self._write,
            self._loop.call_soon,
            self._lending.lend,
            self._on_backpressure,
        )
        self._reader = FrameReader(
            HELLO_LIMITS,
            on_message_begin=self._on_message_begin,
            on_complete=self._on_complete,
            on_whole=self._on_whole,
            on_control=self._on_control,
            failed=self._on_reader_error,
        )
        self.get_buffer, self.buffer_updated = self._reader.buffer, self._reader.parse_received
        self._borrowing = Borrowing(self._loop, self._send_returned, self._schedule_return)
        self._largest = 0  # bytes of the largest value; known once open
        self._position: tuple[object, ...] | None = None  # the place within a frame at the last look
        self._checks = 0  # looks that found the same place
        self.open = False
        self.peer = ""
        self.probe = False
        self.where = ""
        self.clean = False
        self.why = ""
        self.cut_off = False

    @property
    def encrypted(self) -> bool:
        return bool(self._hello.binding)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        self._outbox.with_digests = self._reader.checked = sock is None or sock.family != socket.AF_UNIX
        self._hello.binding = channel_binding(transport.get_extra_info("ssl_object"))
        self.where = self.where or str(transport.get_extra_info("peername") or "a unix socket")
        self._timer = self._loop.call_later(self._hello_s, self._on_hello_timeout)
        self._owner.on_connected(self)
        if isinstance(self._hello, DiallerHello):
            self._send_hello(self._hello.open())

    def _on_reader_error(self, error: Exception) -> None:
        """Ends the session after a refused hello, of which it tells the peer, or a frame that cannot be read.

        Raises any other error: a mistake of a handler that the reader called.
        """
        if isinstance(error, HelloRefused):
            self._on_refused(error)
        elif isinstance(error, OtherVersion) and not self._hello.done:
            self._on_refused(HelloRefused(str(error), tell=True))
        elif isinstance(error, DecodeError):
            if self._hello.done:
                log.error("session with node %s: %s; closing it", self.peer, error)
            self.end(f"it sent a frame that cannot be read: {error}")
        else:
            raise error

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
        self._owner.on_disconnected(self)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def _on_backpressure(self, crowded: bool) -> None:
        """Called when the outbox is full, and when it has room again."""

    # Hello.

    def _on_hello_timeout(self) -> None:
        self.end(f"no hello within {self._hello_s:g} s")

    def _send_hello(self, frames: list[tuple[FrameKind, bytes]]) -> None:
        for kind, data in frames:
            self._outbox.send(kind, header=data)

    def _on_refused(self, refused: HelloRefused) -> None:
        """Ends the session after a failed hello; tells the peer why, unless the peer refused."""
        if refused.tell:
            self._send_hello([(FrameKind.HELLO_REFUSE, refusal(str(refused)))])
        self.end(f"the hello failed: {refused}", flush=True)

    def _on_control(self, head: Head, header: bytes) -> None:
        """Handles a frame that opens no message: a step of the hello, a goodbye, a cancelled call, returned or declined
        memory.
        """
        if not self._hello.done:
            self._send_hello(self._hello.on_frame(head.kind, header))
            if self._hello.done:
                self._on_hello_done()
        elif head.kind is FrameKind.GOODBYE:
            self.clean = True
            self.end("it said goodbye")
        elif head.kind is FrameKind.CANCEL:
            self._on_cancel(head.call)
        elif head.kind is FrameKind.RETURN:
            self._lending.take_returned(header)
        elif head.kind is FrameKind.DECLINE:
            self._lending.stop(for_good=header == _FOR_GOOD)
            self._on_decline(head.call)
        elif head.kind in _OF_DEVICES:
            self._on_device(head.kind, header)
        else:
            raise DecodeError(f"a {head.kind.name} frame in an open session")

    def _on_hello_done(self) -> None:
        """Opens the session, since both sides have proved themselves."""
        assert self._timer is not None
        self._timer.cancel()
        self.open, self.peer, self.probe = True, self._hello.peer, self._hello.probe
        self._largest = self._owner.max_value_bytes
        self._reader.limits = Limits(MAX_HEADER_BYTES, MAX_BUFFERS, self._largest)
        whole = [
            kind for kind in self._opening_kinds if kind is not FrameKind.REPLY_ON_DEVICE
        ]  # which has to be copied yet
        self._reader.whole = (*whole, FrameKind.RETURN)
        assert self._transport is not None
        self._outbox.write = self._transport.write  # no call in between: it writes nothing once this has ended
        if pid := peer_pid(self._transport.get_extra_info("socket")):
            self._borrowing.start(pid, self._owner.mappings)
            self._lending.start()
            self._on_same_host()
        self._owner.on_opened(self)

    # Messages.

    def _take_back(self, call: int) -> bool:
        """Drops what is still queued of the message of a call. Returns True if the peer got, or will get, a part of the
        message.
        """
        seen = self._outbox.drop(call)
        if not seen:
            self._lending.take_back(call)
        return seen

    def give_back(self) -> None:
        """Gives the lender back the leases of memory that this process has finished reading."""
        self._borrowing.flush()

    def _schedule_return(self) -> None:
        """Schedules `give_back` of several leases. May be called in the middle of any code."""
        if not self._loop.is_closed():
            self._loop.call_soon(self.give_back)

    def _send_returned(self, leases: bytes) -> None:
        """Sends the numbers of returned leases."""
        if self.open:
            self._outbox.send(FrameKind.RETURN, header=leases)

    def _on_message_begin(self, head: Head, sizes: tuple[int, ...], header: bytes) -> IncomingMessage | None:
        """Begins to receive a message of several frames; returns the `IncomingMessage`, or None to skip its payload."""
        if not self._hello.done:
            raise DecodeError(f"a {head.kind.name} before the hello")
        if head.kind not in self._opening_kinds:
            raise DecodeError(f"a {head.kind.name} in the wrong direction")
        lengths = [size ^ LENT for size in sizes if size & LENT]
        references, header = self._borrowing.read(header, lengths) if lengths else ((), header)
        if (whole := head.payload + sum(lengths)) > self._largest:
            raise DecodeError(f"a value of {whole} bytes; the limit is {self._largest}")
        message = wire.from_header(header)
        if wire.value_of(message) is None and (head.payload or sizes):
            raise DecodeError(f"a {type(message).__name__} with a payload")
        if not self._admit(head.call, type(message)):
            self._borrowing.return_unopened(references)
            return None
        try:
            lent = self._borrowing.take(references) if references else ()
            return IncomingMessage(
                head, sizes, message, lent=lent, allocate=self._owner.allocate, digesting=self._owner.digesting
            )
        except CannotBorrow as error:
            self._decline_lent_memory(head.call, error)
            return None
        except MemoryError:
            self._on_no_memory(head)
            return None

    def _decline_lent_memory(self, call: int, error: CannotBorrow) -> None:
        """Tells the peer that its lent memory cannot be opened, so that it sends bytes, for good or for a while."""
        log.warning("memory lent by node %s cannot be opened, so bytes are sent: %s", self.peer, error)
        self._outbox.send(FrameKind.DECLINE, call, _FOR_GOOD if error.for_good else b"")
        self._on_cannot_borrow(call)

    def _on_whole(
        self, kind: FrameKind, call: int, sizes: tuple[int, ...], header: bytes, meta: bytes, carried: bytes
    ) -> None:
        """Takes a frame with a complete message: `_on_message_begin` and `_on_complete` in one.

        The buffers of the value, if any, are either all lent or all in `carried`.
        """
        if kind is _RETURN:
            if sizes or meta:
                raise DecodeError("a RETURN frame with a payload")
            self._lending.take_returned(header)
            return
        references: Sequence[MemoryReference] | None = None
        if sizes and (first := sizes[0] ^ LENT) < LENT:
            lengths = (first,) if len(sizes) == 1 else (*map(LENT.__xor__, sizes),)
            references, header = self._borrowing.read(header, lengths)
            if (whole := len(meta) + sum(lengths)) > self._largest:
                raise DecodeError(f"a value of {whole} bytes; the limit is {self._largest}")
        message = wire.from_header(header)
        value = wire.value_of(message)
        if value is None:
            if meta or sizes:
                raise DecodeError(f"a {type(message).__name__} with a payload")
        elif references is not None:
            if not self._admit(call, type(message)):
                self._borrowing.return_unopened(references)
                return
            try:
                buffers = self._borrowing.take(references)
            except CannotBorrow as error:
                self._decline_lent_memory(call, error)
                return
            value.complete(meta, buffers)  # lent memory needs no check: its producer digested it
            self._take(kind, call, message)
            return
        else:
            value.complete(meta, split_buffers(carried, sizes) if sizes else ())
            verify = self._owner.verify_now
            if not verify(value):
                raise _corrupted_error(type(message), value)
        self._take_whole(kind, call, message)

    def _admit(self, call: int, cls: type) -> bool:
        """Checks whether to take a message. False: it is to be skipped, as the reply to a cancelled call, or a call too
        many, which is refused. An `AcceptedSession` lists the call. Raises DecodeError if the peer may not send it.
        """
        raise NotImplementedError

    def _take(self, kind: FrameKind, call: int, message: Any) -> None:
        """Handles a complete message that was admitted: serves the call, or settles the one that it answers."""
        raise NotImplementedError

    def _take_whole(self, kind: FrameKind, call: int, message: Any) -> None:
        """Handles a complete message, if it is admitted."""
        if self._admit(call, type(message)):
            self._take(kind, call, message)

    def _on_no_memory(self, head: Head) -> None:
        """Handles a message for which there is no memory: refuses the call, or fails the one that it answers."""
        raise NotImplementedError

    def _on_cannot_borrow(self, call: int) -> None:
        """Forgets an admitted message whose lent memory cannot be opened. Its sender will send bytes."""
        raise NotImplementedError

    def _on_complete(self, incoming: IncomingMessage) -> None:
        """Handles a message of several frames that is complete."""
        raise NotImplementedError

    def _on_cancel(self, call: int) -> None:
        """Handles the peer's cancellation of a call; only a session that serves calls may get one."""
        raise DecodeError("a CANCEL in the wrong direction")

    def _on_same_host(self) -> None:
        """Called if the peer is a process of this host."""

    def _on_device(self, kind: FrameKind, data: bytes) -> None:
        """Handles a frame about lent device memory; only a session that serves calls may get one."""
        raise DecodeError(f"a {kind.name} in the wrong direction")

    def _on_decline(self, call: int) -> None:
        """Called if the peer cannot open the memory that was lent with the message of a call."""

    async def _complete(self, incoming: IncomingMessage) -> Any:
        """Returns the message with its value. If the value is damaged, ends the session and raises PeerLost."""
        value = incoming.complete()
        if value is None:
            return incoming.message
        whole = incoming.is_undamaged(value)
        return self._check_value(incoming.message, value, await self._owner.verify(value) if whole is None else whole)

    def _complete_now(self, incoming: IncomingMessage) -> Any:
        """Returns the message with its value, which is small, or none. If the value is damaged, ends the session and
        raises PeerLost.
        """
        value = incoming.complete()
        if value is None:
            return incoming.message
        whole = incoming.is_undamaged(value)
        return self._check_value(incoming.message, value, self._owner.verify_now(value) if whole is None else whole)

    def _check_value(self, message: Message, value: Encoded, whole: bool) -> Message:
        """Returns the message. If its value is damaged (`whole` is False), ends the session and raises PeerLost."""
        if whole:
            return message
        error = _corrupted_error(type(message), value)
        if not self.why:
            log.error("session with node %s: %s; closing it", self.peer, error)
            self.end(f"it sent {error}")
        raise PeerLost(f"node {self.peer} sent {error}") from error

    # The end.

    def end(self, why: str, *, flush: bool = False) -> None:
        """Ends the session, its calls and its outbox; does nothing if it has ended. With `flush` the buffer of the
        socket is still sent."""
        if self.why:
            return
        self.why = why
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        self._reader.stop()
        self._outbox.close()
        self._borrowing.close()
        self._lending.spoil_all()
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
        self._end_calls()
        if self._transport is not None:
            self._owner.on_ended(self)

    def goodbye(self) -> None:
        """Ends the session in good order: the peer sees no loss."""
        if self.open:
            self._borrowing.flush()
            self._outbox.close()
            self._write(Head(FrameKind.GOODBYE, 0).pack())
            self.clean = True
        self.end("this node said goodbye", flush=True)

    def abort(self) -> None:
        """Closes the socket at once."""
        self.end("this node closed it")
        if self._transport is not None:
            self._transport.abort()
            if not self._transport.is_closing():
                # The dialling task was cancelled, so uvloop closed the socket and does not call this.
                self.connection_lost(None)

    def end_if_stuck(self, checks: int) -> None:
        """Ends a TCP session that got no byte of an unfinished frame for `checks` calls. Called periodically.

        Frames are sent without a pause. If the rest of a frame is missing, a proxy between the nodes lost it, and TCP
        does not notice. Calls are counted, not time: a process that was stopped has bytes that it has not read.
        """
        reads = self.open and self._transport is not None and self._transport.is_reading()
        position = self._reader.position if reads and self._reader.checked else None
        self._checks = self._checks + 1 if position is not None and position == self._position else 0
        self._position = position
        if self._checks >= checks:
            log.error("session with node %s: the rest of a frame did not arrive; closing it", self.peer)
            self.end("the rest of a frame did not arrive")

    def trim(self) -> None:
        """Closes the peer's device memory that was idle for long, if this session opens any. Called periodically."""

    def tune(self, settings: Settings) -> None:
        """Sets the options of an accepted TCP socket; does nothing for a unix socket."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            tune_tcp(sock, settings)

    def _end_calls(self) -> None:
        """Ends all calls of the session."""
        raise NotImplementedError


def split_buffers(carried: bytes, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Returns views of the consecutive buffers in `carried`, each of its size in `sizes`."""
    whole, at, buffers = memoryview(carried), 0, []
    for size in sizes:
        buffers.append(whole[at : at + size])
        at += size
    return tuple(buffers)


def _corrupted_error(cls: type, value: Encoded) -> DecodeError:
    size = value.size_bytes
    return DecodeError(f"a corrupted value: the digest of a {cls.__name__} of {size} bytes does not match")
