"""The frame: what one session writes after another, and how it is read without trusting it.

    head (40 bytes, big endian) | sizes of the buffers (8 bytes each) | protobuf header | body

A CALL, TELL or REPLY frame opens a message: its head tells the size of the whole payload (the value's meta, then its
buffers, without padding). The body is the first part of that payload; what does not fit travels in CHUNK frames of the
same call, so that a large value never stands between two small messages for longer than one chunk takes.

`FrameReader` does no I/O: a protocol asks it where the next bytes go and tells it how many came. Large buffers are
received where they will stay; everything else passes a small reusable buffer. Every size is checked against a
bound before anything is allocated for it. A small message that lies whole in that buffer, as most do, is taken out of
it at once; whatever is larger, cut, or not right is read step by step.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.blocks import Allocate, Block
from taskgraph.transport.wire import ParsedHeader

__all__ = [
    "CHUNK_BYTES",
    "HEAD_BYTES",
    "INLINE_BYTES",
    "LENT",
    "MAX_BODY_BYTES",
    "MAX_BUFFERS",
    "MAX_HEADER_BYTES",
    "PROTOCOL_VERSION",
    "FrameReader",
    "Head",
    "Incoming",
    "Kind",
    "Limits",
    "OtherVersion",
    "pack_frame",
    "pack_whole",
]

PROTOCOL_VERSION = 1

#: A payload up to this size travels in the frame that opens the message, copied into one write.
INLINE_BYTES = 64 << 10
#: What a large payload is cut into. 1 MiB takes 0.3 ms on a unix socket: the longest a small message waits behind it.
CHUNK_BYTES = 1 << 20
#: The largest body a reader accepts; leaves other versions room to cut differently.
MAX_BODY_BYTES = 16 << 20
#: The largest protobuf header. The longest in practice is a ledger page: some 60 bytes for each edge of an epoch.
MAX_HEADER_BYTES = 64 << 20
#: Buffers of one value: one for each large array in it.
MAX_BUFFERS = 1 << 20
#: Set in the size of a buffer that is lent: it is no part of the payload, and a reference to it stands in the header.
LENT = 1 << 63

_MAGIC = b"TG"
_TLS_HANDSHAKE, _TLS_MAJOR = 22, 3
_HEAD = struct.Struct("!2sBBQIIIQQ")
HEAD_BYTES = _HEAD.size
_CLEARED_BYTES = 4 << 10
_SCRATCH_BYTES = 64 << 10  # the reusable receive buffer of a session
_WHOLE_BYTES = _SCRATCH_BYTES  # a longer message is not taken whole, even where a large header made the buffer grow
_DIGESTED_BYTES = 256 << 10  # values with this much bulk, and less meta, are digested as they come
_DIRECT_BYTES = 32 << 10  # a rest at least this long is received in place; below, one more copy is cheaper than a read


class Kind(enum.IntEnum):
    """What a frame is. The HELLO kinds keep their numbers in every version."""

    HELLO_OPEN = 1
    HELLO_CHALLENGE = 2
    HELLO_PROOF = 3
    HELLO_WELCOME = 4
    HELLO_REFUSE = 5
    CALL = 16  # opens a call
    REPLY = 17  # opens the reply to a call
    CHUNK = 18  # more of the payload of the call or reply of that id
    CANCEL = 19  # the caller does not want the reply any more
    GOODBYE = 20  # the session ends here on purpose
    RETURN = 21  # leases of memory that was lent, by whoever borrowed it
    DECLINE = 22  # what was lent with the message of that call cannot be opened here: send bytes
    TELL = 23  # opens a call that needs no reply where it is accepted at once


_KINDS = {int(kind): kind for kind in Kind}
_OPENING = (Kind.CALL, Kind.REPLY, Kind.TELL)


class OtherVersion(DecodeError):
    """A frame of another version of this protocol."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"the peer speaks protocol version {theirs}; this node speaks {PROTOCOL_VERSION}")
        self.theirs = theirs


