"""Lending memory of a device between processes of one host, without a copy.

In place of a lent buffer, a reply has a *ticket*: a handle that opens the memory, and a number.

    ticket      next       by
    out         returned   the borrower has no view of the memory, and all queued reads are done
    out         spoiled    the session ends, or the ticket is returned as spoiled

1. The lender does not change memory while a ticket for it is out (`taskgraph.device.shared`).
2. The borrower keeps the memory open for later tickets. It stays valid if the lender dies (`taskgraph.device.virtual`).
3. No digest is checked: the bytes never leave the memory in which they were digested.
4. Only replies lend, since items are the values on devices. The lender begins when the peer is a process of its host.
   If the peer cannot open the memory (other device, other container), values go by the host's memory from then on.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from taskgraph.device import afterwards, shared
from taskgraph.device.api import HANDLE_BYTES, IDENTITY_BYTES, Device, Event
from taskgraph.device.buffers import DeviceBuffer, borrow_buffer
from taskgraph.device.shared import IDLE_PART, LEAST_BYTES, Segment, make_segment
from taskgraph.errors import DecodeError
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.protocol.messages import Encoded, EncodedOnDevice
from taskgraph.transport.mappings import CannotBorrow

__all__ = ["TICKET_BYTES", "DeviceBorrowing", "DeviceLending", "DeviceTicket", "OpenMemory"]

log = logging.getLogger("taskgraph.transport")

_TICKET: Final = struct.Struct(f"!QQQQ{IDENTITY_BYTES}s{HANDLE_BYTES}s")
TICKET_BYTES: Final = _TICKET.size
"""Smaller than any other buffer of a value, so tickets are recognized by their size."""
_NUMBER: Final = struct.Struct("!Q")
_SPOILED: Final = 1 << 63
"""Bit in the number of a returned ticket: a third process may read the memory for ever."""
_MAX_LENT: Final = 1 << 12
"""The most tickets of a session that are out."""
_MAX_OPEN: Final = 256
"""The most pieces of memory that a session keeps open for later tickets. Memory that is read stays open beyond that."""
_IDLE_S: Final = 15.0
"""Time that memory stays open for another ticket."""


class DeviceTicket(NamedTuple):
    """A description of a lent buffer.

    Attributes:
        number: grows within a session.
        memory: the lender's number of the memory.
        size: size of the memory, in bytes.
        length: size of the buffer, which begins where the memory begins.
        identity: the identity of the device.
        handle: the handle that opens the memory.
    """

    number: int
    memory: int
    size: int
    length: int
    identity: bytes
    handle: bytes

    @classmethod
    def read(cls, data: bytes | memoryview) -> DeviceTicket:
        """Parses a ticket. Raises DecodeError if a number is out of bounds."""
        ticket = cls(*_TICKET.unpack(data))
        if not 0 < ticket.number < _SPOILED or not 0 < ticket.memory < _SPOILED:
            raise DecodeError(f"ticket {ticket.number} for memory {ticket.memory}")
        if not LEAST_BYTES <= ticket.length <= ticket.size < _SPOILED:  # bounds the tickets of a value
            raise DecodeError(f"a ticket for {ticket.length} bytes of {ticket.size}")
        return ticket


class DeviceLending:
    """The lender's side: tickets that it gave to the peer of a session. To be used on the event loop."""

    def __init__(self) -> None:
        self._enabled = False
        self._lent: dict[int, tuple[DeviceBuffer, int]] = {}  # number of a ticket that is out -> buffer, call
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    def start(self) -> None:
        """Lets `lend` give tickets: the peer is a process of this host."""
        self._enabled = True

    def stop(self) -> None:
        """Makes `lend` give no more tickets: the peer cannot open the memory."""
        self._enabled = False

    def can_lend(self, buffer: DeviceBuffer) -> bool:
        """Returns True if a buffer can be lent now."""
        return self._enabled and buffer.segment is not None and len(self._lent) < _MAX_LENT

    def lend(self, call: int, value: EncodedOnDevice) -> Encoded | None:
        """Returns a copy of the value with tickets for its device buffers, for the reply to `call`. None: one cannot be
        lent."""
        buffers: list[Any] = list(value.buffers)
        if not all(self.can_lend(buffer) for buffer in buffers if isinstance(buffer, DeviceBuffer)):
            return None
        try:
            for at, buffer in enumerate(buffers):
                if isinstance(buffer, DeviceBuffer):
                    assert buffer.segment is not None
                    buffers[at] = memoryview(self._make_ticket(call, buffer, buffer.segment))
        except Exception as error:  # borrowed memory needs a descriptor to be lent again
            log.warning(
                "device memory cannot be lent, so values go by the host's memory: %s: %s", type(error).__name__, error
            )
            self.take_back(call)
            self.stop()
            return None
        return Encoded(value.meta, tuple(buffers), value.digest)

    def _make_ticket(self, call: int, buffer: DeviceBuffer, segment: Segment) -> bytes:
        """Numbers a ticket for a buffer of the reply to a call, lists it as out, and returns it as bytes."""
        number, identity = self._last + 1, buffer.device.identity
        ticket = _TICKET.pack(number, segment.number, segment.size, buffer.nbytes, identity, segment.handle)
        self._last = number
        self._lent[number] = buffer, call
        return ticket

    def take_back(self, call: int) -> None:
        """Takes back the tickets of the reply to a call, which the peer will not read."""
        for number in [number for number, (_, of) in self._lent.items() if of == call]:
            del self._lent[number]

    def take_returned(self, data: bytes) -> None:
        """Takes back the tickets whose numbers the peer returned.

        Raises:
            DecodeError: the peer never had such a ticket.
        """
        if len(data) % _NUMBER.size:
            raise DecodeError(f"tickets in {len(data)} bytes")
        for (sent,) in _NUMBER.iter_unpack(data):
            spoiled, number = sent & _SPOILED, sent & ~_SPOILED
            if not 0 < number <= self._last:
                raise DecodeError(f"it returned ticket {number}, which it never had")
            if number in self._lent:
                buffer, _ = self._lent.pop(number)
                if spoiled:
                    _spoil(buffer)

    def spoil_all(self) -> None:
        """Spoils the memory of all tickets that are out, since the session ended."""
        self.stop()
        for buffer, _ in self._lent.values():
            _spoil(buffer)
        self._lent.clear()


