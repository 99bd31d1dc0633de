"""A message that is being received: the memory its payload goes to, and its digest, taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.blocks import Allocate
from taskgraph.protocol.messages import Encoded, Message
from taskgraph.transport.frames import LENT, Head
from taskgraph.transport.wire import value_of

__all__ = ["Digesting", "Incoming"]

_CLEARED_BYTES = 4 << 10
_DIGESTED_BYTES = 256 << 10  # values with this much bulk, and less meta, are digested as they come


def _allocate(size_bytes: int, allocate: Allocate) -> memoryview:
    """Memory that was touched before, or is not before data is written to it; small pieces are cheaper cleared."""
    if size_bytes <= _CLEARED_BYTES:
        return memoryview(bytearray(size_bytes))
    block = allocate(size_bytes)
    return np.empty(size_bytes, np.uint8).data if block is None else block.data


def _no_pool(size_bytes: int) -> None:
    return None


class Hasher(Protocol):
    """A digest that is being taken."""

    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


Digesting = Callable[[bytes, Sequence[int]], Hasher]
"""(meta, sizes of the buffers) -> what takes a value's digest as its buffers come."""


class Incoming:
    """A message that is being received: where its payload goes, and how far it is.

    Attributes:
        head: of the frame that opened it.
        message: the message; its value has a digest only until `complete`.
        missing: bytes still to come.
    """

    __slots__ = ("_at", "_digesting", "_hasher", "_lent", "_offset", "_sizes", "_targets", "head", "message", "missing")

    def __init__(
        self,
        head: Head,
        sizes: Sequence[int],
        message: Message,
        *,
        lent: Sequence[memoryview] = (),
        allocate: Allocate = _no_pool,
        digesting: Digesting | None = None,
    ) -> None:
        """Allocates the destinations. Raises MemoryError where there is not enough; DecodeError.

        Args:
            lent: what the sizes marked as LENT stand for, in their order.
            allocate: where large buffers are received, as far as it has memory.
            digesting: takes the digest of large values while what came is still in the cache.
        """
        self.head = head
        self.message = message
        self.missing = head.payload
        if [buffer.nbytes | LENT for buffer in lent] != [size for size in sizes if size & LENT]:
            raise DecodeError("a value with memory that was not lent")
        borrowed = iter(lent)
        self._lent = [next(borrowed) if size & LENT else None for size in sizes]
        carried = (size for size in sizes if not size & LENT)
        self._targets = [_allocate(size, allocate) for size in (head.meta, *carried)]  # may be empty ones
        self._sizes = sizes
        self._hasher: Hasher | None = None
        large = head.payload - head.meta >= _DIGESTED_BYTES > head.meta
        self._digesting = digesting if large and not lent else None
        self._at = 0  # the destination that is being filled
        self._offset = 0  # and how far it is
        self._skip_full()

    def _skip_full(self) -> None:
        while self._at < len(self._targets) and self._offset == self._targets[self._at].nbytes:
            if self._at == 0 and self._digesting is not None:
                self._hasher = self._digesting(self.meta(), self._sizes)
            self._at += 1
            self._offset = 0

    def room(self) -> memoryview:
        """The rest of the destination that is being filled. Not empty while something is missing."""
        return self._targets[self._at][self._offset :]

    def filled(self, count: int) -> None:
        """`count` bytes were written to `room()`."""
        if self._hasher is not None:
            self._hasher.update(self._targets[self._at][self._offset : self._offset + count])
        self._offset += count
        self.missing -= count
        self._skip_full()

    def take(self, data: memoryview) -> None:
        """Copies `data`, which is at most what is missing."""
        while data.nbytes:
            room = self.room()
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            self.filled(count)
            data = data[count:]

    def meta(self) -> bytes:
        return bytes(self._targets[0])

    def buffers(self) -> tuple[memoryview, ...]:
        received = iter(self._targets[1:])
        return tuple((next(received) if lent is None else lent).toreadonly() for lent in self._lent)

    def digest(self) -> bytes | None:
        """The digest of what came, where it was taken meanwhile."""
        return None if self._hasher is None else self._hasher.digest()

    def complete(self) -> Encoded | None:
        """Adds what was received to the value of the message, and returns the value; None: the message has none."""
        value = value_of(self.message)
        if value is not None:
            value.complete(self.meta(), self.buffers())
        return value

    def is_whole(self, value: Encoded) -> bool | None:
        """Compares the digest that was taken on the way; None: none was taken."""
        if any(lent is not None for lent in self._lent):
            return True  # what never left the host's memory is what its producer digested
        digest = self.digest()
        return None if digest is None else digest == value.digest
