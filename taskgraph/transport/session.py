"""One connection, from hello to goodbye.

A session carries calls in one direction and their replies in the other: whoever dialled it calls, whoever accepted it
serves. A node that wants to call back dials a session of its own. So call ids have one author, and no rule is
needed for who may speak first.

A session ends once, for one reason, which it keeps: `clean` says that a goodbye was said.
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
from taskgraph.transport.endpoints import process_behind, tune_tcp
from taskgraph.transport.frames import (
    LENT,
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    Head,
    Kind,
    Limits,
    OtherVersion,
)
from taskgraph.transport.hello import HELLO_LIMITS, Answering, Dialling, HelloRefused, refusal
from taskgraph.transport.incoming import Digesting, Incoming
from taskgraph.transport.lending import Borrowing, Lending
from taskgraph.transport.mappings import CannotBorrow, Mappings, Reference
from taskgraph.transport.outbox import Outbox
from taskgraph.transport.reader import FrameReader

__all__ = ["VERIFY_AT_ONCE_BYTES", "Owner", "Session", "cut", "wake"]

log = logging.getLogger("taskgraph.transport")

T = TypeVar("T")
_FOR_GOOD = b"\x01"
_RETURN = Kind.RETURN  # a global: to look up a member of an enum takes longer
_OF_DEVICES = (Kind.RETURN_ON_DEVICE, Kind.DECLINE_ON_DEVICE)
#: High-water mark of the event loop's own buffer. Beyond the kernel's, so that a fast reader never finds us idle.
_WRITE_BUFFER_BYTES = 256 << 10


#: Digests of larger values are checked in a thread: 4 MiB take 0.2 ms.
VERIFY_AT_ONCE_BYTES = 4 << 20


class Owner(Protocol):
    """What a session needs of the transport it belongs to."""

    tasks: OwnedTasks
    serve: Serve
    max_value_bytes: int
    mappings: Mappings
    digesting: Digesting | None
    returning: dict[str, Session]
    """By the node at the other end: who gives leases back to it as soon as anything else wakes it up."""
    verified_now: Callable[[Encoded], bool]
    """Whether the digest fits; called on the event loop, with values below `VERIFY_AT_ONCE_BYTES`."""

    async def hosted(self, value: Encoded, *, but: Callable[[DeviceBuffer], bool]) -> Encoded:
        """The same value with its bulk on the host, but for what is to stay on the device."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, in a thread where it may wait for a device."""

    def in_thread_soon(self, work: Callable[[], None]) -> None:
        """The same of something that nobody waits for; nothing where no threads are there any more."""

    def connected(self, session: Session) -> None:
        """The connection exists; nothing is proven."""

    def opened(self, session: Session) -> None:
        """The hello is done."""

    def ended(self, session: Session) -> None:
        """Called once after `connected`: no call will be made or served any more."""

    def disconnected(self, session: Session) -> None:
        """Called once after `ended`: the socket is closed."""

    async def verified(self, value: Encoded) -> bool:
        """The same in a thread, where the value is large."""

    def allocate(self, nbytes: int) -> Block | None:
        """Memory to receive into."""


