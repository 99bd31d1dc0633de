"""Arrays as runs of bytes that nobody can change, and such runs as arrays.

Encoding copies an array once, unless its memory is provably immutable: that of a `bytes` object, or of an encoded value
(an array we decoded). Decoding makes views that cannot be made writable.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph import dtypes

__all__ = ["freeze", "small_bytes", "view"]

Array = NDArray[Any]

_SHARED_PART: Final = 2
"""Memory is shared where the array is at least this part (one half) of it: a row must not keep a whole table alive."""


_decoded: Final[weakref.WeakValueDictionary[int, Array]] = weakref.WeakValueDictionary()
"""The bases of decoded arrays, by id: their memory belongs to an encoded value, and nobody writes to it."""


def small_bytes(array: Array) -> bytes:
    """The elements in C order; padding is zero."""
    mask = dtypes.padding(array.dtype)
    if mask is None:
        return array.tobytes()
    return freeze(array).tobytes()


def freeze(array: Array, *, adopt: bool = False) -> memoryview:
    """The elements in C order, as read-only bytes that later writes to `array` cannot reach.

    Args:
        adopt: nobody will write to `array` any more: take its memory, where it has its own, and make it read-only.
    """
    if array.nbytes == 0:
        return memoryview(b"")
    mask = dtypes.padding(array.dtype)
    if mask is None and array.flags.c_contiguous and ((adopt and array.flags.owndata) or _is_immutable(array)):
        kept = array
    else:
        kept = np.array(array, order="C", copy=True, subok=False)
    flat = kept.reshape(-1).view(np.uint8)
    if mask is not None:
        flat.reshape(-1, array.itemsize)[:, mask] = 0
    kept.flags.writeable = False
    return flat.data.toreadonly()


def _is_immutable(array: Array) -> bool:
    if array.flags.writeable:
        return False
    base: Any = array
    while type(base) is np.ndarray:
        if _decoded.get(id(base)) is base:
            return array.nbytes * _SHARED_PART >= base.nbytes
        base = base.base
    return type(base) is bytes and array.nbytes * _SHARED_PART >= len(base)


def view(data: bytes | memoryview, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, writable: bool) -> Array:
    """The array of the bytes at `at`: a view that cannot be made writable, or a fresh writable copy.

    Args:
        data: immutable; long enough.

    Raises:
        ValueError, TypeError: no such array can be made.
    """
    if dtype.itemsize == 0:
        # On its own, numpy makes an empty text dtype one byte long; within a field it keeps it. No memory is needed.
        found = np.ndarray(shape, np.dtype([("f", dtype)]))["f"]
        found.flags.writeable = writable
        return found
    if isinstance(data, bytes):
        found = np.ndarray(shape, dtype, data, at)
    else:
        # By frombuffer, since ndarray() takes the object behind a memoryview, which may be writable, for its base.
        base = np.frombuffer(data if data.readonly else data.toreadonly(), np.uint8)
        _decoded[id(base)] = base
        found = np.ndarray(shape, dtype, base, at)
    if writable:
        return found.copy()
    if not found.flags.aligned:  # some code cannot work on unaligned elements, and numpy is slow on them
        found = found.copy()
    found.flags.writeable = False
    return found
