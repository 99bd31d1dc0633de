"""Encodes one value as meta and buffers. `layout` defines the format.

msgspec encodes the tree. msgspec alone would change types: it encodes sets, subclasses and dataclasses as other types,
and tuples as lists. So a value is converted first: containers of plain values stay, after one check of the set of their
types; other values become extensions, or are refused.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device import shared
from taskgraph.device.api import Device, DeviceArrayOnHost
from taskgraph.device.buffers import PrivateCopy
from taskgraph.device.lookup import device_of
from taskgraph.graph import arrays, codecs, dtypes, layout, orders
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.graph.layout import MAX_DEPTH, ArrayHead, Ext, lone_array_head, to_bytes
from taskgraph.graph.libraries import codec_of_library
from taskgraph.graph.refusals import CannotTravel, key_step, suggest_instead, trial

__all__ = ["Writer", "write"]

_MAX_BUFFERS: Final = 1 << 16
"""A transport accepts at most this many buffers. Arrays after that are small parts, whatever their size."""
_MAX_PARTS: Final = 1 << 27
"""Parts of all containers of a value. A larger value repeats its parts, or should be made of arrays."""
_CONTAINER_PARTS: Final = 8
"""Parts that a container counts as, in addition to its own parts: each container costs a Python call."""

_PLAIN: Final = frozenset((type(None), bool, int, float, str))
_ALWAYS_PLAIN: Final = frozenset((type(None), bool, float))

Buffer = memoryview | arrays.PendingCopy | arrays.SmallParts | PrivateCopy


class _NotPlain(Exception):
    """An integer has more than 64 bits, or a text has a lone surrogate: MessagePack supports neither."""


class Writer:
    """Converts one value to a tree, and collects its buffers. The arguments beside `careful` are those of `encode`.

    Args:
        careful: check each integer and text. Otherwise values that MessagePack lacks raise `_NotPlain`.

    Attributes:
        stayed: arrays that stay on a device, kept alive until they are copied.
        on_device: the numbers of the arrays that were on a device.
        in_user_code: above 0 while encoding parts that a codec or message returned: user code may change them later.
        plain: types whose values are encoded unchecked.
        lone_array: dtype and shape of the last array, if it can be a value of kind ARRAY.
    """

    __slots__ = (
        "adopt",
        "allocate",
        "arrays",
        "buffers",
        "depth",
        "extended",
        "in_user_code",
        "lendable",
        "lone_array",
        "on_device",
        "ordered",
        "parts",
        "plain",
        "small",
        "stayed",
        "stays",
    )

    def __init__(
        self, adopt: bool, allocate: Allocate | None, stays: bool, lendable: bool, ordered: bool, careful: bool
    ) -> None:
        self.adopt = adopt
        self.allocate = allocate
        self.stays = stays
        self.lendable = lendable
        self.ordered = ordered
        self.plain = _ALWAYS_PLAIN if careful else _PLAIN
        self.buffers: list[Buffer] = []  # copies are made when the digest is taken
        self.small: arrays.SmallParts | None = None
        self.stayed: tuple[Any, ...] = ()
        self.on_device: list[int] = []
        self.arrays = 0
        self.in_user_code = 0
        self.depth = 0
        self.parts = 0
        self.extended = False
        self.lone_array: tuple[bytes, tuple[int, ...]] | None = None

    def enter(self, container: Any, parts: int) -> None:
        """Goes a level deeper and counts the parts there. Raises CannotTravel if the value is too deep or too large."""
        self.depth += 1
        self.parts += parts + _CONTAINER_PARTS
        if self.depth > MAX_DEPTH:
            raise CannotTravel(container, f"it is nested more than {MAX_DEPTH} deep (does it contain itself?)")
        if self.parts > _MAX_PARTS:
            raise CannotTravel(
                container,
                f"the value has more than {_MAX_PARTS >> 20} million parts by here: send arrays instead of lists of "
                "numbers, and what is shared only once",
            )

    def extension(self, code: int, payload: bytes) -> Ext:
        """Makes an extension, and notes that the tree has one."""
        self.extended = True
        return Ext(code, payload)

    def finish(self, tree: Any) -> bytes:
        """Encodes the tree as meta without its trailer. Adds the small parts to `buffers` if they are large."""
        small, in_buffer = b"", 0
        if self.small is not None and self.small.nbytes < INLINE_BYTES:
            small = self.small.join()
        elif self.small is not None:
            self.buffers.append(self.small)
            in_buffer = len(self.buffers)
        if type(tree) is Ext and tree.code == layout.ARRAY_EXT and self.lone_array is not None:
            kind = layout.LARGE_ARRAY if self.buffers else layout.ARRAY
            if (lone := lone_array_head(kind, *self.lone_array)) is not None:
                return lone + small
        data = _encode_tree(tree)
        if not self.extended:
            return layout.PLAIN + data
        return layout.TREE_HEAD.pack(layout.TREE, len(small), in_buffer) + small + data


def write(
    value: Any, adopt: bool, allocate: Allocate | None, stays: bool, lendable: bool, ordered: bool
) -> tuple[Writer, bytes]:
    """Encodes a value. Returns its writer, which has the buffers, and meta without the trailer.

    Raises:
        CannotTravel: a part of the value cannot travel.
    """
    for careful in (False, True):
        writer = Writer(adopt, allocate, stays, lendable, ordered, careful)
        try:
            return writer, writer.finish(_CONVERT[type(value)](writer, value))
        except _NotPlain:
            pass
    raise CannotTravel(value, "one of its parts has more than 4 GiB: send arrays instead")


def _encode_tree(tree: Any) -> bytes:
    try:
        return to_bytes(tree)
    except (OverflowError, UnicodeEncodeError) as error:
        raise _NotPlain from error


# -- containers -------------------------------------------------------------------------------------------------------


def _list(writer: Writer, value: list[Any]) -> list[Any]:
    items = value.copy()  # another thread may change the list meanwhile
    writer.enter(value, len(items))
    plain = writer.plain
    if not plain.issuperset(map(type, items)):
        index = 0
        try:
            for index, item in enumerate(items):
                if type(item) not in plain:
                    items[index] = _CONVERT[type(item)](writer, item)
        except CannotTravel as refused:
            raise refused.with_step(f"[{index}]")  # noqa: B904 - the same exception goes on
    writer.depth -= 1
    return items


def _tuple(writer: Writer, value: tuple[Any, ...]) -> Ext:
    return writer.extension(layout.TUPLE_EXT, _encode_tree(_list(writer, list(value))))


def _dict(writer: Writer, value: dict[Any, Any]) -> dict[Any, Any] | Ext:
    items = value.copy()
    writer.enter(value, len(items))
    plain = writer.plain
    keys_plain = plain.issuperset(map(type, items))
    keys = None if keys_plain else _encode_tree(_keys(writer, list(items)))
    if not plain.issuperset(map(type, items.values())):
        key = None
        try:
            for key, item in items.items():
                if type(item) not in plain:
                    items[key] = _CONVERT[type(item)](writer, item)
        except CannotTravel as refused:
            raise refused.with_step(key_step(key))  # noqa: B904
    writer.depth -= 1
    if keys is None:
        return items
    return writer.extension(layout.ITEMS_EXT, to_bytes((keys, _encode_tree(list(items.values())))))


def _keys(writer: Writer, keys: list[Any]) -> list[Any]:
    for index, key in enumerate(keys):
        try:
            keys[index] = _CONVERT[type(key)](writer, key)
        except CannotTravel as refused:
            raise refused.with_step(f" (in the key {key_step(key)})")  # noqa: B904
    return keys


# -- plain values that MessagePack does not have ----------------------------------------------------------------------


def _int(writer: Writer, value: int) -> int | Ext:
    if -(1 << 63) <= value < 1 << 64:
        return value
    size = (value.bit_length() + 8) // 8
    return writer.extension(layout.INT_EXT, value.to_bytes(size, "little", signed=True))


def _complex(writer: Writer, value: complex) -> Ext:
    return writer.extension(layout.COMPLEX_EXT, struct.pack("<dd", value.real, value.imag))


def _str(writer: Writer, value: str) -> str | Ext:
    try:
        value.encode()
    except UnicodeEncodeError:
        return writer.extension(layout.STR_EXT, value.encode("utf-8", "surrogatepass"))
    return value


def _bytes(writer: Writer, value: bytes) -> bytes | Ext:
    if len(value) < INLINE_BYTES or len(writer.buffers) >= _MAX_BUFFERS:
        return value
    writer.buffers.append(memoryview(value))
    return writer.extension(layout.BYTES_EXT, to_bytes(len(writer.buffers)))


# -- arrays and scalars -----------------------------------------------------------------------------------------------


def _in_c_order(writer: Writer, value: Any, itemsize: int = 0) -> tuple[Any, bytes]:
    """Returns a view of an array in C order, and the array's order; b"" if the order is not to be restored."""
    order = orders.order_of(value.shape, value.strides, itemsize) if writer.ordered else b""
    return (orders.in_c_order(value, order), order) if order else (value, b"")


