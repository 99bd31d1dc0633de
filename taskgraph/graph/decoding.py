"""The reader: meta and buffers as a value. It trusts nothing: what is announced is checked before it is made."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import DecodeError, worded
from taskgraph.graph import arrays, codecs, dtypes, orders, runs
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.encoding import ALIGN, MAX_DEPTH
from taskgraph.graph.tags import (
    ARRAY,
    BYTES,
    CODED,
    COLUMNS,
    COMPLEX,
    DICT,
    FALSE,
    FLOAT,
    INT,
    LIST,
    LONG_INT,
    MESSAGE,
    NONE,
    NUMPY_BYTES,
    NUMPY_STR,
    ORDERED,
    PROTOBUF,
    RUN,
    SCALAR,
    STR,
    TRUE,
    TUPLE,
)
from taskgraph.protocol.messages import Encoded

__all__ = ["SHAPES", "Reader"]

_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_TOO_DEEP: Final = f"a value is nested more than {MAX_DEPTH} deep"
SHAPES: Final = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(65))
"""How an array's sides are written, by their number."""
_INLINE_ARRAY: Final = ord(ARRAY.inline)
_PACKED_ARRAY: Final = ord(ARRAY.packed)
_ARRAYS: Final = frozenset(b"".join(ARRAY))
_NUMBERS: Final = "biufcmM"
"""numpy's kinds of them, bools and times among them."""
_frombuffer: Final = np.frombuffer  # numpy makes some of its names when asked, so Python looks up each in every call
_BULK_OF_RUNS: Final = frozenset(b"".join(BYTES + STR))


