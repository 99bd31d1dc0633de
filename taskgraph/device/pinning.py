"""Memory of the host that is page-locked ("pinned") for a device, which copies from and to it by itself at full speed.

A copy from or to other memory goes through small buffers of the driver, at a fraction of the speed, and the call that
queues it takes as long as the copy. Locking memory takes about as long, too. So only memory that is used again and
again is locked, with its first copy, and it stays locked until it is freed.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.afterwards import FinalizerThread, on_a_loop
from taskgraph.device.api import Array, Device, Event
from taskgraph.system.host import memory_bytes

__all__ = ["PART", "Pin", "Pinnable", "pin_of"]

log = logging.getLogger("taskgraph.devices")

PART: Final = 16
"""A process locks at most this part (a sixteenth) of its host's memory: it is one of several."""


class Pinnable(Protocol):
    """Memory that is used again and again, with its pin; None: it is not page-locked."""

    memory: Any
    pin: Pin | None


class _Reads:
    """A device's unfinished reads of locked memory.

    Attributes:
        events: after each queued read.
        unknown: after an error it is unknown when the reads end.
    """

    __slots__ = ("events", "unknown")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.unknown = False


_reads: Final[set[_Reads]] = set()
"""Of all pins. Python finalizes objects that become garbage together in any order, and a finalizer of CuPy destroys its
event. This set keeps the events that the finalizer of a pin needs."""


class Pin:
    """Keeps memory page-locked as long as this object lives.

    Then a thread unlocks the memory, after the device's last read: unlocking may take long, and the last reference to
    this object may end in any thread.

    Attributes:
        device: the device that the memory is locked for.
        then: called in that thread once the memory is unlocked.
    """

    __slots__ = ("_lock", "_locked", "_memory", "_reads", "device", "then")

    def __init__(self, locked: _LockedMemory, device: Device, memory: Any) -> None:
        self.device = device
        self.then: Callable[[], object] | None = None
        self._locked = locked
        self._memory = memory
        self._reads = _Reads()
        _reads.add(self._reads)
        self._lock = threading.Lock()

    def upload(self, host: NDArray[Any]) -> Array:
        """Queues a copy of an array in this memory to the device. Do not write to the memory until `is_idle`."""
        device = self.device
        made = device.upload(host)
        try:
            event = device.record(device.current_stream())
        except Exception:
            self._reads.unknown = True
            raise
        with self._lock:
            self._reads.events.append(event)
            self._drop_done_reads()
        return made

    def is_idle(self) -> bool:
        """True if the device has done all copies of `upload`: the memory may take a new value. False after errors."""
        with self._lock:
            return self._drop_done_reads()

    def _drop_done_reads(self) -> bool:
        """Recycles the events that the device has passed. True if no read is left, and none is unknown."""
        reads = self._reads
        if reads.events and not reads.unknown:
            try:
                events = []
                for event in reads.events:
                    if self.device.has_passed(event):
                        self.device.recycle(event)
                    else:
                        events.append(event)
                reads.events = events
            except Exception as error:  # usually the device is lost
                log.warning("the device failed, so page-locked memory is not reused: %s", error)
                reads.unknown = True
        return not reads.events and not reads.unknown

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # this module may be gone already
            self._locked.unlock_soon(self.device, self._memory, self._reads, self.then)


class _LockedMemory:
    """Locks and unlocks memory for devices, and counts the bytes that this process has locked.

    Args:
        limit: the most bytes; memory beyond it stays unlocked.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._locking = threading.Lock()
        self._counting = threading.Lock()
        self._unlocking = FinalizerThread(lambda gone: self._unlock(*gone))
        self._left: list[Any] = []  # memory of lost devices, kept for ever
        self._warned = False
        self.nbytes = 0

    def pin(self, holder: Pinnable, device: Device) -> None:
        """Locks the holder's memory and sets its `pin`, unless it has one, or the limit or the system forbids that."""
        with self._locking:
            if holder.pin is not None:
                return
            memory = holder.memory
            size = len(memory)
            with self._counting:
                if self.nbytes + size > self._limit:
                    return
                self.nbytes += size
            try:
                device.register(np.frombuffer(memory, np.uint8))
            except Exception as error:
                with self._counting:
                    self.nbytes -= size
                    self._limit = self.nbytes
                if not self._warned:
                    self._warned = True
                    text = "only %d bytes can be page-locked, so copies from and to a device are slow: %s"
                    log.warning(text, self.nbytes, error)
                return
            holder.pin = Pin(self, device, memory)

    def is_full_for(self, size: int) -> bool:
        return self.nbytes + size > self._limit

    def unlock_soon(self, device: Device, memory: Any, reads: _Reads, then: Callable[[], object] | None) -> None:
        """Asks a thread to unlock memory once the device has read it, and to call `then`.

        Does not wait, since finalizers call it.
        """
        self._unlocking.ask((device, memory, reads, then))

    def _unlock(self, device: Device, memory: Any, reads: _Reads, then: Callable[[], object] | None) -> None:
        size = len(memory)
        try:
            if reads.unknown:
                raise RuntimeError("the device may still use this memory")
            while reads.events:
                device.wait(reads.events[-1])
                device.recycle(reads.events.pop())
            device.unregister(np.frombuffer(memory, np.uint8))
        except Exception as error:
            log.warning("page-locked memory of %d bytes cannot be unlocked, and stays in use: %s", size, error)
            self._left.append(memory)
            return
        _reads.discard(reads)
        with self._counting:
            self.nbytes -= size
        if then is not None:
            then()


_locked = _LockedMemory(memory_bytes() // PART)


def pin_of(holder: Pinnable, device: Device) -> Pin | None:
    """Returns the pin of memory for a device; None: it has none, or one for another device. Then copies are slower.

    In a worker thread, locks memory without a pin if the limit allows it, which may take long. Not on an event loop.
    """
    if holder.pin is None and not _locked.is_full_for(len(holder.memory)) and not on_a_loop():
        _locked.pin(holder, device)
    pin = holder.pin
    return pin if pin is not None and pin.device is device else None
