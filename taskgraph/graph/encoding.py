"""The writer: one value as meta and buffers. The format is told in `values`."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device import shared
from taskgraph.device.api import Device, OnDevice
from taskgraph.device.buffers import Private
from taskgraph.device.lookup import device_of
from taskgraph.graph import arrays, codecs, dtypes, orders, runs
from taskgraph.graph.arrays import INLINE_BYTES, SMALL_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.digests import BLOCK_BYTES
from taskgraph.graph.libraries import codec_of_library
from taskgraph.graph.refusals import CannotTravel, key_step, way_out
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
    Bulk,
)

__all__ = ["ALIGN", "MAX_DEPTH", "WRITERS", "Writer"]

MAX_DEPTH: Final = 100
"""Containers in containers. Each takes one or two Python frames of the thousand there are."""
ALIGN: Final = 16
"""Where array elements begin inside meta; the data of a bytes object itself begins at a multiple of 16."""
_MAX_BUFFERS: Final = 1 << 16
"""More bulk than that goes inside meta, whatever its size: a transport takes so many pieces and no more."""
_MAX_META: Final = 1 << 30
"""A description of more bytes is a structure that holds the same parts over and over, or should be arrays."""
_KEY_CHARS: Final = 64
_KEYS_KEPT: Final = 1024
"""Keys of dicts that are remembered: the names of a program's things are few, and come in every epoch."""
_PLAIN_SCALARS: Final = tuple(map(np.dtype, "?bhilqBHILQefdFD"))

_ARRAY_INLINE, _ARRAY_PACKED, _ARRAY_BUFFERED = ARRAY
_PADS: Final = tuple(bytes(-n % ALIGN) for n in range(ALIGN))
_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_SHAPES: Final = tuple(struct.Struct(f"<B{ndim}Q") for ndim in range(65))


Buffer = memoryview | arrays.Copy | arrays.Pack | Private


class Writer:
    """Writes one value."""

    __slots__ = (
        "adopt",
        "allocate",
        "arrays",
        "buffers",
        "depth",
        "eager",
        "lendable",
        "meta",
        "on_device",
        "ordered",
        "pack",
        "stayed",
        "stays",
    )

    def __init__(
        self,
        adopt: bool,
        allocate: Allocate | None,
        stays: bool = False,
        lendable: bool = False,
        ordered: bool = False,
    ) -> None:
        self.meta = bytearray()
        self.buffers: list[Buffer] = []  # copies are made when the digest is taken
        self.pack: arrays.Pack | None = None  # one of them
        self.stays = stays
        self.lendable = lendable
        self.ordered = ordered
        self.stayed: tuple[Any, ...] = ()  # arrays that did: until they are copied, nobody may get their memory
        self.allocate = allocate
        self.eager = 0  # within user code's own types: what they gave may change when they are asked for more
        self.on_device: list[int] = []  # which arrays, by number, were on a device
        self.arrays = 0
        self.depth = 0
        self.adopt = adopt

    def too_much(self, value: Any) -> CannotTravel:
        """Why a container does not fit: it is too deep, or too much came before it."""
        if self.depth > MAX_DEPTH:
            return CannotTravel(value, f"it is nested more than {MAX_DEPTH} deep (does it contain itself?)")
        return CannotTravel(
            value,
            "what comes before it already needs 1 GiB of description: send arrays instead of lists of numbers, "
            "and what is shared only once",
        )

    def inline(self, size: int) -> bool:
        """Whether bulk of so many bytes goes inside meta; else what is less than `INLINE_BYTES` goes to the pack.

        It depends on the value alone, not on where its arrays are.
        """
        return size <= SMALL_BYTES or len(self.meta) + size < INLINE_BYTES or len(self.buffers) >= _MAX_BUFFERS

    def packed(self) -> arrays.Pack:
        """The pack, made where it is needed first."""
        if self.pack is None:
            self.pack = arrays.Pack(self.allocate)
            self.buffers.append(self.pack)
        return self.pack

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.meta += _U64.pack(len(data))
        self.meta += data

    def data(self, tags: Bulk, data: bytes) -> None:
        """Immutable bytes, after one of three tags."""
        size = len(data)
        inline, packed, buffered = tags
        if self.inline(size):
            self.meta += inline + _U64.pack(size)
            self.meta += data
        elif size < INLINE_BYTES:
            self.meta += packed + _U64.pack(size)
            self.packed().add(data)
        else:
            self.meta += buffered + _U64.pack(size)
            self.buffers.append(memoryview(data))


