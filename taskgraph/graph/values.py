"""Encodes values once when they are put, and decodes them read-only where they arrive. Nothing is pickled.

These travel: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, numpy arrays and scalars of
every built-in dtype of numpy but object, CuPy arrays, protobuf messages, dataclasses declared with `message`, and types
with a `codec`. A value arrives with exactly the type and the bits it was sent with. Other types are refused, with
advice on what to send. `docs/values.md` is the users' guide.

`layout` defines the format. Most values are a single array, so `encode` and `decode` try fast paths for it first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.buffers import BlockDigests, DeviceBuffer
from taskgraph.errors import DecodeError
from taskgraph.graph import arrays, digests, dtypes
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.codecs import codec, message
from taskgraph.graph.decoding import Reader
from taskgraph.graph.digests import without_buffers
from taskgraph.graph.encoding import write
from taskgraph.graph.layout import ARRAY, LARGE_ARRAY, lone_array_head, read_lone_array_head
from taskgraph.graph.refusals import CannotTravel
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

__all__ = [
    "begin_copy_to_host",
    "begin_digest",
    "codec",
    "copy_device_buffers",
    "copy_to_host",
    "decode",
    "decode_small_array",
    "device_buffers",
    "device_buffers_intact",
    "digest_of",
    "encode",
    "join_values",
    "message",
    "split_values",
    "value_end",
    "verify",
]

_U32 = struct.Struct("<I")
_EMPTY_TRAILER: Final = _U32.pack(0)
_NO_NUMBERS: Final[frozenset[int]] = frozenset()
_ndarray: Final = np.ndarray  # cached: attributes of numpy are looked up dynamically, in every call
_CACHE_ENTRIES: Final = 1024
"""Entries in each of the caches below; a full cache is cleared."""

_array_heads: Final[dict[tuple[np.dtype[Any], int, tuple[int, ...]], bytes]] = {}
"""Caches the heads of values that are one array, by dtype, dtype.num and shape."""

_small_arrays: Final[dict[int, tuple[bytes, np.dtype[Any], tuple[int, ...], int]]] = {}
"""Maps a length of meta to the last small array of that length: its head, dtype, shape and offset of elements. As a
rule, the next array of that length has the same head."""

_large_arrays: Final[dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int, bytes]]] = {}
"""Maps the meta of a value that is one large array to dtype, shape, bytes of elements, and meta without its trailer. In
every epoch arrays arrive with the same meta, and only the elements differ."""


def encode(
    value: Any,
    *,
    what: str = "value",
    adopt: bool = False,
    allocate: Allocate | None = None,
    stays: bool = False,
    lendable: bool = False,
    ordered: bool = False,
) -> Encoded:
    """Encodes a value; later changes to it cannot reach the result.

    Arrays are copied once, but those whose memory cannot change (decoded ones, and those on `bytes`) are shared. The
    digest is taken in the pass that copies.

    Args:
        what: names the value in errors, e.g. "channel 'grad' of task 3".
        adopt: the caller promises not to write to the value's arrays again: large arrays that own their memory are
            not copied, and become read-only.
        allocate: gives memory for copies of large arrays, if it has some.
        stays: copy large arrays of a device within the device's memory, if possible. This waits for the device once,
            also for the digests. The result is only for this process; see `copy_to_host`.
        lendable: copy these arrays to memory that other processes can open, if there is some.
        ordered: arrays keep their memory order (`orders`) instead of arriving in C order.

    Raises:
        ValueNotEncodable: a part of the value cannot travel; the message says which part, and what to send instead.
    """
    if type(value) is _ndarray and not ordered:
        dtype = value.dtype
        key = dtype, dtype.num, value.shape
        head = _array_heads.get(key) or _cached_head(key, value.nbytes)
        if head:
            if value.nbytes >= INLINE_BYTES:
                return _encode_large_array(value, head, adopt, allocate)
            whole = head + value.tobytes()
            return Encoded(whole + _EMPTY_TRAILER, (), without_buffers(whole))
    try:
        writer, meta = write(value, adopt, allocate, stays, lendable, ordered)
    except CannotTravel as refused:
        raise refused.error(what) from refused.__cause__
    except RecursionError as error:
        too_deep = CannotTravel(value, "it is nested deeper than what is left of this thread's stack allows")
        raise too_deep.error(what) from error
    flags = writer.on_device
    if writer.buffers:
        ready, digest = _finish_buffers(meta, writer.buffers)
    else:
        ready, digest = (), without_buffers(meta)
    meta += struct.pack(f"<{len(flags) + 1}I", *flags, len(flags)) if flags else _EMPTY_TRAILER
    return (EncodedOnDevice if writer.stayed else Encoded)(meta, ready, digest)


def _cached_head(key: tuple[np.dtype[Any], int, tuple[int, ...]], nbytes: int) -> bytes | None:
    """Returns the head of a value that is one array, and caches it; None if only `write` can encode the array."""
    dtype, number, shape = key
    try:
        described, packed = dtypes.DTYPE_DESCRIPTIONS[dtype, number]
    except dtypes.DtypeRefused:
        return None
    head = lone_array_head(LARGE_ARRAY if nbytes >= INLINE_BYTES else ARRAY, described, shape) if packed else None
    if head is not None:
        if len(_array_heads) >= _CACHE_ENTRIES:
            _array_heads.clear()
        _array_heads[key] = head
    return head


def _encode_large_array(array: NDArray[Any], head: bytes, adopt: bool, allocate: Allocate | None) -> Encoded:
    """Encodes a value that is one large array."""
    buffer = arrays.share_bytes(array, adopt=adopt, packed=True)
    if buffer is None:
        copy = arrays.PendingCopy(array, allocate)
        copy.begin()
        digest = digests.digest(head, (copy,))
        buffer = copy.seal()
    else:
        known = None if adopt else arrays.known_digest(array, head)
        digest = known or digests.of_one_buffer(head, buffer)
    return Encoded(head + _EMPTY_TRAILER, (buffer,), digest)


def _finish_buffers(meta: bytes, buffers: Sequence[Any]) -> tuple[tuple[memoryview, ...], bytes]:
    """Makes all pending copies. Returns the finished buffers, and the digest of the value."""
    for buffer in buffers:
        if not isinstance(buffer, memoryview):
            buffer.begin()
    digest = _digest(meta, buffers)
    return tuple([buffer if isinstance(buffer, memoryview) else buffer.seal() for buffer in buffers]), digest


def _digest(meta: bytes | bytearray | memoryview, buffers: Sequence[memoryview | digests.FillingBuffer]) -> bytes:
    """Returns the digest of a value, from known digests of blocks where there are some."""
    known = [arrays.known_block_digests(buffer) for buffer in buffers]
    if any(known):
        parts = [one or digests.block_digests(buffer) for one, buffer in zip(known, buffers, strict=True)]
        return digests.of_block_digests(meta, [buffer.nbytes for buffer in buffers], b"".join(parts))
    blocks = b""
    for buffer in buffers:
        if not isinstance(buffer, BlockDigests):
            return digests.digest(meta, buffers)
        blocks += buffer.blocks
    return digests.of_block_digests(
        meta, [buffer.nbytes for buffer in buffers], blocks
    )  # nothing that threads could share


def copy_to_host(
    value: Encoded, *, allocate: Allocate | None = None, but: Callable[[DeviceBuffer], bool] | None = None
) -> Encoded:
    """Copies all buffers of a value to the host. Waits for the device, so call it in a thread.

    Args:
        allocate: gives the memory to copy to, if it has some. Each buffer is copied once, for all callers.
        but: returns True for a buffer that stays on the device.
    """
    if type(value) is not EncodedOnDevice:
        return value
    buffers: list[Any] = []
    kind: type[Encoded] = Encoded
    for buffer in cast(Sequence[Any], value.buffers):
        if not isinstance(buffer, DeviceBuffer):
            buffers.append(buffer)
        elif but is not None and but(buffer):
            buffers.append(buffer)
            kind = EncodedOnDevice
        else:
            buffers.append(buffer.copy_to_host(allocate))
    return kind(value.meta, tuple(buffers), value.digest)


def begin_copy_to_host(value: Encoded, *, allocate: Allocate) -> None:
    """Queues the copies that `copy_to_host` waits for, as far as page-locked memory is free. Does not wait."""
    for buffer in device_buffers(value):
        buffer.copy_early(allocate)


def join_values(values: Sequence[Encoded]) -> Encoded:
    """Joins values without buffers to one value that cannot be decoded; `split_values` splits it again."""
    whole = b"".join([value.meta for value in values])
    return Encoded(whole + _EMPTY_TRAILER, (), without_buffers(whole))


def split_values(whole: Encoded, parts: Sequence[tuple[int, bytes]]) -> list[Encoded]:
    """Splits a value that `join_values` made.

    Args:
        parts: size and digest of each value. Size 0 repeats the previous value, which was joined only once.

    Raises:
        DecodeError: the sizes do not fit the joined value.
    """
    meta, at, found = whole.meta, 0, []
    for size, digest in parts:
        if size > 0:
            found.append(Encoded(meta[at : at + size], (), digest))
            at += size
        elif found and not size:
            found.append(found[-1])
        else:
            raise DecodeError(f"one of joined values has {size} bytes")
    if whole.buffers or meta[at:] != _EMPTY_TRAILER:
        have = at + len(_EMPTY_TRAILER)
        raise DecodeError(f"{len(meta)} bytes of joined values; their parts have {have}")
    return found


def device_buffers(value: Encoded) -> list[DeviceBuffer]:
    """Returns the buffers of a value that are on a device."""
    return [buffer for buffer in cast(Sequence[Any], value.buffers) if isinstance(buffer, DeviceBuffer)]


def copy_device_buffers(value: EncodedOnDevice) -> EncodedOnDevice:
    """Copies the device buffers of a value, so that it shares no device memory. Waits for the device."""
    buffers: Any = tuple([b.copy_on_device() if isinstance(b, DeviceBuffer) else b for b in value.buffers])
    return EncodedOnDevice(value.meta, buffers, value.digest)


def device_buffers_intact(value: Encoded) -> bool:
    """Digests device buffers again, on the current stream: True if the digest matches. Waits for the device."""
    fresh = [buffer.digest_again() if isinstance(buffer, DeviceBuffer) else buffer for buffer in value.buffers]
    for source in fresh:
        if isinstance(source, BlockDigests):
            source.begin()
    return _digest(memoryview(value.meta)[: value_end(value.meta)], fresh) == value.digest


def decode(encoded: Encoded, *, device: Device | None = None, writable: bool = False) -> Any:
    """Decodes a value. Its arrays are read-only views on the encoded bytes; they live as long as you keep them.

    Args:
        device: decodes arrays that were on a device to arrays of this device, in the order of its current stream;
            None decodes all arrays to numpy arrays.
        writable: decode to fresh arrays that the caller may write to.

    Raises:
        DecodeError: the bytes are not a value, or name a type that is not declared here.
    """
    meta = encoded.meta
    if len(encoded.buffers) == 1 and not writable and (known := _large_arrays.get(meta)) is not None:
        buffer = encoded.buffers[0]
        dtype, shape, nbytes, head = known  # looked up once: another thread may clear the table
        if type(buffer) is memoryview and buffer.nbytes == nbytes and buffer.format == "B" and buffer.c_contiguous:
            return arrays.view_whole(buffer, dtype, shape, (head, encoded.digest))
    size = len(meta)
    end, on_device = size - 4, _NO_NUMBERS
    if end < 0 or meta[end:] != _EMPTY_TRAILER:
        end = value_end(meta)
        on_device = _read_trailer(meta, end)
    elif not encoded.buffers and (small := decode_small_array(meta)) is not None:
        return small.copy() if writable else small
    value = Reader(encoded, end, on_device, device, writable).read()
    if meta[:2] == LARGE_ARRAY and type(value) is np.ndarray:
        head = meta[:end]
        arrays.remember_digest(value, head, encoded.digest)
        if not on_device:
            if len(_large_arrays) >= _CACHE_ENTRIES:
                _large_arrays.clear()
            _large_arrays[meta] = value.dtype, value.shape, value.nbytes, head
    return value


def decode_small_array(meta: bytes) -> NDArray[Any] | None:
    """Decodes a value without buffers that is a single array, faster than `decode`; None for all other values.

    Most items are such values.
    """
    known = _small_arrays.get(len(meta))
    if known is not None and meta.startswith(known[0]) and meta.endswith(_EMPTY_TRAILER):
        return _ndarray(known[2], known[1], meta, known[3])  # bytes are all aligned alike
    if meta[:2] != ARRAY or not meta.endswith(_EMPTY_TRAILER):
        return None
    try:
        dtype, shape, nbytes, at = read_lone_array_head(meta)
        if at + nbytes + 4 != len(meta) or not nbytes or dtype.subdtype is not None:
            return None
        found: NDArray[Any] = np.ndarray(shape, dtype, meta, at)
    except (DecodeError, IndexError, TypeError, ValueError, OverflowError):
        return None
    if not found.flags.aligned:
        return None
    if len(_small_arrays) >= _CACHE_ENTRIES:
        _small_arrays.clear()
    _small_arrays[len(meta)] = meta[:at], dtype, shape, at
    return found


def digest_of(meta: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Returns the 16-byte digest of a value (`digests`). The trailer is not digested."""
    return digests.digest(memoryview(meta)[: value_end(meta)], buffers)


