"""Converts arrays to immutable bytes, and immutable bytes to arrays.

Encoding copies an array once, unless its memory is provably immutable: memory of a `bytes` object, or of an encoded
value (the array was decoded). The copy may wait until the digest is taken, so that one pass over memory does both.
Decoding makes views that cannot be made writable.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final
from weakref import getweakrefs

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from taskgraph.graph import dtypes, worksharing
from taskgraph.graph.blocks import Allocate, Finalizer, block_behind
from taskgraph.graph.digests import BLOCK_BYTES, block_digests

__all__ = [
    "INLINE_BYTES",
    "PART_ALIGN",
    "PendingCopy",
    "SmallParts",
    "empty",
    "immutable_base",
    "immutable_copy",
    "known_block_digests",
    "known_digest",
    "remember_digest",
    "share_bytes",
    "small_bytes",
    "view",
    "view_whole",
]

Array = NDArray[Any]

INLINE_BYTES: Final = 64 << 10
"""Arrays and `bytes` of this size or more get a buffer each. All smaller arrays of a value share one buffer if they
have this size together. Measured: a buffer costs as much as a few copies of 64 KiB, until another process decoded it.
Another size changes digests: see `digests.BLOCK_BYTES`."""
_EAGER_COPY_BYTES: Final = 16 << 10
"""Smaller arrays are copied at once: two copies cost less than to keep views of the arrays."""
PART_ALIGN: Final = 16
"""The alignment of each array in `SmallParts`, bytes."""
_ZEROS: Final = bytes(PART_ALIGN)
_LEAST_SHARED_FRACTION: Final = 2
"""Memory is shared if the array is at least one half of it: a row must not keep a whole table alive."""


_CHUNK_BYTES: Final = 512 << 10
"""Bytes that are copied, then digested, while they are in the CPU cache. Measured: in one thread
128 KiB to 1 MiB do as well; two threads that share a copy lose a fifth by 256 KiB, since each piece releases the
interpreter's lock."""


class _DecodedMark(Finalizer[Array]):
    """Marks the base of a decoded array: its memory belongs to an encoded value, and never changes.

    Attributes:
        value_id: meta and digest of the value, if the array is the whole value; None: it is not.
        blocks: the digests of the memory's blocks (`digests`), if `immutable_copy` made it; otherwise not set.
    """

    __slots__ = ("blocks", "value_id")
    blocks: bytes
    value_id: tuple[bytes, bytes] | None


_live_marks: Final[set[_DecodedMark]] = set()
"""Keeps the marks of live arrays. Each array refers to its own mark weakly."""


_keep_mark: Final = _live_marks.add
_drop_mark: Final = _live_marks.discard
# Cached: attributes of numpy are looked up dynamically, in every call.
_frombuffer: Final = np.frombuffer
_ndarray: Final = np.ndarray
_uint8: Final = np.uint8


def _find_mark(base: object) -> _DecodedMark | None:
    """Returns the mark of an array that `immutable_base` made; None for any other object."""
    if type(base) is np.ndarray:
        for found in getweakrefs(base):
            if type(found) is _DecodedMark:
                return found
    return None


def small_bytes(array: Array) -> bytes:
    """Returns the elements in C order as bytes, with zeros in place of padding."""
    if dtypes.padding(array.dtype) is None or not array.nbytes:
        return array.tobytes()
    return PendingCopy(array, None).make().tobytes()


