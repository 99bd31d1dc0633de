"""Memory of a device between processes of one host: read where it is, and given back.

What travels of a buffer that is lent is a *ticket*: by what to open the memory, and a number. Who gets it opens the
memory, keeps it open for the next ticket, and reads it there; nothing is copied, and as what was digested is what is
read, no digest is taken again. It gives the ticket back when nobody reads it any more, and all that was queued for
that is done. Until then the lender's memory stays as it is (`taskgraph.device.shared`). It stays, too, where the lender
ends: memory of a device goes when nobody has it open (`taskgraph.device.virtual`).

Only replies lend: items are what is on a device. Lenders begin with it when they see that the other side is a process
of their host, and go by the host's memory from the first "no" on: another device, another container, none at all.
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
from taskgraph.device.buffers import DeviceBuffer, borrowed
from taskgraph.device.shared import IDLE_PART, LEAST_BYTES, Segment, segment_of
from taskgraph.errors import DecodeError
from taskgraph.graph.arrays import SMALL_BYTES
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.protocol.messages import Encoded, EncodedOnDevice
from taskgraph.transport.mappings import CannotBorrow

__all__ = ["TICKET_BYTES", "DeviceBorrowing", "DeviceLending", "Opened", "Ticket"]

log = logging.getLogger("taskgraph.transport")

_TICKET: Final = struct.Struct(f"!QQQQ{IDENTITY_BYTES}s{HANDLE_BYTES}s")
TICKET_BYTES: Final = _TICKET.size
"""Smaller than any other buffer of a value: so it is known by its size."""
_NUMBER: Final = struct.Struct("!Q")
_SPOILED: Final = 1 << 63
"""Set in the number of a ticket for memory that somebody to whom it was lent on may read for ever."""
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
        if not 0 < ticket.number < _SPOILED or not 0 < ticket.memory < _SPOILED:
            raise DecodeError(f"ticket {ticket.number} for memory {ticket.memory}")
        if not LEAST_BYTES <= ticket.length <= ticket.size < _SPOILED:  # so there are few of them in a value
            raise DecodeError(f"a ticket for {ticket.length} bytes of {ticket.size}")
        return ticket


class DeviceLending:
    """What one side of a session lent to the other. On the event loop."""

    def __init__(self) -> None:
        self._on = False
        self._lent: dict[int, tuple[DeviceBuffer, int]] = {}  # by number of a ticket that is out: with its call
        self._last = 0

    def __len__(self) -> int:
        return len(self._lent)

    def start(self) -> None:
        """The other side is a process of this host."""
        self._on = True

    def stop(self) -> None:
        """The other side cannot open what was lent."""
        self._on = False

    def lendable(self, buffer: DeviceBuffer) -> bool:
        return self._on and buffer.segment is not None and len(self._lent) < _MAX_LENT

    def lend(self, call: int, value: EncodedOnDevice) -> Encoded | None:
        """The value with tickets in place of what is on a device; None where not all of that is to be lent."""
        buffers: list[Any] = list(value.buffers)
        if not all(self.lendable(buffer) for buffer in buffers if isinstance(buffer, DeviceBuffer)):
            return None
        try:
            for at, buffer in enumerate(buffers):
                if isinstance(buffer, DeviceBuffer):
                    assert buffer.segment is not None
                    buffers[at] = memoryview(self._ticket(call, buffer, buffer.segment))
        except Exception as error:  # of what was lent to us: to lend it on may take what there is not
            log.warning("memory of a device goes by the host's: %s: %s", type(error).__name__, error)
            self.take_back(call)
            self.stop()
            return None
        return Encoded(value.meta, tuple(buffers), value.digest)

    def _ticket(self, call: int, buffer: DeviceBuffer, segment: Segment) -> bytes:
        number, identity = self._last + 1, buffer.device.identity
        ticket = _TICKET.pack(number, segment.number, segment.size, buffer.nbytes, identity, segment.handle)
        self._last = number
        self._lent[number] = buffer, call
        return ticket

    def take_back(self, call: int) -> None:
        """The other side did not read the reply to that call, and will not."""
        for number in [number for number, (_, of) in self._lent.items() if of == call]:
            del self._lent[number]

    def returned(self, data: bytes) -> None:
        """Tickets that the other side gave back.

        Raises:
            DecodeError: it never had such a ticket.
        """
        if len(data) % _NUMBER.size:
            raise DecodeError(f"tickets in {len(data)} bytes")
        for (told,) in _NUMBER.iter_unpack(data):
            spoiled, number = told & _SPOILED, told & ~_SPOILED
            if not 0 < number <= self._last:
                raise DecodeError(f"it gives back ticket {number}, which it never had")
            if number in self._lent:
                buffer, _ = self._lent.pop(number)
                if spoiled:
                    _spoil(buffer)

    def broken(self) -> None:
        """The session is over: what the other side did not give back it may read for as long as it lives."""
        self.stop()
        for buffer, _ in self._lent.values():
            _spoil(buffer)
        self._lent.clear()


def _spoil(buffer: DeviceBuffer) -> None:
    assert buffer.segment is not None
    buffer.segment.spoiled = True


class Opened:
    """Memory of the other side that is open.

    Attributes:
        segment: how it is lent on.
        readers: tickets for it that are not given back.
        most: bytes of the device that may be open for further tickets, and for nothing else.
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
    """What one side of a session borrowed from the other. On the event loop, but for `open`.

    Args:
        tell: what to send.
        wake: calls a function soon, on the event loop; called in any thread, in the middle of anything.
        clock: seconds.
    """

    def __init__(
        self,
        tell: Callable[[bytes], object],
        wake: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell: Callable[[bytes], object] | None = tell  # None: the session is over
        self._wake = wake
        self._clock = clock
        self._opened: dict[int, Opened] = {}

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

    def unopened(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Those whose memory is to be opened first."""
        return [ticket for ticket in tickets if ticket.memory not in self._opened]

    @staticmethod
    def open(tickets: Sequence[Ticket]) -> dict[int, Opened]:
        """Opens the memory of these tickets. It waits, for other processes, too: call it in a thread.

        Raises:
            CannotBorrow: there is no device here, it is another one, or cannot open what other processes have.
        """
        found: dict[int, Opened] = {}
        for ticket in tickets:
            if ticket.memory in found:
                continue
            try:
                memory = shared.with_identity(ticket.identity)
                if memory is None:
                    raise CannotBorrow("it is on a device that this process does not use", for_good=True)
                array = memory.device.open(ticket.handle, ticket.size)
                keeps, most = memory.device.keeps(array), memory.device.memory_bytes // IDLE_PART
            except CannotBorrow:
                raise
            except Exception as error:  # the library's own; the next who uses a device that is lost is told
                raise CannotBorrow(f"{type(error).__name__}: {error}", for_good=True) from error
            if not keeps:
                raise CannotBorrow("arrays do not stay on this process's device", for_good=True)
            found[ticket.memory] = Opened(memory.device, segment_of(memory.device, array), ticket.size, most)
        return found

    def keep(self, opened: dict[int, Opened], tickets: Sequence[Ticket]) -> None:
        """It stays open for further tickets, as does what these tickets are for."""
        if self._tell is None:
            raise CannotBorrow("the session is over", for_good=False)
        too_many = len(self._opened) + len(opened) - _MAX_OPEN
        if too_many > 0:
            needed = {ticket.memory for ticket in tickets}
            kept = [(one.idle_since, memory) for memory, one in self._opened.items() if not one.readers]
            idle = [(since, memory) for since, memory in sorted(kept) if memory not in needed]
            for _, memory in idle[:too_many]:
                del self._opened[memory]
        for memory, new in opened.items():
            new.idle_since = self._clock()
            self._opened.setdefault(memory, new)  # another reply may have come with a ticket for it

    def take(self, value: Encoded, tickets: Sequence[Ticket]) -> EncodedOnDevice:
        """The value, in memory that is open. Its tickets are given back when nobody has it any more.

        Raises:
            CannotBorrow: the other side tells something else of that memory than it did before.
            Exception: the library's own. Then some of the tickets were given back, maybe.
        """
        opened = [self._opened[ticket.memory] for ticket in tickets]
        for ticket, memory in zip(tickets, opened, strict=True):
            if ticket.size != memory.size:
                raise CannotBorrow(f"memory of {memory.size} bytes, told to have {ticket.size}", for_good=True)
        coming = iter(zip(tickets, opened, strict=True))
        buffers: list[Any] = []
        for buffer in value.buffers:
            if buffer.nbytes == TICKET_BYTES:
                ticket, memory = next(coming)
                ended = partial(self._ended, memory, ticket.number)
                buffers.append(borrowed(memory.device, memory.segment, ticket.length, BLOCK_BYTES, ended))
                memory.readers += 1
            else:
                buffers.append(buffer)
        return EncodedOnDevice(value.meta, tuple(buffers), value.digest)

    def give_back(self, tickets: Sequence[Ticket]) -> None:
        """Nobody read, or will read, by these."""
        self._say([ticket.number for ticket in tickets])

    def _ended(self, memory: Opened, number: int, events: list[Event]) -> None:
        """In any thread, in the middle of anything."""
        afterwards.call(memory.device, events, partial(self._wake, partial(self._through, memory, number)))

    def _through(self, memory: Opened, number: int) -> None:
        memory.readers -= 1
        memory.idle_since = self._clock()
        if not memory.readers:
            self._close_beyond(memory.most)
        self._say([number | _SPOILED if memory.segment.spoiled else number])

    def _close_beyond(self, most: int) -> None:
        """So that memory that its owner freed goes: what waited longest is closed until so many bytes wait."""
        idle = sorted((kept.idle_since, number) for number, kept in self._opened.items() if not kept.readers)
        nbytes = sum(self._opened[number].size for _, number in idle)
        for _, number in idle:
            if nbytes <= most:
                return
            nbytes -= self._opened.pop(number).size

    def _say(self, numbers: Sequence[int]) -> None:
        if numbers and self._tell is not None:
            self._tell(b"".join([_NUMBER.pack(number) for number in numbers]))

    def trim(self) -> list[Opened]:
        """What has not been used for long is not kept: to be dropped in a thread, as the device may take its time."""
        before = self._clock() - _IDLE_S
        idle = [memory for memory, kept in self._opened.items() if not kept.readers and kept.idle_since < before]
        return [self._opened.pop(memory) for memory in idle]

    def end(self) -> list[Opened]:
        """The session is over: nothing more is opened. The same; what is read stays open until it is not."""
        self._tell = None  # else what is read would keep the session
        opened, self._opened = list(self._opened.values()), {}
        return opened


assert TICKET_BYTES <= SMALL_BYTES  # of which size no other buffer is
