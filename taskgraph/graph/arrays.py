"""Arrays as immutable bytes, and immutable bytes as arrays.

Encoding copies an array once, unless its memory is provably immutable: that of a `bytes` object, or of an encoded value
(an array we decoded). The copy may wait until the digest is taken, so that one pass over memory does both. Decoding
makes views that cannot be made writable.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from weakref import getweakrefs

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from taskgraph.graph import dtypes, worksharing
from taskgraph.graph.blocks import Allocate, Watch, block_behind
from taskgraph.graph.digests import BLOCK_BYTES

__all__ = [
    "INLINE_BYTES",
    "PART_ALIGN",
    "Copy",
    "SmallParts",
    "as_it_is",
    "base_of",
    "empty",
    "known_digest",
    "remember",
    "small_bytes",
    "view",
    "whole_view",
]

Array = NDArray[Any]

INLINE_BYTES: Final = 64 << 10
"""Arrays and `bytes` of this size have a buffer of their own. All smaller arrays of a value
share one, if they have this size together. Measured: to look after a buffer, until it is decoded in another process,
costs as much as to copy 64 KiB a few times. To change either is to change digests: see `digests.BLOCK_BYTES`."""
_COPIED_BYTES: Final = 16 << 10
"""Small arrays that are copied at once: to copy them twice costs less than to hold views of them."""
PART_ALIGN: Final = 16
"""Where each of `SmallParts` begins."""
_ZEROS: Final = bytes(PART_ALIGN)
_SHARED_PART: Final = 2
"""Memory is shared where the array is at least this part (one half) of it: a row must not keep a whole table alive."""


_CHUNK_BYTES: Final = 512 << 10
"""Bytes that are copied before they are digested, so that they are still in the cache. Measured: in one thread
128 KiB to 1 MiB do as well; two threads that share a copy lose a fifth by 256 KiB, since each piece releases the
interpreter's lock."""


class _Decoded(Watch[Array]):
    """Marks the base of a decoded array: its memory belongs to an encoded value, and never changes.

    Attributes:
        whole: meta and digest of the value, where that is such an array and nothing else.
    """

    __slots__ = ("whole",)
    whole: tuple[bytes, bytes] | None


_decoded: Final[set[_Decoded]] = set()
"""Those whose arrays live; each array knows its own."""


_remember: Final = _decoded.add
_forget: Final = _decoded.discard
# numpy makes some of its names when asked, so Python looks up each of them in every call
_frombuffer: Final = np.frombuffer
_ndarray: Final = np.ndarray
_uint8: Final = np.uint8


def _mark(base: object) -> _Decoded | None:
    if type(base) is np.ndarray:
        for found in getweakrefs(base):
            if type(found) is _Decoded:
                return found
    return None


def small_bytes(array: Array) -> bytes:
    """The elements in C order; padding is zero."""
    if dtypes.padding(array.dtype) is None or not array.nbytes:
        return array.tobytes()
    return Copy(array, None).made().tobytes()


def as_it_is(array: Array, *, adopt: bool = False, packed: bool = False) -> memoryview | None:
    """The elements in C order, as read-only bytes that later writes to `array` cannot reach, if that needs no copy.

    Args:
        adopt: the caller promises not to write to `array` again: take the memory that it owns, and make it read-only.
        packed: its dtype is known to have no padding.
    """
    size = array.nbytes
    if size == 0:
        return memoryview(b"")
    flags = array.flags
    if not flags.c_contiguous or not (packed or dtypes.padding(array.dtype) is None):
        return None
    if adopt and not flags.owndata:
        block = block_behind(array)
        if block is not None and block.nbytes == size:
            flags.writeable = block.flags.writeable = False
            return block.data  # read-only, as it is now
    if not (adopt and flags.owndata) and not _is_immutable(array):
        return None
    flags.writeable = False
    return array.reshape(-1).view(np.uint8).data  # read-only, as the array is


