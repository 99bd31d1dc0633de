"""Values that travel: encoded once when they are put, decoded read-only where they arrive. Never pickled.

A value becomes `meta`, a compact description with everything small in it, and `buffers`, the bulk of its arrays and
bytes. Encoding copies what the user could change later; decoding copies nothing. The digest covers both, and is the
same wherever an array lived: on the host or on a device.

What travels: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, numpy arrays and scalars of
every dtype but object, cupy arrays, protobuf messages, dataclasses declared with `message`, and types with a `codec`.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import numpy as np
import xxhash

from taskgraph.errors import DecodeError, JobError, ValueNotEncodable
from taskgraph.graph import dtypes
from taskgraph.protocol.messages import Encoded

__all__ = ["codec", "decode", "digest_of", "encode", "message", "verify"]

C = TypeVar("C", bound=type[Any])
X = TypeVar("X")

_MAX_DEPTH = 200
_INLINE_BYTES = 2048
"""Smaller bulk travels inside meta: one piece less to send."""
_ALIGN = 16

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")


# -- what users declare -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_codecs: dict[type, _Codec] = {}
_codecs_by_name: dict[str, _Codec] = {}
_messages: dict[str, type] = {}
_message_names: dict[type, str] = {}


def codec(cls: type[X], encode: Callable[[X], Any], decode: Callable[[Any], X], *, name: str | None = None) -> None:
    """Makes values of a type travel: `encode` turns one into a value that travels, `decode` turns that back.

    Args:
        name: what it is called on the wire; default the type's qualified name. The same in every process.
    """
    name = name or cls.__qualname__
    known = _codecs_by_name.get(name)
    if known is not None and known.type.__qualname__ != cls.__qualname__:
        raise JobError(f"two codecs are called {name!r}: give one of them name='...'")
    _codecs[cls] = _codecs_by_name[name] = _Codec(name, cls, encode, decode)


@overload
def message(cls: C) -> C: ...
@overload
def message(*, name: str | None = None) -> Callable[[C], C]: ...
def message(cls: C | None = None, *, name: str | None = None) -> Any:
    """Class decorator: a dataclass that travels, field by field. Makes a dataclass of a class that is none yet."""

    def declare(target: C) -> C:
        made = target if dataclasses.is_dataclass(target) else cast(C, dataclass(target))
        wire_name = name or made.__qualname__
        known = _messages.get(wire_name)
        if known is not None and (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise JobError(f"two messages are called {wire_name!r}: declare one with @tg.message(name='...')")
        _messages[wire_name] = made
        _message_names[made] = wire_name
        return made

    return declare(cls) if cls is not None else declare


# -- encoding ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes one value. `path` is where it is inside the value, for messages."""

    def __init__(self, what: str) -> None:
        self.meta = bytearray()
        self.buffers: list[memoryview] = []
        self.path: list[str] = []
        self.arrays = 0
        self.on_device: list[int] = []  # which arrays, by number, were on a device
        self._what = what

    def refuse(self, value: Any, way_out: str) -> ValueNotEncodable:
        where = "".join(self.path)
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return ValueNotEncodable(
            f"{self._what}: a value of type {name}{f' at {where}' if where else ''} cannot travel; {way_out}"
        )

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.meta += _U64.pack(len(data))
        self.meta += data

    def bulk(self, view: memoryview) -> None:
        """A C-contiguous, immutable run of bytes."""
        if view.nbytes <= _INLINE_BYTES:
            self.meta += b"i" + _U32.pack(view.nbytes)
            self.meta += b"\0" * (-len(self.meta) % _ALIGN)
            self.meta += view
        else:
            self.meta += b"b" + _U32.pack(len(self.buffers)) + _U64.pack(view.nbytes)
            self.buffers.append(view)

    def put(self, value: Any) -> None:
        writer = _WRITERS.get(type(value))
        if writer is not None:
            writer(self, value)
            return
        self._put_other(value)

    def _put_other(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, np.generic):
            _write_scalar(self, value)
        elif kind.__module__.partition(".")[0] == "cupy":
            _write_array(self, value.get(), device=True)
        elif kind in _message_names:
            _write_message(self, value)
        elif kind in _codecs:
            known = _codecs[kind]
            self.meta += b"C"
            self.text(known.name)
            self._deeper(f".encode({kind.__name__})", known.encode(value))
        elif _is_protobuf(kind):
            self.meta += b"P"
            self.text(value.DESCRIPTOR.full_name)
            self.bulk(memoryview(value.SerializeToString(deterministic=True)).cast("B"))
        else:
            raise self.refuse(value, _way_out(value))

    def _deeper(self, step: str, value: Any) -> None:
        if len(self.path) >= _MAX_DEPTH:
            raise self.refuse(value, f"it is nested more than {_MAX_DEPTH} deep (does it contain itself?)")
        self.path.append(step)
        self.put(value)
        self.path.pop()

    def items(self, values: Iterable[Any]) -> None:
        for index, value in enumerate(values):
            self._deeper(f"[{index}]", value)