def share_bytes(array: Array, *, adopt: bool = False, packed: bool = False) -> memoryview | None:
    """Returns the elements in C order as immutable bytes, if that needs no copy; None otherwise.

    Args:
        adopt: the caller promises not to write to `array` again: memory that it owns is taken, and made read-only. A
            read-only part of a block is taken, too, whatever the rest of it.
        packed: the dtype is known to have no padding.
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
        if block is not None and not flags.writeable:
            return array.reshape(-1).view(np.uint8).data
    if not (adopt and flags.owndata) and not _is_immutable(array):
        return None
    flags.writeable = False
    return array.reshape(-1).view(np.uint8).data  # read-only, as the array is


def empty(shape: int | tuple[int, ...], dtype: DTypeLike, allocate: Allocate) -> Array:
    """Creates an array like `np.empty`, in memory of `allocate` if it has some: `share_bytes` needs no copy of it.

    Raises:
        TypeError, ValueError: shape or dtype is invalid, or such an array could not travel.
    """
    known = _known_dtypes.get(dtype) if type(dtype) is type else None
    found, nbytes = _dtype_and_itemsize(dtype) if known is None else known
    if nbytes < 0 and found.hasobject:
        raise TypeError(f"arrays of {found} cannot travel: only what numpy holds as bytes can")
    sizes = shape if isinstance(shape, tuple) else (shape,)
    for size in sizes:
        nbytes = nbytes * size if type(size) is int and size >= 0 <= nbytes else -1
    block = allocate(nbytes) if nbytes >= INLINE_BYTES else None
    if block is not None and block.origin is not None and block.origin.locked:
        # A copy from page-locked memory to a device is asynchronous: user code could write to the array too early.
        block = None
    return np.empty(shape, found) if block is None else np.ndarray(sizes, found, buffer=block)


def _dtype_and_itemsize(dtype: DTypeLike) -> tuple[np.dtype[Any], int]:
    """Returns a dtype, and the bytes of an element; -1 if arrays of the dtype must be created by numpy."""
    found = np.dtype(dtype)
    return found, -1 if found.subdtype is not None or found.hasobject else found.itemsize


_SCALAR_TYPES: Final[tuple[type[Any], ...]] = (bool, int, float, complex, *np.sctypeDict.values())
_known_dtypes: Final = {kind: _dtype_and_itemsize(kind) for kind in _SCALAR_TYPES}
"""Caches `_dtype_and_itemsize` for Python's and numpy's own scalar types, which most arrays have."""


class PendingCopy:
    """A pending copy of an array's elements in C order.

    Call `begin`, `digest` for all bytes, then `seal`: the copy is made with the digest. Or call `make`.

    Args:
        allocate: gives the memory for the copy, if it has some.
    """

    __slots__ = ("_array", "_source", "_target", "nbytes")

    def __init__(self, array: Array, allocate: Allocate | None) -> None:
        self.nbytes = array.nbytes
        block = allocate(array.nbytes) if allocate is not None else None
        self._target: Array = np.empty(array.nbytes, np.uint8) if block is None else block
        self._array: Array | None = array
        self._source: Array | None = None  # the bytes to copy, if they are contiguous and without padding

    def begin(self) -> None:
        """Copies now an array with gaps or padding, which cannot be copied block by block. Call it before `digest`."""
        array, self._array = self._array, None
        if array is None:
            return
        mask = dtypes.padding(array.dtype)
        if mask is None and array.flags.c_contiguous:
            self._source = array.reshape(-1).view(np.uint8)
            return
        target = self._target
        np.copyto(dtypes.as_void(np.ndarray(array.shape, array.dtype, target.data)), dtypes.as_void(array))
        if mask is not None:
            np.ndarray((self.nbytes,), np.uint8, target.data).reshape(-1, array.itemsize)[:, mask] = 0

    def digest(self, begin: int, end: int) -> bytes:
        """Copies bytes `begin` to `end`, and returns their xxh3-128. Digests pieces while they are in the CPU cache."""
        if end - begin <= _CHUNK_BYTES:
            return xxhash.xxh3_128_digest(self._copy_piece(begin, end))
        hasher = xxhash.xxh3_128()
        for at in range(begin, end, _CHUNK_BYTES):
            hasher.update(self._copy_piece(at, min(at + _CHUNK_BYTES, end)))
        return hasher.digest()

    def _copy_piece(self, begin: int, end: int) -> memoryview:
        """Copies bytes `begin` to `end`, and returns the copy of them."""
        piece = self._target[begin:end]
        if self._source is not None:
            np.copyto(piece, self._source[begin:end])
        return piece.data

    def seal(self) -> memoryview:
        """Returns the copy, read-only. Call it after `digest` of all bytes."""
        self._source = None
        self._target.flags.writeable = False
        return self._target.data.toreadonly()

    def make(self) -> memoryview:
        """Copies the whole array now, and returns the copy."""
        self.begin()
        source, target = self._source, self._target
        if source is not None and self.nbytes >= worksharing.LEAST_BYTES:
            worksharing.for_each(partial(_copy_block, source, target), -(-self.nbytes // BLOCK_BYTES))
        elif source is not None:
            np.copyto(target, source)
        return self.seal()


class SmallParts:
    """Collects the elements of a value's small arrays, each aligned to `PART_ALIGN` bytes.

    They become a part of meta (`join`), or a buffer (`begin`, then `digest` for all bytes, then `seal`).

    Args:
        allocate: gives the memory of the buffer, if it has some.
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
            packed: the dtype has no padding.
            now: copy the elements at once. Otherwise a larger array is copied when the parts are joined.
        """
        size = array.nbytes
        part: bytes | Array
        if size > _EAGER_COPY_BYTES and packed and not now and array.flags.c_contiguous:
            part = array.reshape(-1).view(np.uint8)
        else:
            part = array.tobytes() if packed else small_bytes(array)
        if gap := -self.nbytes % PART_ALIGN:
            self._parts.append(_ZEROS[:gap])
        at = self.nbytes + gap
        self._parts.append(part)
        self.nbytes = at + size
        return at

    def join(self) -> bytes:
        """Returns all parts as one `bytes`."""
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
        """Returns the xxh3-128 of bytes `begin` to `end` of the buffer."""
        return xxhash.xxh3_128_digest(self._target[begin:end])

    def seal(self) -> memoryview:
        """Returns the buffer, read-only."""
        return self._target.toreadonly()


def _copy_block(source: Array, target: Array, number: int) -> None:
    block = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
    np.copyto(target[block], source[block])


def remember_digest(array: Array, meta: bytes, digest: bytes) -> None:
    """Notes meta and digest of a decoded value that is `array` alone: encoding it again needs no new digest."""
    mark = _find_mark(array.base)
    if mark is not None:
        mark.value_id = meta, digest


def known_digest(array: Array, meta: bytes) -> bytes | None:
    """Returns the digest noted for `array`, if it was decoded from a value with just this meta; None otherwise."""
    base = array.base
    mark = _find_mark(base)
    if base is None or mark is None or mark.value_id is None or base.nbytes != array.nbytes or mark.value_id[0] != meta:
        return None
    return mark.value_id[1]


def _is_immutable(array: Array) -> bool:
    """True if the array's memory never changes, and at least half of it is the array."""
    if array.flags.writeable:
        return False
    base: Any = array
    while type(base) is np.ndarray:
        if _find_mark(base) is not None:
            return array.nbytes * _LEAST_SHARED_FRACTION >= base.nbytes
        base = base.base
    return type(base) is bytes and array.nbytes * _LEAST_SHARED_FRACTION >= len(base)


