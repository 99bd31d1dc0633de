"""Copies from a device to the host, piece by piece.

All pieces are queued at once where the device copies by itself, into page-locked memory; else each takes the time of
the call that queues it, and the next one is queued when the piece before is there. Every thread that needs a copy waits
for its pieces, in their order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.afterwards import Aside
from taskgraph.device.api import Array, Device, Event, Stream
from taskgraph.device.memory import givers

__all__ = ["LARGE_PIECE_BYTES", "PIECE_BYTES", "HostCopy", "sweep"]

log = logging.getLogger("taskgraph.devices")

PIECE_BYTES: Final = 4 << 20
"""It takes 0.1 to 0.3 ms to copy to page-locked memory: long beside what an event costs, short beside sending it."""
LARGE_PIECE_BYTES: Final = 64 << 20
"""Of what is not sent meanwhile: to queue a piece takes some 60 us."""

_queued: Final[set[_Queued]] = set()
"""Copies that devices make, or may still make after an error: their memory is not reused. Finalizers of objects that
are garbage together run in any order: without this set, the memory could have another user before the copy's finalizer
ran."""


class _Queued:
    """A copy that was queued, and not waited for yet.

    Attributes:
        abandoned: no caller will wait for it.
    """

    __slots__ = ("abandoned", "device", "events", "keep", "source", "target")

    def __init__(self, device: Device, source: Array, target: NDArray[np.uint8], keep: object) -> None:
        self.device = device
        self.source = source
        self.target = target
        self.keep = keep
        self.events: list[Event] = []  # behind each piece
        self.abandoned = False

    def over(self) -> bool:
        """True if the copy is done, or failed, and no caller waits for it."""
        try:
            return self.abandoned and all(map(self.device.done, self.events))
        except Exception as error:  # the device is lost, as a rule
            log.warning("a copy to the host of %d bytes is left alone: %s", self.target.nbytes, error)
            self.abandoned = False
            return False


def sweep() -> bool:
    """Releases copies that are done and have no waiting caller. True if there were some."""
    over = [queued for queued in _queued.copy() if queued.over()]
    for queued in over:
        _queued.discard(queued)
    return bool(over)


def _sweep(nbytes: int) -> bool:
    """See `taskgraph.device.memory.givers`."""
    return sweep()


givers.append(_sweep)


class HostCopy:
    """A copy to the host on its way. Every method may be called in any thread.

    Attributes:
        data: where it goes, read-only; behind `ready` there is nothing of use yet.
        ready: how many bytes are there.
        error: what ended it early.
    """

    __slots__ = (
        "_aside",
        "_at_once",
        "_device",
        "_events",
        "_lock",
        "_piece_bytes",
        "_queued",
        "_queueing",
        "_stream",
        "_target",
        "data",
        "error",
        "ready",
    )

    def __init__(
        self,
        device: Device,
        source: Array,
        stream: Stream,
        allocate: Callable[[int], Any] | None,
        *,
        keep: object,
        sent: bool = True,
    ) -> None:
        """
        Args:
            source: in C order; it does not change.
            stream: on which it is queued.
            allocate: where it goes, as far as that has memory.
            keep: stays as long as the device reads the source.
            sent: while it is copied, maybe; else it is of use once all of it is there.
        """
        self.error: Exception | None = None
        self._queued: _Queued | None = None
        sweep()
        size: int = source.nbytes
        block = None if allocate is None else allocate(size)
        origin = None if block is None else block.origin
        self._at_once = origin is not None and origin.pinned(device) is not None
        self._device = device
        self._stream = stream
        self._piece_bytes = PIECE_BYTES if sent else LARGE_PIECE_BYTES
        self._target: NDArray[np.uint8] = np.empty(size, np.uint8) if block is None else block
        self._queued = _Queued(device, source, self._target, keep)
        self._events = self._queued.events
        self._aside = Aside([self._events])  # they go in a thread
        self._queueing = threading.Lock()
        self._lock = threading.Lock()
        self.data = self._target.data.toreadonly()
        self.ready = 0

    def __del__(self) -> None:
        if self._queued is not None and self.error is None:
            self._queued.abandoned = True
        self._queued, self._events = None, []  # so that what is aside has them last

    def begin(self) -> None:
        """Queues what can be queued without waiting for it."""
        if not self._at_once:
            return
        try:
            self._event(self._end(self._target.nbytes) - 1)
        except Exception as error:
            self._fail(error)

    def finish(self, until: int | None = None) -> None:
        """Waits until this many bytes are there, or all of them.

        Raises:
            Exception: what ended it.
        """
        last = self._end(self._target.nbytes if until is None else until)
        number = self._end(self.ready)
        while number < last and self.error is None:
            try:
                event = self._event(number)
                if event is None:
                    break
                self._device.wait(event)
            except Exception as error:
                self._fail(error)
                break
            number += 1
            self._come(min(number * self._piece_bytes, self._target.nbytes))
        if self.error is not None:
            raise self.error

    def _end(self, nbytes: int) -> int:
        """The number of pieces for this many bytes."""
        return -(-nbytes // self._piece_bytes)

    def _event(self, number: int) -> Event | None:
        """The event behind a piece, which is queued if it was not yet; None: all of it is there."""
        with self._queueing:
            if self.ready == self._target.nbytes:
                return None
            events, queued = self._events, self._queued
            if number >= len(events):
                assert queued is not None
                device, stream, piece = self._device, self._stream, self._piece_bytes
                _queued.add(queued)
                with device.on(stream):
                    for begin in range(len(events) * piece, (number + 1) * piece, piece):
                        device.fetch(queued.source, self._target[begin : begin + piece], begin)
                        events.append(device.record(stream))
            return events[number]

    def _come(self, ready: int) -> None:
        past: list[object] = []
        with self._lock:
            if ready <= self.ready:
                return  # another thread was faster
            self.ready = ready
            if ready == self._target.nbytes:
                self._target.flags.writeable = False
                queued = self._queued
                assert queued is not None
                _queued.discard(queued)
                past = [queued.source, queued.keep]
                queued.source = queued.keep = None
        past.clear()  # behind the lock: it may stop

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self.error is not None or self.ready == self._target.nbytes:
                return
            self.error = error