def _describe_dtype(value: Any, dtype: np.dtype[Any]) -> tuple[bytes, bool]:
    try:
        return dtypes.DTYPE_DESCRIPTIONS[dtype, dtype.num]
    except dtypes.DtypeRefused as refused:
        raise CannotTravel(value, str(refused)) from None


def _array(writer: Writer, value: NDArray[Any], adopt: bool = False, order: bytes = b"") -> Ext:
    """Encodes an array on the host: among the small parts, or in a buffer of its own."""
    if not order and not value.flags.c_contiguous:
        value, order = _in_c_order(writer, value, value.itemsize)
    dtype, packed = _describe_dtype(value, value.dtype)
    if value.nbytes < INLINE_BYTES or len(writer.buffers) >= _MAX_BUFFERS:
        if writer.small is None:
            writer.small = arrays.SmallParts(writer.allocate)
        at = writer.small.add(value, packed=packed, now=writer.in_user_code > 0)
        return _array_head(writer, value, dtype, packed, order, 0, at)
    shared = arrays.share_bytes(value, adopt=adopt or writer.adopt, packed=packed)
    if shared is None:
        copy = arrays.PendingCopy(value, writer.allocate)
        writer.buffers.append(copy.make() if writer.in_user_code else copy)
    else:
        writer.buffers.append(shared)
    return _array_head(writer, value, dtype, packed, order, len(writer.buffers), 0)