class Reader:
    """Reads one value from `meta` between `at` and `end`.

    Attributes:
        readers: what reads a value of each tag, from behind the tag; one for every byte.
        view: makes an array.
    """

    readers: ClassVar[tuple[Callable[[Any], Any], ...]]
    view = staticmethod(arrays.view)

    __slots__ = (
        "_arrays",
        "_at",
        "_buffers",
        "_depth",
        "_device",
        "_end",
        "_meta",
        "_next",
        "_on_device",
        "_pack",
        "_pack_base",
        "_pack_end",
        "_pack_number",
        "_writable",
    )

    def __init__(
        self, encoded: Encoded, at: int, end: int, on_device: frozenset[int], device: Device | None, writable: bool
    ) -> None:
        self._meta = encoded.meta
        self._buffers = encoded.buffers
        self._at = at
        self._end = end
        self._on_device = on_device
        self._device = device
        self._writable = writable
        self._next = 0  # buffers are named in their order
        self._pack: memoryview | None = None  # the buffer that has parts, from the first of them on
        self._pack_base: NDArray[Any] | None = None  # what its arrays are made on
        self._pack_end = self._pack_number = 0  # where the last part ended; which buffer it is
        self._arrays = 0
        self._depth = 0

    def whole(self) -> Any:
        """The value, if it is all there is."""
        try:
            self._at += 1  # as `_value` does it, without a call
            found = self.readers[self._meta[self._at - 1]](self)
        except (struct.error, IndexError) as error:
            raise DecodeError(f"a value ends after {len(self._meta)} bytes, within itself") from error
        except UnicodeDecodeError as error:
            raise DecodeError(f"not a text: {error}") from error
        except RecursionError as error:
            raise DecodeError("a value is nested deeper than this thread's stack allows") from error
        if self._at != self._end:
            raise DecodeError(f"a value ends at byte {self._at} of {self._end}")
        if self._next != len(self._buffers):
            raise DecodeError(f"a value names {self._next} buffers and has {len(self._buffers)}")
        if self._pack is not None and self._pack_end != self._pack.nbytes:
            raise DecodeError(f"the parts of a buffer end at byte {self._pack_end} of {self._pack.nbytes}")
        if self._on_device and max(self._on_device) >= self._arrays:
            raise DecodeError(f"a value of {self._arrays} arrays has others on a device")
        return found

    def _value(self) -> Any:
        at = self._at
        self._at = at + 1
        return self.readers[self._meta[at]](self)

    def unknown(self) -> Any:
        raise DecodeError(f"not a value: it begins with byte {self._meta[self._at - 1]}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        at = self._at
        if size > self._end - at:
            raise DecodeError(f"a value announces {size} bytes and has {self._end - at} left")
        self._at = at + size
        return self._meta[at : at + size]

    def _count(self, least: int) -> int:
        """A number of parts that take `least` bytes each at least: more than fit cannot be meant."""
        count: int = _U64.unpack_from(self._meta, self._at)[0]
        self._at += 8
        if count * least > self._end - self._at:
            raise DecodeError(f"a value announces {count} parts and has {self._end - self._at} bytes left")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DecodeError(_TOO_DEEP)
        return count

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DecodeError(_TOO_DEEP)

    def _inline(self) -> bytes:
        at = self._at + 8
        size = _U64.unpack_from(self._meta, at - 8)[0]
        if size > self._end - at:
            raise DecodeError(f"a value announces {size} bytes and has {self._end - at} left")
        self._at = at + size
        return self._meta[at : at + size]

    def _text(self) -> str:
        return str(self._inline(), "utf-8", "surrogatepass")

    def _next_buffer(self) -> Any:
        if self._next >= len(self._buffers):
            raise DecodeError(f"a value names buffer {self._next} and has {len(self._buffers)}")
        self._next += 1
        return self._buffers[self._next - 1]

    def _buffer(self, size: int) -> Any:
        """The next buffer: a memoryview; for an array that stayed on its device, a `DeviceBuffer`."""
        buffer = self._next_buffer()
        if buffer.nbytes != size or buffer.format != "B" or not buffer.c_contiguous:
            raise DecodeError(f"a value names a buffer of {size} bytes, and has one of {buffer.nbytes}")
        return buffer

    def _part(self, size: int) -> tuple[memoryview, int]:
        """The buffer that has parts, and where in it the next one begins."""
        pack = self._pack
        if pack is None:
            self._pack_number = self._next
            found = self._next_buffer()
            if type(found) is not memoryview or found.format != "B" or not found.c_contiguous:
                raise DecodeError("a value has parts of a buffer that is none")
            pack = self._pack = found
        at = arrays.pack_at(self._pack_end)
        if size > pack.nbytes - at:
            raise DecodeError(f"a value has a part of {size} bytes at {at} of {pack.nbytes}")
        self._pack_end = at + size
        return pack, at

    def _packed(self) -> bytes:
        self._at += 8
        size = _U64.unpack_from(self._meta, self._at - 8)[0]
        pack, at = self._part(size)
        return bytes(pack[at : at + size])

    def _buffered(self) -> bytes:
        self._at += 8
        buffer = self._buffer(_U64.unpack_from(self._meta, self._at - 8)[0])
        owner = buffer.obj
        return owner if type(owner) is bytes and len(owner) == buffer.nbytes else bytes(buffer)

    # -- values -----------------------------------------------------------------------------------------------------

    def small_integer(self) -> int:
        number: int = _I64.unpack_from(self._meta, self._at)[0]
        self._at += 8
        return number

    def integer(self) -> int:
        return int.from_bytes(self._inline(), "little", signed=True)

    def real(self) -> float:
        number: float = _F64.unpack_from(self._meta, self._at)[0]
        self._at += 8
        return number

    def two_reals(self) -> complex:
        return complex(*_C128.unpack(self._take(16)))

    def sequence(self) -> list[Any]:
        count = self._count(1)
        meta, readers = self._meta, self.readers
        found = []
        for _ in range(count):
            at = self._at  # as `_value` does it, without a call
            self._at = at + 1
            found.append(readers[meta[at]](self))
        self._depth -= 1
        return found

    def run(self) -> Any:
        tag, kind = self._run_of()
        found = runs.unpacked(kind, self._run_parts(kind))
        return list(found) if tag == LIST else tuple(found)

    def _run_of(self) -> tuple[bytes, bytes]:
        """What a run is, and of what."""
        head = self._take(2)
        tag, kind = head[:1], head[1:]
        if tag not in (LIST, TUPLE) or kind not in runs.PARTS:
            raise DecodeError(f"a run of kind {kind!r} as {tag!r}")
        return tag, kind

    def _run_parts(self, kind: bytes) -> list[Any]:
        parts = []
        for _ in range(runs.PARTS[kind]):
            if self._meta[self._at] not in _BULK_OF_RUNS:
                raise DecodeError(f"a run of kind {kind!r} without its bulk")
            parts.append(self._value())
        return parts

    def columns(self) -> Any:
        """A dict of two runs."""
        keys, values = self._column(), self._column()
        found = dict(zip(keys, values, strict=False))
        if not len(keys) == len(values) == len(found):
            raise DecodeError(f"a dict of {len(keys)} keys, {len(found)} different ones, has {len(values)} values")
        return found

    def _column(self) -> Sequence[Any]:
        if self._take(1) != RUN:
            raise DecodeError("a column that is no run")
        _, kind = self._run_of()
        return runs.unpacked(kind, self._run_parts(kind))

    def mapping(self) -> dict[Any, Any]:
        count = self._count(2)
        meta, readers = self._meta, self.readers
        writable = self._writable
        found = {}
        for _ in range(count):
            at = self._at
            self._at = at + 1
            self._writable = False  # a scalar of a structured dtype that can be written to has no hash
            key = readers[meta[at]](self)
            self._writable = writable
            at = self._at
            self._at = at + 1
            value = readers[meta[at]](self)
            try:
                found[key] = value
            except Exception as error:  # a message's own __hash__ and __eq__ are user code
                raise DecodeError(f"a dict has a key that is none: {worded(error)}") from error
        if len(found) != count:
            raise DecodeError(f"a dict of {count} keys has {len(found)} different ones")
        self._depth -= 1
        return found

    def message(self) -> Any:
        name = self._text()
        known = codecs.message_named(name)
        if known is None:
            raise DecodeError(f"no @tg.message is called {name!r} here: declare it where the driver is imported")
        count = _U32.unpack(self._take(4))[0]
        if count != len(known.fields):
            raise DecodeError(f"message {name!r} came with {count} fields, here it has {len(known.fields)}")
        self._enter()
        place = self._place()
        fields = self._fields(known)
        try:
            made = known.type(**{field: fields[field] for field in fields.keys() & known.init})
        except Exception as error:
            raise DecodeError(f"message {name!r} cannot be made of what came: {worded(error)}") from error
        if known.runs_code:  # it may have changed lists and arrays that it was given: what was sent is read anew
            self._return_to(place)
            fields = self._fields(known)
        self._depth -= 1
        try:
            for field, value in fields.items():
                if getattr(made, field, made) is not value:  # not of __init__, or changed
                    object.__setattr__(made, field, value)
        except Exception as error:
            raise DecodeError(f"message {name!r} cannot be made of what came: {worded(error)}") from error
        return made

    def _fields(self, known: codecs.Message) -> dict[str, Any]:
        fields = {}
        for expected in known.fields:
            field = self._text()
            if field != expected:
                raise DecodeError(f"message {known.name!r} came with field {field!r}, here it is {expected!r}")
            fields[field] = self._value()
        return fields

    def _place(self) -> tuple[Any, ...]:
        """Where the reader is, to `_return_to` it."""
        return self._at, self._next, self._pack, self._pack_base, self._pack_end, self._pack_number, self._arrays

    def _return_to(self, place: tuple[Any, ...]) -> None:
        self._at, self._next, self._pack, self._pack_base, self._pack_end, self._pack_number, self._arrays = place

    def coded(self) -> Any:
        name = self._text()
        known = codecs.codec_named(name)
        if known is None:
            raise DecodeError(f"no codec is called {name!r} here: call tg.codec where the driver is imported")
        self._enter()
        inner = self._value()
        self._depth -= 1
        try:
            return known.decode(inner)
        except Exception as error:
            raise DecodeError(f"the codec {name!r} cannot decode what came: {worded(error)}") from error

    def protobuf(self) -> Any:
        from google.protobuf import descriptor_pool, message_factory
        from google.protobuf.message import DecodeError as BadMessage

        name = self._text()
        data = self._value()
        if type(data) is not bytes:
            raise DecodeError(f"a protobuf message {name!r} without its bytes")
        try:
            descriptor = descriptor_pool.Default().FindMessageTypeByName(name)
        except (KeyError, TypeError, ValueError) as error:  # the last two of a name that is no UTF-8
            raise DecodeError(f"no protobuf message is called {name!r} here: import its _pb2 in the driver") from error
        try:
            return message_factory.GetMessageClass(descriptor).FromString(data)
        except (BadMessage, ValueError) as error:
            raise DecodeError(f"not a protobuf message {name!r}: {error}") from error

    def array(self) -> Any:
        """An array whose elements follow, are in a buffer, or are part of one: the tag says so."""
        meta = self._meta
        tag = meta[self._at - 1]
        dtype, at = dtypes.read(meta, self._at)
        ndim = meta[at]
        shape = SHAPES[ndim].unpack_from(meta, at + 1)
        at += 1 + 8 * ndim
        if dtype.subdtype is not None:
            raise DecodeError("an array of arrays: its shape says so, not its dtype")
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        data: Any
        if tag == _INLINE_ARRAY:
            at += -at % ALIGN
            if size > self._end - at:
                raise DecodeError(f"an array announces {size} bytes and has {self._end - at} left")
            self._at = at + size
            data = meta
        elif tag == _PACKED_ARRAY:
            self._at = at
            data, at = self._part(size)
            if self._pack_base is None:
                self._pack_base = arrays.base_of(data)
            data = self._pack_base
        else:
            self._at = at
            data, at = self._buffer(size), 0
        number = self._arrays
        self._arrays = number + 1
        try:
            if type(data) is DeviceBuffer:
                if data.device is self._device:
                    there = data.array(dtype, shape)
                    return self._device.copy(there) if self._writable else there
                data = data.host()
            if self._device is not None and number in self._on_device:
                return _to_device(self._device, self.view(data, at, dtype, shape, writable=False))
            return self.view(data, at, dtype, shape, writable=self._writable)
        except (ValueError, TypeError, OverflowError) as error:
            raise DecodeError(f"not an array of shape {shape} and dtype {dtype}: {error}") from error

    def ordered(self) -> Any:
        """An array that does not lie in C's order, or not side by side."""
        array, order = self._array_in_order()
        try:
            return orders.put_back(array, order)
        except (ValueError, MemoryError) as error:
            raise DecodeError(str(error)) from error

    def _array_in_order(self) -> tuple[Any, bytes]:
        """The array as its elements lie, and in which order that is."""
        order = self._take(self._take(1)[0])
        if self._meta[self._at] not in _ARRAYS:
            raise DecodeError(f"the order of an array, and behind it byte {self._meta[self._at]}")
        return self._value(), order

    def scalar(self) -> Any:
        dtype, self._at = dtypes.read(self._meta, self._at)
        if dtype.kind in _NUMBERS:  # numpy copies those; others are views, of memory that is known to be immutable
            return _frombuffer(self._take(dtype.itemsize), dtype)[0]
        if dtype.subdtype is not None or dtype.kind in "SU":
            raise DecodeError(f"a scalar of dtype {dtype}")
        return arrays.view(self._take(dtype.itemsize), 0, dtype, (), writable=self._writable)[()]


def _to_device(device: Device, host: NDArray[Any]) -> Any:
    """A copy on the device, straight from where the value lies where that memory is page-locked."""
    block = block_behind(host)
    pin = block.origin.pinned(device) if block is not None and block.origin is not None else None
    return device.to_device(host) if pin is None else pin.upload(host)


_READERS: Final[dict[bytes, Callable[[Reader], Any]]] = {
    NONE: lambda reader: None,
    TRUE: lambda reader: True,
    FALSE: lambda reader: False,
    INT: Reader.small_integer,
    LONG_INT: Reader.integer,
    FLOAT: Reader.real,
    COMPLEX: Reader.two_reals,
    STR.inline: Reader._text,
    STR.packed: lambda reader: str(reader._packed(), "utf-8", "surrogatepass"),
    STR.buffered: lambda reader: str(reader._buffered(), "utf-8", "surrogatepass"),
    BYTES.inline: Reader._inline,
    BYTES.packed: Reader._packed,
    BYTES.buffered: Reader._buffered,
    LIST: Reader.sequence,
    TUPLE: lambda reader: tuple(reader.sequence()),
    RUN: Reader.run,
    DICT: Reader.mapping,
    COLUMNS: Reader.columns,
    ARRAY.inline: Reader.array,
    ARRAY.packed: Reader.array,
    ARRAY.buffered: Reader.array,
    SCALAR: Reader.scalar,
    ORDERED: Reader.ordered,
    NUMPY_STR.inline: lambda reader: np.str_(reader._text()),
    NUMPY_STR.packed: lambda reader: np.str_(str(reader._packed(), "utf-8", "surrogatepass")),
    NUMPY_STR.buffered: lambda reader: np.str_(str(reader._buffered(), "utf-8", "surrogatepass")),
    NUMPY_BYTES.inline: lambda reader: np.bytes_(reader._inline()),
    NUMPY_BYTES.packed: lambda reader: np.bytes_(reader._packed()),
    NUMPY_BYTES.buffered: lambda reader: np.bytes_(reader._buffered()),
    MESSAGE: Reader.message,
    CODED: Reader.coded,
    PROTOBUF: Reader.protobuf,
}
Reader.readers = tuple(_READERS.get(bytes((tag,)), Reader.unknown) for tag in range(256))
