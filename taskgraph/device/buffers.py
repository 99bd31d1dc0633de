"""The bulk of values that stays on its device: private copies, views of them, and when their memory goes back.

A copy is made on the stream of the caller, and is complete before a `DeviceBuffer` exists: so it can be read on any
stream. Its memory belongs to the stream it was made on, which would give it to the next one who
allocates there while the reading of others is still queued on theirs. So every view holds the memory by a lease of its
own, which ends with an event on the stream that the view was made for; and the memory is freed once all of these events
are past. Only a thread made for this waits for them (`afterwards`). It also ends leases that end on an event loop, as
CUDA's driver may block the thread that does so.

A task's stream is in the hands of its code, which may capture a graph on it: whatever is queued there meanwhile becomes
part of the graph, or spoils it. So the framework queues only
events there, and only while no graph is captured (`Device.try_record`).
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

from taskgraph.device.afterwards import Aside, call, do_now, later, on_a_loop, soon
from taskgraph.device.api import Array, Device, Event, Stream
from taskgraph.device.digest import DIGEST_BYTES
from taskgraph.device.memory import givers
from taskgraph.device.shared import Segment, SharedMemory
from taskgraph.device.staging import HostCopy

__all__ = ["Allocate", "DeviceBuffer", "Digested", "Private", "borrowed"]

log = logging.getLogger("taskgraph.devices")

Allocate = Callable[[int], Any]
"""`taskgraph.graph.blocks.Allocate`: memory of the host, or None."""

_side: Final[weakref.WeakKeyDictionary[Device, Stream]] = weakref.WeakKeyDictionary()
"""Streams for copies to the host that wait for no task's work."""
_lock: Final = threading.Lock()
_kept: Final[set[_Memory]] = set()
"""Memory that has leases. Finalizers of objects that are garbage together run in any order, and those of CuPy destroy
its streams and events: this set keeps what a lease's finalizer needs."""
_numbers: Final = itertools.count()
_NOBODYS: Final = object()
"""In place of a stream: no stream is this one."""


def _side_stream(device: Device) -> Stream:
    with _lock:
        found = _side.get(device)
        if found is None:
            found = _side[device] = device.stream()
        return found


class _Memory:
    """An array that no longer changes, and the streams that read it. It is freed with its last lease.

    After an error of the device it is kept, so that its memory is not reused.
    """

    __slots__ = ("_last", "array", "device", "leases", "read", "stream")

    segment: Segment | None = None  # what other processes can open of it

    def __init__(self, device: Device, array: Array, stream: Stream) -> None:
        self.device = device
        self.array = array
        self.stream = stream
        self.leases: dict[int, Stream] = {}  # by a lease's number: the stream it is for
        self.read: list[Event] = []  # not the last of each stream: leases end in any thread, and in any order
        self._last = [None]

    def release(self, number: int) -> None:
        """Ends a lease; all its reads are queued. Called in any thread, also within other code of this module."""
        stream = self.leases[number]
        try:
            if stream != self.stream:
                event = self.device.try_record(stream)
                if event is None:
                    later(partial(self.release, number))
                    return
                self.read.append(event)
            del self.leases[number]
            if not self.leases and self._is_last():
                self._give_back()
        except Exception as error:  # the device is lost, as a rule
            log.warning("memory of %d bytes is left alone: %s", self.array.nbytes, error)

    def _is_last(self) -> bool:
        """True for one of the threads that find no lease left. Without a lock: a finalizer may come in its middle."""
        try:
            self._last.pop()
        except IndexError:
            return False
        return True

    def may_release(self, number: int) -> bool:
        """True if a lease may end in this thread: its stream is current here, or no event is needed."""
        return self.leases[number] in (self.stream, self.device.current())

    def _give_back(self) -> None:
        """Frees the memory after its readers."""
        call(self.device, self.read, self._free)

    def _free(self) -> None:
        self.stream = None  # who has this object still may drop it anywhere
        _kept.discard(self)


class _InSegment(_Memory):
    """`_Memory` that belongs to no stream: its next user follows all who read it, the owner, too.

    Args:
        segment: how it is lent on; of this process, or of another one.
        ended: called with the events of who reads it, in any thread, in the middle of anything.
    """

    __slots__ = ("_ended", "segment")

    def __init__(self, device: Device, segment: Segment, nbytes: int, ended: Callable[[list[Event]], object]) -> None:
        super().__init__(device, device.view(segment.array, np.dtype(np.uint8), (nbytes,), None), _NOBODYS)
        self.segment = segment
        self._ended = ended

    def _give_back(self) -> None:
        self._ended(self.read)
        self._free()


class _Lease:
    """A hold on memory for as long as anybody has this object.

    Args:
        stream: the stream that reads it; None: only the memory's own, or the reader waits for its reads.
    """

    __slots__ = ("__weakref__", "_number", "memory")

    def __init__(self, memory: _Memory, stream: Stream | None = None) -> None:
        self.memory = memory
        self._number = next(_numbers)
        memory.leases[self._number] = memory.stream if stream is None else stream
        _kept.add(memory)

    def waited(self) -> None:
        """Notes that the work queued for this lease is done."""
        self.memory.leases[self._number] = self.memory.stream

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, here: Callable[[], bool] = on_a_loop
    ) -> None:
        if is_finalizing():  # some go after this module
            return
        if not here() and self.memory.may_release(self._number):
            self.memory.release(self._number)
        else:
            soon(partial(self.memory.release, self._number))


