"""Bounds the memory of a device that one process holds, and frees some before an out-of-memory error is final.

CuPy's pool keeps freed memory, and returns it to the device when it can get no more. But it cannot reach what the pool
of another process keeps. So each process gets an equal part of the device. A pool that reaches its part first returns
its unused memory. Then it may grow beyond its part, as far as the device has free memory: a process that took over the
tasks of another one needs more.

Nothing here imports CuPy.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, Final

from taskgraph.system.host import memory_bytes

__all__ = ["BoundedAllocator", "bound_pinned_memory", "reclaimers"]

log = logging.getLogger("taskgraph.devices")

reclaimers: Final[list[Callable[[int], bool]]] = []
"""Functions that free unused memory of a device, called in turn with the bytes needed; True: it freed some.

They run in any thread, in the middle of an allocation, so they must neither allocate nor wait for one that does."""

LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"
_UNIT: Final = 512
"""CuPy's pool allocates multiples of it."""
_STEPS: Final = 8
"""A pool grows beyond its part by an eighth of it at a time, so that not every array of a loop raises the limit."""
_TRIES: Final = 8
"""Attempts while there should be room: other threads may take it, and memory may be fragmented."""
_PINNED_SHARE: Final = 16
"""A process keeps at most a sixteenth of the host's memory pinned and unused, since several share the host."""


class BoundedAllocator:
    """An allocator for CuPy: its pool with a limit, which calls `reclaimers` before it is out of memory.

    Args:
        cupy: the module.
        number: the device's number.
        fraction: the part of the device that all processes may hold together, at most 1.
        sharing: the number of processes on the device.
    """

    def __init__(self, cupy: Any, number: int, fraction: float, sharing: int) -> None:
        self._cuda = cupy.cuda
        self._number = number
        self._pool = pool = cupy.get_default_memory_pool()
        self._malloc = pool.malloc
        self._out_of_memory: type[Exception] = cupy.cuda.memory.OutOfMemoryError
        self._raising = threading.RLock()  # a garbage collection may allocate in the middle
        total: int = cupy.cuda.runtime.getDeviceProperties(number)["totalGlobalMem"]
        self._whole = int(total * fraction)
        self._spared = total - self._whole
        self._part = self._whole // sharing
        self._limit = 0  # the limit that this object set; 0: the user set one

    def install(self) -> str:
        """Becomes CuPy's allocator, unless the user set another one. Returns a line for the log."""
        cuda = self._cuda
        if cuda.get_allocator() != self._malloc:
            return f"device {self._number}: CuPy has another allocator than its pool, whose memory is not bounded"
        # Make the device current only if needed: that creates CUDA's context, which costs a second, and memory.
        here = cuda.runtime.getDevice() == self._number
        with nullcontext() if here else cuda.Device(self._number):
            known = self._pool.get_limit()
            if known or LIMIT in os.environ:
                text = f"{_gib(known)} (its own limit)" if known else f"all it can get ({LIMIT})"
            else:
                self._pool.set_limit(size=self._part)
                self._limit = self._part
                text = f"{_gib(self._part)} of {_gib(self._whole + self._spared)}"
                if self._part < self._whole:
                    text += f", and up to {_gib(self._whole)} if other processes leave room"
        cuda.set_allocator(self.malloc)
        return f"device {self._number}: CuPy's pool may hold {text}"

    def malloc(self, size: int) -> Any:
        """Allocates by `MemoryPool.malloc`; frees memory and tries again if there is too little."""
        try:
            return self._malloc(size)
        except self._out_of_memory:
            for _ in self._make_room(size):
                with suppress(self._out_of_memory):
                    return self._malloc(size)
            raise

    def _make_room(self, size: int) -> Iterator[None]:
        """Frees memory step by step, and yields after each step that may have freed enough: the caller tries again."""
        for reclaimer in tuple(reclaimers):
            if reclaimer(size):
                yield
        tries = _TRIES
        while tries and (raised := self._raise_limit(size)) is not False:
            tries -= raised is None
            yield

    def _raise_limit(self, size: int) -> bool | None:
        """Raises the pool's limit so that the pool can take `size` more bytes. Returns True if so.

        Returns None if the limit was high enough, so that a retry may succeed. Returns False if the device has no room
        for them, or the limit is the user's.
        """
        runtime = self._cuda.runtime
        if not self._limit or runtime.getDevice() != self._number:
            return False
        size = -(-size // _UNIT) * _UNIT
        with self._raising:
            limit = self._pool.get_limit()
            if limit != self._limit:
                return False  # user code set another
            self._pool.free_all_blocks()  # CuPy does not if the size alone exceeds the limit
            wanted, free = self._pool.total_bytes() + size, runtime.memGetInfo()[0]
            if wanted <= limit:
                return None if size <= free else False
            if wanted > self._whole or size > free - self._spared:
                return False
            step = max(wanted - limit, min(self._part // _STEPS, free - self._spared))
            self._limit = min(self._whole, limit + step)
            self._pool.set_limit(size=self._limit)
        log.info(
            "device %d: CuPy's pool has used up its part, %s, and may hold %s now, as other processes leave room",
            self._number,
            _gib(self._part),
            _gib(self._limit),
        )
        return True


def bound_pinned_memory(cupy: Any, limit: int | None = None) -> None:
    """Gives CuPy a pool of pinned host memory that frees unused memory before it holds more than `limit` bytes.

    CuPy's own pool keeps all memory that it ever pinned, the next power of two above the largest array. Memory in use
    is not bounded: a larger array is pinned all the same, and freed after use.
    """
    cuda = cupy.cuda
    most = memory_bytes() // _PINNED_SHARE if limit is None else limit
    held: dict[int, int] = {}

    def allocate(size: int) -> Any:
        if sum(tuple(held.values())) + size > most:
            pool.free_all_blocks()
        memory = cuda.PinnedMemory(size, cuda.runtime.hostAllocPortable)
        held[id(memory)] = size
        weakref.finalize(memory, held.pop, id(memory), None).atexit = False
        return cuda.PinnedMemoryPointer(memory, 0)

    pool = cuda.PinnedMemoryPool(allocate)
    cuda.set_pinned_memory_allocator(pool.malloc)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