def immutable_base(data: memoryview, whole: tuple[bytes, bytes] | None = None) -> Array:
    """Returns an array over a buffer, as the base of views, and marks the memory as immutable.

    Args:
        whole: meta and digest of the value, if the value is this array alone.
    """
    # np.frombuffer, since np.ndarray() would make the object behind the memoryview the base, maybe a writable one.
    base = _frombuffer(data if data.readonly else data.toreadonly(), _uint8)
    mark = _DecodedMark(base, _drop_mark)
    mark.value_id = whole
    _keep_mark(mark)
    return base


def immutable_copy(parts: Iterable[Array]) -> NDArray[np.uint8]:
    """Joins the elements of arrays to one array of bytes that never changes: values share it, and its digest is known.

    For a state that keeps most of its memory from snapshot to snapshot.
    """
    base = immutable_base(memoryview(b"".join([part.tobytes() for part in parts])))
    mark = _find_mark(base)
    assert mark is not None
    mark.blocks = block_digests(base.data)
    return base


def known_block_digests(buffer: object) -> bytes | None:
    """Returns the digests of a buffer's blocks if the buffer is all of what `immutable_copy` made; else None."""
    if type(buffer) is not memoryview:
        return None
    base: Any = buffer.obj
    while type(base) is np.ndarray:
        mark = _find_mark(base)
        if mark is not None:
            return getattr(mark, "blocks", None) if base.nbytes == buffer.nbytes else None
        base = base.base
    return None


def view_whole(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], whole: tuple[bytes, bytes]) -> Array:
    """Returns a read-only array over a whole buffer. Like `view`, but for dtypes with an itemsize above 0 only."""
    found = _ndarray(shape, dtype, immutable_base(data, whole))
    return found if found.flags.aligned else _aligned_copy(found)


def _aligned_copy(array: Array) -> Array:
    """Copies an unaligned array: some code cannot work on unaligned elements, and numpy is slow on them."""
    copy = dtypes.copy_with_padding(array)
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
    """Returns the array whose bytes begin at `at`: a view that cannot be made writable, or a fresh writable copy.

    Args:
        data: immutable, and long enough. An array must come from `immutable_base`.

    Raises:
        ValueError, TypeError: dtype or shape is invalid.
    """
    if dtype.itemsize == 0:
        # numpy makes an empty text dtype one byte long, unless it is the dtype of a field. No memory is needed.
        found = np.ndarray(shape, np.dtype([("f", dtype)]))["f"]
        found.flags.writeable = writable
        return found
    found = np.ndarray(shape, dtype, immutable_base(data) if isinstance(data, memoryview) else data, at)
    if writable:
        return found.copy() if dtype.names is None else dtypes.copy_with_padding(found)
    # Read-only, since its base is read-only.
    return found if found.flags.aligned else _aligned_copy(found)
