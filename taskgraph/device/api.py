"""The interface to a device.

Work on a device is *queued* on a stream: it is done in the order of the stream, later than the call that queued it, and
in no order with what is queued on other streams, unless one follows an event of the other. Every thread has a current
stream, on which the arrays' own operations are queued. Only `wait`, `to_host`, `open`, `register` and `unregister`
block, and belong into a worker thread; everything else may be called anywhere, but for `fetch` to memory that is not
registered: CUDA makes such a copy while it is called.

Memory belongs to the stream that was current when it was allocated: freed, it is given to the next who allocates on
that stream, without any wait. So who reads an array on another stream has to see to it that this is over, or that the
owner's stream follows it, before the array is freed.

An array, a stream and an event are whatever the device's library has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["HANDLE_BYTES", "IDENTITY_BYTES", "Array", "Device", "Event", "OnDevice", "Stream"]

Array = Any
"""An array on a device: it has `shape`, `dtype` (numpy's), `nbytes`."""
Stream = Hashable
"""Equal to another where both are the same queue."""
Event = Any
"""A place in a stream."""
HANDLE_BYTES: Final = 64
IDENTITY_BYTES: Final = 16


class Device(Protocol):
    """One device. Every method may be called from any thread."""

    # Order.

    def stream(self) -> Stream:
        """A new stream."""

    def current(self) -> Stream:
        """This thread's current stream."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within, the device is this thread's, and this its current stream. Code within may make others current."""

    def record(self, stream: Stream) -> Event:
        """An event of what is queued on `stream` by now."""

    def try_record(self, stream: Stream) -> Event | None:
        """Records an event, from any thread. None while a graph is captured on `stream`: the event would join it."""

    def recycle(self, event: Event) -> None:
        """Takes back an event without users, to record it again: to destroy it may take long."""

    def follow(self, stream: Stream, event: Event) -> None:
        """Makes later work on `stream` wait for `event`."""

    def wait(self, event: Event) -> None:
        """Blocks this thread until `event`, without using the processor."""

    def done(self, event: Event) -> bool:
        """True if `event` is past."""

    # Memory. What is queued is so on the current stream.

    def keeps(self, array: Array) -> bool:
        """True if the array is in this device's memory, and can be copied within it."""

    def copy(self, array: Array) -> Array:
        """Queues a copy in C order, which owns its memory."""

    def view(self, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], owner: object) -> Array:
        """Returns an array on the memory of `array`, which is in C order. It and its views keep `owner` alive."""

    def empty(self, nbytes: int) -> Array:
        """Bytes that belong to the current stream."""

    def digests(self, array: Array, block_bytes: int) -> Callable[[], bytes]:
        """Queues taking the xxh3-128 of every block of an array in C order, 16 bytes each.

        What it returns is to be called once that was waited for.
        """

    def to_device(self, host: NDArray[Any]) -> Array:
        """Queues a copy of a host's array. It may go as soon as this returns, and, unless registered, change."""

    def upload(self, host: NDArray[Any]) -> Array:
        """Copies like `to_device`, from registered memory in C order, which must not change until the copy is done."""

    def fetch(self, array: Array, target: NDArray[np.uint8], begin: int = 0) -> None:
        """Queues a copy of as many bytes as `target` has, from `begin` on, of the elements of an array in C order.

        The memory stays until it is done; what is registered stays registered.
        """

    def to_host(self, array: Array) -> NDArray[Any]:
        """A new array of the host with the same elements, in C order, after what is queued on the current stream."""

    # Memory that other processes of the host can open: `taskgraph.device.shared`.

    @property
    def identity(self) -> bytes:
        """Returns `IDENTITY_BYTES` by which every process knows the device."""

    @property
    def memory_bytes(self) -> int:
        """Returns how much memory it has, for all processes."""

    def allocate(self, nbytes: int) -> Array:
        """Allocates bytes that belong to no stream. They are freed with their last reference, which must not go
        before all that is queued for them is done, and stay as long as other processes have them open.

        Raises:
            MemoryError: there is not that much.
        """

    def fill(self, target: Array, source: Array, block_bytes: int) -> Callable[[], bytes]:
        """Queues a copy of the elements of `source`, in C order, to bytes that are as many, and `digests` of them.

        In one pass, where `source` is in C order.
        """

    def share(self, memory: Array) -> bytes:
        """Returns `HANDLE_BYTES` by which others open memory of `allocate` or `open`, while this process has it.

        Raises, by the library, where none can.
        """

    def open(self, handle: bytes, nbytes: int) -> Array:
        """Bytes of another process, to be read only. They go with their last reference, as what `allocate` gave.

        It waits, for the other process, too. Raises, by the library, where they cannot be opened. They may be opened
        several times.
        """

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Has memory of the host page-locked, so that the device copies from and to it by itself.

        Raises:
            Exception: the library's own, where that cannot be.
        """

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Takes that back, for the same memory. Before it goes, and when nothing is queued that reads or writes it."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A fresh host copy of an array that lived on a device; for codecs of other libraries' device arrays."""

    host: NDArray[Any]
