"""Large values between processes of one host: lent where they lie, given back when nobody reads them any more.

What a message carries of a buffer that is lent is a `Reference`: where to open the memory, and a number, the *lease*.
Who borrows gives each lease back exactly once, when the last view of it is garbage. Until then the lender keeps the
block, so that its segment cannot take another value. A session that ends with leases open spoils their blocks: the
other side may read them for as long as it lives, and nobody will ever write there again. What is borrowed can be lent
on: the borrower keeps it for its own borrower, and gives it back, as spoiled where it is, when that one did.
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
from taskgraph.transport.mappings import CannotBorrow, Loan, Mappings, Reference
from taskgraph.transport.regions import Region
from taskgraph.transport.segments import LEAST_BYTES

__all__ = ["Borrowing", "Lending"]

_new: Final = tuple.__new__
"""What makes a `Reference`, whose own constructor is Python code."""

_MAX_LEASES: Final = 1 << 16
"""Leases of one session that are open at a time; values are sent beyond that."""
_MAX_SIZE: Final = 1 << 62
_PAUSE_S: Final = 5.0
"""Nothing is lent for this long to a peer that could not open it for want of something it may have again."""
_REFERENCE: Final = struct.Struct("!QQQQQI")
_REFERENCE_BYTES: Final = _REFERENCE.size
_pack_reference: Final = _REFERENCE.pack
_read_reference: Final = _REFERENCE.unpack_from
_this_thread: Final = threading.get_ident
_LEASE: Final = struct.Struct("!Q")
_SPOILED: Final = 1 << 63
_TOGETHER: Final = 4
"""So many leases are worth a message, where it does not wake the lender by itself."""
_LARGE_BYTES: Final = 8 << 20
"""Of that much nothing waits: its memory takes other values."""
_LATE_S: Final = 0.02
"""Nor longer than this, or twice as long where some were given back meanwhile: some epochs of such values."""


class Lending:
    """What one side of a session lent to the other.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: float | None = None  # nothing is lent before then; None: never
        self._lent: dict[int, tuple[Block, int]] = {}  # by lease: what, and with the message of which call
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    def start(self) -> None:
        """The other side is a process of this host."""
        self._until = 0.0

    def stop(self, *, for_good: bool) -> None:
        """The other side could not open what was lent."""
        self._until = None if for_good else self._now() + _PAUSE_S

    def lend(self, call: int, buffer: memoryview) -> bytes:
        """The reference to a buffer that is lent with the message of that call; nothing where it is to be sent."""
        until, size = self._until, buffer.nbytes
        if until is None or size < LEAST_BYTES or (until and self._now() < until):
            return b""
        block = block_behind(buffer)
        if block is None:
            return b""
        origin: Any = block.origin  # a pool's, or of a loan
        region: Region | None = origin.region
        lent = self._lent
        if region is None or region.fd < 0 or len(lent) >= _MAX_LEASES:
            return b""
        offset = origin.offset if size == block.nbytes and buffer.c_contiguous else _offset(buffer, region)
        self._last = lease = self._last + 1
        lent[lease] = (block, call)
        return _pack_reference(lease, region.dev, region.ino, region.size, offset, region.fd)

    def take_back(self, call: int) -> None:
        """Nothing of that call's message was sent. (Few are taken back: nothing is kept for it.)"""
        for lease in [lease for lease, (_, of) in self._lent.items() if of == call]:
            del self._lent[lease]

    def returned(self, data: bytes) -> None:
        """The other side gave leases back. Raises DecodeError where it has none of that number."""
        if len(data) % _LEASE.size:
            raise DecodeError(f"leases in {len(data)} bytes")
        for (number,) in _LEASE.iter_unpack(data):
            entry = self._lent.pop(number & ~_SPOILED, None)
            if entry is None:
                raise DecodeError(f"it gives back lease {number & ~_SPOILED}, which it does not have")
            if number & _SPOILED:
                _spoil(entry[0])

    def broken(self) -> None:
        """The session is over: what the other side did not give back it may read for ever."""
        self._until = None
        for block, _ in self._lent.values():
            _spoil(block)
        self._lent.clear()