def _let_go(nbytes: int) -> bool:
    """See `taskgraph.device.memory.givers`."""
    return do_now()


givers.insert(0, _let_go)  # before those that free what it gives back


class Digested:
    """The digests of an array's blocks, being taken on the current stream. A source of `taskgraph.graph.digests`.

    Args:
        take: what queued them gave.
    """

    def __init__(self, device: Device, take: Callable[[], bytes], nbytes: int, block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._take = take
        self._done: Aside | None = Aside([device.record(device.current())])
        self.blocks = b""
        self.nbytes = nbytes

    def begin(self) -> None:
        """Waits until they are taken. To be called before `digest` is, or `blocks` are read."""
        done, self._done = self._done, None
        if done is not None:
            (event,) = done.things
            self._device.wait(event)
            self._device.recycle(event)
        self.blocks = self._take()

    def digest(self, begin: int, end: int) -> bytes:
        at = begin // self._block_bytes * DIGEST_BYTES
        return self.blocks[at : at + DIGEST_BYTES]


class Private(Digested):
    """A private copy of an array, being made and digested on the current stream: later writes do not reach it.

    Args:
        shared: where it is copied to, as far as there is memory, so that other processes can open it.
    """

    def __init__(self, device: Device, array: Array, block_bytes: int, shared: SharedMemory | None = None) -> None:
        nbytes: int = array.nbytes
        segment = None if shared is None else shared.take(nbytes)
        if shared is None or segment is None:
            self._lease = _Lease(_Memory(device, device.empty(nbytes), device.current()))
        else:
            memory = _InSegment(device, segment, nbytes, partial(shared.give_back, segment))
            self._lease = _Lease(memory, device.current())
        super().__init__(device, device.fill(self._lease.memory.array, array, block_bytes), nbytes, block_bytes)

    def begin(self) -> None:
        super().begin()
        self._lease.waited()

    def sealed(self) -> DeviceBuffer:
        """The copy, once `begin` returned."""
        return DeviceBuffer(self._lease, self._block_bytes)


def borrowed(
    device: Device, segment: Segment, nbytes: int, block_bytes: int, ended: Callable[[list[Event]], object]
) -> DeviceBuffer:
    """A buffer in memory of another process, which stays as it is until `ended` was called.

    Args:
        ended: called once, in any thread, when this process has no reference left to the buffer or a view of it, with
            the events of its readers.
    """
    return DeviceBuffer(_Lease(_InSegment(device, segment, nbytes, ended)), block_bytes)


class DeviceBuffer:
    """A buffer of an encoded value, in the memory of a device. It never changes.

    Attributes:
        nbytes: its size.
        host_copies: how often it was copied to the host, or that was tried.
    """

    __slots__ = ("_block_bytes", "_copy", "_lease", "_lock", "_memory", "_views", "host_copies", "nbytes")

    format = "B"
    c_contiguous = True

    def __init__(self, lease: _Lease, block_bytes: int) -> None:
        self._lease = lease
        self._memory = memory = lease.memory
        self._block_bytes = block_bytes
        self._views: weakref.WeakSet[_Lease] = weakref.WeakSet()
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
    def viewed(self) -> bool:
        """True if there are views of it."""
        return bool(self._views)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A view, to be read on the current stream: nothing is copied."""
        memory = self._memory
        lease = _Lease(memory, memory.device.current())
        self._views.add(lease)
        return memory.device.view(memory.array, dtype, shape, lease)

    def separate(self) -> DeviceBuffer:
        """Copies to memory of its own. Waits for the device."""
        copy = Private(self.device, self.array(np.dtype(np.uint8), (self.nbytes,)), self._block_bytes)
        copy.begin()
        return copy.sealed()

    def digested(self) -> Digested:
        """Its digests now, taken after the work that is queued on the current stream."""
        device = self._memory.device
        return Digested(device, device.digests(self._memory.array, self._block_bytes), self.nbytes, self._block_bytes)

    def host(self, allocate: Allocate | None = None) -> memoryview:
        """Returns the bytes on the host. Copies them once, and waits for the copy, so call it in a thread.

        Args:
            allocate: where they are copied to, as far as it has memory.
        """
        copy = self.copying(allocate)
        copy.finish()
        return copy.data

    def copy_early(self, allocate: Allocate) -> None:
        """Begins to copy it to the host, for `host`, where that takes neither new memory nor a lock on some."""
        block = allocate(self.nbytes)
        if block is not None and block.origin is not None and block.origin.locked:
            self.copying(lambda _: block, sent=False)

    def copying(self, allocate: Allocate | None = None, *, sent: bool = True) -> HostCopy:
        """Returns the copy to the host, which the first caller begins. May page-lock memory: call it in a thread."""
        with self._lock:
            if self._copy is None or self._copy.error is not None:
                memory = self._memory
                self.host_copies += 1
                self._copy = HostCopy(
                    memory.device,
                    memory.array,
                    _side_stream(memory.device),
                    allocate,
                    keep=_Lease(memory),
                    sent=sent,
                )
                self._copy.begin()
            return self._copy
