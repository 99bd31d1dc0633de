"""Blocks of memory from an allocator, and how to find the block behind an array or a buffer.

A transport that can lend memory to another process without a copy offers an allocator: values that are encoded into its
memory travel as references. This module knows no transport. It defines blocks, and finds them behind buffers.

A block lives as long as anything refers to it: an array, a memoryview, an encoded value. A `Finalizer` on the `Block`
calls its allocator when the block is garbage, and only then does the allocator reuse the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.pinning import Pin

__all__ = ["Allocate", "Block", "Finalizer", "Origin", "block_behind"]

A = TypeVar("A", bound="np.ndarray[Any, Any]")


class Finalizer(weakref.ref[A]):
    """A weak reference to an array or block that calls `callback(reference)` once that is garbage.

    The owner must keep the reference, for example in a set, or the callback is never called. The callback may run at
    any time, in any thread: it only takes a note, and raises nothing. Use a method of a deque or set where possible,
    so that no Python code runs (`weakref.finalize` costs five Python calls for each array).
    """

    __slots__ = ()
    __hash__ = object.__hash__  # by identity: weak references forward both to their object, and arrays have no hash
    __eq__ = object.__eq__


class Origin(Protocol):
    """What the allocator of a block knows about the block's memory: the interface to it.

    Attributes:
        locked: the memory was page-locked when the allocator gave it out. So a copy to the host may begin before it is
            wanted; but arrays for user code are made elsewhere, since a device still reads such memory after a copy
            from it was queued.
    """

    @property
    def locked(self) -> bool: ...

    def spoil(self) -> None:
        """Forbids any reuse of this memory, since another process may still read it."""

    def pin(self, device: Device) -> Pin | None:
        """Page-locks the memory for a device, unless it is locked. Returns the pin; None if locking fails."""


class Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory from an allocator. `np.ndarray(..., buffer=block)` creates plain arrays on it.

    Create a block by `Block(nbytes, np.uint8, buffer)`, where `buffer` is no array: otherwise arrays on the block would
    refer to that array instead of the block, and not keep the block alive.

    Attributes:
        origin: the allocator's record; None for views that numpy made of a block.
    """

    origin: Origin | None = None


Allocate = Callable[[int], Block | None]
"""Allocates a number of writable bytes; None if the allocator has none. May be called from every thread."""


def block_behind(memory: NDArray[Any] | memoryview) -> Block | None:
    """Returns the block that an array or a buffer lies in; None if its memory is from no block."""
    below: Any = memory.obj if type(memory) is memoryview else memory.base
    if type(below) is Block and below.origin is not None:
        return below  # as a rule
    holder: Any = memory
    while holder is not None:
        kind = type(holder)
        if kind is np.ndarray:
            holder = holder.base
        elif kind is memoryview:
            holder = holder.obj
        elif kind is Block and holder.origin is not None:
            found: Block = holder
            return found
        elif isinstance(holder, np.ndarray):
            holder = holder.base
        else:
            return None
    return None
