"""numpy dtypes as bytes and back: without pickle, without `eval`, without trusting what arrives.

A plain dtype is its text, e.g. `<f8`, after its length; structured and sub-array dtypes are spelled out field by field.
dtypes that numpy calls equal may still differ in what users see (`np.longlong` and `np.int64`, records, alignment), so
nothing here is looked up by equality alone: equal values must give equal bytes in every process.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import DecodeError

__all__ = ["DESCRIBED", "PARSED", "DtypeRefused", "opaque", "padding", "read", "whole_copy"]

_SUBARRAY: Final = 0xFF
_RECORD: Final = 0xFE
_ALIGNED: Final = 1
_NP_RECORD: Final = 2

_MAX_TEXT: Final = 100
_MAX_ITEM: Final = 2**31 - 1
"""Bytes of one element; numpy's own limit."""
_MAX_DEPTH: Final = 32
_CACHED: Final = 1024
"""Plain dtypes remembered; a program uses a handful, but `U1`, `U2`, `U3` ... has no end."""

_REC = struct.Struct("<BQI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_PLAIN = re.compile(r"([<>|][b-zA-Z]\d{0,10}(?:\[\w{1,24}\])?)(/\d{1,3})?", re.ASCII)
_LONG_DOUBLES: Final = frozenset((np.dtype(np.longdouble).num, np.dtype(np.clongdouble).num))
_LONG_DOUBLE_FORM: Final = f"/{np.finfo(np.longdouble).nmant}"
"""Bits of the mantissa: 63 on x86, 112 on ARM. The same text `<f16` means other numbers there."""
_LONG_DOUBLE_BYTES: Final = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype(np.longdouble).itemsize
"""How many bytes of a long double are the number; x86 leaves the others as they happen to be."""
_LARGEST_BUILTIN: Final = np.dtype(np.float16).num


class DtypeRefused(Exception):
    """A dtype that cannot travel. The message is the way out."""


class _Described(dict[tuple[np.dtype[Any], int], tuple[bytes, bool]]):
    """Descriptions by dtype, and by its number, which tells plain dtypes that are equal apart. A look-up is no call."""

    def __missing__(self, key: tuple[np.dtype[Any], int]) -> tuple[bytes, bool]:
        dtype, number = key
        made = _describe(dtype, 0), dtype.names is None and number not in _LONG_DOUBLES
        if dtype.names is None:
            if len(self) >= _CACHED:
                self.clear()
            self[key] = made
        return made


class _Parsed(dict[bytes, np.dtype[Any]]):
    """Plain dtypes by their description, those that were read before."""

    def __missing__(self, key: bytes) -> np.dtype[Any]:
        made = _parse_plain(key[1:])
        if len(self) >= _CACHED:
            self.clear()
        self[key] = made
        return made


DESCRIBED: Final = _Described()
"""By (dtype, dtype.num): its description, and whether it is known to have no padding. Raises DtypeRefused: it holds
Python objects, or comes from another package."""

PARSED: Final = _Parsed()


def _describe(dtype: np.dtype[Any], depth: int) -> bytes:
    if depth > _MAX_DEPTH:
        raise DtypeRefused(f"its dtype is nested more than {_MAX_DEPTH} deep: send its fields one by one")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return struct.pack(f"<BB{len(shape)}Q", _SUBARRAY, len(shape), *shape) + _describe(base, depth + 1)
    if dtype.names is not None:
        return _describe_record(dtype, depth)
    if dtype.num > _LARGEST_BUILTIN:
        if dtype.kind == "T":
            raise DtypeRefused("dtype StringDType keeps its text elsewhere: send a.astype('U'), or a.tolist()")
        raise DtypeRefused(f"dtype {dtype} is not one of numpy's own: send a view of its bits, e.g. a.view(np.uint16)")
    if dtype.hasobject:
        raise DtypeRefused(
            "dtype object holds references to Python objects: give the array a dtype of its own, "
            "e.g. a.astype(float), or send a.tolist()"
        )
    text = _text(dtype).encode("ascii")
    return bytes((len(text),)) + text


def _text(dtype: np.dtype[Any]) -> str:
    text = dtype.str
    if np.dtype(text).num != dtype.num:  # np.longlong and its like: another C type of the same size
        text = text[0] + dtype.char
    return text + _LONG_DOUBLE_FORM if dtype.num in _LONG_DOUBLES else text


def _describe_record(dtype: np.dtype[Any], depth: int) -> bytes:
    assert dtype.names is not None
    if dtype.type not in (np.void, np.record):
        raise DtypeRefused(f"its dtype makes scalars of {dtype.type.__name__}: send a.view((np.void, a.dtype))")
    flags = _ALIGNED * dtype.isalignedstruct | _NP_RECORD * (dtype.type is np.record)
    parts = [bytes((_RECORD,)), _REC.pack(flags, dtype.itemsize, len(dtype.names))]
    for name in dtype.names:
        field, offset, *titles = _field(dtype, name)
        title = titles[0] if titles else None
        if not isinstance(title, str | None):
            raise DtypeRefused(f"field {name!r} has a title that is not a text: {title!r:.40}; send the fields alone")
        parts += [_name(name), _name(title), _U64.pack(offset), _describe(field, depth + 1)]
    return b"".join(parts)


def _field(dtype: np.dtype[Any], name: str) -> tuple[Any, ...]:
    """dtype and offset of a field, and its title if it has one."""
    assert dtype.fields is not None
    return tuple(dtype.fields[name])


def _name(name: str | None) -> bytes:
    """A text after its length plus one; 0 for none."""
    if name is None:
        return _U32.pack(0)
    data = name.encode("utf-8", "surrogatepass")
    return _U32.pack(len(data) + 1) + data


def read(data: bytes, at: int) -> tuple[np.dtype[Any], int]:
    """The dtype described at `at`, and where its description ends.

    Raises:
        DecodeError: it is none, or not one of this machine.
    """
    size = data[at]
    if size <= _MAX_TEXT:
        end = at + 1 + size
        return PARSED[data[at:end]], end
    try:
        return _parse(data, at, 0)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DecodeError(f"not a dtype: {error}") from error


def _parse_plain(text: bytes) -> np.dtype[Any]:
    match = _PLAIN.fullmatch(text.decode("latin-1"))
    if match is None:
        raise DecodeError(f"not a dtype: {text!r}")
    try:
        dtype = np.dtype(match[1])
    except (ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"not a dtype: {text!r} ({error})") from error
    if dtype.num in _LONG_DOUBLES and match[2] != _LONG_DOUBLE_FORM:
        raise DecodeError(f"a long double of another kind of machine ({text!r}): send float64 between them")
    if dtype.hasobject or _text(dtype) != match[0]:
        raise DecodeError(f"not a dtype that travels: {text!r}")
    return dtype


def _parse(data: bytes, at: int, depth: int) -> tuple[np.dtype[Any], int]:
    if depth > _MAX_DEPTH:
        raise DecodeError(f"a dtype is nested more than {_MAX_DEPTH} deep")
    kind = data[at]
    if kind <= _MAX_TEXT:
        return read(data, at)
    if kind == _SUBARRAY:
        ndim = data[at + 1]
        shape = struct.unpack_from(f"<{ndim}Q", data, at + 2)
        base, at = _parse(data, at + 2 + 8 * ndim, depth + 1)
        whole = base.itemsize * math.prod(shape)
        if whole > _MAX_ITEM:
            raise DecodeError(f"a dtype of {whole} bytes")
        return _sized(np.dtype((base, shape)), whole), at
    if kind != _RECORD:
        raise DecodeError(f"not a dtype: it begins with {kind}")
    flags, itemsize, count = _REC.unpack_from(data, at + 1)
    at += 1 + _REC.size
    if count > len(data) - at:
        raise DecodeError(f"a dtype announces {count} fields and has {len(data) - at} bytes left")
    if itemsize > _MAX_ITEM:
        raise DecodeError(f"a dtype of {itemsize} bytes")
    names, titles, offsets, formats = [], [], [], []
    for _ in range(count):
        name, at = _read_name(data, at)
        title, at = _read_name(data, at)
        offsets.append(_U64.unpack_from(data, at)[0])
        field, at = _parse(data, at + 8, depth + 1)
        if offsets[-1] + field.itemsize > itemsize:
            # numpy adds in 32 bits, and reads beyond the array where that wraps around.
            raise DecodeError(f"a field that ends at {offsets[-1] + field.itemsize} in a dtype of {itemsize} bytes")
        names.append(name)
        titles.append(title)
        formats.append(field)
    spec: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(title is not None for title in titles):
        spec["titles"] = titles
    made = _sized(np.dtype(spec, align=bool(flags & _ALIGNED)), itemsize)
    return (np.dtype((np.record, made)) if flags & _NP_RECORD else made), at


def _sized(made: np.dtype[Any], itemsize: int) -> np.dtype[Any]:
    if made.itemsize != itemsize:
        raise DecodeError(f"a dtype of {made.itemsize} bytes that announces {itemsize}")
    return made


def _read_name(data: bytes, at: int) -> tuple[str | None, int]:
    size = _U32.unpack_from(data, at)[0]
    at += _U32.size
    if size == 0:
        return None, at
    if at + size - 1 > len(data):
        raise DecodeError("a dtype ends within a name")
    return str(data[at : at + size - 1], "utf-8", "surrogatepass"), at + size - 1


def padding(dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Which bytes of an element are no part of its value, or None if all are.

    What they hold is chance: they are sent as zeros, so that equal values have equal digests and nothing leaks.
    """
    if dtype.names is None and dtype.num not in _LONG_DOUBLES:
        return None
    mask = _padding(dtype)
    return mask if mask.any() else None


def _padding(dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(_padding(base), int(np.prod(shape, dtype=np.int64)))
    if dtype.names is not None:
        mask = np.ones(dtype.itemsize, np.bool_)
        for name in dtype.names:
            field, offset = _field(dtype, name)[:2]
            mask[offset : offset + field.itemsize] &= _padding(field)
        return mask
    mask = np.zeros(dtype.itemsize, np.bool_)
    if dtype.num in _LONG_DOUBLES:
        part = np.dtype(np.longdouble).itemsize
        one = np.arange(part) >= _LONG_DOUBLE_BYTES
        mask[:] = np.tile(one if dtype.isnative else one[::-1], dtype.itemsize // part)
    return mask


def opaque(array: NDArray[Any]) -> NDArray[Any]:
    """A view of it for copies: numpy copies records field by field, and what memory held before stays between them.

    Each element of the view is so many bytes, and all of them are copied.
    """
    dtype = array.dtype
    return array if dtype.names is None or not dtype.itemsize else array.view(f"V{dtype.itemsize}")


def whole_copy(array: NDArray[Any]) -> NDArray[Any]:
    """`array.copy()`, padding included."""
    if array.dtype.names is None:
        return array.copy()
    copy: NDArray[Any] = np.empty(array.shape, array.dtype)
    opaque(copy)[...] = opaque(array)
    return copy
