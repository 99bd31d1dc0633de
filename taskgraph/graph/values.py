"""Values that travel: encoded once when they are put, decoded read-only where they arrive. Never pickled.

What travels: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, numpy arrays and scalars of
every dtype of numpy's own but object, CuPy arrays, protobuf messages, dataclasses declared with `message`, and types
with a `codec`. Each arrives with exactly the type and the bits it was sent with; anything else is refused with the way
out. `docs/values.md` tells it to users.

`layout` defines the format. A value that is one array, and nothing else, is the most common one: `encode` and `decode`
treat it before any other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.buffers import DeviceBuffer, Digested
from taskgraph.errors import DecodeError
from taskgraph.graph import arrays, digests, dtypes
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.codecs import codec, message
from taskgraph.graph.decoding import Reader
from taskgraph.graph.digests import without_buffers
from taskgraph.graph.encoding import write
from taskgraph.graph.layout import ARRAY, LARGE_ARRAY, lone_head, read_lone_head
from taskgraph.graph.refusals import CannotTravel
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

__all__ = [
    "begin_hosted",
    "codec",
    "decode",
    "digest_of",
    "digesting",
    "encode",
    "hosted",
    "joined",
    "message",
    "parted",
    "separate",
    "small_array",
    "staying",
    "untouched",
    "value_end",
    "verify",
]

_U32 = struct.Struct("<I")
_NOTHING_ON_DEVICE: Final = _U32.pack(0)
_NONE: Final[frozenset[int]] = frozenset()
_ndarray: Final = np.ndarray  # numpy makes some of its names when asked, so Python looks up each of them in every call
_KEPT: Final = 1024
"""Entries of each of the tables below; a full table begins again."""

_heads: Final[dict[tuple[np.dtype[Any], int, tuple[int, ...]], bytes]] = {}
"""The beginning of values that are one array: by dtype, its number (`dtypes.DESCRIBED`) and shape."""

_small: Final[dict[int, tuple[bytes, np.dtype[Any], tuple[int, ...], int]]] = {}
"""By the length of meta, the last small array of that length: its head, dtype and shape, and where its elements are.
The next array of that length has the same head, as a rule."""

_large: Final[dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int, bytes]]] = {}
"""By meta, of values that are one large array: dtype, shape, bytes of elements, and meta without its trailer. The same
array comes in every epoch, but for its elements."""


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
        what: for messages, e.g. "channel 'grad' of task 3".
        adopt: the caller promises not to write to the value's arrays again: large arrays that own their memory are
            not copied, and become read-only.
        allocate: where large arrays are copied to, as far as it has memory.
        stays: large arrays of a device stay there, where that is possible: they are copied within its memory. It waits
            for the device once, also for the digests. What it returns is for this process; see `hosted`.
        lendable: they are copied to memory that other processes can open, as far as there is some.
        ordered: arrays arrive in the order that they have in memory, and not in C's (`orders`).

    Raises:
        ValueNotEncodable: something in it cannot travel; the message says what, where, and the way out.
    """
    if type(value) is _ndarray and not ordered:
        dtype = value.dtype
        key = dtype, dtype.num, value.shape
        head = _heads.get(key) or _remember_head(key, value.nbytes)
        if head:
            if value.nbytes >= INLINE_BYTES:
                return _large_array(value, head, adopt, allocate)
            whole = head + value.tobytes()
            return Encoded(whole + _NOTHING_ON_DEVICE, (), without_buffers(whole))
    try:
        writer, meta = write(value, adopt, allocate, stays, lendable, ordered)
    except CannotTravel as refused:
        raise refused.error(what) from refused.__cause__
    except RecursionError as error:
        too_deep = CannotTravel(value, "it is nested deeper than what is left of this thread's stack allows")
        raise too_deep.error(what) from error
    flags = writer.on_device
    if writer.buffers:
        ready, digest = _seal(meta, writer.buffers)
    else:
        ready, digest = (), without_buffers(meta)
    meta += struct.pack(f"<{len(flags) + 1}I", *flags, len(flags)) if flags else _NOTHING_ON_DEVICE
    return (EncodedOnDevice if writer.stayed else Encoded)(meta, ready, digest)