def _array_head(writer: Writer, value: Any, dtype: bytes, packed: bool, order: bytes, buffer: int, at: int) -> Ext:
    """Makes the extension that says where an array is, and gives the array the next number."""
    number = writer.arrays
    writer.arrays = number + 1
    shape: tuple[int, ...] = value.shape
    writer.lone_array = (dtype, shape) if packed and not order else None
    return writer.extension(layout.ARRAY_EXT, to_bytes(ArrayHead(number, buffer, at, dtype, shape, order)))


def _host_copy(writer: Writer, value: DeviceArrayOnHost, order: bytes = b"") -> Ext:
    """Encodes a device array that was copied to the host."""
    writer.on_device.append(writer.arrays)
    return _array(writer, value.host, adopt=True, order=order)


def _device_array(writer: Writer, value: Any, device: Device) -> Ext:
    """Encodes an array on a device: a copy that stays there if that is possible, else a copy on the host."""
    order = b""
    if writer.ordered and hasattr(value, "strides"):
        value, order = _in_c_order(writer, value)
    stays = writer.stays and value.nbytes >= INLINE_BYTES and device.can_copy(value)
    dtype, packed = _describe_dtype(value, value.dtype) if stays else (b"", False)
    if not packed or len(writer.buffers) >= _MAX_BUFFERS:
        return _host_copy(writer, DeviceArrayOnHost(device.to_host(value)), order)
    writer.on_device.append(writer.arrays)
    memory = shared.offered_memory(device) if writer.lendable else None
    writer.buffers.append(PrivateCopy(device, value, BLOCK_BYTES, memory))
    writer.stayed += (value,)
    return _array_head(writer, value, dtype, packed, order, len(writer.buffers), 0)


_NUMBERS: Final = {
    np.dtype(code).type: dtypes.DTYPE_DESCRIPTIONS[np.dtype(code), np.dtype(code).num][0] for code in "?bhilqBHILQefdFD"
}
"""Maps numpy's number types without padding to their dtype descriptions."""


def _number(writer: Writer, value: np.generic) -> Ext:
    return writer.extension(layout.SCALAR_EXT, to_bytes((_NUMBERS[type(value)], value.tobytes())))