class Head(NamedTuple):
    """The fixed part of a frame. Sizes in bytes.

    Attributes:
        kind: what the frame is.
        call: the call's id, chosen by the caller, unique in its session; 0 where none is meant.
        header: size of the protobuf header, with the references to lent buffers in front of it.
        buffers: how many sizes of buffers stand before the header.
        body: how much of the payload this frame carries.
        payload: size of the whole payload of the message that this frame opens.
        meta: how much of that payload is meta.
    """

    kind: Kind
    call: int
    header: int = 0
    buffers: int = 0
    body: int = 0
    payload: int = 0
    meta: int = 0

    def pack(self) -> bytes:
        return _HEAD.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self.kind,
            self.call,
            self.header,
            self.buffers,
            self.body,
            self.payload,
            self.meta,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts. Before the hello is done nothing but a small header."""

    header: int = MAX_HEADER_BYTES
    buffers: int = MAX_BUFFERS
    payload: int = 1 << 40


def _unpack(data: memoryview, limits: Limits) -> Head:
    """Reads and bounds a head; knows nothing of what came before it."""
    magic, version, kind, call, header, buffers, body, payload, meta = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        tls = data[0] == _TLS_HANDSHAKE and data[1] == _TLS_MAJOR
        raise DecodeError("TLS, which this node does not speak here" if tls else "not a frame of ours")
    if version != PROTOCOL_VERSION:
        raise OtherVersion(version)
    if kind not in _KINDS:
        raise DecodeError(f"a frame of unknown kind {kind}")
    if header > limits.header:
        raise DecodeError(f"a header of {header} bytes; the limit is {limits.header}")
    if buffers > limits.buffers:
        raise DecodeError(f"a value of {buffers} buffers; the limit is {limits.buffers}")
    if payload > limits.payload:
        raise DecodeError(f"a value of {payload} bytes; the limit is {limits.payload}")
    if kind in _OPENING:
        if body > min(payload, MAX_BODY_BYTES) or meta > payload:
            raise DecodeError(f"a frame with {body} bytes of body and {meta} of meta in a payload of {payload}")
    elif kind == Kind.CHUNK:
        if header or buffers or payload or meta or not 0 < body <= MAX_BODY_BYTES:
            raise DecodeError(f"a chunk of {body} bytes, or one with a header")
    elif buffers or body or payload or meta:
        raise DecodeError(f"a {Kind(kind).name} frame with a payload")
    return Head(_KINDS[kind], call, header, buffers, body, payload, meta)


def pack_frame(head: Head, sizes: Sequence[int] = (), header: bytes = b"") -> bytes:
    """Everything of a frame that stands before its body."""
    if sizes:
        return b"".join((head.pack(), struct.pack(f"!{len(sizes)}Q", *sizes), header))
    return head.pack() + header


def pack_whole(kind: Kind, call: int, header: bytes, meta: bytes = b"") -> bytes:
    """A frame that is all of its message: no value, or one of nothing but meta."""
    size = len(meta)
    return _HEAD.pack(_MAGIC, PROTOCOL_VERSION, kind, call, len(header), 0, size, size, size) + header + meta


def _allocate(size_bytes: int, allocate: Allocate) -> memoryview:
    """Memory that was touched before, or is not before data is written to it; small pieces are cheaper cleared."""
    if size_bytes <= _CLEARED_BYTES:
        return memoryview(bytearray(size_bytes))
    block = allocate(size_bytes)
    return np.empty(size_bytes, np.uint8).data if block is None else block.data


def _no_pool(size_bytes: int) -> None:
    return None


class Hasher(Protocol):
    """A digest that is being taken."""

    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


Digesting = Callable[[bytes, Sequence[int]], Hasher]
"""(meta, sizes of the buffers) -> what takes a value's digest as its buffers come."""


