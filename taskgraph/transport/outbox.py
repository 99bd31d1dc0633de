"""What a session has still to write, in an order that is fair to small messages.

Small frames go first, in order. Large payloads are cut into chunks, a few values in turn, so that a value of
gigabytes delays a small message by one chunk. Nothing is copied: chunks are views of the caller's memory.

Of a value that is still being copied from a device (`EncodedInPart`) the chunks go as soon as they are there, whole;
what waits for its next one waits aside, and others take its turn.

The outbox hands over bytes only while the socket's own buffer has room (`pause` and `resume` come from the event
loop): a peer that reads slowly costs this process one chunk of buffer, besides the values its callers hold anyway.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from taskgraph.device.staging import EncodedInPart, HostCopy
from taskgraph.protocol.messages import Encoded
from taskgraph.transport.frames import (
    CHUNK_BYTES,
    INLINE_BYTES,
    LENT,
    MAGIC,
    MAX_LENT,
    PROTOCOL_VERSION,
    Head,
    Kind,
    pack_head,
    seal,
)

__all__ = ["Outbox"]

_pack_size: Final = struct.Struct("!Q").pack
#: Large values that are sent in turn; the others wait. Few, since what is half received is of no use to anybody.
_IN_TURN = 4
#: Messages that wait for a peer to read. With more of them it is crowded, until half of them are gone.
_CROWDED = 1 << 12
#: What is written before other work of the event loop gets its chance, if the socket takes everything at once.
_TURN_BYTES = 8 << 20


class _Large:
    """A payload on its way, and how far it is."""

    __slots__ = ("_at", "_offset", "_parts", "call", "copies", "left", "opening")

    def __init__(
        self,
        call: int,
        opening: bytes,
        parts: Sequence[memoryview],
        size_bytes: int,
        copies: Sequence[HostCopy | None] | None = None,
    ) -> None:
        self.call = call
        self.opening: bytes | None = opening
        self.left = size_bytes
        self.copies = copies  # what fills each part; None where nothing is to be waited for
        self._parts = parts
        self._at = 0
        self._offset = 0

    def awaited(self) -> tuple[HostCopy, int] | None:
        """The copy that the next chunk waits for, and how much of it was there; None: the chunk is whole."""
        assert self.copies is not None
        missing, offset = min(CHUNK_BYTES, self.left), self._offset
        at = self._at
        while missing > 0:
            copy, size = self.copies[at], self._parts[at].nbytes
            ready = size if copy is None else copy.ready
            missing -= ready - offset
            if missing > 0 and copy is not None and ready < size:
                return copy, ready
            at, offset = at + 1, 0
        return None

    @property
    def error(self) -> Exception | None:
        """What ended a copy that it waits for."""
        errors = (copy.error for copy in self.copies or () if copy is not None)
        return next((error for error in errors if error is not None), None)

    def chunk(self) -> tuple[int, list[memoryview]]:
        """The next chunk: its size, and the pieces of memory it consists of."""
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
        write: takes bytes or a view of memory that will not change; does not block.
        soon: runs a callback after other ready work of the event loop.
        lend: (call, buffer) -> what stands in front of the header for a buffer that does not travel; nothing where it
            does. Asked for each buffer of a value, in their order.
        wake: has a callback run on the event loop; called in any thread.
        failed: (call, seen, error): what was queued of that call cannot be read to its end, and nothing more of it is
            sent; `seen`: the peer has some of it.
        crowded: called with whether more messages wait than should, when that changes.

    Attributes:
        write: may be replaced between two frames.
        sealed: frames have digests in their heads. Where something is lent, nothing travels that could be damaged.
    """

    def __init__(
        self,
        write: Callable[[bytes | memoryview], None],
        soon: Callable[[Callable[[], None]], object],
        lend: Callable[[int, memoryview], bytes],
        wake: Callable[[Callable[[], object]], object],
        failed: Callable[[int, bool, Exception], object],
        crowded: Callable[[bool], object],
    ) -> None:
        self.write = write
        self.sealed = False
        self._soon = soon
        self._lend = lend
        self._wake = wake
        self._failed = failed
        self._crowded = crowded
        self._is_crowded = False
        self._small: deque[tuple[int, bytes]] = deque()
        self._turn: deque[_Large] = deque()
        self._waiting: deque[_Large] = deque()
        self._aside: list[_Large] = []  # their next chunk is not there yet
        self._paused = False
        self._scheduled = False
        self._closed = False

    @property
    def idle(self) -> bool:
        return not (self._small or self._turn or self._waiting or self._aside)

    def send(self, kind: Kind, call: int = 0, header: bytes = b"", value: Encoded | None = None) -> None:
        """Queues one frame, or one message with its value; what is small goes at once where it can."""
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
        if self.sealed:
            frame = seal(frame, len(header))
        if self._paused or self._small:
            self._send_small(call, frame)
        else:
            write = self.write  # for Python 3.11, a call of an attribute is twice the way
            write(frame)  # as a rule

    def send_several(self, kind: Kind, first: int, header: bytes) -> None:
        """Queues one frame that stands for several calls: `drop` of the first of them leaves it for the others."""
        if not self._closed:
            frame = pack_head(MAGIC, PROTOCOL_VERSION, kind, first, len(header), 0, 0, 0, 0) + header
            self._send_small(0, seal(frame, len(header)) if self.sealed else frame)

    def _send_small(self, call: int, frame: bytes) -> None:
        if self._paused or self._small:
            self._small.append((call, frame))
            self._pump()
        else:
            self.write(frame)

    def _send_value(self, kind: Kind, call: int, header: bytes, value: Encoded) -> None:
        """The same with a value that is lent, or may have to wait."""
        buffers, meta = value.buffers, len(value.meta)
        if len(buffers) == 1 and meta <= INLINE_BYTES and type(value) is Encoded:  # a large array, as a rule
            buffer = buffers[0]
            if reference := self._lend(call, buffer):
                size = len(reference) + len(header)
                head = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, size, 1, meta, meta, meta)
                self._send_small(call, head + _pack_size(buffer.nbytes | LENT) + reference + header + value.meta)
                return
        copies: Sequence[HostCopy | None] | None = None
        if type(value) is EncodedInPart:  # nothing is lent of it: who borrows reads at once
            copies = (None, *value.copies)
        sizes: list[int] = []
        carried: list[memoryview] = []
        references: list[bytes] = []
        payload = meta
        for buffer in buffers:
            size = buffer.nbytes
            reference = self._lend(call, buffer) if copies is None and len(references) < MAX_LENT else b""
            if reference:
                references.append(reference)
                sizes.append(size | LENT)
            else:
                sizes.append(size)
                carried.append(buffer)
                payload += size
        if references:
            header = b"".join(references) + header
        inline = payload if payload <= INLINE_BYTES and copies is None else 0
        count = len(sizes)
        head = pack_head(MAGIC, PROTOCOL_VERSION, kind, call, len(header), count, inline, payload, meta)
        opening = b"".join((head, struct.pack(f"!{count}Q", *sizes), header))
        if self.sealed:
            opening = seal(opening, 8 * count + len(header))
        if inline or not payload:
            self._send_small(call, b"".join((opening, value.meta, *carried)))
        else:
            parts = [memoryview(value.meta), *carried]
            self._waiting.append(_Large(call, opening, parts, payload, copies))
            self._pump()

    def drop(self, call: int) -> bool:
        """Sends nothing more of that call. Returns whether the peer has seen, or will see, some of it."""
        if self.idle:
            return True
        before = len(self._small) + len(self._waiting)
        if self._small:
            self._small = deque(entry for entry in self._small if entry[0] != call)
        if self._waiting:
            self._waiting = deque(large for large in self._waiting if large.call != call)
        unseen = len(self._small) + len(self._waiting) < before
        for begun in (self._turn, self._aside):
            for large in begun:
                if large.call == call:
                    unseen = large.opening is not None
                    begun.remove(large)
                    break
        return not unseen

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._pump()

    def close(self) -> None:
        """Drops everything; later sends are ignored."""
        self._closed = True
        self._small.clear()
        self._turn.clear()
        self._waiting.clear()
        self._aside.clear()

    def _pump(self) -> None:
        """Writes while the socket takes it, and looks how many messages wait for that."""
        budget = _TURN_BYTES
        while not self._paused and (self._small or self._turn or self._waiting):
            if budget <= 0:
                if not self._scheduled:
                    self._scheduled = True
                    self._soon(self._continue)
                break
            for data in self._next():
                budget -= len(data)
                self.write(data)
        crowded = len(self._small) + len(self._waiting) > (_CROWDED // 2 if self._is_crowded else _CROWDED)
        if crowded != self._is_crowded:
            self._is_crowded = crowded
            self._crowded(crowded)

    def _continue(self) -> None:
        self._scheduled = False
        self._pump()

    def _next(self) -> Iterator[bytes | memoryview]:
        """The pieces of the next frame. A frame is never cut."""
        if self._small:
            yield self._small.popleft()[1]
            return
        while self._waiting and len(self._turn) < _IN_TURN:
            self._turn.append(self._waiting.popleft())
        large = self._turn.popleft()
        if large.copies is not None and self._put_aside(large):
            return
        if large.opening is not None:
            yield large.opening
            large.opening = None
        size, pieces = large.chunk()
        yield Head(Kind.CHUNK, large.call, body=size).pack()
        yield from pieces
        if large.left:
            self._turn.append(large)

    def _put_aside(self, large: _Large) -> bool:
        """Sets a value aside whose next chunk is not there; it goes on where that is, or turns out not to come."""
        awaited = large.awaited()
        if awaited is None:
            return False
        self._aside.append(large)
        copy, ready = awaited
        go_on = partial(self._go_on, large)
        if copy.more(ready, partial(self._wake, go_on)):
            self._soon(go_on)  # by now
        return True

    def _go_on(self, large: _Large) -> None:
        if large not in self._aside:
            return  # dropped meanwhile
        self._aside.remove(large)
        error = large.error
        if error is not None:
            self._failed(large.call, large.opening is None, error)
        else:
            self._turn.append(large)
            self._pump()
