"""Encodes numpy dtypes as bytes, and decodes them without pickle, without `eval`, without trust in the sender.

A plain dtype is its text, e.g. `<f8`. Structured and sub-array dtypes are MessagePack, field by field: numpy's own
description (`dtype.descr`) loses alignment, records and fields that overlap or are out of order.

dtypes that numpy calls equal may differ in what users see (`np.longlong` and `np.int64`, records, alignment). So no
dtype is looked up by equality alone: equal values must give equal bytes in every process.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder
from numpy.typing import NDArray

from taskgraph.errors import DecodeError

__all__ = ["DTYPES_BY_DESCRIPTION", "DTYPE_DESCRIPTIONS", "DtypeRefused", "as_void", "copy_with_padding", "padding"]

_MAX_ITEM: Final = 2**31 - 1
"""Bytes of one element; numpy's own limit."""
_MAX_DEPTH: Final = 32
_CACHE_ENTRIES: Final = 1024
"""Plain dtypes in each cache; a program uses a handful, but `U1`, `U2`, `U3` ... has no end."""

_PLAIN_PATTERN = re.compile(r"([<>|][b-zA-Z]\d{0,10}(?:\[\w{1,24}\])?)(/\d{1,3})?", re.ASCII)
_LONG_DOUBLES: Final = frozenset((np.dtype(np.longdouble).num, np.dtype(np.clongdouble).num))
_LONG_DOUBLE_SUFFIX: Final = f"/{np.finfo(np.longdouble).nmant}"
"""The suffix of a long double's description: its mantissa bits, 63 on x86, 112 on ARM. `<f16` alone means both."""
_LONG_DOUBLE_BYTES: Final = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype(np.longdouble).itemsize
"""How many bytes of a long double are the number; x86 leaves the others as they happen to be."""
_LARGEST_BUILTIN: Final = np.dtype(np.float16).num


class DtypeRefused(Exception):
    """Raised for a dtype that cannot travel. The message says why, and what to send instead."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ITEM)]


class _SubArray(msgspec.Struct, array_like=True, tag="a"):
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    base: str | _SubArray | _Record


class _Field(msgspec.Struct, array_like=True):
    name: bytes  # UTF-8 with surrogates, as is the title
    title: bytes | None
    offset: _Count
    dtype: str | _SubArray | _Record


class _Record(msgspec.Struct, array_like=True, tag="r"):
    aligned: bool
    is_np_record: bool
    itemsize: _Count
    fields: list[_Field]


_to_bytes: Final = Encoder().encode
_parse_description: Final = Decoder(_SubArray | _Record).decode


class _DescriptionCache(dict[tuple[np.dtype[Any], int], tuple[bytes, bool]]):
    """Caches the descriptions of plain dtypes. The dtype's number tells equal plain dtypes apart."""

    def __missing__(self, key: tuple[np.dtype[Any], int]) -> tuple[bytes, bool]:
        dtype, number = key
        found = _describe(dtype, 0)
        if not isinstance(found, str):
            return _to_bytes(found), False
        made = found.encode(), number not in _LONG_DOUBLES
        if len(self) >= _CACHE_ENTRIES:
            self.clear()
        self[key] = made
        return made


class _DtypeCache(dict[bytes, np.dtype[Any]]):
    """Caches plain dtypes by their description."""

    def __missing__(self, key: bytes) -> np.dtype[Any]:
        if not key.startswith((b"<", b">", b"|")):
            return _parse_structured(key)
        made = _parse_plain(key.decode("latin-1"))
        if len(self) >= _CACHE_ENTRIES:
            self.clear()
        self[key] = made
        return made


DTYPE_DESCRIPTIONS: Final = _DescriptionCache()
"""Maps (dtype, dtype.num) to the dtype's description as bytes, and whether it surely has no padding.

A lookup raises DtypeRefused if the dtype holds Python objects, or comes from another package."""

DTYPES_BY_DESCRIPTION: Final = _DtypeCache()
"""Maps a description to its dtype. A lookup raises DecodeError if the description is invalid or of another machine."""


def _describe(dtype: np.dtype[Any], depth: int) -> str | _SubArray | _Record:
    if depth > _MAX_DEPTH:
        raise DtypeRefused(f"its dtype is nested more than {_MAX_DEPTH} deep: send its fields one by one")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _SubArray(shape, _describe(base, depth + 1))
    if dtype.names is not None:
        if dtype.hasobject:
            raise DtypeRefused("its records hold references to Python objects: send a.tolist()")
        return _describe_record(dtype, depth)
    if dtype.num > _LARGEST_BUILTIN:
        if dtype.kind == "T":
            raise DtypeRefused("dtype StringDType keeps its text elsewhere: send a.astype('U'), or a.tolist()")
        bits = f"a.view(np.uint{8 * dtype.itemsize})" if dtype.itemsize in (1, 2, 4, 8) else "a.view('u1')"
        raise DtypeRefused(f"dtype {dtype} is not one of numpy's own: send a view of its bits, {bits}")
    if dtype.hasobject:
        raise DtypeRefused(
            "dtype object holds references to Python objects: give the array a dtype of its own, "
            "e.g. a.astype(float), or send a.tolist()"
        )
    return _plain_text(dtype)


def _plain_text(dtype: np.dtype[Any]) -> str:
    text = dtype.str
    if np.dtype(text).num != dtype.num:  # np.longlong and its like: another C type of the same size
        text = text[0] + dtype.char
    return text + _LONG_DOUBLE_SUFFIX if dtype.num in _LONG_DOUBLES else text


