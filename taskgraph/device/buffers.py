"""Buffers of values that stay on their device: private copies, views of them, and when their memory is freed.

    array ──► `PrivateCopy`: a copy, being made ──► `DeviceBuffer` ──► views, a copy on the host
                        a `_Memory`, with a `_Use` for the buffer and one for each of its views

A copy is made on the caller's stream, and is complete before its `DeviceBuffer` exists. So any stream can read it. Its
memory belongs to the stream that made it: once freed, the next allocation there gets it, even if reads are still queued
on other streams. So every view has a use. When a view ends, an event is recorded on its stream; when no use is left
and the device has passed all events, the memory is freed. Only a helper thread waits for events (`afterwards`). That
thread also ends uses for event loops, since CUDA's driver may block.

User code owns a task's stream, and may capture a graph on it: work that is queued there meanwhile becomes part of the
graph, or spoils it. So the framework queues only events there, and none during a capture (`Device.try_record`).
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from taskgraph.device.afterwards import (
    OffLoopFinalizer,
    call_after,
    call_later,
    call_soon,
    make_pending_calls,
    on_a_loop,
)
from taskgraph.device.api import Array, Device, Event, Stream
from taskgraph.device.digest import DIGEST_BYTES
from taskgraph.device.memory import reclaimers
from taskgraph.device.shared import Segment, SharedMemory
from taskgraph.device.staging import HostCopy

__all__ = ["Allocate", "BlockDigests", "DeviceBuffer", "PrivateCopy", "borrow_buffer"]

log = logging.getLogger("taskgraph.devices")

Allocate = Callable[[int], Any]
"""`taskgraph.graph.blocks.Allocate`: memory of the host, or None."""

_side: Final[weakref.WeakKeyDictionary[Device, Stream]] = weakref.WeakKeyDictionary()
"""For each device a stream for copies to the host, so that they wait for no task's work."""
_lock: Final = threading.Lock()
_kept: Final[set[_Memory]] = set()
"""Memory with uses. Python finalizes objects that become garbage together in any order, and CuPy's finalizers destroy
streams and events. This set keeps those that the finalizer of a use needs."""
_numbers: Final = itertools.count()
_NO_STREAM: Final = object()
"""In place of a stream; unequal to all streams."""


def _side_stream(device: Device) -> Stream:
    with _lock:
        found = _side.get(device)
        if found is None:
            found = _side[device] = device.new_stream()
        return found


class _Memory:
    """Memory that no longer changes, with its uses: freed when the last use has ended and all reads are done.

    After an error of the device it is kept for ever, so that it is not reused.
    """

    __slots__ = ("_last", "array", "device", "read", "stream", "uses")

    segment: Segment | None = None  # by which other processes can open it

    def __init__(self, device: Device, array: Array, stream: Stream) -> None:
        self.device = device
        self.array = array
        self.stream = stream
        self.uses: dict[int, Stream] = {}  # a use's number -> the stream that reads
        self.read: list[Event] = []  # of all ended uses; threads end uses in any order, so none replaces another
        self._last = [None]

    def end_use(self, number: int) -> None:
        """Ends a use, whose reads are all queued: once for each. Called in any thread, also amid this module's code."""
        stream = self.uses[number]
        try:
            if stream != self.stream:
                event = self.device.try_record(stream)
                if event is None:
                    call_later(partial(self.end_use, number))
                    return
                self.read.append(event)
            del self.uses[number]
            if not self.uses and self._is_last():
                self._free_after_reads()
        except Exception as error:  # usually the device is lost
            log.warning("the device failed, so %d bytes of its memory stay in use: %s", self.array.nbytes, error)

    def _is_last(self) -> bool:
        """True for the first caller only: of several threads that end the last uses, one frees the memory.

        Takes no lock, since a finalizer may interrupt this code.
        """
        try:
            self._last.pop()
        except IndexError:
            return False
        return True

    def may_end_use(self, number: int) -> bool:
        """True if this thread may end the use itself: its stream is current here, or needs no event."""
        return self.uses[number] in (self.stream, self.device.current_stream())

    def _free_after_reads(self) -> None:
        """Frees the memory once the device has passed the events of all readers."""
        call_after(self.device, self.read, self._free)

    def _free(self) -> None:
        self.stream = None  # the last reference to this object may go in any thread
        _kept.discard(self)


