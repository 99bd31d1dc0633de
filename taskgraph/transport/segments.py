"""Memory that values are encoded into, used again and again, and open to other processes of the host where it can be.

Memory that a process has never touched fills at about 1 GB/s here, memory it has at ten to twenty times that: so large
values come from a pool of *segments*, and a segment that nobody reads any more takes the next value.

Segments are cut from *arenas*: anonymous memory of the kernel (`memfd_create`), several for one arena where they are
less than a huge page (`pages`). It has no name in any file system: whatever kills whom, it is gone with the last
descriptor and mapping of it. Where there is no such thing (not on Linux), it is memory of this process alone, and what
lies there travels as bytes.

**A segment is used again only if it is known that nobody reads it.** In this process that is so when the block given
out is garbage: encoded values, views that user code keeps, and what is lent to peers all hold it (`lending`). Who
cannot tell any more whether a peer reads it spoils the block: its segment is never written again, and the others of its
arena take no more values, so that the memory goes when they are free. What a device still copies from there, the
segment's pin knows (`taskgraph.device.pinning`).
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
from taskgraph.graph.blocks import Block, Watch
from taskgraph.transport.pages import address_of, emptied, gathered, huge_page_bytes, mapped
from taskgraph.transport.regions import NAME, Region

__all__ = ["LEAST_BYTES", "Pool", "Use"]

log = logging.getLogger("taskgraph.transport")

LEAST_BYTES: Final = 64 << 10
"""Smaller values are not worth a segment: copying them costs less than telling where they are."""
_STEPS: Final = 8
"""Sizes of segments per power of two: values that differ a little use the same ones, and an eighth is lost at most."""
_FITS: Final = 1.5
"""A value takes a segment of at most this many times its size."""
_PAGES: Final = 2
"""Huge pages of an arena. One value that stays, here or with a peer, keeps no more than so many."""
_GATHERED_PAGES: Final = 8
"""So many are gathered at a time, since an event loop may wait for it: more of it at the next value."""
_NOEXEC_SEAL: Final = 0x8  # MFD_NOEXEC_SEAL, from Linux 6.3 on
_IDLE_S: Final = 10.0
"""How long a segment waits for another value."""
_WANTED_SEALS: Final = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


_LACKING = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""There is not as much as was asked for, of memory or of descriptors: another time, or of less, there may be."""


