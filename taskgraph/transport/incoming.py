"""A message that is being received: memory for its payload, and the digest of the bytes as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.blocks import Allocate
from taskgraph.protocol.messages import Encoded, Message
from taskgraph.transport.frames import LENT, Head
from taskgraph.transport.wire import value_of

__all__ = ["Digesting", "IncomingMessage"]

_CLEARED_BYTES = 4 << 10
_DIGESTED_BYTES = 256 << 10  # values with more bulk, and less meta, are digested while they arrive


def _allocate(size_bytes: int, allocate: Allocate) -> memoryview:
    """Allocates memory for a part of a payload. Only small memory is cleared: then clearing is cheaper."""
    if size_bytes <= _CLEARED_BYTES:
        return memoryview(bytearray(size_bytes))
    block = allocate(size_bytes)
    return np.empty(size_bytes, np.uint8).data if block is None else block.data


def _no_pool(size_bytes: int) -> None:
    return None


class Hasher(Protocol):
    """A running digest."""

    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


Digesting = Callable[[bytes, Sequence[int]], Hasher]
"""(meta, sizes of the buffers) -> the running digest of a value, to be updated with its buffers."""


class IncomingMessage:
    """A message that is being received.

    Attributes:
        head: the head of its first frame.
        message: the message; before `complete` its value has only a digest.
        missing: bytes of the payload that have not arrived.
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
        """Allocates memory for the payload. Raises MemoryError and DecodeError.

        Args:
            lent: the memory of buffers whose sizes are marked as LENT, in order.
            allocate: allocates memory for large buffers, or returns None.
            digesting: begins the digest of a large value, which is taken while its bytes are in the cache.
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
        self._at = 0  # index of the target that is being filled
        self._offset = 0  # bytes in it
        self._skip_full()

    def _skip_full(self) -> None:
        """Moves on to the next part of the payload that has room; begins the digest once the meta is complete."""
        while self._at < len(self._targets) and self._offset == self._targets[self._at].nbytes:
            if self._at == 0 and self._digesting is not None:
                self._hasher = self._digesting(self.meta(), self._sizes)
            self._at += 1
            self._offset = 0

    def room(self) -> memoryview:
        """Returns the memory to receive the next bytes into. Not empty while bytes are missing."""
        return self._targets[self._at][self._offset :]

    def advance(self, count: int) -> None:
        """Notes that `count` bytes were written to `room()`."""
        if self._hasher is not None:
            self._hasher.update(self._targets[self._at][self._offset : self._offset + count])
        self._offset += count
        self.missing -= count
        self._skip_full()

    def take(self, data: memoryview) -> None:
        """Copies received bytes to their place. `data` has at most as many as are missing."""
        while data.nbytes:
            room = self.room()
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            self.advance(count)
            data = data[count:]

    def meta(self) -> bytes:
        """Returns the meta of the value, which has arrived."""
        return bytes(self._targets[0])

    def value_buffers(self) -> tuple[memoryview, ...]:
        """Returns the buffers of the value, received and lent, in order."""
        received = iter(self._targets[1:])
        return tuple((next(received) if lent is None else lent).toreadonly() for lent in self._lent)

    def digest(self) -> bytes | None:
        """Returns the digest that was taken as the bytes arrived; None: none was taken."""
        return None if self._hasher is None else self._hasher.digest()

    def complete(self) -> Encoded | None:
        """Puts the received payload into the value of the message. Returns the value; None: the message has none."""
        value = value_of(self.message)
        if value is not None:
            value.complete(self.meta(), self.value_buffers())
        return value

    def is_undamaged(self, value: Encoded) -> bool | None:
        """Compares the digest taken as the bytes arrived with the value's. False: the value is damaged; None: no digest
        was taken, so the caller has to check the value. True, without a check, for a value in lent memory.
        """
        if any(lent is not None for lent in self._lent):
            return True  # lent memory needs no check: its producer digested it
        digest = self.digest()
        return None if digest is None else digest == value.digest
