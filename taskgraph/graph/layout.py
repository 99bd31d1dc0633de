"""The encoded format of values.

An encoded value is *meta* (one `bytes`) and buffers. Meta begins with a version byte and a kind, and ends with a
trailer. By kind:

| Kind | Between kind and trailer |
|---|---|
| PLAIN | a MessagePack tree of None, bool, int, float, str, bytes, list and dict alone |
| TREE | the rest of `TREE_HEAD`, the small parts (unless they are in a buffer), a MessagePack tree with extensions |
| ARRAY | the rest of a head (`lone_array_head`), and the elements of the array that is the whole value |
| LARGE_ARRAY | the rest of a head; the elements are the only buffer |

MessagePack has no tuples, arrays, big integers or user types. Each of these is an extension (`Ext` in msgspec), by the
codes below. The payload of an extension is MessagePack again, so a tree within a tree is decoded by the same reader.

**Where elements are.** An array of `INLINE_BYTES` or more has a buffer of its own. All smaller arrays of a value lie
side by side, the *small parts*, each at a multiple of `PART_ALIGN` bytes. The small parts are in meta, or, from
`INLINE_BYTES` on, the last buffer. `ArrayHead` says where an array is.

**The trailer** lists the arrays that lived on a device: the number of each (u32), then their count (u32). The
trailer is not part of the digest, since the digest is of the value alone (`digests`). All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder, Encoder, Ext

from taskgraph.graph import dtypes
from taskgraph.graph.arrays import PART_ALIGN

__all__ = [
    "ARRAY",
    "ARRAY_EXT",
    "BYTES_EXT",
    "CODEC_EXT",
    "COMPLEX_EXT",
    "INT_EXT",
    "ITEMS_EXT",
    "LARGE_ARRAY",
    "MAX_DEPTH",
    "MESSAGE_EXT",
    "NUMPY_BYTES_EXT",
    "NUMPY_STR_EXT",
    "PLAIN",
    "PROTOBUF_EXT",
    "SCALAR_EXT",
    "STR_EXT",
    "TREE",
    "TREE_HEAD",
    "TUPLE_EXT",
    "ArrayHead",
    "Ext",
    "lone_array_head",
    "read_array_head",
    "read_byte_pair",
    "read_lone_array_head",
    "read_name_and_payload",
    "to_bytes",
    "tree_decoder",
]

MAX_DEPTH: Final = 100
"""How deep containers may be nested. Each takes one or two Python frames, of the thousand that Python allows."""

_VERSION: Final = 2
PLAIN: Final = bytes((_VERSION,)) + b"p"
TREE: Final = bytes((_VERSION,)) + b"t"
ARRAY: Final = bytes((_VERSION,)) + b"a"
LARGE_ARRAY: Final = bytes((_VERSION,)) + b"A"

TREE_HEAD: Final = struct.Struct("<2s2xII4x")
"""Version and kind, the bytes of small parts in meta, and the number of the buffer with them plus one (0: in meta)."""

# Codes of extensions, and their payloads.
TUPLE_EXT: Final = 1  # a list
INT_EXT: Final = 2  # two's complement, of an integer beyond 64 bits
COMPLEX_EXT: Final = 3  # two f64
STR_EXT: Final = 4  # UTF-8 with lone surrogates
ITEMS_EXT: Final = 5  # a dict with keys that MessagePack has not: its keys as a tree, its values as a tree
BYTES_EXT: Final = 6  # the number of a buffer, which is a `bytes`
ARRAY_EXT: Final = 7  # an `ArrayHead`
SCALAR_EXT: Final = 8  # a dtype, and the bytes of one numpy scalar
MESSAGE_EXT: Final = 9  # the name of a @tg.message, and its fields as a dict
CODEC_EXT: Final = 10  # the name of a codec, and the value that it made
PROTOBUF_EXT: Final = 11  # the name of a protobuf message, and its bytes
NUMPY_STR_EXT: Final = 12  # UTF-8 with lone surrogates
NUMPY_BYTES_EXT: Final = 13

_Count = Annotated[int, Meta(ge=0)]
_Shape = Annotated[tuple[_Count, ...], Meta(max_length=64)]  # numpy has no more axes; their product is bounded


class ArrayHead(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """The header of an array: the place of its bytes, its dtype, shape and order.

    Attributes:
        number: the array's position among the value's arrays, in the order of the tree.
        buffer: the number of its buffer plus one; 0 for an array among the small parts.
        at: the array's offset among the small parts, bytes.
        dtype: see `dtypes`.
        order: the order of its elements in memory (`orders`), if that is not C's.
    """

    number: _Count
    buffer: _Count
    at: _Count
    dtype: bytes
    shape: _Shape
    order: bytes = b""


to_bytes: Final = Encoder().encode
read_array_head: Final = Decoder(ArrayHead).decode
read_byte_pair: Final = Decoder(tuple[bytes, bytes]).decode
read_name_and_payload: Final = Decoder(tuple[str, msgspec.Raw]).decode
_read_shape: Final = Decoder(tuple[bytes, _Shape]).decode


def tree_decoder(extension: Callable[[int, memoryview], Any]) -> Callable[[bytes | memoryview], Any]:
    """Returns a function that decodes a tree, and calls `extension(code, payload)` for each extension in it."""
    return Decoder(ext_hook=extension).decode


def lone_array_head(kind: bytes, dtype: bytes, shape: tuple[int, ...]) -> bytes | None:
    """Encodes the head of a value that is one array: kind, head size / 16, bytes of padding, dtype and shape.

    Returns None if the head would be too long: such an array is encoded as a tree.
    """
    described = to_bytes((dtype, shape))
    padding = -(len(described) + 4) % PART_ALIGN
    sixteenths = (len(described) + 4 + padding) // PART_ALIGN
    return kind + bytes((sixteenths, padding)) + described + bytes(padding) if sixteenths < 256 else None


def read_lone_array_head(meta: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Decodes the head of a value that is one array: returns dtype, shape, bytes of elements, and bytes of the head.

    Raises:
        DecodeError, IndexError, ValueError: meta does not begin with such a head.
    """
    size = meta[2] * PART_ALIGN
    described, shape = _read_shape(meta[4 : size - meta[3]])
    dtype = dtypes.DTYPES_BY_DESCRIPTION[described]
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return dtype, shape, nbytes, size
