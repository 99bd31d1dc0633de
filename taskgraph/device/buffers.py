"""The bulk of values that stays on its device: private copies, views of them, and when their memory goes back.

A copy is made on the stream of who put it, and waited for before anybody hears of it: so whoever has a `DeviceBuffer`
may read it on any stream. Its memory belongs to the stream it was made on, which would give it to the next one who
allocates there while the reading of others is still queued on theirs. So every view holds the memory by a lease of its
own, which ends with an event on the stream that the view was made for; and the owner's stream follows all of these
events before the memory is freed. Nothing of that blocks, wherever the last reference goes.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from taskgraph.device.api import Array, Device, Event, Stream
from taskgraph.device.shared import Segment, SharedMemory
from taskgraph.device.staging import HostCopy

__all__ = ["Allocate", "DeviceBuffer", "Digested", "Private"]

log = logging.getLogger("taskgraph.devices")

Allocate = Callable[[int], Any]
"""`taskgraph.graph.blocks.Allocate`: so many bytes of the host, or None."""

_side: Final[weakref.WeakKeyDictionary[Device, Stream]] = weakref.WeakKeyDictionary()
"""Streams for copies to the host that wait for no task's work."""
_lock: Final = threading.Lock()
_lost: Final[list[_Memory]] = []
"""What could not be put in order any more: nobody gets its memory."""


def _side_stream(device: Device) -> Stream:
    with _lock:
        found = _side.get(device)
        if found is None:
            found = _side[device] = device.stream()
        return found


class _Memory:
    """An array that nobody writes to any more, and which streams read it."""

    __slots__ = ("array", "device", "read", "stream")

    segment: Segment | None = None  # what other processes can open of it

    def __init__(self, device: Device, array: Array, stream: Stream) -> None:
        self.device = device
        self.array = array
        self.stream = stream
        self.read: list[Event] = []  # not the last of each stream: leases end in any thread, and in any order

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # some goes after this module
            return
        try:
            self._put_in_order()
        except Exception as error:  # the device is lost, as a rule
            log.warning("memory of %d bytes is left alone: %s", self.array.nbytes, error)
            _lost.append(self)

    def _put_in_order(self) -> None:
        for event in self.read:
            self.device.follow(self.stream, event)


class _InSegment(_Memory):
    """The same in memory that belongs to no stream: whoever gets it next follows all who read it."""

    __slots__ = ("_shared", "segment")

    def __init__(self, device: Device, shared: SharedMemory, segment: Segment, nbytes: int) -> None:
        super().__init__(device, segment.array, device.current())
        self._shared = shared
        self.segment = segment
        self.array = device.view(segment.array, np.dtype(np.uint8), (nbytes,), None)

    def _put_in_order(self) -> None:
        assert self.segment is not None
        self._shared.give_back(self.segment, [*self.read, self.device.record(self.stream)])


class _Lease:
    """A view's hold on the memory; all views of that view have it, too."""

    __slots__ = ("__weakref__", "_memory", "_stream")

    def __init__(self, memory: _Memory, stream: Stream) -> None:
        self._memory = memory
        self._stream = stream

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        memory, stream = self._memory, self._stream
        if is_finalizing() or stream == memory.stream:
            return
        try:
            memory.read.append(memory.device.record(stream))
        except Exception as error:
            log.warning("memory of %d bytes is left alone: %s", memory.array.nbytes, error)
            _lost.append(memory)


class Digested:
    """The digests of an array's blocks, being taken on the current stream. A source of `taskgraph.graph.digests`."""

    def __init__(self, device: Device, array: Array, block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._take = device.digests(array, block_bytes)
        self._done = device.record(device.current())
        self.blocks: Sequence[bytes] = ()
        self.nbytes: int = array.nbytes

    def begin(self) -> None:
        """Waits until they are taken. To be called before `digest` is."""
        self._device.wait(self._done)
        self.blocks = self._take()

    def digest(self, begin: int, end: int) -> bytes:
        return self.blocks[begin // self._block_bytes]


class Private(Digested):
    """A private copy of an array, being made and digested on the current stream: later writes do not reach it.

    Args:
        shared: where it is copied to, as far as there is memory, so that other processes can open it.
    """

    def __init__(self, device: Device, array: Array, block_bytes: int, shared: SharedMemory | None = None) -> None:
        segment = None if shared is None else shared.take(array.nbytes)
        if shared is None or segment is None:
            self._memory = _Memory(device, device.copy(array), device.current())
        else:
            self._memory = _InSegment(device, shared, segment, array.nbytes)
            device.fill(self._memory.array, array)
        super().__init__(device, self._memory.array, block_bytes)

    def sealed(self) -> DeviceBuffer:
        """The copy, once `begin` returned."""
        return DeviceBuffer(self._memory, self._block_bytes)


class DeviceBuffer:
    """A buffer of an encoded value, in the memory of a device. Nobody writes to it.

    Attributes:
        nbytes: its size.
        host_copies: how often it was copied to the host, or that was tried.
    """

    __slots__ = ("_block_bytes", "_copy", "_leases", "_lock", "_memory", "host_copies", "nbytes")

    format = "B"
    c_contiguous = True

    def __init__(self, memory: _Memory, block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._leases: weakref.WeakSet[_Lease] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._copy: HostCopy | None = None
        self.host_copies = 0
        self.nbytes: int = memory.array.nbytes

    @property
    def device(self) -> Device:
        return self._memory.device

    @property
    def segment(self) -> Segment | None:
        """The memory it is in, where other processes can open that. It begins there."""
        return self._memory.segment

    @property
    def viewed(self) -> bool:
        """Whether there are views of it."""
        return bool(self._leases)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A view, to be read on the current stream: nothing is copied."""
        memory = self._memory
        lease = _Lease(memory, memory.device.current())
        self._leases.add(lease)
        return memory.device.view(memory.array, dtype, shape, lease)

    def separate(self) -> DeviceBuffer:
        """The same bytes in memory of its own. Waits."""
        copy = Private(self.device, self.array(np.dtype(np.uint8), (self.nbytes,)), self._block_bytes)
        copy.begin()
        return copy.sealed()

    def digested(self) -> Digested:
        """What its digests are by now, behind what is queued on the current stream."""
        return Digested(self._memory.device, self._memory.array, self._block_bytes)

    def host(self, allocate: Allocate | None = None) -> memoryview:
        """The bytes, on the host. Copied once: waits for that, so call it in a thread.

        Args:
            allocate: where they are copied to, as far as it has memory.
        """
        copy = self.copying(allocate)
        copy.finish()
        return copy.data

    def copying(self, allocate: Allocate | None = None) -> HostCopy:
        """The same, begun by whoever asks first. It may take memory and have it page-locked: call it in a thread."""
        with self._lock:
            if self._copy is None or self._copy.error is not None:
                memory = self._memory
                self.host_copies += 1
                self._copy = HostCopy(memory.device, memory.array, _side_stream(memory.device), allocate, keep=memory)
                self._copy.begin()
            return self._copy