def _write_int(writer: _Writer, value: int) -> None:
    size = (value.bit_length() + 8) // 8
    writer.meta += b"I" + _U64.pack(size) + value.to_bytes(size, "little", signed=True)


def _write_str(writer: _Writer, value: str) -> None:
    writer.meta += b"S"
    writer.text(value)


def _write_bytes(writer: _Writer, value: bytes) -> None:
    writer.meta += b"B"
    writer.bulk(memoryview(value))


def _write_list(writer: _Writer, value: Sequence[Any]) -> None:
    writer.meta += (b"L" if type(value) is list else b"U") + _U64.pack(len(value))
    writer.items(value)


def _write_dict(writer: _Writer, value: dict[Any, Any]) -> None:
    writer.meta += b"D" + _U64.pack(len(value))
    for key, item in value.items():
        writer._deeper(f" key {key!r:.40}", key)
        writer._deeper(f"[{key!r:.40}]", item)


def _write_message(writer: _Writer, value: Any) -> None:
    fields = dataclasses.fields(value)
    writer.meta += b"M"
    writer.text(_message_names[type(value)])
    writer.meta += _U32.pack(len(fields))
    for field in fields:
        writer.text(field.name)
        writer._deeper(f".{field.name}", getattr(value, field.name))


def _write_array(writer: _Writer, value: np.ndarray[Any, Any], device: bool = False) -> None:
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise writer.refuse(value, "send its data and its mask: (a.filled(0), np.ma.getmaskarray(a))")
        raise writer.refuse(value, "send a plain array: np.asarray(a)")
    if value.dtype.hasobject:
        raise writer.refuse(value, f"dtype {value.dtype} holds Python objects: send a list, or give the array a dtype")
    writer.meta += b"A"
    _write_dtype(writer, value.dtype)
    writer.meta += struct.pack(f"<B{value.ndim}Q", value.ndim, *value.shape)
    if device:
        writer.on_device.append(writer.arrays)
    writer.arrays += 1
    writer.bulk(_bytes_of(value, fresh=device))


def _bytes_of(value: np.ndarray[Any, Any], *, fresh: bool = False) -> memoryview:
    """The array's elements in C order, as bytes nobody can change any more."""
    if value.size == 0 or value.itemsize == 0:
        return memoryview(b"")
    contiguous = value.flags.c_contiguous
    if contiguous and not fresh and not value.flags.writeable and _is_ours(value):
        copy = value  # a view on what was decoded from an encoded value: immutable, shared
    else:
        copy = value if fresh and contiguous else np.array(value, order="C", copy=True, subok=False)
    return copy.reshape(-1).view(np.uint8).data.toreadonly()


class _Frozen(np.ndarray[Any, Any]):
    """The base of decoded arrays: marks memory that only encoded values own."""


def _is_ours(value: np.ndarray[Any, Any]) -> bool:
    base: Any = value
    while base is not None:
        if type(base) is _Frozen:
            return True
        base = getattr(base, "base", None)
    return False


def _write_scalar(writer: _Writer, value: np.generic) -> None:
    if value.dtype.hasobject:
        raise writer.refuse(value, "dtype object holds Python objects")
    writer.meta += b"G"
    _write_dtype(writer, value.dtype)
    writer.bulk(memoryview(np.asarray(value).tobytes()))


def _write_dtype(writer: _Writer, dtype: np.dtype[Any]) -> None:
    data = dtypes.describe(dtype)
    writer.meta += _U32.pack(len(data)) + data


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda w, v: w.meta.extend(b"N"),
    bool: lambda w, v: w.meta.extend(b"T" if v else b"F"),
    int: _write_int,
    float: lambda w, v: w.meta.extend(b"f" + _F64.pack(v)),
    complex: lambda w, v: w.meta.extend(b"c" + _C128.pack(v.real, v.imag)),
    str: _write_str,
    bytes: _write_bytes,
    list: _write_list,
    tuple: _write_list,
    dict: _write_dict,
    np.ndarray: _write_array,
}


def _is_protobuf(kind: type) -> bool:
    return hasattr(kind, "DESCRIPTOR") and hasattr(kind, "SerializeToString")