class _SegmentMemory(_Memory):
    """Memory in a shared segment. It belongs to no stream, so its next user follows the events of all readers.

    Args:
        segment: the segment, of this process or of another one.
        ended: called with the readers' events, in any thread, in the middle of any code.
    """

    __slots__ = ("_ended", "segment")

    def __init__(self, device: Device, segment: Segment, nbytes: int, ended: Callable[[list[Event]], object]) -> None:
        super().__init__(device, device.view(segment.array, np.dtype(np.uint8), (nbytes,), None), _NO_STREAM)
        self.segment = segment
        self._ended = ended

    def _free_after_reads(self) -> None:
        self._ended(self.read)
        self._free()


class _Use:
    """The use of memory by a buffer, a view or a copy: keeps the memory for as long as this object lives.

    Args:
        stream: the stream that reads the memory; None: the memory's own, or the reader waits for its reads.
    """

    __slots__ = ("__weakref__", "_number", "memory")

    def __init__(self, memory: _Memory, stream: Stream | None = None) -> None:
        self.memory = memory
        self._number = next(_numbers)
        memory.uses[self._number] = memory.stream if stream is None else stream
        _kept.add(memory)

    def note_reads_done(self) -> None:
        """Notes that all reads of this use are done, since its owner waited for them: its end needs no event."""
        self.memory.uses[self._number] = self.memory.stream

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, here: Callable[[], bool] = on_a_loop
    ) -> None:
        if is_finalizing():  # this module may be gone already
            return
        if not here() and self.memory.may_end_use(self._number):
            self.memory.end_use(self._number)
        else:
            call_soon(partial(self.memory.end_use, self._number))


reclaimers.insert(0, lambda nbytes: make_pending_calls())  # first: others free the memory that this one returns