def _spoil(buffer: DeviceBuffer) -> None:
    assert buffer.segment is not None
    buffer.segment.spoiled = True


class OpenMemory:
    """Device memory of the peer that this process has opened.

    Attributes:
        segment: by it the memory can be lent to a third process.
        readers: the number of tickets for it that are not returned yet.
        most: bytes of this device that may be open without a reader.
    """

    __slots__ = ("device", "idle_since", "most", "readers", "segment", "size")

    def __init__(self, device: Device, segment: Segment, size: int, most: int) -> None:
        self.device = device
        self.segment = segment
        self.size = size
        self.most = most
        self.readers = 0
        self.idle_since = 0.0


class DeviceBorrowing:
    """The borrower's side: tickets that the peer of a session gave it. To be used on the event loop, except `open`.

    Args:
        send: sends the numbers of returned tickets.
        wake: calls a function on the event loop, soon. Called in any thread, in the middle of anything.
        clock: seconds.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        wake: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send: Callable[[bytes], object] | None = send  # None: the session ended
        self._wake = wake
        self._clock = clock
        self._opened: dict[int, OpenMemory] = {}

    def __len__(self) -> int:
        return len(self._opened)

    @staticmethod
    def read_tickets(value: Encoded, limit: int) -> list[DeviceTicket]:
        """Parses the tickets among the buffers of a value.

        Raises:
            DecodeError: no buffer is a ticket, a ticket is not valid, or the value, with the memory that its tickets
                stand for, is larger than `limit` bytes.
        """
        found = [DeviceTicket.read(buffer) for buffer in value.buffers if buffer.nbytes == TICKET_BYTES]
        size = value.size_bytes + sum(ticket.length for ticket in found)
        if not found or size > limit:
            raise DecodeError(f"{len(found)} tickets for a value of {size} bytes; the limit is {limit}")
        return found

    def unopened(self, tickets: Sequence[DeviceTicket]) -> list[DeviceTicket]:
        """Returns the tickets whose memory is not open."""
        return [ticket for ticket in tickets if ticket.memory not in self._opened]

    @staticmethod
    def open(tickets: Sequence[DeviceTicket]) -> dict[int, OpenMemory]:
        """Opens the memory of tickets. Call it in a thread: it waits for other processes.

        Raises:
            CannotBorrow: this process does not use the device, or cannot open the memory.
        """
        found: dict[int, OpenMemory] = {}
        for ticket in tickets:
            if ticket.memory in found:
                continue
            try:
                memory = shared.memory_of_identity(ticket.identity)
                if memory is None:
                    raise CannotBorrow("this process does not use the device", for_good=True)
                array = memory.device.open(ticket.handle, ticket.size)
                can_copy, most = memory.device.can_copy(array), memory.device.memory_bytes // IDLE_PART
            except CannotBorrow:
                raise
            except Exception as error:  # any error of the library; later uses of a lost device report it
                raise CannotBorrow(f"{type(error).__name__}: {error}", for_good=True) from error
            if not can_copy:
                raise CannotBorrow("arrays do not stay on this process's device", for_good=True)
            found[ticket.memory] = OpenMemory(memory.device, make_segment(memory.device, array), ticket.size, most)
        return found

    def keep(self, opened: dict[int, OpenMemory], tickets: Sequence[DeviceTicket]) -> None:
        """Keeps opened memory for later tickets, and closes idle memory to make room, but none that `tickets` need.
        Raises CannotBorrow if the session ended.
        """
        if self._send is None:
            raise CannotBorrow("the session ended", for_good=False)
        too_many = len(self._opened) + len(opened) - _MAX_OPEN
        if too_many > 0:
            needed = {ticket.memory for ticket in tickets}
            kept = [(one.idle_since, memory) for memory, one in self._opened.items() if not one.readers]
            idle = [(since, memory) for since, memory in sorted(kept) if memory not in needed]
            for _, memory in idle[:too_many]:
                del self._opened[memory]
        for memory, new in opened.items():
            new.idle_since = self._clock()
            self._opened.setdefault(memory, new)  # another reply may have opened it

    def take(self, value: Encoded, tickets: Sequence[DeviceTicket]) -> EncodedOnDevice:
        """Returns the value with buffers in open memory for its tickets. A ticket goes back when its buffer is garbage.

        Raises:
            CannotBorrow: the peer contradicts an earlier ticket.
            Exception: an error of the library. Some tickets may have been returned.
        """
        opened = [self._opened[ticket.memory] for ticket in tickets]
        for ticket, memory in zip(tickets, opened, strict=True):
            if ticket.size != memory.size:
                raise CannotBorrow(f"memory of {memory.size} bytes, the ticket says {ticket.size}", for_good=True)
        lent = iter(zip(tickets, opened, strict=True))
        buffers: list[Any] = []
        for buffer in value.buffers:
            if buffer.nbytes == TICKET_BYTES:
                ticket, memory = next(lent)
                ended = partial(self._end_loan, memory, ticket.number)
                buffers.append(borrow_buffer(memory.device, memory.segment, ticket.length, BLOCK_BYTES, ended))
                memory.readers += 1
            else:
                buffers.append(buffer)
        return EncodedOnDevice(value.meta, tuple(buffers), value.digest)

    def give_back(self, tickets: Sequence[DeviceTicket]) -> None:
        """Gives tickets back to the lender without reading the memory."""
        self._send_back([ticket.number for ticket in tickets])

    def _end_loan(self, memory: OpenMemory, number: int, events: list[Event]) -> None:
        """Ends a loan: the last view is garbage. Called in any thread, in the middle of any code."""
        afterwards.call_after(memory.device, events, partial(self._wake, partial(self._return_ticket, memory, number)))

    def _return_ticket(self, memory: OpenMemory, number: int) -> None:
        """Returns a ticket, after all reads of its memory are done; closes memory that was idle for longest."""
        memory.readers -= 1
        memory.idle_since = self._clock()
        if not memory.readers:
            self._close_beyond(memory.most)
        self._send_back([number | _SPOILED if memory.segment.spoiled else number])

    def _close_beyond(self, most: int) -> None:
        """Closes the memory that was idle for longest, so that at most `most` bytes are idle."""
        idle = sorted((kept.idle_since, number) for number, kept in self._opened.items() if not kept.readers)
        nbytes = sum(self._opened[number].size for _, number in idle)
        for _, number in idle:
            if nbytes <= most:
                return
            nbytes -= self._opened.pop(number).size

    def _send_back(self, numbers: Sequence[int]) -> None:
        if numbers and self._send is not None:
            self._send(b"".join([_NUMBER.pack(number) for number in numbers]))

    def trim(self) -> list[OpenMemory]:
        """Takes out memory that was idle for long, and returns it. Drop it in a thread, since the device may be
        slow.
        """
        before = self._clock() - _IDLE_S
        idle = [memory for memory, kept in self._opened.items() if not kept.readers and kept.idle_since < before]
        return [self._opened.pop(memory) for memory in idle]

    def end(self) -> list[OpenMemory]:
        """Returns no more tickets, since the session ended; takes out all open memory, and returns it. Drop it in a
        thread. Memory that is read stays open.
        """
        self._send = None  # else a reader would keep the session alive
        opened, self._opened = list(self._opened.values()), {}
        return opened


assert TICKET_BYTES < INLINE_BYTES  # no other buffer is as small
