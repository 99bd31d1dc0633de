"""Memory of a device that other processes of the host can open; reused for value after value.

Allocating such memory, and opening it in another process, takes time. So it is kept in *segments*:

    take ──► used ──► give_back ──► idle ──► take
                                        ──► freed: idle for long, too many idle bytes, or memory is short
                           spoiled ─────► freed

A segment takes the next value when no reader is left in this process (`buffers`) or in another one
(`taskgraph.transport.devicelending`). If another process may read it without ever reporting the end, the segment is
*spoiled*: it is freed, and its memory returns when that process has closed it, or ended.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from taskgraph.device import handles
from taskgraph.device.api import HANDLE_BYTES, Array, Device, Event
from taskgraph.device.memory import reclaimers

__all__ = [
    "IDLE_PART",
    "LEAST_BYTES",
    "Segment",
    "SharedMemory",
    "make_segment",
    "may_trim",
    "memory_of_identity",
    "offer_memory",
    "offered_memory",
    "trim",
]

log = logging.getLogger("taskgraph.devices")

LEAST_BYTES: Final = 1 << 20
"""Smaller values go by the host, since segments are not that small."""
_GRAIN: Final = 2 << 20
"""CUDA shares multiples of this size."""
_STEPS: Final = 8
"""Sizes of segments per power of two: values of similar size share segments, and at most an eighth is unused."""
_FITS: Final = 1.5
"""A value takes a segment of at most this many times its size."""
_IDLE_S: Final = 10.0
"""An idle segment is freed after this time."""
IDLE_PART: Final = 32
"""Idle segments of a process hold at most this part of the device's memory."""
_SHORTLY_S: Final = 0.1
_MAX_SEGMENTS: Final = 256
"""Limit, since each takes a descriptor."""
_numbers: Final = itertools.count(1)


class Segment:
    """A piece of a device's memory that other processes can open, for one value at a time.

    Attributes:
        number: unique in this process.
        array: the bytes.
        spoiled: another process may read it without ever reporting the end.
    """

    __slots__ = ("_events", "_freed_at", "_handle", "_share", "array", "number", "size", "spoiled")

    def __init__(self, number: int, array: Array, share: Callable[[Array], bytes]) -> None:
        self.number = number
        self.array = array
        self._share = share
        self._handle = b""
        self.size: int = array.nbytes
        self.spoiled = False
        self._events: list[Event] = []
        self._freed_at = 0.0

    @property
    def handle(self) -> bytes:
        """The handle by which other processes open the segment. Raises the library's error if they cannot."""
        if not self._handle:
            self._handle = self._share(self.array)
            assert len(self._handle) == HANDLE_BYTES
        return self._handle


def make_segment(device: Device, array: Array) -> Segment:
    """Makes a segment of memory of `Device.allocate` or `Device.open`."""
    return Segment(next(_numbers), array, device.share)