def _describe_record(dtype: np.dtype[Any], depth: int) -> _Record:
    assert dtype.names is not None
    if dtype.type not in (np.void, np.record):
        raise DtypeRefused(f"its dtype makes scalars of {dtype.type.__name__}: send a.view((np.void, a.dtype))")
    fields = []
    for name in dtype.names:
        field, offset, *titles = _field_info(dtype, name)
        title = titles[0] if titles else None
        if not isinstance(title, str | None):
            raise DtypeRefused(f"field {name!r} has a title that is not a text: {title!r:.40}; send the fields alone")
        fields.append(
            _Field(_to_utf8(name), None if title is None else _to_utf8(title), offset, _describe(field, depth + 1))
        )
    return _Record(dtype.isalignedstruct, dtype.type is np.record, dtype.itemsize, fields)


def _field_info(dtype: np.dtype[Any], name: str) -> tuple[Any, ...]:
    """Returns the dtype and offset of a field, and its title if the field has one."""
    assert dtype.fields is not None
    return tuple(dtype.fields[name])


def _to_utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _from_utf8(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _parse_plain(text: str) -> np.dtype[Any]:
    match = _PLAIN_PATTERN.fullmatch(text)
    if match is None:
        raise DecodeError(f"not a dtype: {text!r}")
    try:
        dtype = np.dtype(match[1])
    except (ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"not a dtype: {text!r} ({error})") from error
    if dtype.num in _LONG_DOUBLES and match[2] != _LONG_DOUBLE_SUFFIX:
        raise DecodeError(f"a long double of another kind of machine ({text!r}): send float64 between them")
    if dtype.hasobject or _plain_text(dtype) != match[0]:
        raise DecodeError(f"not a dtype that travels: {text!r}")
    return dtype


def _parse_structured(data: bytes) -> np.dtype[Any]:
    """Decodes the description of a structured or sub-array dtype."""
    try:
        return _build_dtype(_parse_description(data), 0)
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise DecodeError(f"not a dtype: {error}") from error


def _build_dtype(described: str | _SubArray | _Record, depth: int) -> np.dtype[Any]:
    if depth > _MAX_DEPTH:
        raise DecodeError(f"a dtype is nested more than {_MAX_DEPTH} deep")
    if isinstance(described, str):
        return DTYPES_BY_DESCRIPTION[described.encode()]
    if isinstance(described, _Record):
        return _build_record(described, depth)
    base = _build_dtype(described.base, depth + 1)
    whole = base.itemsize * math.prod(described.shape)
    if whole > _MAX_ITEM:
        raise DecodeError(f"a dtype of {whole} bytes")
    return _check_itemsize(np.dtype((base, described.shape)), whole)


def _build_record(record: _Record, depth: int) -> np.dtype[Any]:
    itemsize, formats = record.itemsize, []
    for field in record.fields:
        dtype = _build_dtype(field.dtype, depth + 1)
        if field.offset + dtype.itemsize > itemsize:
            # numpy adds in 32 bits, and reads beyond the array if that wraps around.
            raise DecodeError(f"a field that ends at {field.offset + dtype.itemsize} in a dtype of {itemsize} bytes")
        formats.append(dtype)
    spec: Any = {
        "names": [_from_utf8(field.name) for field in record.fields],
        "formats": formats,
        "offsets": [field.offset for field in record.fields],
        "itemsize": itemsize,
    }
    if any(field.title is not None for field in record.fields):
        spec["titles"] = [field.title if field.title is None else _from_utf8(field.title) for field in record.fields]
    made = _check_itemsize(np.dtype(spec, align=record.aligned), itemsize)
    return np.dtype((np.record, made)) if record.is_np_record else made


def _check_itemsize(made: np.dtype[Any], itemsize: int) -> np.dtype[Any]:
    """Returns the dtype. Raises DecodeError if its elements have another size."""
    if made.itemsize != itemsize:
        raise DecodeError(f"a dtype of {made.itemsize} bytes that announces {itemsize}")
    return made


def padding(dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Returns a mask of an element's padding bytes, or None if the dtype has no padding.

    Padding holds leftovers of other data. It is sent as zeros, so that equal values have equal digests.
    """
    if dtype.names is None and dtype.num not in _LONG_DOUBLES:
        return None
    mask = _padding_mask(dtype)
    return mask if mask.any() else None


def _padding_mask(dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(_padding_mask(base), int(np.prod(shape, dtype=np.int64)))
    if dtype.names is not None:
        mask = np.ones(dtype.itemsize, np.bool_)
        for name in dtype.names:
            field, offset = _field_info(dtype, name)[:2]
            mask[offset : offset + field.itemsize] &= _padding_mask(field)
        return mask
    mask = np.zeros(dtype.itemsize, np.bool_)
    if dtype.num in _LONG_DOUBLES:
        part = np.dtype(np.longdouble).itemsize
        one = np.arange(part) >= _LONG_DOUBLE_BYTES
        mask[:] = np.tile(one if dtype.isnative else one[::-1], dtype.itemsize // part)
    return mask


def as_void(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a view of the array whose elements are plain bytes, so that assignments copy padding, too.

    numpy copies records field by field, and leaves the bytes between the fields as they were.
    """
    dtype = array.dtype
    return array if dtype.names is None or not dtype.itemsize else array.view(f"V{dtype.itemsize}")


def copy_with_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Copies an array with its padding."""
    if array.dtype.names is None:
        return array.copy()
    copy: NDArray[Any] = np.empty(array.shape, array.dtype)
    as_void(copy)[...] = as_void(array)
    return copy