def _remember_head(key: tuple[np.dtype[Any], int, tuple[int, ...]], nbytes: int) -> bytes | None:
    """The head of a value that is one array; None if `write` has to look at it, because of padding, say."""
    dtype, number, shape = key
    try:
        described, packed = dtypes.DESCRIBED[dtype, number]
    except dtypes.DtypeRefused:
        return None
    head = lone_head(LARGE_ARRAY if nbytes >= INLINE_BYTES else ARRAY, described, shape) if packed else None
    if head is not None:
        if len(_heads) >= _KEPT:
            _heads.clear()
        _heads[key] = head
    return head


def _large_array(array: NDArray[Any], head: bytes, adopt: bool, allocate: Allocate | None) -> Encoded:
    """A value that is one large array."""
    buffer = arrays.as_it_is(array, adopt=adopt, packed=True)
    if buffer is None:
        copy = arrays.Copy(array, allocate)
        copy.begin()
        digest = digests.digest(head, (copy,))
        buffer = copy.sealed()
    else:
        known = None if adopt else arrays.known_digest(array, head)
        digest = known or digests.of_lone(head, buffer)
    return Encoded(head + _NOTHING_ON_DEVICE, (buffer,), digest)


def _seal(meta: bytes, buffers: Sequence[Any]) -> tuple[tuple[memoryview, ...], bytes]:
    """Makes the copies that are still to be made. Returns the buffers, and the digest of the value."""
    for buffer in buffers:
        if not isinstance(buffer, memoryview):
            buffer.begin()
    digest = _digest(meta, buffers)
    return tuple([buffer if isinstance(buffer, memoryview) else buffer.sealed() for buffer in buffers]), digest


def _digest(meta: bytes | bytearray | memoryview, buffers: Sequence[memoryview | digests.Source]) -> bytes:
    blocks = b""
    for buffer in buffers:
        if not isinstance(buffer, Digested):
            return digests.digest(meta, buffers)
        blocks += buffer.blocks
    return digests.of_blocks(meta, [buffer.nbytes for buffer in buffers], blocks)  # nothing that threads could share


def hosted(
    value: Encoded, *, allocate: Allocate | None = None, but: Callable[[DeviceBuffer], bool] | None = None
) -> Encoded:
    """Copies all buffers of a value to the host. Waits for the device, so call it in a thread.

    Args:
        allocate: gives the memory to copy to, if it has some. Each buffer is copied once, for all callers.
        but: which buffers stay on the device nevertheless.
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
            buffers.append(buffer.host(allocate))
    return kind(value.meta, tuple(buffers), value.digest)


def begin_hosted(value: Encoded, *, allocate: Allocate) -> None:
    """Queues the copies that `hosted` waits for, as far as there is page-locked memory for them, without any wait."""
    for buffer in staying(value):
        buffer.copy_early(allocate)


def joined(values: Sequence[Encoded]) -> Encoded:
    """Joins values without buffers to one message; `parted` takes them apart. The result cannot be decoded."""
    whole = b"".join([value.meta for value in values])
    return Encoded(whole + _NOTHING_ON_DEVICE, (), without_buffers(whole))


def parted(whole: Encoded, parts: Sequence[tuple[int, bytes]]) -> list[Encoded]:
    """Takes apart values that `joined` put together.

    Args:
        parts: of each its size and digest. One of size 0 is the one before, which is not there twice.

    Raises:
        DecodeError: these are not the sizes of what was joined.
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
    if whole.buffers or meta[at:] != _NOTHING_ON_DEVICE:
        have = at + len(_NOTHING_ON_DEVICE)
        raise DecodeError(f"{len(meta)} bytes of joined values; their parts have {have}")
    return found


def staying(value: Encoded) -> list[DeviceBuffer]:
    """The buffers of a value that are on a device."""
    return [buffer for buffer in cast(Sequence[Any], value.buffers) if isinstance(buffer, DeviceBuffer)]


def separate(value: EncodedOnDevice) -> EncodedOnDevice:
    """Copies a value so that its buffers on the device have memory of their own. Waits for the device."""
    buffers: Any = tuple([b.separate() if isinstance(b, DeviceBuffer) else b for b in value.buffers])
    return EncodedOnDevice(value.meta, buffers, value.digest)


def untouched(value: Encoded) -> bool:
    """True if the buffers on a device still match the digest, on the current stream. Waits for the device."""
    fresh = [buffer.digested() if isinstance(buffer, DeviceBuffer) else buffer for buffer in value.buffers]
    for source in fresh:
        if isinstance(source, Digested):
            source.begin()
    return _digest(memoryview(value.meta)[: value_end(value.meta)], fresh) == value.digest


