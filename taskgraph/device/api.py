"""The interface to a device, which is a GPU.

Work on a device is *queued* on a stream. The device does the work of one stream in order, some time after the call
that queued it. Work on different streams has no order, unless one stream follows an event of the other. Every thread
has a current stream; operations of arrays are queued there.

Only `wait`, `to_host`, `open`, `register` and `unregister` block: call them in a worker thread. Other calls may be made
anywhere, except `fetch` to memory that is not registered: CUDA makes such a copy during the call.

Memory belongs to the stream that was current when it was allocated. Once freed, the next allocation on that stream gets
it, without any wait. So a reader on another stream must be done before the array is freed, or the owner's stream must
follow the reader.

An array, a stream and an event are objects of the device's library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["HANDLE_BYTES", "IDENTITY_BYTES", "Array", "Device", "DeviceArrayOnHost", "Event", "Stream"]

Array = Any
"""An array on a device: it has `shape`, `dtype` (numpy's), `nbytes`."""
Stream = Hashable
"""Streams are equal if they are the same queue."""
Event = Any
"""A place in a stream."""
HANDLE_BYTES: Final = 64
IDENTITY_BYTES: Final = 16


class Device(Protocol):
    """One GPU, such as `CudaDevice`. Every method may be called from any thread."""

    # Order.

    def new_stream(self) -> Stream:
        """Makes a stream."""

    def current_stream(self) -> Stream:
        """Returns this thread's current stream."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes this device and this stream current in a `with` block. Code in the block may make others current."""

    def record(self, stream: Stream) -> Event:
        """Records an event after all that is queued on `stream` now."""

    def try_record(self, stream: Stream) -> Event | None:
        """Does as `record`. None while a graph is captured on `stream`: the event would become part of the graph."""

    def recycle(self, event: Event) -> None:
        """Keeps an event that the caller no longer needs for a later `record`: destroying it may take long."""

    def follow(self, stream: Stream, event: Event) -> None:
        """Makes later work on `stream` wait for `event`."""

    def wait(self, event: Event) -> None:
        """Blocks this thread until the device has passed `event`, without using the processor."""

    def has_passed(self, event: Event) -> bool:
        """True if the device has passed `event`."""

    # Memory. All work is queued on the current stream.

    def can_copy(self, array: Array) -> bool:
        """True if the array is in this device's memory and `copy` works, so that the array need not go by the host."""

    def copy(self, array: Array) -> Array:
        """Queues a copy of the array, in C order, to new memory of this device. Returns the copy."""

    def view(self, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], owner: object) -> Array:
        """Views the memory of `array`, which is in C order, as another array. Keeps `owner` alive."""

    def empty(self, nbytes: int) -> Array:
        """Allocates bytes that belong to the current stream."""

    def queue_digests(self, array: Array, block_bytes: int) -> Callable[[], bytes]:
        """Queues the xxh3-128 of every block of an array in C order.

        Returns a function that returns the digests, 16 bytes each. Wait for the stream before you call it.
        """

    def to_device(self, host: NDArray[Any]) -> Array:
        """Queues a copy of a host array, which the caller may free at once, and change unless it is registered."""

    def upload(self, host: NDArray[Any]) -> Array:
        """As `to_device`, for registered memory in C order, which must live unchanged until the copy is done."""

    def fetch(self, array: Array, target: NDArray[np.uint8], begin: int = 0) -> None:
        """Queues a copy to the host: `target.nbytes` bytes of the array, in C order, from byte `begin` on.

        Keep `target`, registered if it is, until the copy is done.
        """

    def to_host(self, array: Array) -> NDArray[Any]:
        """Copies to a new host array in C order, after the work that is queued on the current stream."""

    # Memory that other processes of the host can open: `taskgraph.device.shared`.

    @property
    def identity(self) -> bytes:
        """Identifies the device, by `IDENTITY_BYTES` that are the same in every process of the host."""

    @property
    def memory_bytes(self) -> int:
        """The size of the device's memory, which all processes share."""

    def allocate(self, nbytes: int) -> Array:
        """Allocates bytes that belong to no stream, and that other processes can open.

        Drop the last reference only when all work queued for them is done. Processes that have them open keep them.

        Raises:
            MemoryError: the device has too little memory.
        """

    def fill_and_digest(self, target: Array, source: Array, block_bytes: int) -> Callable[[], bytes]:
        """Queues a copy of `source`, in C order, to `target` of the same size, and digests as `queue_digests` does.

        Takes one pass if `source` is in C order.
        """

    def share(self, memory: Array) -> bytes:
        """Returns `HANDLE_BYTES` by which other processes open this memory, as long as this process keeps it.

        Raises:
            Exception: the library's, if no process can.
        """

    def open(self, handle: bytes, nbytes: int) -> Array:
        """Opens memory that another process shared, for reading only. Waits for that process. May be repeated.

        Raises:
            Exception: the library's, if the memory cannot be opened.
        """

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Page-locks memory of the host, so that the device copies from and to it by itself.

        Raises:
            Exception: the library's, if it cannot be locked.
        """

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Unlocks registered memory. Call it before the memory is freed, when no queued work uses it."""


@dataclass(frozen=True, slots=True)
class DeviceArrayOnHost:
    """A host array that is encoded as if it were on a device: a receiver with a device gets it there."""

    host: NDArray[Any]
