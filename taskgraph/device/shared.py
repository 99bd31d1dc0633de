"""Memory of a device that other processes of the host can open, used again and again.

To allocate such memory, and to open that of others, stops the device for a moment: so it is kept for the next value. A
*segment* is memory that was allocated for this alone. It takes the next value when nobody in this process reads the
last one any more (`buffers`), and no other process does (`taskgraph.transport.devicelending`).

**It is let go of only when nobody has it open.** Who reads memory of another process that was freed there reads
anything, or fails. So a segment knows who opened it (`Borrower`), and is not freed before they all closed it, or ended.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from taskgraph import host
from taskgraph.device.api import HANDLE_BYTES, Array, Device, Event
from taskgraph.device.memory import givers

__all__ = ["LEAST_BYTES", "Borrower", "Segment", "SharedMemory", "idle", "of", "offer", "trim", "with_identity"]

log = logging.getLogger("taskgraph.devices")

LEAST_BYTES: Final = 1 << 20
"""Smaller values go by the host: a segment cannot be as small as they are."""
_GRAIN: Final = 2 << 20
"""CUDA lets others open pieces of this size, with all that is in them: so a segment shares its pieces with nothing."""
_STEPS: Final = 8
"""Sizes of segments per power of two: values that differ a little use the same ones, and an eighth is lost at most."""
_FITS: Final = 1.5
"""A value takes a segment of at most this many times its size."""
_IDLE_S: Final = 10.0
"""How long a segment waits for another value."""
_IDLE_PART: Final = 32
"""What may wait for another value: one of so many parts of the device's memory, which is that of several processes."""
_MAX_SEGMENTS: Final = 1024
_numbers: Final = itertools.count(1)


class Borrower:
    """Another process, to which memory of this one was lent, as one session knows it.

    Args:
        pid: of this host.
    """

    __slots__ = ("_began", "_left", "_pid")

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = _lives_since(pid)
        self._left = False

    def left(self) -> None:
        """Nothing will be heard of it any more."""
        self._left = True

    @property
    def gone(self) -> bool:
        """Whether the process has ended, and with it all that it had open. Looked at once nothing is heard of it."""
        return self._left and _lives_since(self._pid) != self._began

    @property
    def seen(self) -> bool:
        """Whether it can be told when it ends: else nothing is to be lent to it."""
        return self._began != ""


def _lives_since(pid: int) -> str:
    """When a process began; "" where it ended, waited for or not, or cannot be seen."""
    return "" if host.state(pid) in ("Z", "X") else host.began(pid)


class Segment:
    """A run of bytes.

    Attributes:
        number: of this one and no other in this process.
        array: the bytes.
        handle: what other processes open it by.
        open_at: who has it open.
        read_at: who may read it for as long as it lives, since nobody will tell when it is through.
    """

    __slots__ = ("_events", "_freed_at", "array", "handle", "number", "open_at", "read_at", "size")

    def __init__(self, number: int, array: Array, handle: bytes) -> None:
        self.number = number
        self.array = array
        self.handle = handle
        self.size: int = array.nbytes
        self.open_at: set[Borrower] = set()
        self.read_at: set[Borrower] = set()
        self._events: list[Event] = []
        self._freed_at = 0.0

    def is_read(self) -> bool:
        return _some_live(self.read_at)

    def is_open(self) -> bool:
        return _some_live(self.open_at)


def _some_live(borrowers: set[Borrower]) -> bool:
    """Whether one of them lives; forgets those that do not."""
    for borrower in [one for one in tuple(borrowers) if one.gone]:
        borrowers.discard(borrower)
    return bool(borrowers)


