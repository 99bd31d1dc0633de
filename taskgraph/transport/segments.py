"""The pool of shared memory that values are encoded and received into.

New memory fills at about 1 GB/s, used memory ten to twenty times as fast. So large values get *segments* of a pool.

    segment     next        by
    idle        used        `Pool.allocate`
    used        idle        its block is garbage: no encoded value, view or lease refers to it
    used        spoiled     a peer may read it for ever (`SegmentUse.spoil`)
    idle        closed      it was idle for long, the pool has too much idle memory, or its arena is retired

1. A segment takes another value only if no process reads it. A spoiled segment is never written again.
2. Segments are cut from *arenas*: anonymous memory (`memfd_create`). It has no name in a file system, so it ends with
   its last descriptor and mapping. Segments smaller than a huge page (`pages`) share an arena.
3. A spoiled segment retires its arena: other segments of it take no more values, and its memory is freed with them.
4. Without `memfd_create` the memory belongs to this process alone, and its values are sent as bytes.
5. `taskgraph.device.pinning` knows whether a device still copies from a segment.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from taskgraph.device.api import Device
from taskgraph.device.pinning import Pin, pin_of
from taskgraph.graph.blocks import Block, Finalizer
from taskgraph.transport.pages import address_of, huge_page_bytes, map_shared, move_to_huge_pages, release_pages
from taskgraph.transport.regions import NAME, Region

__all__ = ["LEAST_BYTES", "Pool", "SegmentUse"]

log = logging.getLogger("taskgraph.transport")

LEAST_BYTES: Final = 64 << 10
"""Smaller values are copied, which is cheaper than lending."""
_STEPS: Final = 8
"""Sizes of segments per power of two. At most an eighth of a segment is wasted."""
_FITS: Final = 1.5
"""A segment is at most this many times as large as its value."""
_PAGES: Final = 2
"""Huge pages of an arena: the most memory that one small value can keep."""
_PAGES_AT_ONCE: Final = 8
"""Huge pages that one `allocate` asks for, since an event loop may wait for it."""
_NOEXEC_SEAL: Final = 0x8  # MFD_NOEXEC_SEAL, from Linux 6.3 on
_IDLE_S: Final = 10.0
"""Time that a segment waits for another value."""
_WANTED_SEALS: Final = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


_SHORTAGE_ERRORS = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""Errors that may pass: too little memory, too few descriptors."""