def begin_digest(meta: bytes, sizes: Sequence[int]) -> digests.StreamingDigest:
    """Begins the digest of a value, to be updated with the bytes of its buffers as they arrive."""
    return digests.StreamingDigest(memoryview(meta)[: value_end(meta)], sizes)


def verify(encoded: Encoded) -> bool:
    """Returns True if meta and buffers match the digest of the value."""
    meta = encoded.meta
    if not encoded.buffers and meta.endswith(_EMPTY_TRAILER):  # as `digest_of`, but faster: most values have no buffers
        return without_buffers(memoryview(meta)[:-4]) == encoded.digest
    return digest_of(meta, encoded.buffers) == encoded.digest


def _read_trailer(meta: bytes, at: int) -> frozenset[int]:
    """Returns the numbers of the arrays that were on a device. Raises DecodeError if there is no trailer."""
    numbers = struct.unpack_from(f"<{(len(meta) - at) // 4}I", meta, at)
    if not numbers or numbers[-1] != len(numbers) - 1:
        raise DecodeError(f"a value of {len(meta)} bytes has no trailer")
    return frozenset(numbers[:-1])


def value_end(meta: bytes) -> int:
    """Returns the offset of the trailer in meta; the length of meta if the trailer is damaged."""
    size = len(meta)
    if size < 4 or meta.endswith(_EMPTY_TRAILER):
        return max(0, size - 4)
    end = size - 4 - 4 * int(_U32.unpack_from(meta, size - 4)[0])
    return end if end > 0 else size