def _way_out(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return (
            "send its data and its mask: (a.filled(0), np.ma.getmaskarray(a))"
            if isinstance(value, np.ma.MaskedArray)
            else "send a plain array: np.asarray(a)"
        )
    if isinstance(value, bytearray | memoryview):
        return "send bytes(x)"
    if isinstance(value, set | frozenset):
        return "send sorted(x): a set has no order of its own"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"decorate the class {type(value).__name__} with @tg.message"
    if isinstance(value, tuple):
        return "send tuple(x), or declare a dataclass with @tg.message"
    for base in (bool, int, float, str, list, dict):
        if isinstance(value, base):
            return f"send {base.__name__}(x): exact types only, so that what arrives is what was sent"
    return "send its parts, declare a dataclass with @tg.message, or teach its type with tg.codec(type, encode, decode)"


def encode(value: Any, *, what: str = "value") -> Encoded:
    """Encodes a value; later changes to it cannot reach the result.

    Args:
        what: for messages, e.g. "channel 'grad' of task 3".

    Raises:
        ValueNotEncodable: something in it cannot travel; the message says what, where, and the way out.
    """
    writer = _Writer(what)
    writer.put(value)
    # Where an array lived comes last and is in no digest: primary and backup may sit on different kinds of nodes.
    trailer = struct.pack(f"<{len(writer.on_device) + 1}I", *writer.on_device, len(writer.on_device))
    meta, buffers = bytes(writer.meta) + trailer, tuple(writer.buffers)
    return Encoded(meta, buffers, digest_of(meta, buffers))


def digest_of(meta: bytes, buffers: Sequence[memoryview]) -> bytes:
    """xxh3-128 over meta and buffers with their lengths; where an array lived is left out."""
    body = memoryview(meta)[: _body_size(meta)]
    hasher = xxhash.xxh3_128(_U64.pack(len(body)))
    hasher.update(body)
    for buffer in buffers:
        hasher.update(_U64.pack(buffer.nbytes))
        hasher.update(buffer)
    return hasher.digest()


def _body_size(meta: bytes) -> int:
    """Where the trailer begins. A meta too short for its trailer is all body; decoding refuses it."""
    if len(meta) < _U32.size:
        return len(meta)
    flags: int = _U32.unpack_from(meta, len(meta) - _U32.size)[0]
    return max(0, len(meta) - _U32.size * (flags + 1))


def verify(encoded: Encoded) -> bool:
    """Whether the bytes are those the digest was taken of."""
    return digest_of(encoded.meta, encoded.buffers) == encoded.digest


# -- decoding ---------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, encoded: Encoded, device: str, writable: bool) -> None:
        size = _body_size(encoded.meta)
        if (len(encoded.meta) - size) % _U32.size or size == len(encoded.meta):
            raise DecodeError("a value has no trailer")
        self._view = memoryview(encoded.meta)[:size]
        self._size = size
        self._arrays = 0
        self._on_device = frozenset(struct.unpack(f"<{(len(encoded.meta) - size) // 4}I", encoded.meta[size:])[:-1])
        self._buffers = encoded.buffers
        self._at = 0
        self._device = device
        self._writable = writable
        self._depth = 0

    def take(self, size: int) -> memoryview:
        end = self._at + size
        if end > self._size:
            raise DecodeError(f"a value ends after {self._size} bytes, {end} were announced")
        part = self._view[self._at : end]
        self._at = end
        return part

    def number(self, form: struct.Struct) -> int:
        return int(form.unpack(self.take(form.size))[0])

    def count(self) -> int:
        """A number of elements; each takes a byte at least, so more cannot be meant."""
        count = self.number(_U64)
        if count > self._size - self._at:
            raise DecodeError(f"a value announces {count} elements and has {self._size - self._at} bytes left")
        return count

    def text(self) -> str:
        try:
            return str(self.take(self.number(_U64)), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise DecodeError(f"not a text: {error}") from error

    def bulk(self) -> memoryview:
        kind = bytes(self.take(1))
        if kind == b"i":
            size = self.number(_U32)
            self.take(-self._at % _ALIGN)
            return self.take(size)
        if kind == b"b":
            index, size = self.number(_U32), self.number(_U64)
            if index >= len(self._buffers) or self._buffers[index].nbytes != size:
                raise DecodeError(f"a value names buffer {index} of {size} bytes, which is not there")
            return self._buffers[index]
        raise DecodeError(f"not a run of bytes: {kind!r}")

    def value(self) -> Any:
        self._depth += 1
        if self._depth > 2 * _MAX_DEPTH:
            raise DecodeError(f"a value is nested more than {_MAX_DEPTH} deep")
        kind = bytes(self.take(1))
        reader = _READERS.get(kind)
        if reader is None:
            raise DecodeError(f"not a value: it begins with {kind!r}")
        found = reader(self)
        self._depth -= 1
        return found

    def whole(self) -> Any:
        found = self.value()
        if self._at != self._size:
            raise DecodeError(f"{self._size - self._at} bytes are left after a value")
        return found

    def integer(self) -> int:
        return int.from_bytes(self.take(self.number(_U64)), "little", signed=True)

    def mapping(self) -> dict[Any, Any]:
        found = {}
        for _ in range(self.count()):
            key = self.value()
            try:
                found[key] = self.value()
            except TypeError as error:
                raise DecodeError(f"a dict has a key that is none: {error}") from error
        return found

    def message(self) -> Any:
        name = self.text()
        cls: Any = _messages.get(name)
        if cls is None:
            raise DecodeError(f"no @tg.message is called {name!r} here: the driver must declare it when it is imported")
        given = {self.text(): self.value() for _ in range(self.number(_U32))}
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if given.keys() != fields.keys():
            raise DecodeError(f"message {name!r} has fields {sorted(given)}, here it has {sorted(fields)}")
        made = object.__new__(cls)
        for field, value in given.items():
            object.__setattr__(made, field, value)
        return made

    def coded(self) -> Any:
        name = self.text()
        known = _codecs_by_name.get(name)
        if known is None:
            raise DecodeError(f"no codec is called {name!r} here: the driver must declare it when it is imported")
        return known.decode(self.value())

    def protobuf(self) -> Any:
        from google.protobuf import symbol_database
        from google.protobuf.message import DecodeError as BadMessage

        name, data = self.text(), self.bulk()
        try:
            database: Any = symbol_database.Default()
            return database.GetSymbol(name).FromString(bytes(data))
        except KeyError as error:
            raise DecodeError(f"no protobuf message is called {name!r} here: the driver must import it") from error
        except BadMessage as error:
            raise DecodeError(f"not a protobuf message {name!r}: {error}") from error

    def dtype(self) -> np.dtype[Any]:
        return dtypes.parse(bytes(self.take(self.number(_U32))))

    def array(self) -> Any:
        dtype = self.dtype()
        shape = struct.unpack(f"<{(ndim := self.take(1)[0])}Q", self.take(8 * ndim))
        on_device = self._arrays in self._on_device
        self._arrays += 1
        data = self.bulk()
        count = 1
        for n in shape:
            count *= n
        if count * dtype.itemsize != data.nbytes or count > sys.maxsize:
            raise DecodeError(f"an array of shape {shape} and dtype {dtype} has {data.nbytes} bytes")
        try:
            found = _array_on(data, dtype, shape, self._writable)
        except (ValueError, TypeError) as error:
            raise DecodeError(f"not an array: {error}") from error
        if on_device and self._device == "cuda":
            import cupy

            return cupy.asarray(np.asarray(found))
        return found

    def scalar(self) -> Any:
        dtype, data = self.dtype(), self.bulk()
        if data.nbytes != dtype.itemsize:
            raise DecodeError(f"a scalar of dtype {dtype} has {data.nbytes} bytes")
        return np.frombuffer(bytes(data), dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _array_on(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> np.ndarray[Any, Any]:
    if data.nbytes == 0:
        empty = np.zeros(shape, dtype)
        empty.flags.writeable = writable
        return empty
    frozen = np.frombuffer(data, np.uint8).view(_Frozen)
    frozen.flags.writeable = False
    found = np.ndarray(shape, dtype, buffer=frozen)
    if writable or not found.flags.aligned:
        found = found.copy()
    found.flags.writeable = writable
    return found


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda r: None,
    b"T": lambda r: True,
    b"F": lambda r: False,
    b"I": _Reader.integer,
    b"f": lambda r: _F64.unpack(r.take(8))[0],
    b"c": lambda r: complex(*_C128.unpack(r.take(16))),
    b"S": _Reader.text,
    b"B": lambda r: bytes(r.bulk()),
    b"L": lambda r: [r.value() for _ in range(r.count())],
    b"U": lambda r: tuple([r.value() for _ in range(r.count())]),
    b"D": _Reader.mapping,
    b"M": _Reader.message,
    b"C": _Reader.coded,
    b"P": _Reader.protobuf,
    b"A": _Reader.array,
    b"G": _Reader.scalar,
}


def decode(encoded: Encoded, *, device: str = "host", writable: bool = False) -> Any:
    """The value. Arrays are read-only views on the encoded bytes, or fresh ones with `writable`.

    Args:
        device: "cuda" gives cupy arrays where a cupy array was encoded; "host" gives numpy arrays always.

    Raises:
        DecodeError: the bytes are not a value, or name a type that is not declared here.
    """
    return _Reader(encoded, device, writable).whole()