def _write_int(writer: Writer, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        writer.meta += INT + _I64.pack(value)
        return
    size = (value.bit_length() + 8) // 8
    writer.meta += LONG_INT + _U64.pack(size)
    writer.meta += value.to_bytes(size, "little", signed=True)


def _write_float(writer: Writer, value: float) -> None:
    writer.meta += FLOAT + _F64.pack(value)


def _write_str(writer: Writer, value: str) -> None:
    writer.data(STR, value.encode("utf-8", "surrogatepass"))


def _write_bytes(writer: Writer, value: bytes) -> None:
    writer.data(BYTES, value)


def _write_sequence(writer: Writer, value: list[Any] | tuple[Any, ...]) -> None:
    items = tuple(value)  # a list may be appended to by another thread meanwhile
    meta = writer.meta
    writer.depth += 1
    if writer.depth > MAX_DEPTH or len(meta) > _MAX_META:
        raise writer.too_much(value)
    tag = LIST if type(value) is list else TUPLE
    if (run := runs.packed(items)) is not None:
        _write_run(writer, tag, *run)
        writer.depth -= 1
        return
    meta += tag + _U64.pack(len(items))
    index = 0
    try:
        for item in items:
            WRITERS[type(item)](writer, item)
            index += 1
    except CannotTravel as refused:
        raise refused.at(f"[{index}]")  # noqa: B904 - the same exception goes on
    writer.depth -= 1


def _write_run(writer: Writer, tag: bytes, kind: bytes, parts: tuple[Any, ...]) -> None:
    writer.meta += RUN + tag + kind
    for part in parts:
        WRITERS[type(part)](writer, part)


_EMPTY_DICT: Final = DICT + _U64.pack(0)


class _Keys(dict[str, bytes]):
    """Keys as they are written, so that a look-up is no call; nothing for one that is not kept."""

    def __missing__(self, key: str) -> bytes:
        if len(key) > _KEY_CHARS or len(self) >= _KEYS_KEPT:
            return b""
        writer = Writer(False, None)
        _write_str(writer, key)
        made = self[key] = bytes(writer.meta)
        return made


_keys: Final = _Keys()


def _write_dict(writer: Writer, value: dict[Any, Any]) -> None:
    if not value and writer.depth < MAX_DEPTH and len(writer.meta) <= _MAX_META:
        writer.meta += _EMPTY_DICT
        return
    own = value.copy()  # another thread may change it meanwhile; a tuple for each item would cost several times as much
    meta = writer.meta
    writer.depth += 1
    if writer.depth > MAX_DEPTH or len(meta) > _MAX_META:
        raise writer.too_much(value)
    if len(own) >= runs.LEAST and _write_columns(writer, own):
        writer.depth -= 1
        return
    meta += DICT + _U64.pack(len(own))
    for key, item in own.items():
        known = _keys[key] if type(key) is str else b""
        if known:
            meta += known
        else:
            try:
                WRITERS[type(key)](writer, key)
            except CannotTravel as refused:
                raise refused.at(f" (in the key {key_step(key)})")  # noqa: B904
        if type(item) is dict and not item and writer.depth < MAX_DEPTH and len(meta) <= _MAX_META:
            meta += _EMPTY_DICT
            continue
        try:
            WRITERS[type(item)](writer, item)
        except CannotTravel as refused:
            raise refused.at(key_step(key))  # noqa: B904
    writer.depth -= 1


def _write_columns(writer: Writer, own: dict[Any, Any]) -> bool:
    """Writes a dict that nobody changes as two runs, if that is what it is."""
    if (of_keys := runs.packed(tuple(own))) is None or (of_values := runs.packed(tuple(own.values()))) is None:
        return False
    writer.meta += COLUMNS
    _write_run(writer, LIST, *of_keys)
    _write_run(writer, LIST, *of_values)
    return True


def _in_order(writer: Writer, value: Any, itemsize: int = 0) -> Any:
    """An array of numpy's or a device's as it is to be written: where its order counts, behind that, and in C's."""
    if order := orders.order_of(value.shape, value.strides, itemsize):
        writer.meta += ORDERED + bytes((len(order),)) + order
        return orders.in_c_order(value, order)
    return value


def _write_array(writer: Writer, value: NDArray[Any], adopt: bool = False) -> None:
    if writer.ordered and not value.flags.c_contiguous:
        value = _in_order(writer, value, value.itemsize)
    dtype = value.dtype
    try:
        header, packed = dtypes.DESCRIBED[dtype, dtype.num]
    except dtypes.DtypeRefused as refused:
        raise CannotTravel(value, str(refused)) from None
    writer.arrays += 1
    meta = writer.meta
    shape = _SHAPES[value.ndim].pack(value.ndim, *value.shape)
    if writer.inline(value.nbytes):
        meta += _ARRAY_INLINE + header + shape
        meta += _PADS[len(meta) % ALIGN]
        meta += value.tobytes() if packed else arrays.small_bytes(value)
    elif value.nbytes < INLINE_BYTES:
        meta += _ARRAY_PACKED + header + shape
        writer.packed().add_array(value, packed=packed, now=writer.eager > 0)
    else:
        meta += _ARRAY_BUFFERED + header + shape
        shared = arrays.as_it_is(value, adopt=adopt or writer.adopt, packed=packed)
        if shared is None:
            copy = arrays.Copy(value, writer.allocate)
            writer.buffers.append(copy.made() if writer.eager else copy)
        else:
            writer.buffers.append(shared)


def _write_on_device(writer: Writer, value: OnDevice) -> None:
    writer.on_device.append(writer.arrays)
    _write_array(writer, value.host, adopt=True)


def _write_staying(writer: Writer, value: Any, device: Device) -> None:
    dtype = value.dtype
    try:
        header, packed = dtypes.DESCRIBED[dtype, dtype.num]
    except dtypes.DtypeRefused as refused:
        raise CannotTravel(value, str(refused)) from None
    if not packed or len(writer.buffers) >= _MAX_BUFFERS:
        _write_on_device(writer, OnDevice(device.to_host(value)))
        return
    writer.on_device.append(writer.arrays)
    writer.arrays += 1
    writer.meta += _ARRAY_BUFFERED + header + _SHAPES[value.ndim].pack(value.ndim, *value.shape)
    memory = shared.of(device) if writer.lendable else None
    writer.buffers.append(Private(device, value, BLOCK_BYTES, memory))
    writer.stayed += (value,)


_SCALARS: Final = {dtype.type: SCALAR + dtypes.DESCRIBED[dtype, dtype.num][0] for dtype in _PLAIN_SCALARS}
"""What numpy's numbers begin with, by their type: those whose bytes are all there is to them."""


def _write_scalar(writer: Writer, value: np.generic) -> None:
    if head := _SCALARS.get(type(value)):
        writer.meta += head
        writer.meta += value.tobytes()
    elif type(value) is np.str_:
        writer.data(NUMPY_STR, value.encode("utf-8", "surrogatepass"))  # str(value) drops NULs at its end
    elif type(value) is np.bytes_:
        writer.data(NUMPY_BYTES, bytes(value))
    else:
        array = np.asarray(value)
        if array.dtype.type is not type(value):
            raise CannotTravel(value, way_out(value))
        try:
            writer.meta += SCALAR + dtypes.DESCRIBED[array.dtype, array.dtype.num][0]
        except dtypes.DtypeRefused as refused:
            raise CannotTravel(value, str(refused)) from None
        writer.meta += arrays.small_bytes(array)


def _write_message(writer: Writer, value: Any, known: codecs.Message) -> None:
    writer.depth += 1
    if writer.depth > MAX_DEPTH or len(writer.meta) > _MAX_META:
        raise writer.too_much(value)
    writer.meta += MESSAGE
    writer.text(known.name)
    writer.meta += _U32.pack(len(known.fields))
    writer.eager += 1
    for name in known.fields:
        writer.text(name)
        try:
            field = getattr(value, name)
        except AttributeError:
            raise CannotTravel(value, f"its field {name!r} was never set") from None
        try:
            WRITERS[type(field)](writer, field)
        except CannotTravel as refused:
            raise refused.at(f".{name}")  # noqa: B904
    writer.eager -= 1
    writer.depth -= 1


def _write_coded(writer: Writer, value: Any, known: codecs.Codec) -> None:
    writer.depth += 1
    if writer.depth > MAX_DEPTH or len(writer.meta) > _MAX_META:
        raise writer.too_much(value)
    writer.meta += CODED
    writer.text(known.name)
    writer.eager += 1
    try:
        inner = known.encode(value)
        WRITERS[type(inner)](writer, inner)
    except CannotTravel as refused:
        raise refused.at(f".<codec {known.name}>")  # noqa: B904
    writer.eager -= 1
    writer.depth -= 1


def _write_other(writer: Writer, value: Any) -> None:
    kind = type(value)
    if known := codecs.message_of(kind):
        _write_message(writer, value, known)
    elif coded := codecs.codec_of(kind):
        _write_coded(writer, value, coded)
    elif isinstance(value, np.generic):
        _write_scalar(writer, value)
    elif (device := device_of(value)) is not None:
        if writer.ordered and hasattr(value, "strides"):
            value = _in_order(writer, value)
        if writer.stays and value.nbytes >= INLINE_BYTES and device.keeps(value):
            _write_staying(writer, value, device)
        else:
            _write_on_device(writer, OnDevice(device.to_host(value)))
    elif library := codec_of_library(value):
        _write_coded(writer, value, library)
    elif _is_protobuf(value):
        _write_protobuf(writer, value)
    else:
        raise CannotTravel(value, way_out(value))


def _is_protobuf(value: Any) -> bool:
    protobuf = sys.modules.get("google.protobuf.message")
    return protobuf is not None and isinstance(value, protobuf.Message)


def _write_protobuf(writer: Writer, value: Any) -> None:
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
    writer.meta += PROTOBUF
    writer.text(name)
    writer.data(BYTES, data)


class _Writers(dict[type, Callable[[Writer, Any], None]]):
    """The writer of a type, exactly of it: `WRITERS[type(value)](writer, value)`."""

    def __missing__(self, kind: type) -> Callable[[Writer, Any], None]:
        return _write_other


WRITERS: Final = _Writers(
    {
        type(None): lambda writer, value: writer.meta.extend(NONE),
        bool: lambda writer, value: writer.meta.extend(TRUE if value else FALSE),
        int: _write_int,
        float: _write_float,
        complex: lambda writer, value: writer.meta.extend(COMPLEX + _C128.pack(value.real, value.imag)),
        str: _write_str,
        bytes: _write_bytes,
        list: _write_sequence,
        tuple: _write_sequence,
        dict: _write_dict,
        np.ndarray: _write_array,
        OnDevice: _write_on_device,
    }
)
codecs.reserve(WRITERS)
