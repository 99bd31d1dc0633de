"""Memory of the host that is page-locked for a device: copies from and to it run by themselves, and at full speed.

A copy from or to other memory goes through small buffers of the driver, at a fraction of the speed, and the call that
queues it takes as long as the copy. To lock memory takes about as long, too. So it is for memory that is used again and
again: it is locked where it is first copied from or to, and stays so until it goes.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.afterwards import Worker, on_a_loop
from taskgraph.device.api import Array, Device, Event
from taskgraph.system.host import memory_bytes

__all__ = ["PART", "Pin", "Pinnable", "pin_of"]

log = logging.getLogger("taskgraph.devices")

PART: Final = 16
"""A process locks at most this part (a sixteenth) of its host's memory: it is one of several."""


class Pinnable(Protocol):
    """Memory that is used again and again, and its pin, once it has one."""

    memory: Any
    pin: Pin | None


class _Reads:
    """The reads of locked memory that a device still has to make.

    Attributes:
        events: behind what was queued.
        unknown: the end of the reads cannot be known.
    """

    __slots__ = ("events", "unknown")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.unknown = False


_reads: Final[set[_Reads]] = set()
"""Those of all pins. Finalizers of what is garbage together run in any order, and CuPy's events are destroyed by
theirs: what a pin's finalizer needs must be no garbage with it."""


class Pin:
    """Page-locked memory, for as long as anybody has this object: then it is unlocked, and goes.

    That is done in a thread of its own, behind what the device still does there: it may take long, and the last
    reference may go anywhere.

    Attributes:
        device: for which it is locked.
        then: called once it is unlocked, in that thread.
    """

    __slots__ = ("_lock", "_locked", "_memory", "_reads", "device", "then")

    def __init__(self, locked: _Locked, device: Device, memory: Any) -> None:
        self.device = device
        self.then: Callable[[], object] | None = None
        self._locked = locked
        self._memory = memory
        self._reads = _Reads()
        _reads.add(self._reads)
        self._lock = threading.Lock()

    def upload(self, host: NDArray[Any]) -> Array:
        """Copies an array in this memory to the device. Do not change the memory until it is `idle`."""
        device = self.device
        made = device.upload(host)
        try:
            event = device.record(device.current())
        except Exception:
            self._reads.unknown = True
            raise
        with self._lock:
            self._reads.events.append(event)
            self._look()
        return made

    def idle(self) -> bool:
        """True if the device has finished all uploads."""
        with self._lock:
            return self._look()

    def _look(self) -> bool:
        reads = self._reads
        if reads.events and not reads.unknown:
            try:
                events = []
                for event in reads.events:
                    if self.device.done(event):
                        self.device.recycle(event)
                    else:
                        events.append(event)
                reads.events = events
            except Exception as error:  # the device is lost, as a rule
                log.warning("page-locked memory is not used again: %s", error)
                reads.unknown = True
        return not reads.events and not reads.unknown

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # some go after this module
            self._locked.unlock(self.device, self._memory, self._reads, self.then)


class _Locked:
    """The memory that this process has locked.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._locking = threading.Lock()
        self._counting = threading.Lock()
        self._unlocking = Worker(lambda gone: self._unlock(*gone))
        self._left: list[Any] = []  # memory that the device may use for ever
        self._said = False
        self.nbytes = 0

    def pin(self, holder: Pinnable, device: Device) -> None:
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
                if not self._said:
                    self._said = True
                    text = "copies from and to a device are slow: no more than %d bytes can be page-locked: %s"
                    log.warning(text, self.nbytes, error)
                return
            holder.pin = Pin(self, device, memory)

    def full(self, size: int) -> bool:
        return self.nbytes + size > self._limit

    def unlock(self, device: Device, memory: Any, reads: _Reads, then: Callable[[], object] | None) -> None:
        """Unlocks the pages later. Finalizers call this in any thread: it waits for nothing."""
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
            log.warning("page-locked memory of %d bytes is left alone: %s", size, error)
            self._left.append(memory)
            return
        _reads.discard(reads)
        with self._counting:
            self.nbytes -= size
        if then is not None:
            then()


_locked = _Locked(memory_bytes() // PART)


def pin_of(holder: Pinnable, device: Device) -> Pin | None:
    """Returns the pin of some memory for a device. None: the memory is not pinned, so copies are slower.

    In a worker thread it gets one, where there is room for it; that may take long. An event loop takes what there is.
    """
    if holder.pin is None and not _locked.full(len(holder.memory)) and not on_a_loop():
        _locked.pin(holder, device)
    pin = holder.pin
    return pin if pin is not None and pin.device is device else None
