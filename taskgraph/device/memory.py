"""Counts the memory of a device that a process holds, and frees some before an out-of-memory error is final.

CuPy's pool keeps what was freed. It gives that back when it can get no more, but only its own: what another process
on the same device keeps, it cannot reach. So each gets an equal part of the device. That is where its pool gives back
what it only keeps, and not where it ends: a process that took over the tasks of another one goes beyond it, as far as
the device has memory free.

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

__all__ = ["Bounded", "bound_pinned", "givers"]

log = logging.getLogger("taskgraph.devices")

givers: Final[list[Callable[[int], bool]]] = []
"""Functions that are asked, in turn, for bytes of a device's memory: each frees unused memory that it keeps, and says
whether it freed some. In any thread, in the middle of an allocation: they neither allocate nor wait for who does."""

LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"
_UNIT: Final = 512
"""CuPy's pool takes a multiple of it."""
_STEPS: Final = 8
"""A pool that goes beyond its part does so by an eighth of it, so that not every array of a user's loop asks."""
_TRIES: Final = 8
"""How often it is tried again where there should be room: other threads may take it, and memory may be in pieces."""
_PINNED_SHARE: Final = 16
"""A process keeps a sixteenth of its host's memory pinned and unused at most: it is one of several."""


class Bounded:
    """CuPy's pool for one device as an allocator: it asks before it is out of memory, and has a limit.

    Args:
        cupy: the module.
        number: the device's.
        fraction: how much of the device all processes may hold together, at most 1.
        sharing: how many processes share the device.
    """

    def __init__(self, cupy: Any, number: int, fraction: float, sharing: int) -> None:
        self._cuda = cupy.cuda
        self._number = number
        self._pool = pool = cupy.get_default_memory_pool()
        self._malloc = pool.malloc
        self._full: type[Exception] = cupy.cuda.memory.OutOfMemoryError
        self._raising = threading.RLock()  # a collection of garbage in the middle may run anything
        total: int = cupy.cuda.runtime.getDeviceProperties(number)["totalGlobalMem"]
        self._whole = int(total * fraction)
        self._spared = total - self._whole
        self._part = self._whole // sharing
        self._limit = 0  # as it was set here; 0: somebody else did, and knows why

    def install(self) -> str:
        """Makes it CuPy's allocator, unless that is another one already. Returns what to tell about it."""
        cuda = self._cuda
        if cuda.get_allocator() != self._malloc:
            return f"device {self._number}: CuPy has another allocator than its pool, whose memory is not bounded"
        # Only where it has to be made current: that takes CUDA's context, which costs a second, and memory.
        here = cuda.runtime.getDevice() == self._number
        with nullcontext() if here else cuda.Device(self._number):
            known = self._pool.get_limit()
            if known or LIMIT in os.environ:
                said = f"{_gib(known)} (its own limit)" if known else f"all it can get ({LIMIT})"
            else:
                self._pool.set_limit(size=self._part)
                self._limit = self._part
                said = f"{_gib(self._part)} of {_gib(self._whole + self._spared)}"
                if self._part < self._whole:
                    said += f", and up to {_gib(self._whole)} where others leave it"
        cuda.set_allocator(self.malloc)
        return f"device {self._number}: CuPy's pool may hold {said}"

    def malloc(self, size: int) -> Any:
        """Allocates by `MemoryPool.malloc`."""
        try:
            return self._malloc(size)
        except self._full:
            for _ in self._made_room(size):
                with suppress(self._full):
                    return self._malloc(size)
            raise

    def _made_room(self, size: int) -> Iterator[None]:
        """Each time there may be more."""
        for giver in tuple(givers):
            if giver(size):
                yield
        tries = _TRIES
        while tries and (raised := self._raised(size)) is not False:
            tries -= raised is None
            yield

    def _raised(self, size: int) -> bool | None:
        """Raises the pool's limit for this many bytes more. False: it cannot; None: the limit is high enough."""
        runtime = self._cuda.runtime
        if not self._limit or runtime.getDevice() != self._number:
            return False
        size = -(-size // _UNIT) * _UNIT
        with self._raising:
            limit = self._pool.get_limit()
            if limit != self._limit:
                return False  # user code has its own
            self._pool.free_all_blocks()  # it did not where the size alone is beyond the limit
            wanted, free = self._pool.total_bytes() + size, runtime.memGetInfo()[0]
            if wanted <= limit:
                return None if size <= free else False
            if wanted > self._whole or size > free - self._spared:
                return False
            step = max(wanted - limit, min(self._part // _STEPS, free - self._spared))
            self._limit = min(self._whole, limit + step)
            self._pool.set_limit(size=self._limit)
        log.info(
            "device %d: CuPy's pool may hold %s now, beyond its part of %s, which is in use: others leave it",
            self._number,
            _gib(self._limit),
            _gib(self._part),
        )
        return True


def bound_pinned(cupy: Any, limit: int | None = None) -> None:
    """Makes a pool CuPy's for pinned memory of the host that gives back what is free before it holds more than `limit`.

    CuPy's own keeps for good what it ever pinned: the next power of two of the largest array that went to the device.
    What is in use is not bounded: a larger array goes by pinned memory as ever, which is given back after it.
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