def empty(shape: int | tuple[int, ...], dtype: DTypeLike, allocate: Allocate) -> Array:
    """Makes an array like `np.empty`, in memory of `allocate` if it has some: `as_it_is` takes it over as it is.

    Raises:
        TypeError, ValueError: no array is like that, or none that could travel.
    """
    known = _plain.get(dtype) if type(dtype) is type else None
    found, nbytes = _described(dtype) if known is None else known
    if nbytes < 0 and found.hasobject:
        raise TypeError(f"arrays of {found} cannot travel: only what numpy holds as bytes can")
    sizes = shape if isinstance(shape, tuple) else (shape,)
    for size in sizes:
        nbytes = nbytes * size if type(size) is int and size >= 0 <= nbytes else -1
    block = allocate(nbytes) if nbytes >= INLINE_BYTES else None
    if block is not None and block.origin is not None and block.origin.locked:
        # Libraries return from a copy of page-locked memory to a device before it is made: user code could not know.
        block = None
    return np.empty(shape, found) if block is None else np.ndarray(sizes, found, buffer=block)


def _described(dtype: DTypeLike) -> tuple[np.dtype[Any], int]:
    """A dtype, and the bytes of an element; -1 where its arrays are made by numpy alone."""
    found = np.dtype(dtype)
    return found, -1 if found.subdtype is not None or found.hasobject else found.itemsize


_KINDS: Final[tuple[type[Any], ...]] = (bool, int, float, complex, *np.sctypeDict.values())
_plain: Final = {kind: _described(kind) for kind in _KINDS}
"""Of Python's and numpy's own types, one of which most arrays are of."""