class SharedMemory:
    """The segments of one device in this process. May be used from every thread.

    Args:
        max_idle_bytes: what may wait for another value, as far as nobody has it open; None: a part of the device's.
        clock: seconds.
    """

    def __init__(
        self, device: Device, *, max_idle_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._max_idle_bytes = max_idle_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Segment] = []  # the one that was used last is last
        self._used = 0
        self._garbage: deque[tuple[Segment, list[Event], float]] = deque()  # finalizers run anywhere: they only append
        self._works = True

    @property
    def device(self) -> Device:
        return self._device

    def __len__(self) -> int:
        return len(self._idle) + self._used

    @property
    def idle_bytes(self) -> int:
        return sum(segment.size for segment in self._idle)

    def take(self, nbytes: int) -> Segment | None:
        """A segment for so many bytes, for the current stream to write to; None: they go to other memory."""
        if nbytes < LEAST_BYTES or not self._works:
            return None
        if self._max_idle_bytes is None:  # not asked for before: the device may have to be made ready
            self._max_idle_bytes = self._device.memory_bytes // _IDLE_PART
        with self._lock:
            too_much = self._collect()
            found = self._find(nbytes)
            if found is None and len(self) >= _MAX_SEGMENTS:
                return None
            self._used += 1
        try:
            self._free(too_much)
            del too_much  # before anything is allocated
            if found is None:
                return self._make(nbytes)
            for event in found._events:
                self._device.follow(self._device.current(), event)
            found._events = []
            return found
        except BaseException as error:
            if found is not None:
                self.give_back(found, found._events)  # others may have it open
            else:
                self._not_made()
            if isinstance(error, MemoryError):
                return None
            raise

    def _find(self, nbytes: int) -> Segment | None:
        most = max(_FITS * nbytes, _rounded(nbytes))
        for at in range(len(self._idle) - 1, -1, -1):
            if nbytes <= self._idle[at].size <= most and not self._idle[at].is_read():
                return self._idle.pop(at)
        return None

    def _make(self, nbytes: int) -> Segment | None:
        array = self._device.allocate(_rounded(nbytes))
        try:
            handle = self._device.share(array)
            _ = self._device.identity  # asked for here, and not where it is lent, on an event loop
        except Exception as error:
            # Many systems cannot. If the device is lost, the next who uses it is told.
            log.warning("no process but this one can open memory of its device, and it goes by the host: %s", error)
            self._works = False
            self._not_made()
            return None
        assert len(handle) == HANDLE_BYTES
        return Segment(next(_numbers), array, handle)

    def _not_made(self) -> None:
        with self._lock:
            self._used -= 1

    def give_back(self, segment: Segment, events: list[Event]) -> None:
        """Nobody in this process has it any more, and reads and writes of it are done after these events."""
        self._garbage.append((segment, events, self._clock()))

    def _collect(self) -> list[Segment]:
        """What was given back waits for another value; returns what is too much of that, to be freed."""
        while self._garbage:
            segment, events, freed_at = self._garbage.popleft()
            segment._events, segment._freed_at = events, freed_at
            self._used -= 1
            self._idle.append(segment)
        return self._chosen(self._max_idle_bytes or 0, self._clock())

    def _chosen(self, most: int, before: float) -> list[Segment]:
        """Idle segments that nobody has open, the oldest first, until `most` bytes are idle."""
        idle = self.idle_bytes
        chosen = []
        for segment in self._idle:
            if idle <= most or segment._freed_at > before:
                break
            if not segment.is_open():
                chosen.append(segment)
                idle -= segment.size
        for segment in chosen:
            self._idle.remove(segment)
        return chosen

    def _free(self, segments: list[Segment]) -> bool:
        """Their memory goes with the last reference. To be called without the lock: it waits, and so may the device."""
        for segment in segments:
            for event in segment._events:
                self._device.wait(event)
        return bool(segments)

    def trim(self) -> None:
        """Frees what has been idle for long. To be called now and then, in a thread."""
        with self._lock:
            too_much = self._collect() + self._chosen(0, self._clock() - _IDLE_S)
        self._free(too_much)

    def shrink(self, nbytes: int) -> bool:
        """Memory is short: frees that much of what is idle, where there is so much. Whether it did something."""
        with self._lock:
            too_much = self._collect()
            too_much += self._chosen(max(0, self.idle_bytes - nbytes), self._clock())
        return self._free(too_much)


def _rounded(nbytes: int) -> int:
    step = max(_GRAIN, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step


_offered: Final[dict[Device, SharedMemory]] = {}
_lock: Final = threading.Lock()


def offer(device: Device) -> SharedMemory:
    """From now on large values that are put stay in memory of the device that other processes can open."""
    with _lock:
        found = _offered.get(device)
        if found is None:
            found = _offered[device] = SharedMemory(device)
        return found


def of(device: Device) -> SharedMemory | None:
    """What was offered of a device."""
    return _offered.get(device)


def with_identity(identity: bytes) -> SharedMemory | None:
    """The same of the device with that identity."""
    with _lock:
        return next((found for device, found in _offered.items() if device.identity == identity), None)


def idle() -> bool:
    """Whether `trim` may find something."""
    return any(len(memory) for memory in _offered.values())


def trim() -> None:
    """Frees what has been idle for long, of all devices; in a thread."""
    with _lock:
        offered = list(_offered.values())
    for memory in offered:
        memory.trim()


def _give_back(nbytes: int) -> bool:
    """See `taskgraph.device.memory.givers`. It takes no lock that is held while something is allocated."""
    return any(memory.shrink(nbytes) for memory in tuple(_offered.values()))


givers.append(_give_back)