class SharedMemory:
    """The segments of one device in this process. May be used from every thread.

    Args:
        max_idle_bytes: limit on idle segments; None: `IDLE_PART` of the device's memory.
        clock: returns seconds.
    """

    def __init__(
        self, device: Device, *, max_idle_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._max_idle_bytes = max_idle_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Segment] = []  # the last used one is last
        self._used = 0
        self._garbage: deque[tuple[Segment, list[Event], float]] = deque()  # finalizers only append
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
        """Returns a segment of at least `nbytes`, for writes on the current stream.

        Returns None if the value is too small for one, or there is no room: use other memory.
        """
        if nbytes < LEAST_BYTES or not self._works:
            return None
        if self._max_idle_bytes is None:  # not earlier, since this makes CUDA ready
            self._max_idle_bytes = self._device.memory_bytes // IDLE_PART
        with self._lock:
            too_much = self._recycle_returned()
            found = self._take_idle(nbytes)
            full = found is None and len(self) >= _MAX_SEGMENTS
            if full and self._idle:
                too_much.append(self._idle.pop(0))
                full = False
            if not full:
                self._used += 1
        if full:
            self._wait_until_unused(too_much)
            return None
        try:
            self._wait_until_unused(too_much)
            del too_much  # before anything is allocated
            if found is None:
                return self._allocate(nbytes)
            for event in found._events:
                self._device.follow(self._device.current_stream(), event)
            while found._events:
                self._device.recycle(found._events.pop())
            return found
        except BaseException as error:
            if found is not None:
                self.give_back(found, found._events)
            else:
                self._uncount_segment()
            if isinstance(error, MemoryError):
                return None
            raise

    def _take_idle(self, nbytes: int) -> Segment | None:
        most = max(_FITS * nbytes, _segment_size(nbytes))
        for at in range(len(self._idle) - 1, -1, -1):
            if nbytes <= self._idle[at].size <= most:
                return self._idle.pop(at)
        return None

    def _allocate(self, nbytes: int) -> Segment | None:
        try:
            made = make_segment(self._device, self._device.allocate(_segment_size(nbytes)))
            _ = made.handle  # these take a moment, so not later, on an event loop
            _ = self._device.identity
        except MemoryError:
            raise
        except Exception as error:
            # Many systems cannot share memory. If the device is lost, its next use raises the error.
            log.warning("other processes cannot open memory of this device, so values go by the host: %s", error)
            self._works = False
            self._uncount_segment()
            return None
        return made

    def _uncount_segment(self) -> None:
        with self._lock:
            self._used -= 1

    def give_back(self, segment: Segment, events: list[Event]) -> None:
        """Takes back a segment that this process no longer uses; all work on it ends with these events."""
        self._garbage.append((segment, events, self._clock()))

    def _recycle_returned(self) -> list[Segment]:
        """Makes returned segments idle. Returns those to free: spoiled ones, and idle ones above the limit."""
        spoiled: list[Segment] = []
        while self._garbage:
            segment, events, freed_at = self._garbage.popleft()
            segment._events, segment._freed_at = events, freed_at
            self._used -= 1
            (spoiled if segment.spoiled else self._idle).append(segment)
        return spoiled + self._remove_idle(self._max_idle_bytes or 0, self._clock())

    def _remove_idle(self, most: int, before: float) -> list[Segment]:
        """Removes idle segments, oldest first, until at most `most` bytes are idle. Returns them."""
        idle, count = self.idle_bytes, 0
        for segment in self._idle:
            if idle <= most or segment._freed_at > before:
                break
            idle -= segment.size
            count += 1
        chosen, self._idle = self._idle[:count], self._idle[count:]
        return chosen

    def _wait_until_unused(self, segments: list[Segment]) -> bool:
        """Waits until the device is done with the segments; the caller then drops them, which frees them.

        Returns True if there are any. Call it without the lock.
        """
        for segment in segments:
            for event in segment._events:
                self._device.wait(event)
                self._device.recycle(event)
        return bool(segments)

    def trim(self) -> None:
        """Frees segments that were idle for long. Call it now and then in a thread."""
        with self._lock:
            too_much = self._recycle_returned() + self._remove_idle(0, self._clock() - _IDLE_S)
        self._wait_until_unused(too_much)

    def shrink(self, nbytes: int) -> bool:
        """Frees about `nbytes` of idle memory when memory is short. True if it freed any."""
        # The caller may be a finalizer, in a thread that has the lock.
        if not self._lock.acquire(timeout=_SHORTLY_S):
            return False
        try:
            too_much = self._recycle_returned()
            too_much += self._remove_idle(max(0, self.idle_bytes - nbytes), self._clock())
        finally:
            self._lock.release()
        freed = self._wait_until_unused(too_much)
        del too_much
        handles.close_withdrawn()  # a descriptor keeps its memory
        return freed


def _segment_size(nbytes: int) -> int:
    step = max(_GRAIN, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step


_offered: Final[dict[Device, SharedMemory]] = {}
_lock: Final = threading.Lock()


def offer_memory(device: Device) -> SharedMemory:
    """Puts large values of the device, from now on, into memory that other processes can open. Returns that memory."""
    with _lock:
        found = _offered.get(device)
        if found is None:
            found = _offered[device] = SharedMemory(device)
        return found


def offered_memory(device: Device) -> SharedMemory | None:
    """Returns the memory that `offer_memory` made for a device; None: it was not called."""
    return _offered.get(device)


def memory_of_identity(identity: bytes) -> SharedMemory | None:
    """Returns the offered memory of the device with this `Device.identity`, if any."""
    with _lock:
        return next((found for device, found in _offered.items() if device.identity == identity), None)


def may_trim() -> bool:
    """True if `trim` may have work: there are idle segments, or withdrawn descriptors that are open."""
    return handles.any_withdrawn() or any(len(memory) for memory in _offered.values())


def trim() -> None:
    """Frees segments of all devices that were idle for long, and closes withdrawn descriptors. Call it in a thread."""
    with _lock:
        offered = list(_offered.values())
    for memory in offered:
        memory.trim()
    handles.close_withdrawn()


def _free_idle_segments(nbytes: int) -> bool:
    """Frees about `nbytes` of idle segments on each device: which device is short is not known. True if it freed any.

    Called in the middle of an allocation, so it takes no lock that a thread keeps during an allocation.
    """
    freed = [memory.shrink(nbytes) for memory in tuple(_offered.values())]
    return any(freed)


reclaimers.append(_free_idle_segments)
