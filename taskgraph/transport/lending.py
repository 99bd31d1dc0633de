"""Lending memory: large values between processes of one host, without a copy.

In place of a lent buffer, a message has a `MemoryReference`: how to open the memory, and the number of the *lease*.

    lease       next       by
    lent        returned   the last view in the borrower is garbage (exactly once)
    lent        spoiled    the session ends, or the lease is returned as spoiled

1. The lender keeps the block of an open lease, so its segment takes no other value.
2. A spoiled block is never written again: a process may read it as long as it lives.
3. Borrowed memory can be lent to a third process. It is returned after that process returned it, as spoiled if it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.transport.frames import MAX_LENT
from taskgraph.transport.mappings import CannotBorrow, Loan, Mappings, MemoryReference
from taskgraph.transport.regions import Region
from taskgraph.transport.segments import LEAST_BYTES

__all__ = ["Borrowing", "Lending"]

_new: Final = tuple.__new__
"""Makes a `MemoryReference`. Faster than its constructor, which is Python code."""

_MAX_LEASES: Final = 1 << 16
"""Open leases of a session; further values are sent."""
_MAX_SIZE: Final = 1 << 62
_PAUSE_S: Final = 5.0
"""Pause of lending after the peer lacked memory or descriptors."""
_REFERENCE: Final = struct.Struct("!QQQQQI")
_REFERENCE_BYTES: Final = _REFERENCE.size
_pack_reference: Final = _REFERENCE.pack
_read_reference: Final = _REFERENCE.unpack_from
_this_thread: Final = threading.get_ident
_LEASE: Final = struct.Struct("!Q")
_SPOILED: Final = 1 << 63
_BATCH: Final = 4
"""The number of leases that are returned together with the next reply."""
_LARGE_BYTES: Final = 8 << 20
"""Leases of this much memory are returned at once, since the memory is needed for other values."""
_RETURN_DELAY_S: Final = 0.02
"""Time until a lease is returned by itself; twice as long if other leases were returned meanwhile."""


class Lending:
    """The lender's side of a session: memory of this host that the peer reads without a copy.

    A lease is one lent block, until the peer returns it. It is not a lease of etcd.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begins_at: float | None = None  # lending begins then; None: never
        self._lent: dict[int, tuple[Block, int]] = {}  # lease -> block, and call of the message
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    def start(self) -> None:
        """Lets `lend` lend memory: the peer is a process of this host."""
        self._begins_at = 0.0

    def stop(self, *, for_good: bool) -> None:
        """Makes `lend` return b"" for a while, or with `for_good` always: the peer could not open the memory."""
        self._begins_at = None if for_good else self._now() + _PAUSE_S

    def lend(self, call: int, buffer: memoryview) -> bytes:
        """Lends a buffer with the message of a call. Returns its reference, or b"" if the buffer has to be sent."""
        until, size = self._begins_at, buffer.nbytes
        if until is None or size < LEAST_BYTES or (until and self._now() < until):
            return b""
        block = block_behind(buffer)
        if block is None:
            return b""
        origin: Any = block.origin  # a `SegmentUse` or a `Loan`
        region: Region | None = origin.region
        lent = self._lent
        if region is None or region.fd < 0 or len(lent) >= _MAX_LEASES:
            return b""
        offset = origin.offset if size == block.nbytes and buffer.c_contiguous else _offset(buffer, region)
        self._last = lease = self._last + 1
        lent[lease] = (block, call)
        return _pack_reference(lease, region.dev, region.ino, region.size, offset, region.fd)

    def take_back(self, call: int) -> None:
        """Ends the leases of the message of a call, which was not sent. Rare, so a search will do."""
        for lease in [lease for lease, (_, of) in self._lent.items() if of == call]:
            del self._lent[lease]

    def take_returned(self, data: bytes) -> None:
        """Takes back leases that the peer returned. Raises DecodeError if the peer does not have such a lease."""
        if len(data) % _LEASE.size:
            raise DecodeError(f"leases in {len(data)} bytes")
        for (number,) in _LEASE.iter_unpack(data):
            entry = self._lent.pop(number & ~_SPOILED, None)
            if entry is None:
                raise DecodeError(f"it returned lease {number & ~_SPOILED}, which it does not have")
            if number & _SPOILED:
                _spoil(entry[0])

    def spoil_all(self) -> None:
        """Spoils the memory of all open leases, and lends no more, since the session ended."""
        self._begins_at = None
        for block, _ in self._lent.values():
            _spoil(block)
        self._lent.clear()


