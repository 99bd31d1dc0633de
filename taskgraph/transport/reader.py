"""Parsing frames from an untrusted stream of bytes, without I/O.

    state                  buffer holds              next step
    between frames         less than a head          wait for HEAD_BYTES
    between frames         a complete small message  take it at once (most messages)
    head read              sizes and header          `on_message_begin` or `on_control`
    in a body              a part of a payload       copy it to its place, until the body ends

The caller asks `buffer()` where to put the next bytes, then calls `parse_received(n)`. Large buffers are received where
they stay; everything else passes a small reusable buffer. Every size is checked before memory is allocated. A
`DecodeError` is final.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection

from taskgraph.errors import DecodeError
from taskgraph.transport.frames import (
    HEAD_BYTES,
    LENT,
    MAGIC,
    OPENING_KINDS,
    PROTOCOL_VERSION,
    FrameKind,
    Head,
    Limits,
    check_head,
    check_rest,
    unpack_head,
)
from taskgraph.transport.incoming import IncomingMessage

__all__ = ["FrameReader"]

_SCRATCH_BYTES = 192 << 10  # of the receive buffer of a session
_HELLO_BYTES = 8 << 10  # before the hello: strangers may make many connections
_UNREAD = bytearray(_HELLO_BYTES)  # receives all bytes after `stop`, in all sessions
_WHOLE_BYTES = _SCRATCH_BYTES  # the largest message that is taken at once
_BEGINNING, _BEGINS = struct.Struct("!2sBB"), struct.Struct("!I")  # magic, version and kind, as one number
_WHOLE_HEAD = struct.Struct("!IQIIIQQ")  # a head whose first field is that number
_read_size = struct.Struct("!Q").unpack_from
_DIRECT_BYTES = 32 << 10  # a smaller rest is copied, which is cheaper than one more read


class FrameReader:
    """Parses a stream of frames.

    Args:
        limits: the largest sizes; may be replaced between two frames.
        on_message_begin: called with the head of a CALL, TELL or REPLY, the sizes of its buffers and its header.
            Returns the `IncomingMessage` for the payload, or None to skip the payload. May raise DecodeError.
        on_complete: called with an `IncomingMessage` that has its whole payload.
        on_whole: called with (kind, call, sizes, header, meta, carried) of a frame that is a complete message, in place
            of `on_message_begin` and `on_complete`. The buffers of its value are either all lent, or consecutive in
            `carried`. May raise DecodeError.
        on_control: called with (head, header) of all other frames, except chunks.
        failed: called with an error in `parse_received`; None: `parse_received` raises it.

    Attributes:
        whole: kinds of frames for `on_whole`.
        checked: frames must have digests.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        on_message_begin: Callable[[Head, tuple[int, ...], bytes], IncomingMessage | None],
        on_complete: Callable[[IncomingMessage], None],
        on_whole: Callable[[FrameKind, int, tuple[int, ...], bytes, bytes, bytes], None],
        on_control: Callable[[Head, bytes], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self.limits = limits
        self.checked = False
        self._whole: dict[int, FrameKind] = {}
        self._on_message_begin = on_message_begin
        self._on_complete = on_complete
        self._on_whole = on_whole
        self._on_control = on_control
        self._failed = failed
        self._partial: dict[int, IncomingMessage] = {}  # by call: a session carries calls one way and replies the other
        self._memory = bytearray(self._usual_bytes)
        self._scratch = memoryview(self._memory)
        self._start = self._end = 0  # of the unread bytes in the scratch buffer
        self._head: Head | None = None  # its sizes and header are not complete
        self._packed = b""  # the bytes of that head
        self._needed = HEAD_BYTES  # bytes in the scratch buffer for the next step
        self._sink: IncomingMessage | None = None  # takes the current body; None: skip it
        self._body = 0  # missing bytes of the current body
        self._direct: IncomingMessage | None = None  # `buffer` returned memory of this message
        self._stopped = False

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._usual_bytes = _SCRATCH_BYTES if limits.payload else _HELLO_BYTES
        # A message up to this size is within all limits.
        self._whole_bytes = min(_WHOLE_BYTES, limits.header, limits.payload, 8 * limits.buffers)

    @property
    def whole(self) -> Collection[FrameKind]:
        return self._whole.values()

    @whole.setter
    def whole(self, kinds: Collection[FrameKind]) -> None:
        self._whole = {_BEGINS.unpack(_BEGINNING.pack(MAGIC, PROTOCOL_VERSION, kind))[0]: kind for kind in kinds}

    @property
    def mid_frame(self) -> bool:
        """True inside a frame or a message, where the stream must not end."""
        return bool(self._end - self._start or self._head or self._body or self._partial)

    @property
    def position(self) -> tuple[object, ...] | None:
        """The position inside a frame, which changes with each byte; None between two frames. Only compare it."""
        unread = self._end - self._start
        if self._stopped or not (unread or self._head or self._body):
            return None
        head = bytes(self._scratch[self._start : self._end][:HEAD_BYTES])
        sink = self._sink
        message = None if sink is None else (sink.head.call, sink.missing)
        return unread, self._body, head, self._head, message

    def stop(self) -> None:
        """Ignores all further bytes, and drops incomplete messages. May be called by a callback."""
        self._stopped = True
        self._partial.clear()
        self._sink = None
        # An ended session is a cycle of garbage, which may be collected much later.
        self._memory, self._scratch = _UNREAD, memoryview(_UNREAD)

    def drop(self, call: int) -> None:
        """Drops an incomplete message, and skips the rest of it."""
        dropped = self._partial.pop(call, None)
        if dropped is not None and dropped is self._sink:
            self._sink = None

    def buffer(self, _: int = -1) -> memoryview:
        """Returns the memory for the next bytes, never empty. (The argument is `asyncio`'s size hint.)"""
        self._direct = None
        if self._stopped:
            self._start = self._end = 0
            return self._scratch
        if self._start == self._end and not self._body and len(self._memory) == _SCRATCH_BYTES:
            self._start = self._end = 0
            return self._scratch
        if self._body and self._sink is not None and self._start == self._end:
            room = self._sink.room()
            if min(room.nbytes, self._body) >= _DIRECT_BYTES:
                self._direct = self._sink
                return room[: self._body]
        self._make_room()
        return self._scratch[self._end :]

    def parse_received(self, count: int) -> None:
        """Parses the stream after `count` bytes were written to the start of `buffer()`."""
        try:
            if self._direct is not None:
                self._direct.advance(count)
                self._body -= count
                self._after_body_bytes()
                return
            self._end += count
            while not self._stopped and (self._start < self._end or self._head is not None):
                start, stop, data = self._start, self._end, self._memory
                if stop - start >= HEAD_BYTES and self._head is None and not self._body:
                    if self.checked:
                        check_head(self._scratch[start : start + HEAD_BYTES])
                    # The fast path: a complete small message. All other frames, bad ones too, are left to `_step`.
                    begins, call, size, buffers, body, payload, meta = _WHOLE_HEAD.unpack_from(data, start)
                    kind = self._whole.get(begins)
                    begin = start + HEAD_BYTES + 8 * buffers
                    middle = begin + size
                    end = middle + payload
                    if (
                        kind is not None
                        and body == payload >= meta
                        and end - start <= self._whole_bytes
                        and call not in self._partial
                    ):
                        if end > stop:  # waiting for the rest is cheaper than taking pieces
                            self._needed = end - start
                            return
                        self._needed = HEAD_BYTES
                        if self.checked:
                            at = start + HEAD_BYTES
                            check_rest(self._scratch[start:at], self._scratch[at:middle])
                        if not buffers:
                            if payload == meta:
                                self._start = end  # the buffer is used again, so the message is copied
                                value, on_whole = bytes(self._scratch[middle:end]) if meta else b"", self._on_whole
                                on_whole(kind, call, (), bytes(data[begin:middle]), value, b"")
                                if end == stop:
                                    return
                                continue
                        else:
                            if buffers == 1:  # the common case
                                sizes = _read_size(data, begin - 8)
                                lent = sizes[0] >= LENT
                            else:
                                sizes = struct.unpack_from(f"!{buffers}Q", data, start + HEAD_BYTES)
                                lent = min(sizes) >= LENT  # all buffers are
                            if payload == (meta if lent else meta + sum(sizes)):
                                self._start = end
                                bulk = middle + meta
                                value = bytes(self._scratch[middle:bulk]) if meta else b""
                                carried = b"" if lent else bytes(self._scratch[bulk:end])
                                self._on_whole(kind, call, sizes, bytes(data[begin:middle]), value, carried)
                                continue
                if not self._step():
                    return
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def _make_room(self) -> None:
        """Moves unread bytes to the front if the next step needs room behind them."""
        unread = self._end - self._start
        if not unread:
            self._start = self._end = 0
            if len(self._memory) != self._usual_bytes and self._needed <= self._usual_bytes:
                self._memory = bytearray(self._usual_bytes)  # after a large header, or the hello
                self._scratch = memoryview(self._memory)
            return
        if self._start + self._needed <= len(self._memory) and self._end < len(self._memory):
            return
        if self._needed > len(self._memory) and unread == len(self._memory):
            # Grows with the received bytes, not with the sizes in a head.
            larger = bytearray(max(self._usual_bytes, min(self._needed, 2 * len(self._memory))))
            larger[:unread] = self._scratch
            self._memory, self._scratch = larger, memoryview(larger)
        else:
            self._memory[:unread] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, unread

    def _step(self) -> bool:
        """Parses one part of the scratch buffer: a head, the sizes and header behind a head, or a piece of a body.

        Returns False if more bytes are needed first: heads and headers are parsed whole, bodies as their bytes arrive.
        """
        if self._body:
            return self._take_body()
        if self._end - self._start < self._needed:
            return False
        if self._head is None:
            head = unpack_head(self._scratch[self._start : self._end], self.limits)
            if self.checked:  # `parse_received` checked the head
                self._packed = bytes(self._scratch[self._start : self._start + HEAD_BYTES])
            self._start += HEAD_BYTES
            self._head = head
            self._needed = 8 * head.buffers + head.header
            return True
        head, self._head = self._head, None
        at = self._start
        if self.checked:
            check_rest(memoryview(self._packed), self._scratch[at : at + self._needed])
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
        """Handles a frame whose sizes and header were read: opens a message, continues one with a chunk, or calls
        `on_control`.
        """
        if head.kind in OPENING_KINDS:
            carried = head.meta + sum(size for size in sizes if not size & LENT)
            if carried != head.payload:
                raise DecodeError(f"sizes that make {carried} bytes in a payload of {head.payload}")
            if head.call in self._partial:
                raise DecodeError(f"call {head.call} is opened twice")
            incoming = self._on_message_begin(head, sizes, header)
            if incoming is not None and not self._stopped:
                self._partial[head.call] = incoming
            self._sink, self._body = incoming, head.body
            self._after_body_bytes()
        elif head.kind is FrameKind.CHUNK:
            sink = self._partial.get(head.call)
            if sink is not None and head.body > sink.missing:
                raise DecodeError(f"a chunk of {head.body} bytes where {sink.missing} are missing")
            self._sink, self._body = sink, head.body
        else:
            self._on_control(head, header)

    def _take_body(self) -> bool:
        """Copies bytes of the body from the scratch buffer to their place. Returns False if there are none."""
        count = min(self._end - self._start, self._body)
        if not count:
            return False
        if self._sink is not None:
            self._sink.take(self._scratch[self._start : self._start + count])
        self._start += count
        self._body -= count
        self._after_body_bytes()
        return True

    def _after_body_bytes(self) -> None:
        """Called when bytes of a body have arrived: ends the body after its last byte, and passes the message to
        `on_complete` if no byte of it is missing.
        """
        sink = self._sink
        if self._body == 0:
            self._sink = None
        if sink is not None and sink.missing == 0 and not self._stopped:
            self._partial.pop(sink.head.call, None)
            self._on_complete(sink)