def _scalar(writer: Writer, value: np.generic) -> Ext:
    if type(value) is np.str_:
        return writer.extension(layout.NUMPY_STR_EXT, value.encode("utf-8", "surrogatepass"))  # str() drops last NULs
    if type(value) is np.bytes_:
        return writer.extension(layout.NUMPY_BYTES_EXT, bytes(value))
    array = np.asarray(value)
    if array.dtype.type is not type(value):
        raise CannotTravel(value, suggest_instead(value))
    dtype, _ = _describe_dtype(value, array.dtype)
    return writer.extension(layout.SCALAR_EXT, to_bytes((dtype, arrays.small_bytes(array))))


# -- types of users and libraries -------------------------------------------------------------------------------------


def _message(writer: Writer, value: Any, known: codecs.DeclaredDataclass) -> Ext:
    writer.enter(value, len(known.fields))
    writer.in_user_code += 1
    fields = {}
    for name in known.fields:
        try:
            field = getattr(value, name)
        except AttributeError:
            raise CannotTravel(value, f"its field {name!r} was never set") from None
        try:
            fields[name] = _CONVERT[type(field)](writer, field)
        except CannotTravel as refused:
            raise refused.with_step(f".{name}")  # noqa: B904
    writer.in_user_code -= 1
    writer.depth -= 1
    return writer.extension(layout.MESSAGE_EXT, _encode_tree((known.name, fields)))


def _codec_value(writer: Writer, value: Any, known: codecs.Codec) -> Ext:
    writer.enter(value, 1)
    writer.in_user_code += 1
    try:
        inner = known.encode(value)
        tree = _CONVERT[type(inner)](writer, inner)
    except CannotTravel as refused:
        raise refused.with_step(f".<codec {known.name}>")  # noqa: B904
    writer.in_user_code -= 1
    writer.depth -= 1
    return writer.extension(layout.CODEC_EXT, _encode_tree((known.name, tree)))


def _is_protobuf(value: Any) -> bool:
    protobuf = sys.modules.get("google.protobuf.message")
    return protobuf is not None and isinstance(value, protobuf.Message)


def _protobuf(writer: Writer, value: Any) -> Ext:
    from google.protobuf import descriptor_pool
    from google.protobuf.message import EncodeError

    name = value.DESCRIPTOR.full_name
    try:
        found = descriptor_pool.Default().FindMessageTypeByName(name)
    except KeyError:
        found = None
    if found is not value.DESCRIPTOR:
        raise CannotTravel(
            value, "its type is not in protobuf's default pool, where a node looks for it: import its _pb2"
        )
    try:
        data = value.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise CannotTravel(
            value, f"protobuf refuses it ({error}): complete it, or send large data as arrays"
        ) from error
    return writer.extension(layout.PROTOBUF_EXT, to_bytes((name, _bytes(writer, data))))


def _convert_other(writer: Writer, value: Any) -> Any:
    """Converts a value whose type is not in `_CONVERT`. Raises CannotTravel if it cannot travel."""
    kind = type(value)
    if known := codecs.message_of(kind):
        return _message(writer, value, known)
    if coded := codecs.codec_of(kind):
        return _codec_value(writer, value, coded)
    if isinstance(value, np.generic):
        return _scalar(writer, value)
    if (device := device_of(value)) is not None:
        return _device_array(writer, value, device)
    if library := codec_of_library(value):
        return _codec_value(writer, value, library)
    if _is_protobuf(value):
        return _protobuf(writer, value)
    raise CannotTravel(value, suggest_instead(value))


class _Converters(dict[type, Callable[[Writer, Any], Any]]):
    """Maps a type to the function that converts its values: `_CONVERT[type(value)](writer, value)`."""

    def __missing__(self, kind: type) -> Callable[[Writer, Any], Any]:
        return _convert_other


_CONVERT: Final = _Converters(
    {
        type(None): lambda writer, value: value,
        bool: lambda writer, value: value,
        float: lambda writer, value: value,
        int: _int,
        str: _str,
        complex: _complex,
        bytes: _bytes,
        list: _list,
        tuple: _tuple,
        dict: _dict,
        np.ndarray: _array,
        DeviceArrayOnHost: _host_copy,
        **dict.fromkeys(_NUMBERS, _number),
    }
)
codecs.reserve(_CONVERT)
trial.write = lambda value: write(value, False, None, False, False, False)