class Incoming:
    """A message that is being received: where its payload goes, and how far it is.

    Attributes:
        head: of the frame that opened it.
        parsed: its protobuf header.
        missing: bytes still to come.
    """

    __slots__ = ("_at", "_digesting", "_hasher", "_lent", "_offset", "_sizes", "_targets", "head", "missing", "parsed")

    def __init__(
        self,
        head: Head,
        sizes: Sequence[int],
        parsed: ParsedHeader,
        *,
        lent: Sequence[Block] = (),
        allocate: Allocate = _no_pool,
        digesting: Digesting | None = None,
    ) -> None:
        """Allocates the destinations. Raises MemoryError where there is not enough; DecodeError.

        Args:
            lent: what the sizes marked as LENT stand for, in their order.
            allocate: where large buffers are received, as far as it has memory.
            digesting: takes the digest of large values while what came is still in the cache.
        """
        self.head = head
        self.parsed = parsed
        self.missing = head.payload
        if [block.nbytes | LENT for block in lent] != [size for size in sizes if size & LENT]:
            raise DecodeError("a value with memory that was not lent")
        blocks = iter(lent)
        self._lent = [next(blocks).data if size & LENT else None for size in sizes]
        carried = (size for size in sizes if not size & LENT)
        self._targets = [_allocate(size, allocate) for size in (head.meta, *carried)]  # may be empty ones
        self._sizes = sizes
        self._hasher: Hasher | None = None
        large = head.payload - head.meta >= _DIGESTED_BYTES > head.meta
        self._digesting = digesting if large and not lent else None
        self._at = 0  # the destination that is being filled
        self._offset = 0  # and how far it is
        self._skip_full()

    def _skip_full(self) -> None:
        while self._at < len(self._targets) and self._offset == self._targets[self._at].nbytes:
            if self._at == 0 and self._digesting is not None:
                self._hasher = self._digesting(self.meta(), self._sizes)
            self._at += 1
            self._offset = 0

    def room(self) -> memoryview:
        """The rest of the destination that is being filled. Not empty while something is missing."""
        return self._targets[self._at][self._offset :]

    def filled(self, count: int) -> None:
        """`count` bytes were written to `room()`."""
        if self._hasher is not None:
            self._hasher.update(self._targets[self._at][self._offset : self._offset + count])
        self._offset += count
        self.missing -= count
        self._skip_full()

    def take(self, data: memoryview) -> None:
        """Copies `data`, which is at most what is missing."""
        while data.nbytes:
            room = self.room()
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            self.filled(count)
            data = data[count:]

    def meta(self) -> bytes:
        return bytes(self._targets[0])

    def buffers(self) -> tuple[memoryview, ...]:
        received = iter(self._targets[1:])
        return tuple((next(received) if lent is None else lent).toreadonly() for lent in self._lent)

    def digest(self) -> bytes | None:
        """The digest of what came, where it was taken meanwhile."""
        return None if self._hasher is None else self._hasher.digest()

    @property
    def borrowed(self) -> bool:
        """Whether some of it did not travel."""
        return any(lent is not None for lent in self._lent)