class _Arena:
    """A piece of memory that segments are cut from, one behind the other. `region` is None where others cannot open it.

    It stays until the last view of any of them is gone, whatever was closed meanwhile.

    Attributes:
        cut: bytes that segments have, or had.
        gathered: of so many it has been tried to put them into huge pages: what is not cut takes no memory.
        retired: none of its segments takes another value: somebody may read one of them for ever, and memory that is
            of no use any more goes with the whole.
    """

    __slots__ = ("_closed", "_pid", "cut", "gathered", "memory", "region", "retired", "size")

    def __init__(self, size: int, *, shared: bool) -> None:
        """Raises OSError or MemoryError where there is no memory, or no descriptor, for it."""
        self.size = size
        self.cut = 0
        self.retired = False
        self.gathered = 0 if shared else size
        self.region: Region | None = None
        self._closed: list[tuple[int, int]] = []
        self._pid = os.getpid()
        if not shared:
            self.memory = memoryview(mmap.mmap(-1, size))
            return
        fd = _anonymous()
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _WANTED_SEALS)  # nobody, not even we, can take pages from under a reader
            self.memory = mapped(fd, size, writable=True)
            found = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        self.region = Region(fd, found.st_dev, found.st_ino, size, address_of(self.memory))

    def to_gather(self) -> tuple[int, int]:
        """Where in memory, and how much, is to be gathered next, of what is cut: it counts as gathered from now on."""
        huge = huge_page_bytes() or self.size
        begin = self.gathered
        end = self.gathered = min(-(-self.cut // huge) * huge, begin + _GATHERED_PAGES * huge, self.size)
        assert self.region is not None
        return self.region.address + begin, end - begin

    def empty(self, offset: int, size: int) -> None:
        """Gives pages back that nobody reads, and nobody will write to. In any thread."""
        self._closed.append((offset, size))
        self._empty(offset, size)

    def unlocked(self, offset: int, size: int) -> None:
        """The same once they are page-locked no more: nor can the kernel take others of the same huge page before."""
        self.empty(offset, size)
        for piece in tuple(self._closed):
            self._empty(*piece)

    def _empty(self, offset: int, size: int) -> None:
        if self.region is not None and size and self._pid == os.getpid():  # in a child of a fork it is not ours
            emptied(self.region.address + offset, size)


class _Segment:
    """A piece of an arena, which takes one value after the other."""

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
        """It takes no other value. Its pages go, unless somebody may read them: those go with the arena."""
        pin, self.pin = self.pin, None
        if self.spoiled:
            return
        if pin is None:
            self.arena.empty(self.offset, self.size)
        else:
            pin.then = partial(self.arena.unlocked, self.offset, self.size)


def _anonymous() -> int:
    """Memory that is no program: a kernel may be told to give no other (`vm.memfd_noexec`), or not know the word."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(NAME, flags)


class Use(Watch[Block]):
    """One use of a segment, all that is known of it: what its block's `origin` is, and what tells when that is garbage.

    Attributes:
        offset: where the block begins in its region.
    """

    __slots__ = ("locked", "offset", "region", "segment")
    locked: bool
    offset: int
    region: Region | None
    segment: _Segment

    def spoil(self) -> None:
        self.segment.spoiled = self.segment.arena.retired = True

    def pinned(self, device: Device) -> Pin | None:
        return pin_of(self.segment, device)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forked() -> None:
    for pool in _pools:
        pool.disown()


os.register_at_fork(after_in_child=_forked)


class Pool:
    """The segments of one process.

    Args:
        max_segments: more are not made; values go to other memory then. A segment takes one or two descriptors.
        max_idle_bytes: what may wait for another value.
        clock: seconds.
    """

    def __init__(self, *, max_segments: int, max_idle_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_segments = max_segments
        self._max_idle_bytes = max_idle_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._shared = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
        self._idle: list[_Segment] = []  # the one that was used last is last: it is the likeliest in the cache
        self._idle_bytes = 0
        self._used: set[Use] = set()
        self._garbage: deque[Use] = deque()
        self._ended = self._garbage.append  # it may run anywhere, also within our lock
        self._arena: _Arena | None = None  # the one that segments are being cut from
        self._cut_at = 0.0
        self._closed = False
        self._lacked = False  # which is told once
        _pools.add(self)

    def disown(self) -> None:
        """This process is a child that was forked, and all of this memory is its parent's: none is given out here."""
        self._lock = threading.Lock()  # whoever had it is not here
        self._closed = True
        self._idle, self._idle_bytes, self._arena = [], 0, None

    def __len__(self) -> int:
        return len(self._idle) + len(self._used)

    def allocate(self, nbytes: int) -> Block | None:
        """Writable memory, not cleared; or None, where it is too little to matter or there is no more to give."""
        if nbytes < LEAST_BYTES:
            return None
        with self._lock:
            if self._garbage:
                self._collect()
            segment = self._take(nbytes)
            if segment is None:
                return None
            arena = segment.arena
            block = Block((nbytes,), np.uint8, segment.memory)
            block.origin = use = Use(block, self._ended)
            use.segment, use.region, use.offset = segment, arena.region, segment.offset
            use.locked = segment.pin is not None
            self._used.add(use)
            if arena.gathered >= arena.cut:  # as a rule
                return block
            piece = arena.to_gather()
        gathered(*piece)  # not with the lock: it may take a while
        return block

    def _take(self, nbytes: int) -> _Segment | None:
        if self._closed:
            return None
        idle = self._idle
        if idle and (segment := idle[-1]).size == nbytes and segment.pin is None:  # as a rule
            idle.pop()
            self._idle_bytes -= nbytes
            return segment
        most = max(_FITS * nbytes, 2 * LEAST_BYTES)
        for at in range(len(idle) - 1, -1, -1):
            segment = idle[at]
            if nbytes <= segment.size <= most and (segment.pin is None or segment.pin.idle()):
                del idle[at]
                self._idle_bytes -= segment.size
                return segment
        if len(self) >= self._max_segments and self._idle:
            self._drop_oldest()
        if len(self) >= self._max_segments:
            return None
        try:
            return self._cut(_rounded(nbytes))
        except (OSError, MemoryError) as error:
            if isinstance(error, MemoryError) or error.errno in _LACKING:
                if not self._lacked:
                    log.warning("no shared memory for a value of %d bytes (%s): it travels as bytes", nbytes, error)
                self._lacked = True
            elif self._shared and not self._used and not self._idle:
                log.warning("no shared memory here (%s): values travel as bytes", error)
                self._shared = False
            return None

    def _cut(self, size: int) -> _Segment:
        """A new segment. Those that are less than a huge page are cut from arenas of several."""
        huge = huge_page_bytes() if self._shared else 0
        if size >= huge:
            return _Segment(_Arena(size, shared=self._shared), size)
        arena = self._arena
        if arena is None or arena.retired or arena.size - arena.cut < size:
            self._end_arena()
            arena = self._arena = _Arena(_PAGES * huge, shared=True)
        self._cut_at = self._clock()
        return _Segment(arena, size)

    def _end_arena(self) -> None:
        """No more segments are cut from the last arena: what is left of it is given back."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.empty(arena.cut, arena.size - arena.cut)

    def _collect(self) -> None:
        """What became garbage waits for another value, or is closed."""
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
        """Closes the segment that has been idle for longest."""
        self._drop(self._idle[:1])

    def _drop(self, idle: Sequence[_Segment]) -> None:
        for segment in idle:
            self._idle.remove(segment)
            self._idle_bytes -= segment.size
            segment.close()

    def trim(self) -> None:
        """Closes what has been idle for long. To be called now and then."""
        with self._lock:
            self._collect()
            now = self._clock()
            while self._idle and now - self._idle[0].freed_at > _IDLE_S:
                self._drop_oldest()
            if self._arena is not None and now - self._cut_at > _IDLE_S:
                self._end_arena()

    def close(self) -> None:
        """Nothing is given out any more, and nobody opens anything. Views stay valid as long as somebody has them."""
        with self._lock:
            self._closed = True
            self._collect()
            self._end_arena()
            while self._idle:
                self._drop_oldest()
            for use in self._used:
                if use.region is not None:
                    use.region.close()


def _rounded(nbytes: int) -> int:
    step = max(mmap.PAGESIZE, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step
