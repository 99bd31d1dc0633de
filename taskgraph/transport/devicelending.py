"""Memory of a device between processes of one host: copied within the device, and given back at once.

What travels of a buffer that is lent is a *ticket*: by what to open the memory, and a number. Who gets it opens the
memory, keeps it open for the next ticket, and copies what it needs within the device, so that nothing that it has later
depends on another process's life; the digest shows whether the copy is what was sent, also where the lender was killed
meanwhile. Then it gives the ticket back. Until then the lender's memory stays as it is (`taskgraph.device.shared`).

Only replies lend: items are what is on a device. Lenders begin with it when they see that the other side is a process
of their host, and go by the host's memory from the first "no" on: another device, another container, none at all.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from taskgraph.device import shared
from taskgraph.device.api import HANDLE_BYTES, IDENTITY_BYTES, Array, Device, Stream
from taskgraph.device.buffers import DeviceBuffer, Private
from taskgraph.device.shared import LEAST_BYTES, Borrower, Segment, SharedMemory
from taskgraph.errors import DecodeError
from taskgraph.graph.arrays import SMALL_BYTES
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.graph.values import arrived
from taskgraph.protocol.messages import Encoded, EncodedOnDevice
from taskgraph.transport.mappings import CannotBorrow

__all__ = ["TICKET_BYTES", "DeviceBorrowing", "DeviceLending", "Ticket"]

log = logging.getLogger("taskgraph.transport")

_TICKET: Final = struct.Struct(f"!QQQQ{IDENTITY_BYTES}s{HANDLE_BYTES}s")
TICKET_BYTES: Final = _TICKET.size
"""Smaller than any other buffer of a value: so it is known by its size."""
_NUMBER: Final = struct.Struct("!Q")
_CLOSED: Final = 1 << 63
"""Set in the number of memory that was closed; other numbers that are sent are of tickets that are given back."""
_MAX_LENT: Final = 1 << 12
"""Tickets of one session that are out at a time."""
_MAX_OPEN: Final = 256
"""Pieces of memory that one session has open for further tickets: before there are more, those that waited longest are
closed. What is being read stays open, however many buffers a value has."""
_IDLE_S: Final = 15.0
"""How long memory stays open for another ticket."""


class Ticket(NamedTuple):
    """What one process tells another of a buffer on its device.

    Attributes:
        number: grows within a session.
        memory: the lender's number of the memory; size: how many bytes it has.
        length: of the buffer, which begins where the memory does.
        identity: of the device. handle: what the memory is opened by.
    """

    number: int
    memory: int
    size: int
    length: int
    identity: bytes
    handle: bytes

    @classmethod
    def read(cls, data: bytes | memoryview) -> Ticket:
        ticket = cls(*_TICKET.unpack(data))
        if not 0 < ticket.number < _CLOSED or not 0 < ticket.memory < _CLOSED:
            raise DecodeError(f"ticket {ticket.number} for memory {ticket.memory}")
        if not LEAST_BYTES <= ticket.length <= ticket.size < _CLOSED:  # so there are few of them in a value
            raise DecodeError(f"a ticket for {ticket.length} bytes of {ticket.size}")
        return ticket


class _Away:
    """Memory that the other side may have open."""

    __slots__ = ("open", "out", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.out = 0  # tickets, of which nothing was heard yet
        self.open = False  # by what was heard last


class DeviceLending:
    """What one side of a session lent to the other. On the event loop."""

    def __init__(self) -> None:
        self._pid = 0
        self._borrower: Borrower | None = None
        self._lent: dict[int, tuple[DeviceBuffer, int, _Away]] = {}  # by number of a ticket that is out: with its call
        self._away: dict[int, _Away] = {}  # by number of the memory
        self._unseen: dict[int, list[int]] = {}  # by call: tickets of which none was given back
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    def start(self, pid: int) -> None:
        """The other side is a process of this host."""
        self._pid = pid

    def stop(self) -> None:
        """The other side cannot open what was lent."""
        self._pid = 0

    def lendable(self, buffer: DeviceBuffer) -> bool:
        return self._pid != 0 and buffer.segment is not None and len(self._lent) < _MAX_LENT

    def lend(self, call: int, value: EncodedOnDevice) -> Encoded | None:
        """The value with tickets in place of what is on a device; None where not all of that is to be lent."""
        buffers: list[Any] = list(value.buffers)
        if not all(self.lendable(buffer) for buffer in buffers if isinstance(buffer, DeviceBuffer)):
            return None
        if self._borrower is None:
            borrower = Borrower(self._pid)
            if not borrower.seen:
                self.stop()
                return None
            self._borrower = borrower
        for at, buffer in enumerate(buffers):
            if isinstance(buffer, DeviceBuffer):
                assert buffer.segment is not None
                buffers[at] = memoryview(self._ticket(call, buffer, buffer.segment, self._borrower))
        return Encoded(value.meta, tuple(buffers), value.digest)

    def _ticket(self, call: int, buffer: DeviceBuffer, segment: Segment, borrower: Borrower) -> bytes:
        self._last = number = self._last + 1
        away = self._away.get(segment.number)
        if away is None:
            away = self._away[segment.number] = _Away(segment)
            segment.open_at.add(borrower)
        away.out += 1
        self._lent[number] = (buffer, call, away)
        self._unseen.setdefault(call, []).append(number)
        identity = buffer.device.identity
        return _TICKET.pack(number, segment.number, segment.size, buffer.nbytes, identity, segment.handle)

    def take_back(self, call: int) -> None:
        """The other side did not read the reply to that call, and will not."""
        for number in self._unseen.pop(call, ()):
            self._end(number)

    def returned(self, data: bytes) -> None:
        """What the other side did, in order: it gave a ticket back, for memory that is open now, or closed memory.

        Raises:
            DecodeError: it never had such a ticket.
        """
        if len(data) % _NUMBER.size:
            raise DecodeError(f"tickets in {len(data)} bytes")
        for (number,) in _NUMBER.iter_unpack(data):
            if number & _CLOSED:
                away = self._away.get(number ^ _CLOSED)
                if away is not None:
                    away.open = False
                    self._look(away)
            elif not 0 < number <= self._last:
                raise DecodeError(f"it gives back ticket {number}, which it never had")
            elif number in self._lent:
                _, call, away = self._lent[number]
                self._unseen.pop(call, None)
                away.open = True
                self._end(number)

    def _end(self, number: int) -> None:
        away = self._lent.pop(number)[2]
        away.out -= 1
        self._look(away)

    def _look(self, away: _Away) -> None:
        """Whether the other side is through with that memory: a ticket on its way to it would open it again."""
        if not away.out and not away.open:
            del self._away[away.segment.number]
            assert self._borrower is not None
            away.segment.open_at.discard(self._borrower)

    def broken(self) -> None:
        """The session is over: what the other side did not give back, or close, it may read for as long as it lives."""
        self.stop()
        if self._borrower is not None:
            for buffer, _, _ in self._lent.values():
                if buffer.segment is not None:
                    buffer.segment.read_at.add(self._borrower)
            self._borrower.left()
        self._lent.clear()
        self._unseen.clear()
        self._away.clear()


class _Opened:
    """Memory of the other side that is open."""

    __slots__ = ("array", "device", "idle_since", "readers", "size")

    def __init__(self, device: Device, array: Array, size: int) -> None:
        self.device = device
        self.array = array
        self.size = size
        self.readers = 0
        self.idle_since = 0.0


class DeviceBorrowing:
    """What one side of a session borrowed from the other. Its methods wait for the device: to be called in threads.

    Args:
        tell: called in threads, one after another: what to send, in that order.
        clock: seconds.

    Attributes:
        over: the session is: nothing more is opened. What is open, `close` closes, or the last `fetch` that reads it.
    """

    def __init__(self, tell: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._opened: dict[int, _Opened] = {}
        self._streams: dict[Device, Stream] = {}
        self.over = False

    def __len__(self) -> int:
        return len(self._opened)

    @staticmethod
    def tickets(value: Encoded, limit: int) -> list[Ticket]:
        """Those of a value, of which some buffers are tickets. Raises DecodeError."""
        found = [Ticket.read(buffer) for buffer in value.buffers if buffer.nbytes == TICKET_BYTES]
        size = value.size_bytes + sum(ticket.length for ticket in found)
        if not found or size > limit:
            raise DecodeError(f"{len(found)} tickets for a value of {size} bytes; the limit is {limit}")
        return found

    def fetch(self, value: Encoded, tickets: Sequence[Ticket]) -> EncodedOnDevice | None:
        """The value, in memory of this process's own; None where it is not what was sent.

        Args:
            tickets: those of the value, which are given back, whatever comes of it.

        Raises:
            CannotBorrow: there is no device here, it is another one, or cannot open what other processes have.
        """
        parts: list[memoryview | Private] = []
        held: list[_Opened] = []
        coming = iter(tickets)
        try:
            for buffer in value.buffers:
                if buffer.nbytes == TICKET_BYTES:
                    ticket = next(coming)
                    memory = self._memory(ticket)
                    with memory.device.on(self._own_stream(memory.device)):
                        opened = self._open(memory, ticket)
                        held.append(opened)
                        source = memory.device.view(opened.array, np.dtype(np.uint8), (ticket.length,), None)
                        parts.append(Private(memory.device, source, BLOCK_BYTES, memory))
                else:
                    parts.append(buffer)
            return arrived(value.meta, parts, value.digest)
        except BaseException:
            for opened in held:
                with contextlib.suppress(Exception):  # it is on its way already
                    opened.device.wait(opened.device.record(self._own_stream(opened.device)))
            raise
        finally:
            self._through(held, tickets)

    @staticmethod
    def _memory(ticket: Ticket) -> SharedMemory:
        memory = shared.with_identity(ticket.identity)
        if memory is None:
            raise CannotBorrow("it is on a device that this process does not use", for_good=True)
        return memory

    def _own_stream(self, device: Device) -> Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = device.stream()
            return self._streams[device]

    def _open(self, memory: SharedMemory, ticket: Ticket) -> _Opened:
        with self._lock:
            opened = self._opened.get(ticket.memory)
            if opened is None:
                if self.over:
                    raise CannotBorrow("the session is over", for_good=False)
                self._make_room()
                try:
                    array = memory.device.open(ticket.handle, ticket.size)
                except Exception as error:  # the library's own; the next who uses a device that is lost is told
                    raise CannotBorrow(f"{type(error).__name__}: {error}", for_good=True) from error
                opened = self._opened[ticket.memory] = _Opened(memory.device, array, ticket.size)
                opened.idle_since = self._clock()
                if not memory.device.keeps(array):
                    raise CannotBorrow("arrays do not stay on this process's device", for_good=True)
            elif opened.size != ticket.size:
                raise CannotBorrow(f"memory of {opened.size} bytes, told to have {ticket.size}", for_good=True)
            opened.readers += 1
            return opened

    def _through(self, held: Sequence[_Opened], tickets: Sequence[Ticket]) -> None:
        """What was queued for them is done, or the device is lost."""
        with self._lock:
            for opened in held:
                opened.readers -= 1
                opened.idle_since = self._clock()
            told = [ticket.number for ticket in tickets]
            # The lender takes memory for open that a ticket was for.
            told += [ticket.memory | _CLOSED for ticket in tickets if ticket.memory not in self._opened]
            self._say(told)
            if self.over:
                self._close([memory for memory, opened in self._opened.items() if not opened.readers])

    def _make_room(self) -> None:
        too_many = len(self._opened) - _MAX_OPEN + 1
        if too_many > 0:
            idle = [(opened.idle_since, memory) for memory, opened in self._opened.items() if not opened.readers]
            self._close([memory for _, memory in sorted(idle)[:too_many]])

    def trim(self) -> None:
        """Closes what has not been used for long. To be called now and then."""
        before = self._clock() - _IDLE_S
        with self._lock:
            idle = [memory for memory, o in self._opened.items() if not o.readers and o.idle_since < before]
            self._close(idle)

    def close(self) -> None:
        """Closes all of it, once the session is over; what is being read when that is done."""
        with self._lock:
            self._close([memory for memory, opened in self._opened.items() if not opened.readers])

    def _close(self, memories: list[int]) -> None:
        """With the lock."""
        told = []
        for memory in memories:
            opened = self._opened.pop(memory)
            try:
                opened.device.close(opened.array)
            except Exception as error:  # it stays open; the lender keeps it, too
                log.warning("memory of a peer's device cannot be closed: %s: %s", type(error).__name__, error)
                continue
            told.append(memory | _CLOSED)
        self._say(told)

    def _say(self, numbers: Sequence[int]) -> None:
        """With the lock: they are sent in the order in which it was done."""
        if numbers and not self.over:
            self._tell(b"".join([_NUMBER.pack(number) for number in numbers]))


assert TICKET_BYTES <= SMALL_BYTES  # of which size no other buffer is