class Copy:
    """A copy of an array's elements in C order, still to be made.

    Args:
        allocate: gives the memory it goes to, where it has some.
    """

    __slots__ = ("_array", "_source", "_target", "nbytes")

    def __init__(self, array: Array, allocate: Allocate | None) -> None:
        self.nbytes = array.nbytes
        block = allocate(array.nbytes) if allocate is not None else None
        self._target: Array = np.empty(array.nbytes, np.uint8) if block is None else block
        self._array: Array | None = array
        self._source: Array | None = None  # the bytes still to be copied, where they are a run as they should be

    def begin(self) -> None:
        """Makes all of the copy that cannot be made block by block. To be called before `digest` is."""
        array, self._array = self._array, None
        if array is None:
            return
        mask = dtypes.padding(array.dtype)
        if mask is None and array.flags.c_contiguous:
            self._source = array.reshape(-1).view(np.uint8)
            return
        target = self._target
        np.copyto(dtypes.opaque(np.ndarray(array.shape, array.dtype, target.data)), dtypes.opaque(array))
        if mask is not None:
            np.ndarray((self.nbytes,), np.uint8, target.data).reshape(-1, array.itemsize)[:, mask] = 0

    def digest(self, begin: int, end: int) -> bytes:
        """Copies these bytes, and digests each piece of them while it is in the cache."""
        if end - begin <= _CHUNK_BYTES:
            return xxhash.xxh3_128_digest(self._piece(begin, end))
        hasher = xxhash.xxh3_128()
        for at in range(begin, end, _CHUNK_BYTES):
            hasher.update(self._piece(at, min(at + _CHUNK_BYTES, end)))
        return hasher.digest()

    def _piece(self, begin: int, end: int) -> memoryview:
        piece = self._target[begin:end]
        if self._source is not None:
            np.copyto(piece, self._source[begin:end])
        return piece.data

    def sealed(self) -> memoryview:
        """The copy, once all of it was digested."""
        self._source = None
        self._target.flags.writeable = False
        return self._target.data.toreadonly()

    def made(self) -> memoryview:
        """The copy, made at once."""
        self.begin()
        source, target = self._source, self._target
        if source is not None and self.nbytes >= worksharing.LEAST_BYTES:
            worksharing.for_each(partial(_copy_block, source, target), -(-self.nbytes // BLOCK_BYTES))
        elif source is not None:
            np.copyto(target, source)
        return self.sealed()


class SmallParts:
    """The elements of small arrays, side by side: each begins at a multiple of `PART_ALIGN`, with zeros in between.

    They become a part of meta (`joined`), or a buffer (`begin`, `digest`, `sealed`).

    Args:
        allocate: gives the memory of that buffer, if it has some.
    """

    __slots__ = ("_allocate", "_parts", "_target", "nbytes")

    def __init__(self, allocate: Allocate | None) -> None:
        self.nbytes = 0
        self._allocate = allocate
        self._parts: list[bytes | Array] = []
        self._target = memoryview(b"")

    def add(self, array: Array, *, packed: bool, now: bool) -> int:
        """Appends an array's elements in C order, and returns where they begin.

        Args:
            packed: its dtype has no padding.
            now: its elements are taken at once; else, if they are many, when all parts are joined.
        """
        size = array.nbytes
        part: bytes | Array
        if size > _COPIED_BYTES and packed and not now and array.flags.c_contiguous:
            part = array.reshape(-1).view(np.uint8)
        else:
            part = array.tobytes() if packed else small_bytes(array)
        if gap := -self.nbytes % PART_ALIGN:
            self._parts.append(_ZEROS[:gap])
        at = self.nbytes + gap
        self._parts.append(part)
        self.nbytes = at + size
        return at

    def joined(self) -> bytes:
        """All parts, joined."""
        return b"".join([part if isinstance(part, bytes) else part.data for part in self._parts])

    def begin(self) -> None:
        """Fills the buffer. Call it before `digest`."""
        block = self._allocate(self.nbytes) if self._allocate is not None else None
        self._target = target = (np.empty(self.nbytes, np.uint8) if block is None else block).data
        at = 0
        for part in self._parts:
            end = at + len(part)
            target[at:end] = part if isinstance(part, bytes) else part.data
            at = end
        self._parts.clear()

    def digest(self, begin: int, end: int) -> bytes:
        """The xxh3-128 of these bytes."""
        return xxhash.xxh3_128_digest(self._target[begin:end])

    def sealed(self) -> memoryview:
        """The buffer."""
        return self._target.toreadonly()


def _copy_block(source: Array, target: Array, number: int) -> None:
    block = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
    np.copyto(target[block], source[block])


def remember(array: Array, meta: bytes, digest: bytes) -> None:
    """Keeps the digest of a decoded value that is `array` alone: encoding it again needs no new digest."""
    mark = _mark(array.base)
    if mark is not None:
        mark.whole = meta, digest


def known_digest(array: Array, meta: bytes) -> bytes | None:
    """The digest of the value that is `array` alone and has this meta, where it was decoded from just that."""
    base = array.base
    mark = _mark(base)
    if base is None or mark is None or mark.whole is None or base.nbytes != array.nbytes or mark.whole[0] != meta:
        return None
    return mark.whole[1]


def _is_immutable(array: Array) -> bool:
    if array.flags.writeable:
        return False
    base: Any = array
    while type(base) is np.ndarray:
        if _mark(base) is not None:
            return array.nbytes * _SHARED_PART >= base.nbytes
        base = base.base
    return type(base) is bytes and array.nbytes * _SHARED_PART >= len(base)


def base_of(data: memoryview, whole: tuple[bytes, bytes] | None = None) -> Array:
    """Returns the base of arrays that are views of a buffer. It marks their memory as immutable."""
    # By frombuffer, since ndarray() takes the object behind a memoryview, which may be writable, for its base.
    base = _frombuffer(data if data.readonly else data.toreadonly(), _uint8)
    mark = _Decoded(base, _forget)
    mark.whole = whole
    _remember(mark)
    return base


def whole_view(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], whole: tuple[bytes, bytes]) -> Array:
    """`view` of all of a buffer, for elements of some size: for read-only use."""
    found = _ndarray(shape, dtype, base_of(data, whole))
    return found if found.flags.aligned else _aligned(found)


def _aligned(array: Array) -> Array:
    """Some code cannot work on unaligned elements, and numpy is slow on them."""
    copy = dtypes.whole_copy(array)
    copy.flags.writeable = False
    return copy


def view(
    data: bytes | memoryview | Array,
    at: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    writable: bool,
) -> Array:
    """The array of the bytes at `at`: a view that cannot be made writable, or a fresh writable copy.

    Args:
        data: immutable; long enough. An array is one of `base_of`.

    Raises:
        ValueError, TypeError: no such array can be made.
    """
    if dtype.itemsize == 0:
        # On its own, numpy makes an empty text dtype one byte long; within a field it keeps it. No memory is needed.
        found = np.ndarray(shape, np.dtype([("f", dtype)]))["f"]
        found.flags.writeable = writable
        return found
    found = np.ndarray(shape, dtype, base_of(data) if isinstance(data, memoryview) else data, at)
    if writable:
        return found.copy() if dtype.names is None else dtypes.whole_copy(found)
    # Read-only, as the memory is that it was made on.
    return found if found.flags.aligned else _aligned(found)
