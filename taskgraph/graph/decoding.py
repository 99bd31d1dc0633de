"""Decodes values from meta and buffers. Announced sizes and types are checked before memory is allocated."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import Device
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import DecodeError, error_text
from taskgraph.graph import arrays, codecs, dtypes, layout, orders
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.layout import MAX_DEPTH, TREE_HEAD
from taskgraph.protocol.messages import Encoded

__all__ = ["Reader", "read_tree"]

_NUMBERS: Final = "biufcmM"
"""numpy's kinds of numbers, with bools and times."""


class Reader:
    """Decodes one value from its buffers and its meta up to `end`, where the trailer begins.

    Args:
        on_device: the numbers of the arrays that were on a device. With a `device` they are decoded to it.
        writable: decode to fresh arrays that the caller may write to.

    Attributes:
        extensions: maps the code of an extension to the function that decodes its payload.
    """

    extensions: ClassVar[dict[int, Callable[[Any, memoryview], Any]]]

    __slots__ = ("_depth", "_device", "_encoded", "_end", "_inline", "_on_device", "_small", "_writable")

    def __init__(
        self, encoded: Encoded, end: int, on_device: frozenset[int], device: Device | None, writable: bool
    ) -> None:
        self._encoded = encoded
        self._end = end
        self._on_device = on_device
        self._device = device
        self._writable = writable
        self._depth = 0
        self._small: Any = encoded.meta  # the memory of small parts, and where in meta they begin
        self._inline = 0

    def read(self) -> Any:
        """Decodes the value.

        Raises:
            DecodeError: the bytes are not a value, or name a type that is not declared here.
        """
        outer, _current.reader = _current.reader, self  # user code within a value may decode others
        try:
            return self._read_by_kind()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"not a value: {error}") from error
        except RecursionError as error:
            raise DecodeError("a value is nested deeper than this thread's stack allows") from error
        finally:
            _current.reader = outer

    def _read_by_kind(self) -> Any:
        """Decodes the value by its first two bytes: a tree, a plain value or a lone array."""
        meta, end = self._encoded.meta, self._end
        kind = meta[:2]
        if kind == layout.TREE and end >= TREE_HEAD.size:
            _, size, buffer = TREE_HEAD.unpack_from(meta)
            begin = TREE_HEAD.size
            if buffer:
                self._small = arrays.immutable_base(self._buffer(buffer))
            else:
                self._inline = begin
                begin += size
            if begin > end:
                raise DecodeError(f"a value announces {size} bytes of small arrays and has {end}")
            return read_tree(memoryview(meta)[begin:end])
        if kind == layout.PLAIN:
            return read_tree(memoryview(meta)[2:end])
        if kind in (layout.ARRAY, layout.LARGE_ARRAY):
            return self._lone_array(kind == layout.LARGE_ARRAY)
        raise DecodeError(f"not an encoded value: it begins with {kind!r}, and {layout.TREE!r} is known here")

    def _lone_array(self, large: bool) -> Any:
        """Decodes a value that is a single array and nothing else."""
        try:
            dtype, shape, nbytes, at = layout.read_lone_array_head(self._encoded.meta)
        except IndexError as error:
            raise DecodeError("a value ends within its head") from error
        if self._end != (at if large else at + nbytes) or len(self._encoded.buffers) != large:
            raise DecodeError(f"an array of {nbytes} bytes in a value of {self._end} bytes")
        data = self._buffer(1) if large else self._encoded.meta
        return self._make_array(data, 0 if large else at, dtype, shape, nbytes, 0)

    def read_extension(self, code: int, payload: memoryview) -> Any:
        """Decodes an extension of a tree by its code. Raises DecodeError if the code is unknown."""
        read = self.extensions.get(code)
        if read is None:
            raise DecodeError(f"a value has a part of the unknown kind {code}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DecodeError(f"a value is nested more than {MAX_DEPTH} deep")
        found = read(self, payload)
        self._depth -= 1
        return found

    def _buffer(self, number: int) -> Any:
        """Returns buffer `number - 1`: a memoryview, or a DeviceBuffer if its array stayed on a device."""
        buffers = self._encoded.buffers
        if not 0 < number <= len(buffers):
            raise DecodeError(f"a value names buffer {number} and has {len(buffers)}")
        buffer = buffers[number - 1]
        if buffer.format != "B" or not buffer.c_contiguous:
            raise DecodeError(f"buffer {number} of a value is not of bytes")
        return buffer

    # -- plain values -----------------------------------------------------------------------------------------------

    def _tuple(self, payload: memoryview) -> Any:
        items = read_tree(payload)
        if type(items) is not list:
            raise DecodeError(f"a tuple of {type(items).__name__}")
        return tuple(items)

    def _dict_of_any_keys(self, payload: memoryview) -> Any:
        """Decodes a dict with keys that MessagePack lacks, such as tuples."""
        packed_keys, packed_values = layout.read_byte_pair(payload)
        writable, self._writable = self._writable, False  # a writable scalar of a structured dtype has no hash
        keys = read_tree(packed_keys)
        self._writable = writable
        values = read_tree(packed_values)
        if type(keys) is not list or type(values) is not list or len(keys) != len(values):
            raise DecodeError("a dict has not as many values as keys")
        try:
            found = dict(zip(keys, values, strict=True))
        except Exception as error:  # a message's own __hash__ and __eq__ are user code
            raise DecodeError(f"a dict has a key that cannot be one: {error_text(error)}") from error
        if len(found) != len(keys):
            raise DecodeError(f"a dict of {len(keys)} keys has {len(found)} different ones")
        return found

    def _bytes(self, payload: memoryview) -> bytes:
        buffer = self._buffer(self._buffer_number(payload))
        owner = buffer.obj if type(buffer) is memoryview else None
        return owner if type(owner) is bytes and len(owner) == buffer.nbytes else bytes(buffer)

    def _buffer_number(self, payload: memoryview) -> int:
        number = read_tree(payload)
        if type(number) is not int:
            raise DecodeError(f"{type(number).__name__} in place of a buffer's number")
        return number

    # -- types of users ---------------------------------------------------------------------------------------------

    def _message(self, payload: memoryview) -> Any:
        name, packed = layout.read_name_and_payload(payload)
        known = codecs.message_named(name)
        if known is None:
            raise DecodeError(f"no @tg.message is called {name!r} here: declare it where the driver is imported")
        fields = self._message_fields(known, packed)
        try:
            made = known.type(**{field: fields[field] for field in fields.keys() & known.init_fields})
            if known.runs_user_code:  # user code may have changed its arguments: decode them again
                fields = self._message_fields(known, packed)
            for field, value in fields.items():
                if getattr(made, field, made) is not value:  # no argument of __init__, or changed by user code
                    object.__setattr__(made, field, value)
        except Exception as error:
            raise DecodeError(f"message {name!r} cannot be made of what came: {error_text(error)}") from error
        return made

    def _message_fields(self, known: codecs.DeclaredDataclass, packed: msgspec.Raw) -> dict[str, Any]:
        fields = read_tree(memoryview(packed))
        if type(fields) is not dict or tuple(fields) != known.fields:
            came = list(fields) if type(fields) is dict else type(fields).__name__
            raise DecodeError(f"message {known.name!r} came with {came!s:.200}, and has {known.fields!r} here")
        return fields

    def _codec_value(self, payload: memoryview) -> Any:
        name, packed = layout.read_name_and_payload(payload)
        known = codecs.codec_named(name)
        if known is None:
            raise DecodeError(f"no codec is called {name!r} here: call tg.codec where the driver is imported")
        inner = read_tree(memoryview(packed))
        try:
            return known.decode(inner)
        except Exception as error:
            raise DecodeError(f"the codec {name!r} cannot decode what came: {error_text(error)}") from error

    def _protobuf(self, payload: memoryview) -> Any:
        from google.protobuf import descriptor_pool, message_factory
        from google.protobuf.message import DecodeError as BadMessage

        name, packed = layout.read_name_and_payload(payload)
        data = read_tree(memoryview(packed))
        if type(data) is not bytes:
            raise DecodeError(f"a protobuf message {name!r} without its bytes")
        try:
            descriptor = descriptor_pool.Default().FindMessageTypeByName(name)
        except (KeyError, TypeError, ValueError) as error:  # the last two: the name is not UTF-8
            raise DecodeError(f"no protobuf message is called {name!r} here: import its _pb2 in the driver") from error
        try:
            return message_factory.GetMessageClass(descriptor).FromString(data)
        except (BadMessage, ValueError) as error:
            raise DecodeError(f"not a protobuf message {name!r}: {error}") from error

    # -- arrays and scalars -----------------------------------------------------------------------------------------

    def _array(self, payload: memoryview) -> Any:
        head = layout.read_array_head(payload)
        dtype = dtypes.DTYPES_BY_DESCRIPTION[head.dtype]
        nbytes = dtype.itemsize
        for extent in head.shape:
            nbytes *= extent
        if head.buffer:
            data, at = self._buffer(head.buffer), head.at
        else:
            data, at = self._small, self._inline + head.at
        found = self._make_array(data, at, dtype, head.shape, nbytes, head.number)
        return self._restore_order(found, head.order) if head.order else found

    def _restore_order(self, array: Any, order: bytes) -> Any:
        try:
            return orders.restore_order(array, order)
        except (ValueError, MemoryError) as error:
            raise DecodeError(str(error)) from error

    def _make_array(
        self, data: Any, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int, number: int
    ) -> Any:
        """Makes an array of the bytes that begin at `at`, on the device if it was on one. Raises DecodeError."""
        self._check_bounds(data, at, dtype, nbytes)
        try:
            if type(data) is DeviceBuffer:
                if data.device is self._device:
                    there = data.array(dtype, shape)
                    return self._device.copy(there) if self._writable else there
                data = data.copy_to_host()
            if self._device is not None and number in self._on_device:
                return _to_device(self._device, arrays.view(data, at, dtype, shape, writable=False))
            return arrays.view(data, at, dtype, shape, writable=self._writable)
        except (ValueError, TypeError, OverflowError) as error:
            raise DecodeError(f"not an array of shape {shape} and dtype {dtype}: {error}") from error

    def _check_bounds(self, data: Any, at: int, dtype: np.dtype[Any], nbytes: int) -> None:
        """Raises DecodeError if an array's bytes do not lie within the memory that has them."""
        if dtype.subdtype is not None:
            raise DecodeError("an array of arrays: its shape says so, not its dtype")
        size = self._end if type(data) is bytes else data.nbytes
        if at + nbytes > size or (type(data) in (memoryview, DeviceBuffer) and nbytes != size):
            raise DecodeError(f"an array has {nbytes} bytes from {at} on, in memory of {size} bytes")

    def _scalar(self, payload: memoryview) -> Any:
        described, data = layout.read_byte_pair(payload)
        dtype = dtypes.DTYPES_BY_DESCRIPTION[described]
        if len(data) != dtype.itemsize or dtype.subdtype is not None or dtype.kind in "SU":
            raise DecodeError(f"a scalar of {len(data)} bytes and dtype {dtype}")
        if dtype.kind in _NUMBERS:  # numpy copies numbers; other scalars are views
            return np.frombuffer(data, dtype)[0]
        return arrays.view(data, 0, dtype, (), writable=self._writable)[()]


class _Current(threading.local):
    """Holds the reader at work in this thread. All readers share one tree decoder, which is expensive to create."""

    reader: Reader | None = None


_current: Final = _Current()


def _extension(code: int, payload: memoryview) -> Any:
    """Decodes an extension by the reader at work in this thread."""
    assert _current.reader is not None
    return _current.reader.read_extension(code, payload)


read_tree: Final = layout.tree_decoder(_extension)


def _to_device(device: Device, host: NDArray[Any]) -> Any:
    """Copies a host array to the device, without a staging copy if its memory is page-locked."""
    block = block_behind(host)
    pin = block.origin.pin(device) if block is not None and block.origin is not None else None
    return device.to_device(host) if pin is None else pin.upload(host)


def _text(reader: Reader, payload: memoryview) -> str:
    return str(payload, "utf-8", "surrogatepass")


def _complex(reader: Reader, payload: memoryview) -> complex:
    try:
        return complex(*struct.unpack("<dd", payload))
    except struct.error as error:
        raise DecodeError(f"a complex number of {len(payload)} bytes") from error


Reader.extensions = {
    layout.TUPLE_EXT: Reader._tuple,
    layout.INT_EXT: lambda reader, payload: int.from_bytes(payload, "little", signed=True),
    layout.COMPLEX_EXT: _complex,
    layout.STR_EXT: _text,
    layout.ITEMS_EXT: Reader._dict_of_any_keys,
    layout.BYTES_EXT: Reader._bytes,
    layout.ARRAY_EXT: Reader._array,
    layout.SCALAR_EXT: Reader._scalar,
    layout.MESSAGE_EXT: Reader._message,
    layout.CODEC_EXT: Reader._codec_value,
    layout.PROTOBUF_EXT: Reader._protobuf,
    layout.NUMPY_STR_EXT: lambda reader, payload: np.str_(_text(reader, payload)),
    layout.NUMPY_BYTES_EXT: lambda reader, payload: np.bytes_(bytes(payload)),
}