def _offset(buffer: memoryview, region: Region) -> int:
    """Returns the offset of a buffer in its region."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    offset = address - region.address
    if not 0 <= offset <= region.size - buffer.nbytes:
        raise AssertionError(f"a buffer at {offset} of memory of {region.size} bytes")
    return offset


def _spoil(block: Block) -> None:
    """Marks the memory of a block as spoiled, so that it is never written again."""
    if block.origin is not None:
        block.origin.spoil()


class Borrowing:
    """The borrower's side: leases that the peer of a session gave it.

    Args:
        send: sends returned leases; called on the event loop.
        on_batch: called when `_BATCH` leases can be returned; the next message to the lender should call `flush`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None], on_batch: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._send = send
        self._on_batch = on_batch
        self._pid = 0
        self._mappings: Mappings | None = None
        self._thread = threading.get_ident()
        self._to_return: deque[int] = deque()
        self._to_return_bytes = 0  # roughly, since threads add to it
        self._flush_scheduled = False  # `flush` will run soon
        self._flushed = False  # `flush` ran since the timer was set
        self._return_timer: asyncio.TimerHandle | None = None  # flushes after a while
        self._closed = False

    def start(self, pid: int, mappings: Mappings) -> None:
        """Begins to borrow from process `pid` of this host."""
        self._pid = pid
        self._mappings = mappings

    def read(self, header: bytes, lengths: Sequence[int]) -> tuple[list[MemoryReference], bytes]:
        """Splits a header into the references in front of it, one for each of `lengths`, and the rest.

        Args:
            lengths: of the lent buffers, in bytes.

        Raises:
            DecodeError: there are too many references, or one is not valid.
        """
        count = len(lengths)
        if count > MAX_LENT:
            raise DecodeError(f"a value with {count} references; the limit is {MAX_LENT}")
        rest = count * _REFERENCE_BYTES
        if len(header) < rest:
            raise DecodeError(f"{count} references in a header of {len(header)} bytes")
        if count == 1:  # the common case
            return [self._make_reference(_read_reference(header), lengths[0])], header[rest:]
        pairs = zip(_REFERENCE.iter_unpack(header[:rest]), lengths, strict=True)
        return [self._make_reference(fields, length) for fields, length in pairs], header[rest:]

    def _make_reference(self, fields: tuple[int, ...], length: int) -> MemoryReference:
        """Checks the fields of a reference, and makes it. Raises DecodeError if a number is out of bounds."""
        lease, _, _, size, offset, _ = fields
        if not 0 < lease < _SPOILED:  # in any order, since small messages overtake large ones
            raise DecodeError(f"lease {lease}")
        if not 0 < length <= size <= _MAX_SIZE or offset > size - length:
            raise DecodeError(f"a reference to {length} bytes at {offset} of {size}")
        return _new(MemoryReference, (*fields, length))

    def take(self, references: Sequence[MemoryReference]) -> tuple[memoryview, ...]:
        """Maps the memory of references, read-only, and returns it. If one cannot be mapped, gives all leases back and
        raises CannotBorrow.
        """
        buffers: list[memoryview] = []
        for at, reference in enumerate(references):
            try:
                if self._mappings is None:  # the peer sees this process, but not the other way round
                    raise CannotBorrow("the process of the peer is not visible here", for_good=True)
                buffers.append(self._mappings.borrow(self._pid, reference, self.give_back).data)
            except CannotBorrow:
                buffers.clear()
                self.return_unopened(references[at:])
                raise
        return tuple(buffers)

    def return_unopened(self, references: Sequence[MemoryReference]) -> None:
        """Gives leases back to the lender without opening the memory."""
        self._to_return.extend(reference.lease for reference in references)
        self._flush_soon()

    def give_back(self, loan: Loan) -> None:
        """Ends a loan: notes its lease, and schedules `flush`. Called in any thread, in the middle of any code."""
        loan.loans.discard(loan)
        self._to_return.append(loan.lease | _SPOILED if loan.spoiled else loan.lease)
        self._to_return_bytes += loan.length
        if self._flush_scheduled or self._closed:
            return
        if _this_thread() != self._thread:
            self._flush_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self.flush)
        elif self._to_return_bytes >= _LARGE_BYTES:
            if not self._loop.is_closed():
                self._flush_soon()
        elif self._return_timer is None:
            if not self._loop.is_closed():
                self._flushed = False
                self._return_timer = self._loop.call_later(_RETURN_DELAY_S, self._flush_by_timer)
        elif len(self._to_return) == _BATCH:
            self._on_batch()

    def _flush_soon(self) -> None:
        """Calls `flush` from the event loop, soon."""
        self._flush_scheduled = True
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends the noted leases back to the lender now."""
        self._flush_scheduled, self._flushed, self._to_return_bytes = False, True, 0
        leases = []
        while self._to_return:
            leases.append(_LEASE.pack(self._to_return.popleft()))
        if leases:
            self._send(b"".join(leases))

    def _flush_by_timer(self) -> None:
        """Flushes, unless `flush` ran since the timer was set; then the timer starts again."""
        self._return_timer = None
        if not self._flushed:
            self.flush()
        elif self._to_return:
            self._flushed = False
            self._return_timer = self._loop.call_later(_RETURN_DELAY_S, self._flush_by_timer)

    def close(self) -> None:
        """Gives no more leases back, since the session ended."""
        self._closed = True
        if self._return_timer is not None:
            self._return_timer.cancel()
            self._return_timer = None