def wake(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Calls a function on the loop, soon; from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed just now
        loop.call_soon_threadsafe(callback)


class Session(asyncio.BufferedProtocol):
    """What both directions share: hello, frames, the end.

    Attributes:
        open: the hello is done, and nothing has ended it.
        peer: the node of the other side, once open.
        probe: only the hello was wanted; known once open.
        clean: a goodbye was said, by either side.
        why: what ended it, or "" while it lives.
        cut_off: it ended because the connection did, without a word from either side.
    """

    _opening_kinds: ClassVar[tuple[Kind, ...]]
    get_buffer: Callable[[int], memoryview]  # type: ignore[assignment]  # only for want of the argument's name
    buffer_updated: Callable[[int], None]  # type: ignore[assignment]

    def __init__(self, owner: Owner, hello: Dialling | Answering, *, hello_s: float) -> None:
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
            on_open=self._on_open,
            on_complete=self._on_complete,
            on_whole=self._on_whole,
            on_control=self._on_control,
            failed=self._unreadable,
        )
        self.get_buffer, self.buffer_updated = self._reader.buffer, self._reader.received
        self._borrowing = Borrowing(self._loop, self._return, self._several)
        self._largest = 0  # value, in bytes; known once open
        self._within: tuple[object, ...] | None = None  # a frame, where it was looked at last
        self._looks = 0  # how often it was the same
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

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        self._outbox.sealed = self._reader.checked = sock is None or sock.family != socket.AF_UNIX
        self._hello.binding = channel_binding(transport.get_extra_info("ssl_object"))
        self.where = self.where or str(transport.get_extra_info("peername") or "a unix socket")
        self._timer = self._loop.call_later(self._hello_s, self._hello_late)
        self._owner.connected(self)
        if isinstance(self._hello, Dialling):
            self._send_hello(self._hello.open())

    def _unreadable(self, error: Exception) -> None:
        """What came, or what it leads to."""
        if isinstance(error, HelloRefused):
            self._refused(error)
        elif isinstance(error, OtherVersion) and not self._hello.done:
            # A refusal is enough: its head tells our version.
            self._refused(HelloRefused(str(error), tell=True))
        elif isinstance(error, DecodeError):
            if self._hello.done:
                log.error("session with node %s: %s; closing it", self.peer, error)
            self.end(f"it sent what cannot be read: {error}")
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
        self._owner.disconnected(self)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def _on_backpressure(self, crowded: bool) -> None:
        """So many messages wait for the peer to read, or no more."""

    # Hello.

    def _hello_late(self) -> None:
        self.end(f"no hello within {self._hello_s:g} s")

    def _send_hello(self, frames: list[tuple[Kind, bytes]]) -> None:
        for kind, data in frames:
            self._outbox.send(kind, header=data)

    def _refused(self, refused: HelloRefused) -> None:
        if refused.tell:
            self._send_hello([(Kind.HELLO_REFUSE, refusal(str(refused)))])
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
        elif head.kind is Kind.RETURN:
            self._lending.returned(header)
        elif head.kind is Kind.DECLINE:
            self._lending.stop(for_good=header == _FOR_GOOD)
            self._on_decline(head.call)
        elif head.kind in _OF_DEVICES:
            self._on_device(head.kind, header)
        else:
            raise DecodeError(f"a {head.kind.name} frame in an open session")

    def _opened(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.open, self.peer, self.probe = True, self._hello.peer, self._hello.probe
        self._largest = self._owner.max_value_bytes
        self._reader.limits = Limits(MAX_HEADER_BYTES, MAX_BUFFERS, self._largest)
        whole = [kind for kind in self._opening_kinds if kind is not Kind.REPLY_ON_DEVICE]  # which has to be copied yet
        self._reader.whole = (*whole, Kind.RETURN)
        assert self._transport is not None
        self._outbox.write = self._transport.write  # no call in between: it writes nothing once this has ended
        if pid := process_behind(self._transport.get_extra_info("socket")):
            self._borrowing.start(pid, self._owner.mappings)
            self._lending.start()
            self._same_host()
        self._owner.opened(self)

    # Messages.

    def _take_back(self, call: int) -> bool:
        """Sends nothing more of that call. Returns whether the peer has seen, or will see, some of it."""
        seen = self._outbox.drop(call)
        if not seen:
            self._lending.take_back(call)
        return seen

    def give_back(self) -> None:
        """Gives back what the other side lent and nobody here reads any more."""
        self._borrowing.flush()

    def _several(self) -> None:
        """There is enough to be given back. Called wherever garbage is found."""
        if not self._loop.is_closed():
            self._loop.call_soon(self.give_back)

    def _return(self, leases: bytes) -> None:
        if self.open:
            self._outbox.send(Kind.RETURN, header=leases)

    def _on_open(self, head: Head, sizes: tuple[int, ...], header: bytes) -> Incoming | None:
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
        if not self._admits(head.call, type(message)):
            self._borrowing.refuse(references)
            return None
        try:
            lent = self._borrowing.take(references) if references else ()
            return Incoming(
                head, sizes, message, lent=lent, allocate=self._owner.allocate, digesting=self._owner.digesting
            )
        except CannotBorrow as error:
            self._decline(head.call, error)
            return None
        except MemoryError:
            self._no_memory(head)
            return None

    def _decline(self, call: int, error: CannotBorrow) -> None:
        log.warning("what node %s lends cannot be used here, and travels as bytes: %s", self.peer, error)
        self._outbox.send(Kind.DECLINE, call, _FOR_GOOD if error.for_good else b"")
        self._cannot_borrow(call)

    def _on_whole(
        self, kind: Kind, call: int, sizes: tuple[int, ...], header: bytes, meta: bytes, carried: bytes
    ) -> None:
        """A frame that is all of its message: `_on_open` and `_on_complete` in one.

        Its buffers, if it has some, are either all lent or all in `carried`.
        """
        if kind is _RETURN:
            if sizes or meta:
                raise DecodeError("a RETURN frame with a payload")
            self._lending.returned(header)
            return
        references: Sequence[Reference] | None = None
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
            if not self._admits(call, type(message)):
                self._borrowing.refuse(references)
                return
            try:
                buffers = self._borrowing.take(references)
            except CannotBorrow as error:
                self._decline(call, error)
                return
            value.complete(meta, buffers)  # what never left the host's memory is what its producer digested
            self._take(kind, call, message)
            return
        else:
            value.complete(meta, cut(carried, sizes) if sizes else ())
            verified = self._owner.verified_now
            if not verified(value):
                raise _corrupted(type(message), value)
        self._take_whole(kind, call, message)

    def _admits(self, call: int, cls: type) -> bool:
        """Whether to receive this message (False: skip it). Raises DecodeError."""
        raise NotImplementedError

    def _take(self, kind: Kind, call: int, message: Any) -> None:
        """A message that was admitted is here, and whole."""
        raise NotImplementedError

    def _take_whole(self, kind: Kind, call: int, message: Any) -> None:
        """A message is here, and whole: admits and takes it."""
        if self._admits(call, type(message)):
            self._take(kind, call, message)

    def _no_memory(self, head: Head) -> None:
        raise NotImplementedError

    def _cannot_borrow(self, call: int) -> None:
        """A message that was admitted does not come: its sender was told, and sends bytes from now on."""
        raise NotImplementedError

    def _on_complete(self, incoming: Incoming) -> None:
        raise NotImplementedError

    def _on_cancel(self, call: int) -> None:
        raise DecodeError("a CANCEL in the wrong direction")

    def _same_host(self) -> None:
        """The other side is a process of this host."""

    def _on_device(self, kind: Kind, data: bytes) -> None:
        raise DecodeError(f"a {kind.name} in the wrong direction")

    def _on_decline(self, call: int) -> None:
        """The peer cannot open what came with the message of that call."""

    async def _received(self, incoming: Incoming) -> Any:
        """The message that came. Ends the session and raises PeerLost where it is damaged."""
        value = incoming.complete()
        if value is None:
            return incoming.message
        whole = incoming.is_whole(value)
        return self._checked(incoming.message, value, await self._owner.verified(value) if whole is None else whole)

    def _received_now(self, incoming: Incoming) -> Any:
        """The same for what is small, or has no value."""
        value = incoming.complete()
        if value is None:
            return incoming.message
        whole = incoming.is_whole(value)
        return self._checked(incoming.message, value, self._owner.verified_now(value) if whole is None else whole)

    def _checked(self, message: Message, value: Encoded, whole: bool) -> Message:
        """The message. Ends the session if its value is damaged."""
        if whole:
            return message
        error = _corrupted(type(message), value)
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
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        self._reader.stop()
        self._outbox.close()
        self._borrowing.close()
        self._lending.broken()
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
            self._borrowing.flush()
            self._outbox.close()
            self._write(Head(Kind.GOODBYE, 0).pack())
            self.clean = True
        self.end("this node said goodbye", flush=True)

    def abort(self) -> None:
        """Closes the socket without waiting for the peer to read what was written."""
        self.end("this node closed it")
        if self._transport is not None:
            self._transport.abort()
            if not self._transport.is_closing():
                # uvloop closed it without a word, since who dialled was cancelled: there is nothing left to abort.
                self.connection_lost(None)

    def look(self, looks: int) -> None:
        """Ends a session over TCP that stands within a frame so many looks long. To be called now and then.

        A frame is sent without a pause. Where its rest does not come although the kernels of both ends are content,
        something between them has lost it, and nobody would ever notice. Looks are counted, and not time: a process
        that was stopped has not read yet what came meanwhile.
        """
        reads = self.open and self._transport is not None and self._transport.is_reading()
        within = self._reader.within if reads and self._reader.checked else None
        self._looks = self._looks + 1 if within is not None and within == self._within else 0
        self._within = within
        if self._looks >= looks:
            log.error("session with node %s: nothing more of a frame comes; closing it", self.peer)
            self.end("nothing more of a frame came")

    def trim(self) -> None:
        """Lets go of what was not used for long. To be called now and then."""

    def tune(self, settings: Settings) -> None:
        """Sets the options of an accepted TCP socket."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            tune_tcp(sock, settings)

    def _release(self) -> None:
        """Lets go of everybody who waits for this session."""
        raise NotImplementedError


def cut(carried: bytes, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """The buffers that came one behind the other."""
    whole, at, buffers = memoryview(carried), 0, []
    for size in sizes:
        buffers.append(whole[at : at + size])
        at += size
    return tuple(buffers)


def _corrupted(cls: type, value: Encoded) -> DecodeError:
    size = value.size_bytes
    return DecodeError(
        f"a corrupted value: the {size} bytes of a {cls.__name__} do not have the digest they were sent with"
    )