class FrameReader:
    """Turns bytes into frames.

    Ask `buffer()` for where to receive the next bytes, then call `received(n)`.

    Args:
        limits: what is accepted; `limits` may be replaced between two frames.
        on_open: called with the head of a CALL, TELL or REPLY, the sizes of its buffers and its header; all are
            bounded and nothing is allocated yet. Returns the `Incoming` that takes the payload, or None: the payload
            is skipped then. Raises DecodeError.
        on_complete: called with an `Incoming` that has all of its payload.
        on_whole: called with (kind, call, header, meta) of a message that came whole, in place of `on_open` and
            `on_complete`. Its value, if it has one, has no buffers. Raises DecodeError.
        on_control: called with (head, header) of any other frame but chunks.

    Attributes:
        whole: kinds of messages that `on_whole` takes; none unless told.

    A `DecodeError` from `received` is final: the stream cannot be read any further.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        on_open: Callable[[Head, tuple[int, ...], bytes], Incoming | None],
        on_complete: Callable[[Incoming], None],
        on_whole: Callable[[Kind, int, bytes, bytes], None],
        on_control: Callable[[Head, bytes], None],
    ) -> None:
        self.limits = limits
        self.whole: Collection[Kind] = ()
        self._on_open = on_open
        self._on_complete = on_complete
        self._on_whole = on_whole
        self._on_control = on_control
        self._partial: dict[int, Incoming] = {}  # by call: a session carries calls one way and replies the other
        self._memory = bytearray(_SCRATCH_BYTES)
        self._scratch = memoryview(self._memory)
        self._start = 0  # unread bytes of the scratch buffer: from here
        self._end = 0  # to here
        self._head: Head | None = None  # a head whose sizes and header are still coming
        self._needed = HEAD_BYTES  # bytes of the scratch buffer that make the next step possible
        self._sink: Incoming | None = None  # whom the current body belongs to; None: skip it
        self._body = 0  # bytes of the current body still to come
        self._direct: Incoming | None = None  # whose memory `buffer` returned
        self._stopped = False

    @property
    def mid_frame(self) -> bool:
        """Whether the stream stands inside a frame or a message: an end of the stream here is a broken one."""
        return bool(self._end - self._start or self._head or self._body or self._partial)

    def stop(self) -> None:
        """Reads nothing any more and lets go of half-received messages; may be called from a callback."""
        self._stopped = True
        self._partial.clear()
        self._sink = None

    def drop(self, call: int) -> None:
        """Forgets a message that is being received; what is still coming of it is skipped."""
        dropped = self._partial.pop(call, None)
        if dropped is not None and dropped is self._sink:
            self._sink = None

    def buffer(self, _: int = -1) -> memoryview:
        """Where the next bytes go. Valid until `received`; never empty. (The argument is `asyncio`'s size hint.)"""
        self._direct = None
        if self._stopped:
            self._start = self._end = 0
            return self._scratch
        if self._start == self._end and not self._body and self._scratch.nbytes == _SCRATCH_BYTES:
            self._start = self._end = 0
            return self._scratch  # as a rule
        if self._body and self._sink is not None and self._start == self._end:
            room = self._sink.room()
            if min(room.nbytes, self._body) >= _DIRECT_BYTES:
                self._direct = self._sink
                return room[: self._body]
        self._make_room()
        return self._scratch[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes were written to the start of `buffer()`."""
        if self._direct is not None:
            self._direct.filled(count)
            self._body -= count
            self._end_of_body()
            return
        self._end += count
        while not self._stopped and (self._start < self._end or self._head is not None):
            if not self._take_whole() and not self._step():
                return

    def _make_room(self) -> None:
        """Moves what is unread to the front where the next step would not fit behind it."""
        unread = self._end - self._start
        if not unread:
            self._start = self._end = 0
            if len(self._memory) > _SCRATCH_BYTES and self._needed <= _SCRATCH_BYTES:
                self._memory = bytearray(_SCRATCH_BYTES)  # a large header came and went
                self._scratch = memoryview(self._memory)
            return
        if self._start + self._needed <= len(self._memory) and self._end < len(self._memory):
            return
        if self._needed > len(self._memory) and unread == len(self._memory):
            # Grows with what came, not by what a head promises.
            larger = bytearray(min(self._needed, 2 * len(self._memory)))
            larger[:unread] = self._scratch
            self._memory, self._scratch = larger, memoryview(larger)
        else:
            self._memory[:unread] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, unread

    def _take_whole(self) -> bool:
        """Takes a message that lies whole in the scratch buffer; there may be many of them in it.

        What it leaves, for whatever reason, `_step` reads, and refuses where it has to be refused.
        """
        start = self._start
        if self._end - start < HEAD_BYTES or self._head is not None or self._body:
            return False
        magic, version, kind, call, header, buffers, body, payload, meta = _HEAD.unpack_from(self._memory, start)
        if kind not in self.whole or magic != _MAGIC or version != PROTOCOL_VERSION or call in self._partial:
            return False
        start += HEAD_BYTES
        middle = start + header
        end = middle + meta
        if buffers or body != meta or payload != meta or end > self._end or end - start > _WHOLE_BYTES:
            return False
        if header > self.limits.header or payload > self.limits.payload:
            return False
        self._start = end
        data = self._scratch  # used again: what is handed on is a copy
        self._on_whole(_KINDS[kind], call, bytes(data[start:middle]), bytes(data[middle:end]))
        return True

    def _step(self) -> bool:
        """Takes one thing off the scratch buffer; False if it holds too little for that."""
        if self._body:
            return self._take_body()
        if self._end - self._start < self._needed:
            return False
        if self._head is None:
            head = _unpack(self._scratch[self._start : self._end], self.limits)
            self._start += HEAD_BYTES
            self._head = head
            self._needed = 8 * head.buffers + head.header
            return True
        head, self._head = self._head, None
        at = self._start
        sizes: tuple[int, ...] = ()
        if head.buffers:
            sizes = struct.unpack_from(f"!{head.buffers}Q", self._scratch, at)
            at += 8 * head.buffers
        header = bytes(self._scratch[at : at + head.header])
        self._start = at + head.header
        self._needed = HEAD_BYTES
        self._dispatch(head, sizes, header)
        return True

    def _dispatch(self, head: Head, sizes: tuple[int, ...], header: bytes) -> None:
        if head.kind in _OPENING:
            carried = head.meta + sum(size for size in sizes if not size & LENT)
            if carried != head.payload:
                raise DecodeError(f"sizes that make {carried} bytes in a payload of {head.payload}")
            if head.call in self._partial:
                raise DecodeError(f"call {head.call} is opened twice")
            incoming = self._on_open(head, sizes, header)
            if incoming is not None and not self._stopped:
                self._partial[head.call] = incoming
            self._sink, self._body = incoming, head.body
            self._end_of_body()
        elif head.kind is Kind.CHUNK:
            sink = self._partial.get(head.call)
            if sink is not None and head.body > sink.missing:
                raise DecodeError(f"a chunk of {head.body} bytes where {sink.missing} are missing")
            self._sink, self._body = sink, head.body
        else:
            self._on_control(head, header)

    def _take_body(self) -> bool:
        count = min(self._end - self._start, self._body)
        if not count:
            return False
        if self._sink is not None:
            self._sink.take(self._scratch[self._start : self._start + count])
        self._start += count
        self._body -= count
        self._end_of_body()
        return True

    def _end_of_body(self) -> None:
        sink = self._sink
        if self._body == 0:
            self._sink = None
        if sink is not None and sink.missing == 0 and not self._stopped:
            self._partial.pop(sink.head.call, None)
            self._on_complete(sink)