class BlockDigests:
    """Digests of an array's blocks, computed on the current stream. A source of `taskgraph.graph.digests`.

    Args:
        get_digests: the function that `Device.queue_digests` or `Device.fill_and_digest` returned.
    """

    def __init__(self, device: Device, get_digests: Callable[[], bytes], nbytes: int, block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._get_digests = get_digests
        self._done: OffLoopFinalizer | None = OffLoopFinalizer([device.record(device.current_stream())])
        self.blocks = b""
        self.nbytes = nbytes

    def begin(self) -> None:
        """Waits until the device has computed the digests. Call it before `digest`, and before `blocks` is read."""
        done, self._done = self._done, None
        if done is not None:
            (event,) = done.things
            self._device.wait(event)
            self._device.recycle(event)
        self.blocks = self._get_digests()

    def digest(self, begin: int, end: int) -> bytes:
        """Returns the digest of one block, the bytes from `begin` to `end`."""
        at = begin // self._block_bytes * DIGEST_BYTES
        return self.blocks[at : at + DIGEST_BYTES]


class PrivateCopy(BlockDigests):
    """Copies and digests an array on the current stream; later writes to the array do not reach the copy.

    Args:
        shared: memory that other processes can open. The copy is made in it if it has room.
    """

    def __init__(self, device: Device, array: Array, block_bytes: int, shared: SharedMemory | None = None) -> None:
        nbytes: int = array.nbytes
        segment = None if shared is None else shared.take(nbytes)
        if shared is None or segment is None:
            self._use = _Use(_Memory(device, device.empty(nbytes), device.current_stream()))
        else:
            memory = _SegmentMemory(device, segment, nbytes, partial(shared.give_back, segment))
            self._use = _Use(memory, device.current_stream())
        super().__init__(
            device, device.fill_and_digest(self._use.memory.array, array, block_bytes), nbytes, block_bytes
        )

    def begin(self) -> None:
        super().begin()
        self._use.note_reads_done()

    def seal(self) -> DeviceBuffer:
        """Returns the copy as a buffer; call `begin` first."""
        return DeviceBuffer(self._use, self._block_bytes)


def borrow_buffer(
    device: Device, segment: Segment, nbytes: int, block_bytes: int, ended: Callable[[list[Event]], object]
) -> DeviceBuffer:
    """Makes a buffer of another process's memory. That process must not change the memory before `ended` is called.

    Args:
        ended: called once, in any thread, with the readers' events, when this process has neither the buffer nor views.
    """
    return DeviceBuffer(_Use(_SegmentMemory(device, segment, nbytes, ended)), block_bytes)


class DeviceBuffer:
    """A buffer of an encoded value, in the memory of a device. It never changes.

    Attributes:
        nbytes: its size.
        host_copies: the number of copies to the host, failed ones included.
    """

    __slots__ = ("_block_bytes", "_copy", "_lock", "_memory", "_use", "_views", "host_copies", "nbytes")

    format = "B"
    c_contiguous = True

    def __init__(self, use: _Use, block_bytes: int) -> None:
        self._use = use
        self._memory = memory = use.memory
        self._block_bytes = block_bytes
        self._views: weakref.WeakSet[_Use] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._copy: HostCopy | None = None
        self.host_copies = 0
        self.nbytes: int = memory.array.nbytes

    @property
    def device(self) -> Device:
        return self._memory.device

    @property
    def segment(self) -> Segment | None:
        """The shared segment at whose start the buffer lies; None if other processes cannot open its memory."""
        return self._memory.segment

    @property
    def is_viewed(self) -> bool:
        """True while there are views of the buffer."""
        return bool(self._views)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a view of the buffer, for reading on the current stream. The memory lives as long as the view."""
        memory = self._memory
        use = _Use(memory, memory.device.current_stream())
        self._views.add(use)
        return memory.device.view(memory.array, dtype, shape, use)

    def copy_on_device(self) -> DeviceBuffer:
        """Copies the buffer to memory of its own. Waits for the device."""
        copy = PrivateCopy(self.device, self.array(np.dtype(np.uint8), (self.nbytes,)), self._block_bytes)
        copy.begin()
        return copy.seal()

    def digest_again(self) -> BlockDigests:
        """Queues digests of the buffer as it is now, on the current stream."""
        device = self._memory.device
        return BlockDigests(
            device, device.queue_digests(self._memory.array, self._block_bytes), self.nbytes, self._block_bytes
        )

    def copy_to_host(self, allocate: Allocate | None = None) -> memoryview:
        """Returns the bytes on the host. Copies them once for all callers. Waits for the copy: call it in a thread.

        Args:
            allocate: gives the host memory, if it has some.
        """
        copy = self.begin_host_copy(allocate)
        copy.finish()
        return copy.data

    def copy_early(self, allocate: Allocate) -> None:
        """Begins the copy to the host if page-locked memory is at hand. Does not wait."""
        block = allocate(self.nbytes)
        if block is not None and block.origin is not None and block.origin.locked:
            self.begin_host_copy(lambda _: block)

    def begin_host_copy(self, allocate: Allocate | None = None) -> HostCopy:
        """Returns the copy to the host, and begins it if there is none, or only a failed one.

        May page-lock memory: call it in a thread.
        """
        with self._lock:
            if self._copy is None or self._copy.error is not None:
                memory = self._memory
                self.host_copies += 1
                stream = _side_stream(memory.device)
                self._copy = HostCopy(memory.device, memory.array, stream, allocate, keep=_Use(memory))
            return self._copy
