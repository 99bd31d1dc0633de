"""Copies from a device to the host.

To page-locked memory the device copies by itself: making a `HostCopy` queues the whole copy, and `finish` waits for it.
To other memory CUDA copies during the call that queues it, and blocks other threads of the process meanwhile; so
`finish` makes such a copy in short pieces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Array, Device, Event, Stream
from taskgraph.device.memory import reclaimers

__all__ = ["HostCopy", "free_abandoned_copies"]

log = logging.getLogger("taskgraph.devices")

_BLOCKING_PIECE_BYTES: Final = 4 << 20
"""Piece of a copy to memory that is not page-locked: blocks other threads for about 1 ms."""
_QUEUED_PIECE_BYTES: Final = 64 << 20
"""Piece of a copy to page-locked memory: queueing one takes about 60 us, and the task's own copies get in between."""

_queued: Final[set[_QueuedCopy]] = set()
"""Copies that a device makes, or may still make after an error: their memory must not be reused. Python finalizes
objects that become garbage together in any order, so without this set the memory could be reused too early."""


class _QueuedCopy:
    """What must outlive a `HostCopy` while the device still copies.

    Attributes:
        event: follows the last queued piece; None: nothing is queued, or all of it is done.
        abandoned: the `HostCopy` is gone; no thread will wait for the copy.
    """

    __slots__ = ("abandoned", "device", "event", "keep", "source", "stream", "target")

    def __init__(self, device: Device, source: Array, stream: Stream, target: NDArray[np.uint8], keep: object) -> None:
        self.device = device
        self.source = source
        self.stream = stream
        self.target = target
        self.keep = keep
        self.event: Event | None = None
        self.abandoned = False

    def queue(self, begin: int, end: int) -> None:
        """Queues the copy of the bytes from `begin` to `end`."""
        _queued.add(self)
        with self.device.on(self.stream):
            for at in range(begin, end, _QUEUED_PIECE_BYTES):
                self.device.fetch(self.source, self.target[at : min(end, at + _QUEUED_PIECE_BYTES)], at)
            self.event = self.device.record(self.stream)

    def wait(self) -> None:
        """Waits for the queued pieces."""
        if self.event is not None:
            self.device.wait(self.event)
            self.recycle_event()

    def recycle_event(self) -> None:
        event, self.event = self.event, None
        if event is not None:
            self.device.recycle(event)

    def is_useless(self) -> bool:
        """True if the copy is abandoned and done."""
        try:
            return self.abandoned and (self.event is None or self.device.has_passed(self.event))
        except Exception as error:  # usually the device is lost
            size = self.target.nbytes
            log.warning("the device failed during a copy to the host, so %d bytes stay in use: %s", size, error)
            self.abandoned = False
            return False


def free_abandoned_copies() -> bool:
    """Frees abandoned copies that are done: their memory on the host, and their source arrays on the device.

    Returns True if there were any.
    """
    released = False
    for queued in _queued.copy():
        try:
            _queued.remove(queued)  # so that no other thread looks at the same one
        except KeyError:
            continue
        if queued.is_useless():
            queued.recycle_event()
            released = True
        else:
            _queued.add(queued)
    return released


reclaimers.append(lambda nbytes: free_abandoned_copies())


class HostCopy:
    """A copy from a device to the host. Making one does not wait.

    The copy is queued at once if the host memory is page-locked; otherwise `finish` makes it.

    Args:
        source: an array in C order that does not change.
        stream: the copy is queued there.
        allocate: gives the host memory, if it has some.
        keep: kept alive as long as the device reads the source.

    Attributes:
        data: the host memory, read-only; valid after `finish`.
        error: the error that ended the copy; None: none so far.
    """

    __slots__ = ("_lock", "_pinned", "_queued", "data", "error")

    def __init__(
        self, device: Device, source: Array, stream: Stream, allocate: Callable[[int], Any] | None, *, keep: object
    ) -> None:
        self.error: Exception | None = None
        self._queued: _QueuedCopy | None = None  # None: done
        free_abandoned_copies()
        size: int = source.nbytes
        block = None if allocate is None else allocate(size)
        origin = None if block is None else block.origin
        self._pinned = origin is not None and origin.pin(device) is not None
        target: NDArray[np.uint8] = np.empty(size, np.uint8) if block is None else block
        self._queued = _QueuedCopy(device, source, stream, target, keep)
        self._lock = threading.Lock()
        self.data = target.data.toreadonly()
        if self._pinned:
            try:
                self._queued.queue(0, size)
            except Exception as error:
                self.error = error

    def __del__(self) -> None:
        if self._queued is not None and self.error is None:
            self._queued.abandoned = True

    def finish(self) -> None:
        """Waits for the copy. May be called again, and in several threads.

        Raises:
            Exception: the error that ended the copy.
        """
        done = None
        with self._lock:
            if self._queued is not None and self.error is None:
                try:
                    self._finish(self._queued)
                    done, self._queued = self._queued, None
                except Exception as error:
                    self.error = error
        del done  # without the lock, since finalizers may wait
        if self.error is not None:
            raise self.error

    def _finish(self, queued: _QueuedCopy) -> None:
        size = self.data.nbytes
        if not self._pinned:
            for begin in range(0, size, _BLOCKING_PIECE_BYTES):
                queued.queue(begin, min(size, begin + _BLOCKING_PIECE_BYTES))
                queued.wait()
        queued.wait()
        queued.target.flags.writeable = False
        _queued.discard(queued)
