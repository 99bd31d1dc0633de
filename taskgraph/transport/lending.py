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
from taskgraph.transport.mappings import CannotBorrow, Loan, Mappings, Reference
from taskgraph.transport.regions import Region
from taskgraph.transport.segments import LEAST_BYTES

__all__ = ["MAX_LENT", "Borrowing", "Lending"]

_new: Final = tuple.__new__
"""What makes a `Reference`, whose own constructor is Python code."""

MAX_LENT: Final = 1024
"""Buffers of one message that are lent; further ones are sent."""
_MAX_LEASES: Final = 1 << 16
"""Leases of one session that are open at a time; values are sent beyond that."""
_MAX_SIZE: Final = 1 << 62
_PAUSE_S: Final = 5.0
"""Nothing is lent for this long to a peer that could not open it for want of something it may have again."""
_REFERENCE: Final = struct.Struct("!QQQQQI")
_REFERENCE_BYTES: Final = _REFERENCE.size
_LEASE: Final = struct.Struct("!Q")
_SPOILED: Final = 1 << 63
_TOGETHER: Final = 4
"""Leases that are given back in one message: each wakes the process of the lender up."""
_LARGE_BYTES: Final = 4 << 20
"""Of that much nothing waits: its memory takes other values."""
_LATE_S: Final = 0.02
"""Nor longer than this: some epochs of such values, so that as a rule so many come together."""


class Lending:
    """What one side of a session lent to the other.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: float | None = None  # nothing is lent before then; None: never
        self._lent: dict[int, tuple[Block, int]] = {}
        self._unseen: dict[int, range] = {}  # by call: leases, one behind the other, of which none was given back
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    @property
    def off(self) -> bool:
        """Whether nothing will be lent to the other side."""
        return self._until is None

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
        if region is None or region.fd < 0:
            return b""
        lent, unseen, lease = self._lent, self._unseen.get(call), self._last + 1
        if len(lent) >= _MAX_LEASES or (unseen is not None and len(unseen) >= MAX_LENT):
            return b""
        whole = size == block.nbytes and buffer.c_contiguous
        offset = origin.offset if whole else _offset(buffer, region)
        self._last = lease
        lent[lease] = (block, call)
        self._unseen[call] = range(lease if unseen is None else unseen.start, lease + 1)
        return _REFERENCE.pack(lease, region.dev, region.ino, region.size, offset, region.fd)

    def take_back(self, call: int) -> None:
        """The message of that call was never sent."""
        for lease in self._unseen.pop(call, ()):
            self._lent.pop(lease, None)

    def returned(self, data: bytes) -> None:
        """The other side gave leases back. Raises DecodeError where it has none of that number."""
        if len(data) % _LEASE.size:
            raise DecodeError(f"leases in {len(data)} bytes")
        for (number,) in _LEASE.iter_unpack(data):
            entry = self._lent.pop(number & ~_SPOILED, None)
            if entry is None:
                raise DecodeError(f"it gives back lease {number & ~_SPOILED}, which it does not have")
            block, call = entry
            self._unseen.pop(call, None)
            if number & _SPOILED:
                _spoil(block)

    def broken(self) -> None:
        """The session is over: what the other side did not give back it may read for ever."""
        self._until = None
        for block, _ in self._lent.values():
            _spoil(block)
        self._lent.clear()
        self._unseen.clear()


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
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._send = send
        self._pid = 0
        self._mappings: Mappings | None = None
        self._thread = threading.get_ident()
        self._last = 0
        self._back: deque[int] = deque()
        self._back_bytes = 0  # about: threads may count at the same time
        self._asked = False  # to flush as soon as the loop comes to it
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
        if len(lengths) > MAX_LENT:
            raise DecodeError(f"a value with {len(lengths)} references; the limit is {MAX_LENT}")
        rest = len(lengths) * _REFERENCE_BYTES
        if len(header) < rest:
            raise DecodeError(f"{len(lengths)} references in a header of {len(header)} bytes")
        found = []
        for length, told in zip(lengths, _REFERENCE.iter_unpack(header[:rest]), strict=True):
            lease, _, _, size, offset, _ = told
            if not self._last < lease < _SPOILED:
                raise DecodeError(f"lease {lease} after {self._last}")
            self._last = lease
            if not 0 < size <= _MAX_SIZE or not 0 < length <= size or offset > size - length:
                raise DecodeError(f"a reference to {length} bytes at {offset} of {size}")
            found.append(_new(Reference, (*told, length)))
        return found, header[rest:]

    def take(self, references: Sequence[Reference]) -> list[memoryview]:
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
        return buffers

    def refuse(self, references: Sequence[Reference]) -> None:
        """Gives back what was never looked at: the lender sends it in another way."""
        self._back.extend(reference.lease for reference in references)
        self._flush_soon()

    def give_back(self, loan: Loan) -> None:
        """Called by whatever thread found the garbage, at any time: it only notes it and wakes the loop."""
        loan.loans.discard(loan)
        self._back.append(loan.lease | _SPOILED if loan.spoiled else loan.lease)
        self._back_bytes += loan.length
        if self._asked or self._closed or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(self.flush)
        elif len(self._back) >= _TOGETHER or self._back_bytes >= _LARGE_BYTES:
            self._flush_soon()
        elif self._late is None:
            self._late = self._loop.call_later(_LATE_S, self._flush_late)

    def _flush_soon(self) -> None:
        self._asked = True
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Gives back now what is to be given back."""
        self._asked, self._back_bytes = False, 0
        leases = []
        while self._back:
            leases.append(_LEASE.pack(self._back.popleft()))
        if leases:
            self._send(b"".join(leases))

    def _flush_late(self) -> None:
        """Some of it may have waited for less: a timer is left alone by those who give back before it ends."""
        self._late = None
        self.flush()

    def close(self) -> None:
        """The session is over: there is nobody to give anything back to."""
        self._closed = True
        if self._late is not None:
            self._late.cancel()
            self._late = None
