"""The queue of frames that a session has to send.

Small frames go first, in order. Large payloads are cut into chunks, and a few values take turns, so a value of
gigabytes delays a small message by one chunk. Nothing is copied: chunks are views of the caller's memory.

The event loop calls `pause` and `resume` as the buffer of the socket fills and empties. So a peer that reads slowly
costs this process one chunk of buffer, besides the values that wait.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from taskgraph.protocol.messages import Encoded
from taskgraph.transport.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    LENT,
    MAGIC,
    MAX_LENT,
    PROTOCOL_VERSION,
    FrameKind,
    Head,
    add_digests,
    pack_head,
)

__all__ = ["Outbox"]

_pack_size: Final = struct.Struct("!Q").pack
#: Large values that take turns; others wait. Few, since half a value is of no use to the receiver.
_MAX_IN_TURN = 4
#: With more messages than this the outbox is full, until half of them are sent.
_FULL = 1 << 12
#: Bytes written before other work of the event loop runs, if the socket takes them all at once.
_TURN_BYTES = 8 << 20


class _LargePayload:
    """A payload that is sent in chunks."""

    __slots__ = ("_at", "_offset", "_parts", "call", "left", "opening")

    def __init__(self, call: int, opening: bytes, parts: Sequence[memoryview], size_bytes: int) -> None:
        self.call = call
        self.opening: bytes | None = opening
        self.left = size_bytes
        self._parts = parts
        self._at = 0
        self._offset = 0

    def take_chunk(self) -> tuple[int, list[memoryview]]:
        """Takes the next chunk; returns its size, and its pieces of memory."""
        size = room = min(CHUNK_BYTES, self.left)
        pieces = []
        while room:
            part = self._parts[self._at]
            piece = part[self._offset : self._offset + room]
            if piece.nbytes:
                pieces.append(piece)
                room -= piece.nbytes
            self._offset += piece.nbytes
            if self._offset == part.nbytes:
                self._at += 1
                self._offset = 0
        self.left -= size
        return size, pieces


class Outbox:
    """The queue between callers and a socket.

    Args:
        write: takes bytes, or a view of memory that will not change; does not block.
        call_soon: runs a callback after other ready work of the event loop.
        lend: (call, buffer) -> the reference to a lent buffer, or b"" for a buffer that has to be sent. Called for the
            buffers of a value in order.
        on_backpressure: called with True when the outbox is full, and with False when it has room again.

    Attributes:
        write: may be replaced between two frames.
        with_digests: frame heads contain digests. Without them if buffers may be lent: a unix socket damages nothing.
    """

    def __init__(
        self,
        write: Callable[[bytes | memoryview], None],
        call_soon: Callable[[Callable[[], None]], object],
        lend: Callable[[int, memoryview], bytes],
        on_backpressure: Callable[[bool], object],
    ) -> None:
        self.write = write
        self.with_digests = False
        self._call_soon = call_soon
        self._lend = lend
        self._on_backpressure = on_backpressure
        self._is_full = False
        self._small: deque[tuple[int, bytes]] = deque()
        self._in_turn: deque[_LargePayload] = deque()
        self._waiting: deque[_LargePayload] = deque()
        self._paused = False
        self._scheduled = False
        self._closed = False

    @property
    def idle(self) -> bool:
        """True if no frame waits to be written."""
        return not (self._small or self._in_turn or self._waiting)

    def send(self, kind: FrameKind, call: int = 0, header: bytes = b"", value: Encoded | None = None) -> None:
        """Sends a frame, with a value if one is given, or queues it while the socket is full."""
        if self._closed:
            return
        if value is None:
            frame = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, len(header), 0, 0, 0, 0) + header
        else:
            meta = value.meta
            size = len(meta)
            if value.buffers or size > INLINE_BYTES:
                self._send_value(kind, call, header, value)
                return
            head = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, len(header), 0, size, size, size)
            frame = head + header + meta
        if self.with_digests:
            frame = add_digests(frame, len(header))
        if self._paused or self._small:
            self._send_small(call, frame)
        else:
            write = self.write  # Python 3.11 takes twice as long to call an attribute
            write(frame)

    def send_several(self, kind: FrameKind, first: int, header: bytes) -> None:
        """Sends a frame that makes several calls. `drop` of the first call does not remove it."""
        if not self._closed:
            frame = pack_head(MAGIC, PROTOCOL_VERSION, kind, first, len(header), 0, 0, 0, 0) + header
            self._send_small(0, add_digests(frame, len(header)) if self.with_digests else frame)

    def _send_small(self, call: int, frame: bytes) -> None:
        """Writes a frame in one piece now, or queues it before large payloads."""
        if self._paused or self._small:
            self._small.append((call, frame))
            self._pump()
        else:
            self.write(frame)

    def _send_value(self, kind: FrameKind, call: int, header: bytes, value: Encoded) -> None:
        """Sends a frame with a value whose buffers are lent, or follow in chunks."""
        buffers, meta = value.buffers, len(value.meta)
        if len(buffers) == 1 and meta <= INLINE_BYTES and type(value) is Encoded:  # mostly one large array
            buffer = buffers[0]
            if reference := self._lend(call, buffer):
                size = len(reference) + len(header)
                head = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, size, 1, meta, meta, meta)
                self._send_small(call, head + _pack_size(buffer.nbytes | LENT) + reference + header + value.meta)
                return
        sizes: list[int] = []
        carried: list[memoryview] = []
        references: list[bytes] = []
        payload = meta
        for buffer in buffers:
            size = buffer.nbytes
            reference = self._lend(call, buffer) if len(references) < MAX_LENT else b""
            if reference:
                references.append(reference)
                sizes.append(size | LENT)
            else:
                sizes.append(size)
                carried.append(buffer)
                payload += size
        if references:
            header = b"".join(references) + header
        inline = payload if payload <= INLINE_BYTES else 0
        count = len(sizes)
        head = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, len(header), count, inline, payload, meta)
        opening = b"".join((head, struct.pack(f"!{count}Q", *sizes), header))
        if self.with_digests:
            opening = add_digests(opening, 8 * count + len(header))
        if inline or not payload:
            self._send_small(call, b"".join((opening, value.meta, *carried)))
        else:
            parts = [memoryview(value.meta), *carried]
            self._waiting.append(_LargePayload(call, opening, parts, payload))
            self._pump()

    def drop(self, call: int) -> bool:
        """Drops what is still queued of the message of a call. Returns True if the peer got, or will get, a part of the
        message.
        """
        if self.idle:
            return True
        before = len(self._small) + len(self._waiting)
        if self._small:
            self._small = deque(entry for entry in self._small if entry[0] != call)
        if self._waiting:
            self._waiting = deque(large for large in self._waiting if large.call != call)
        unseen = len(self._small) + len(self._waiting) < before
        for large in self._in_turn:
            if large.call == call:
                unseen = large.opening is not None
                self._in_turn.remove(large)
                break
        return not unseen

    def pause(self) -> None:
        """Stops writing, since the buffer of the socket is full."""
        self._paused = True

    def resume(self) -> None:
        """Writes again, since the buffer of the socket has room."""
        self._paused = False
        self._pump()

    def close(self) -> None:
        """Drops all frames, and ignores later ones."""
        self._closed = True
        self._small.clear()
        self._in_turn.clear()
        self._waiting.clear()

    def _pump(self) -> None:
        """Writes frames while the socket has room, then reports backpressure."""
        budget = _TURN_BYTES
        while not self._paused and (self._small or self._in_turn or self._waiting):
            if budget <= 0:
                if not self._scheduled:
                    self._scheduled = True
                    self._call_soon(self._continue)
                break
            for data in self._take_pieces():
                budget -= len(data)
                self.write(data)
        full = len(self._small) + len(self._waiting) > (_FULL // 2 if self._is_full else _FULL)
        if full != self._is_full:
            self._is_full = full
            self._on_backpressure(full)

    def _continue(self) -> None:
        """Goes on to write in a later turn of the event loop."""
        self._scheduled = False
        self._pump()

    def _take_pieces(self) -> Iterator[bytes | memoryview]:
        """Takes the next frame, or chunk with its head, out of the queue, and yields its pieces."""
        if self._small:
            yield self._small.popleft()[1]
            return
        while self._waiting and len(self._in_turn) < _MAX_IN_TURN:
            self._in_turn.append(self._waiting.popleft())
        large = self._in_turn.popleft()
        if large.opening is not None:
            yield large.opening
            large.opening = None
        size, pieces = large.take_chunk()
        yield Head(FrameKind.CHUNK, large.call, body=size).pack()
        yield from pieces
        if large.left:
            self._in_turn.append(large)