def decode(encoded: Encoded, *, device: Device | None = None, writable: bool = False) -> Any:
    """Decodes a value. Its arrays are read-only views on the encoded bytes; they live as long as you keep them.

    Args:
        device: where arrays go that were on a device when they were encoded, as its arrays, behind what is queued on
            the current stream; None gives numpy arrays always.
        writable: fresh arrays that are yours to write.

    Raises:
        DecodeError: the bytes are not a value, or name a type that is not declared here.
    """
    meta = encoded.meta
    if len(encoded.buffers) == 1 and not writable and (known := _large.get(meta)) is not None:
        buffer = encoded.buffers[0]
        dtype, shape, nbytes, head = known  # looked up once: another thread may clear the table
        if type(buffer) is memoryview and buffer.nbytes == nbytes and buffer.format == "B" and buffer.c_contiguous:
            return arrays.whole_view(buffer, dtype, shape, (head, encoded.digest))
    size = len(meta)
    end, on_device = size - 4, _NONE
    if end < 0 or meta[end:] != _NOTHING_ON_DEVICE:
        end = value_end(meta)
        on_device = _on_device(meta, end)
    elif not encoded.buffers and (small := small_array(meta)) is not None:
        return small.copy() if writable else small
    value = Reader(encoded, end, on_device, device, writable).whole()
    if meta[:2] == LARGE_ARRAY and type(value) is np.ndarray:
        head = meta[:end]
        arrays.remember(value, head, encoded.digest)
        if not on_device:
            if len(_large) >= _KEPT:
                _large.clear()
            _large[meta] = value.dtype, value.shape, value.nbytes, head
    return value


def small_array(meta: bytes) -> NDArray[Any] | None:
    """The array that a value without buffers is, if it is one and nothing else.

    Most items are: `decode` does the same with them, in one call. None if `decode` would do anything else, or refuse.
    """
    known = _small.get(len(meta))
    if known is not None and meta.startswith(known[0]) and meta.endswith(_NOTHING_ON_DEVICE):
        return _ndarray(known[2], known[1], meta, known[3])  # bytes are all aligned alike
    if meta[:2] != ARRAY or not meta.endswith(_NOTHING_ON_DEVICE):
        return None
    try:
        dtype, shape, nbytes, at = read_lone_head(meta)
        if at + nbytes + 4 != len(meta) or not nbytes or dtype.subdtype is not None:
            return None
        found: NDArray[Any] = np.ndarray(shape, dtype, meta, at)
    except (DecodeError, IndexError, TypeError, ValueError, OverflowError):
        return None
    if not found.flags.aligned:
        return None
    if len(_small) >= _KEPT:
        _small.clear()
    _small[len(meta)] = meta[:at], dtype, shape, at
    return found


def digest_of(meta: bytes, buffers: Sequence[memoryview]) -> bytes:
    """The digest of a value, 16 bytes (`digests`); where arrays lived is left out."""
    return digests.digest(memoryview(meta)[: value_end(meta)], buffers)


def digesting(meta: bytes, sizes: Sequence[int]) -> digests.Streaming:
    """`digest_of` a value with buffers, to be updated with the bytes of its buffers as they arrive."""
    return digests.Streaming(memoryview(meta)[: value_end(meta)], sizes)


def verify(encoded: Encoded) -> bool:
    """True if the bytes match the digest."""
    meta = encoded.meta
    if not encoded.buffers and meta.endswith(_NOTHING_ON_DEVICE):  # `digest_of`, for what most values are
        return without_buffers(memoryview(meta)[:-4]) == encoded.digest
    return digest_of(meta, encoded.buffers) == encoded.digest


def _on_device(meta: bytes, at: int) -> frozenset[int]:
    numbers = struct.unpack_from(f"<{(len(meta) - at) // 4}I", meta, at)
    if not numbers or numbers[-1] != len(numbers) - 1:
        raise DecodeError(f"a value of {len(meta)} bytes has no trailer")
    return frozenset(numbers[:-1])


def value_end(meta: bytes) -> int:
    """Returns where the trailer begins; the whole length if there is none, which `decode` refuses."""
    size = len(meta)
    if size < 4 or meta.endswith(_NOTHING_ON_DEVICE):
        return max(0, size - 4)
    end = size - 4 - 4 * int(_U32.unpack_from(meta, size - 4)[0])
    return end if end > 0 else size