def _offset(buffer: memoryview, region: Region) -> int:
    """Where a buffer begins in the memory that it lies in."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    offset = address - region.address
    if not 0 <= offset <= region.size - buffer.nbytes:
        raise AssertionError(f"a buffer at {offset} of memory of {region.size} bytes")
    return offset


def _spoil(block: Block) -> None:
    if block.origin is not None:
        block.origin.spoil()


class Borrowing:
    """What one side of a session borrowed from the other.

    Args:
        send: sends leases back; called on the event loop.
        several: there are so many to be given back that they are worth a message, if only something else wakes the
            lender at the same time; `flush` is to be called then.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None], several: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._send = send
        self._several = several
        self._pid = 0
        self._mappings: Mappings | None = None
        self._thread = threading.get_ident()
        self._back: deque[int] = deque()
        self._back_bytes = 0  # about: threads may count at the same time
        self._asked = False  # to flush as soon as the loop comes to it
        self._flushed = False  # since the timer was set
        self._late: asyncio.TimerHandle | None = None  # to flush after a while
        self._closed = False

    def start(self, pid: int, mappings: Mappings) -> None:
        """The other side is process `pid` of this host."""
        self._pid = pid
        self._mappings = mappings

    def read(self, header: bytes, lengths: Sequence[int]) -> tuple[list[Reference], bytes]:
        """The references in front of a header, and the header.

        Raises:
            DecodeError: they do not describe pieces of memory.
        """
        count = len(lengths)
        if count > MAX_LENT:
            raise DecodeError(f"a value with {count} references; the limit is {MAX_LENT}")
        rest = count * _REFERENCE_BYTES
        if len(header) < rest:
            raise DecodeError(f"{count} references in a header of {len(header)} bytes")
        if count == 1:  # as a rule
            return [self._reference(_read_reference(header), lengths[0])], header[rest:]
        told = zip(_REFERENCE.iter_unpack(header[:rest]), lengths, strict=True)
        return [self._reference(one, length) for one, length in told], header[rest:]

    def _reference(self, told: tuple[int, ...], length: int) -> Reference:
        lease, _, _, size, offset, _ = told
        if not 0 < lease < _SPOILED:  # in any order: a large message begins after small ones that were sent later
            raise DecodeError(f"lease {lease}")
        if not 0 < length <= size <= _MAX_SIZE or offset > size - length:
            raise DecodeError(f"a reference to {length} bytes at {offset} of {size}")
        return _new(Reference, (*told, length))

    def take(self, references: Sequence[Reference]) -> tuple[memoryview, ...]:
        """What they refer to, read-only. Raises CannotBorrow; then all of them are given back."""
        buffers: list[memoryview] = []
        for at, reference in enumerate(references):
            try:
                if self._mappings is None:  # it may see us, and we not it
                    raise CannotBorrow("the process at the other end is not one that can be seen here", for_good=True)
                buffers.append(self._mappings.borrow(self._pid, reference, self.give_back).data)
            except CannotBorrow:
                buffers.clear()
                self.refuse(references[at:])
                raise
        return tuple(buffers)

    def refuse(self, references: Sequence[Reference]) -> None:
        """Gives back what was never looked at: the lender sends it in another way."""
        self._back.extend(reference.lease for reference in references)
        self._flush_soon()

    def give_back(self, loan: Loan) -> None:
        """Called by whatever thread found the garbage, at any time: it only notes it and wakes the loop."""
        loan.loans.discard(loan)
        self._back.append(loan.lease | _SPOILED if loan.spoiled else loan.lease)
        self._back_bytes += loan.length
        if self._asked or self._closed:
            return
        if _this_thread() != self._thread:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self.flush)
        elif self._back_bytes >= _LARGE_BYTES:
            if not self._loop.is_closed():
                self._flush_soon()
        elif self._late is None:
            if not self._loop.is_closed():
                self._flushed = False
                self._late = self._loop.call_later(_LATE_S, self._flush_late)
        elif len(self._back) == _TOGETHER:
            self._several()

    def _flush_soon(self) -> None:
        self._asked = True
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Gives back now what is to be given back."""
        self._asked, self._flushed, self._back_bytes = False, True, 0
        leases = []
        while self._back:
            leases.append(_LEASE.pack(self._back.popleft()))
        if leases:
            self._send(b"".join(leases))

    def _flush_late(self) -> None:
        """A timer is left alone by those who give back before it ends: what came since then waits for another one."""
        self._late = None
        if not self._flushed:
            self.flush()
        elif self._back:
            self._flushed = False
            self._late = self._loop.call_later(_LATE_S, self._flush_late)

    def close(self) -> None:
        """The session is over: there is nobody to give anything back to."""
        self._closed = True
        if self._late is not None:
            self._late.cancel()
            self._late = None