class _Arena:
    """Memory that consecutive segments are cut from. It stays until the last view of it is gone.

    Attributes:
        region: how other processes open it; None: they cannot.
        cut: bytes that were given to segments. The rest takes no memory.
        collapsed: bytes that the kernel was asked to move into huge pages.
        retired: its segments take no more values, since one was spoiled.
    """

    __slots__ = ("_closed", "_pid", "collapsed", "cut", "memory", "region", "retired", "size")

    def __init__(self, size: int, *, shared: bool) -> None:
        """Raises OSError or MemoryError if there is no memory or no descriptor."""
        self.size = size
        self.cut = 0
        self.retired = False
        self.collapsed = 0 if shared else size
        self.region: Region | None = None
        self._closed: list[tuple[int, int]] = []
        self._pid = os.getpid()
        if not shared:
            self.memory = memoryview(mmap.mmap(-1, size))
            return
        fd = _make_anonymous_memory()
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _WANTED_SEALS)  # no process, nor this one, can take pages from a reader
            self.memory = map_shared(fd, size, writable=True)
            found = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        self.region = Region(fd, found.st_dev, found.st_ino, size, address_of(self.memory))

    def next_to_collapse(self) -> tuple[int, int]:
        """Returns address and size of the next part to move to huge pages, and counts it as `collapsed`."""
        huge = huge_page_bytes() or self.size
        begin = self.collapsed
        end = self.collapsed = min(-(-self.cut // huge) * huge, begin + _PAGES_AT_ONCE * huge, self.size)
        assert self.region is not None
        return self.region.address + begin, end - begin

    def free(self, offset: int, size: int) -> None:
        """Gives a part of the arena, of which no segment is left, back to the kernel. May be called in any thread."""
        self._closed.append((offset, size))
        self._release_pages(offset, size)

    def free_after_unlock(self, offset: int, size: int) -> None:
        """Does as `free` after the memory was page-locked: gives back all closed segments, which the lock kept."""
        self.free(offset, size)
        for piece in tuple(self._closed):
            self._release_pages(*piece)

    def _release_pages(self, offset: int, size: int) -> None:
        """Gives these pages back to the kernel; does nothing for memory that is not shared, or in a forked child."""
        if self.region is not None and size and self._pid == os.getpid():  # a forked child does not own it
            release_pages(self.region.address + offset, size)


class _ArenaSegment:
    """A part of an arena that takes one value after another."""

    __slots__ = ("arena", "freed_at", "memory", "offset", "pin", "size", "spoiled")

    def __init__(self, arena: _Arena, size: int) -> None:
        self.arena = arena
        self.size = size
        self.offset = arena.cut
        arena.cut += size
        self.memory = arena.memory[self.offset : arena.cut]
        self.spoiled = False
        self.freed_at = 0.0
        self.pin: Pin | None = None

    def close(self) -> None:
        """Gives the segment's pages back to the kernel. Those of a spoiled segment stay until its arena is freed."""
        pin, self.pin = self.pin, None
        if self.spoiled:
            return
        if pin is None:
            self.arena.free(self.offset, self.size)
        else:
            pin.then = partial(self.arena.free_after_unlock, self.offset, self.size)


def _make_anonymous_memory() -> int:
    """Makes anonymous memory. Some kernels require the flag for no executable memory, older ones refuse it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(NAME, flags)


class SegmentUse(Finalizer[Block]):
    """One use of a segment: the `origin` of its block, called when the block is garbage.

    Attributes:
        offset: of the block in its region.
    """

    __slots__ = ("locked", "offset", "region", "segment")
    locked: bool
    offset: int
    region: Region | None
    segment: _ArenaSegment

    def spoil(self) -> None:
        """Marks the segment as spoiled, so that it is never written again, and retires its arena."""
        self.segment.spoiled = self.segment.arena.retired = True

    def pin(self, device: Device) -> Pin | None:
        return pin_of(self.segment, device)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _disown_in_child() -> None:
    for pool in _pools:
        pool.disown()


os.register_at_fork(after_in_child=_disown_in_child)


class Pool:
    """The segments of one process.

    Args:
        max_segments: the most segments; further values get other memory. A segment takes one or two descriptors.
        max_idle_bytes: the most memory of idle segments.
        clock: seconds.
    """

    def __init__(self, *, max_segments: int, max_idle_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_segments = max_segments
        self._max_idle_bytes = max_idle_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._shared = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
        self._idle: list[_ArenaSegment] = []  # the last used one is last, and likely in the cache
        self._idle_bytes = 0
        self._used: set[SegmentUse] = set()
        self._garbage: deque[SegmentUse] = deque()
        self._note_garbage = self._garbage.append  # may run anywhere, also while this thread has the lock
        self._arena: _Arena | None = None  # new small segments are cut from it
        self._cut_at = 0.0
        self._closed = False
        self._logged_shortage = False  # logged once
        _pools.add(self)

    def disown(self) -> None:
        """Stops giving out memory, since this process was forked and its parent owns the memory."""
        self._lock = threading.Lock()  # its owner may not exist in this process
        self._closed = True
        self._idle, self._idle_bytes, self._arena = [], 0, None

    def __len__(self) -> int:
        return len(self._idle) + len(self._used)

    def allocate(self, nbytes: int) -> Block | None:
        """Returns writable memory, not cleared; None: `nbytes` is small, there is no memory, or the pool is closed.

        May be called in any thread. The memory returns to the pool when the block is garbage.
        """
        if nbytes < LEAST_BYTES:
            return None
        with self._lock:
            if self._garbage:
                self._recycle()
            segment = self._take(nbytes)
            if segment is None:
                return None
            arena = segment.arena
            block = Block((nbytes,), np.uint8, segment.memory)
            block.origin = use = SegmentUse(block, self._note_garbage)
            use.segment, use.region, use.offset = segment, arena.region, segment.offset
            use.locked = segment.pin is not None
            self._used.add(use)
            if arena.collapsed >= arena.cut:
                return block
            piece = arena.next_to_collapse()
        move_to_huge_pages(*piece)  # without the lock, since it may take a while
        return block

    def _take(self, nbytes: int) -> _ArenaSegment | None:
        """Returns an idle segment of a fitting size, or a new one; None: there is no memory, or the pool is full."""
        if self._closed:
            return None
        idle = self._idle
        if idle and (segment := idle[-1]).size == nbytes and segment.pin is None:  # the common case
            idle.pop()
            self._idle_bytes -= nbytes
            return segment
        most = max(_FITS * nbytes, 2 * LEAST_BYTES)
        for at in range(len(idle) - 1, -1, -1):
            segment = idle[at]
            if nbytes <= segment.size <= most and (segment.pin is None or segment.pin.is_idle()):
                del idle[at]
                self._idle_bytes -= segment.size
                return segment
        if len(self) >= self._max_segments and self._idle:
            self._drop_oldest()
        if len(self) >= self._max_segments:
            return None
        try:
            return self._cut(_round_up(nbytes))
        except (OSError, MemoryError) as error:
            if isinstance(error, MemoryError) or error.errno in _SHORTAGE_ERRORS:
                if not self._logged_shortage:
                    log.warning("no shared memory for a value of %d bytes (%s): bytes are sent", nbytes, error)
                self._logged_shortage = True
            elif self._shared and not self._used and not self._idle:
                log.warning("no shared memory here (%s): bytes are sent", error)
                self._shared = False
            return None

    def _cut(self, size: int) -> _ArenaSegment:
        """Makes a segment: in an arena that small ones share; from a huge page on, in its own. Raises as `_Arena`."""
        huge = huge_page_bytes() if self._shared else 0
        if size >= huge:
            return _ArenaSegment(_Arena(size, shared=self._shared), size)
        arena = self._arena
        if arena is None or arena.retired or arena.size - arena.cut < size:
            self._end_arena()
            arena = self._arena = _Arena(_PAGES * huge, shared=True)
        self._cut_at = self._clock()
        return _ArenaSegment(arena, size)

    def _end_arena(self) -> None:
        """Gives the unused rest of the current arena back to the kernel; the next small segment begins another
        arena.
        """
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.free(arena.cut, arena.size - arena.cut)

    def _recycle(self) -> None:
        """Makes segments whose blocks are garbage idle, to be used again. Closes those of retired arenas, and the
        oldest if there are too many bytes."""
        now, retired = self._clock(), False
        while self._garbage:
            use = self._garbage.popleft()
            self._used.remove(use)
            segment = use.segment
            if segment.arena.retired or self._closed:
                segment.close()
                retired = True
                continue
            segment.freed_at = now
            self._idle.append(segment)
            self._idle_bytes += segment.size
        if retired:
            self._drop([segment for segment in self._idle if segment.arena.retired])
        while self._idle_bytes > self._max_idle_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Closes the segment that was idle for longest."""
        self._drop(self._idle[:1])

    def _drop(self, idle: Sequence[_ArenaSegment]) -> None:
        """Closes these idle segments."""
        for segment in idle:
            self._idle.remove(segment)
            self._idle_bytes -= segment.size
            segment.close()

    def trim(self) -> None:
        """Closes segments that were idle for long. Called periodically."""
        with self._lock:
            self._recycle()
            now = self._clock()
            while self._idle and now - self._idle[0].freed_at > _IDLE_S:
                self._drop_oldest()
            if self._arena is not None and now - self._cut_at > _IDLE_S:
                self._end_arena()

    def close(self) -> None:
        """Gives out no more memory. From now on no other process can open what is used. Views stay valid."""
        with self._lock:
            self._closed = True
            self._recycle()
            self._end_arena()
            while self._idle:
                self._drop_oldest()
            for use in self._used:
                if use.region is not None:
                    use.region.close_descriptor()


def _round_up(nbytes: int) -> int:
    """Returns the size of the smallest kind of segment that has this many bytes."""
    step = max(mmap.PAGESIZE, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step
