"""Memory that an allocator gave, recognised in whatever is made of it.

A transport that can hand memory to another process without copying it offers an allocator: what is encoded straight
into its memory travels as a reference. This module knows no transport; it says what a piece of such memory looks like,
and finds it behind a value's buffers.

A piece lives as long as anything refers to it: an array on it, a memoryview, an encoded value. Its allocator learns
that it is garbage by a `Watch` on the `Block`, and only then gives the memory to somebody else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.pinning import Pin

__all__ = ["Allocate", "Block", "Origin", "Watch", "block_behind"]

A = TypeVar("A", bound="np.ndarray[Any, Any]")


class Watch(weakref.ref[A]):
    """A weak reference to memory, with what is to be known when that is garbage: `Watch(array, callback)`.

    The callback is called with the watch, as long as somebody has the watch: its maker keeps it in a set. It may come
    at any time, in any thread, also between two lines of its maker's: it does no more than to note it, and raises
    nothing. Where a method of a deque or a set will do, no Python code runs. (`weakref.finalize` is Python code, some
    five calls for each array that comes and goes.)
    """

    __slots__ = ()
    __hash__ = object.__hash__  # by identity: a weak reference takes both from what it refers to, and arrays have none
    __eq__ = object.__eq__


class Origin(Protocol):
    """The allocator's note on a block.

    Attributes:
        locked: its memory was page-locked when it was given out.
    """

    @property
    def locked(self) -> bool: ...

    def spoil(self) -> None:
        """Forbids any reuse of this memory: some process may read it for ever."""

    def pinned(self, device: Device) -> Pin | None:
        """Page-locks its memory for a device, unless it is. Returns the pin, or None if it cannot be locked."""


class Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """A run of bytes of an allocator. Arrays on it are made by `np.ndarray(..., buffer=block)`: they are plain ones.

    It is made by `Block(nbytes, np.uint8, buffer)` on something that is no array: numpy would name an array below it as
    the base of arrays on it, and no array would keep the block alive.

    Attributes:
        origin: the allocator's own note; None for views that numpy made of a block.
    """

    origin: Origin | None = None


Allocate = Callable[[int], Block | None]
"""(bytes) -> that much writable memory, or None: take any other. May be called from every thread."""


def block_behind(memory: NDArray[Any] | memoryview) -> Block | None:
    """The block that an array or a buffer lies in, if it does."""
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
