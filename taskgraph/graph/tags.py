"""The tags of the encoded format: the byte that each part of a value begins with.

| Tag | What follows |
|---|---|
| NONE, TRUE, FALSE | nothing |
| INT | i64; LONG_INT: a size (u64) and so many bytes, two's complement |
| FLOAT, COMPLEX | one f64, two |
| LIST, TUPLE | a number of parts (u64), and each of them |
| RUN | LIST or TUPLE, the kind (a tag), and one or two values that hold all the parts (`runs`) |
| DICT | a number of entries (u64); of each its key and what it maps to |
| COLUMNS | two runs, keys and what they map to: a dict |
| bulk: STR, BYTES, NUMPY_STR, NUMPY_BYTES, ARRAY | three tags each: where the bytes are |
| SCALAR | a dtype and the bytes of one numpy scalar |
| ORDERED | a number of axes (u8), an order (`orders`), and the array in it: its elements as they lie in memory |
| MESSAGE | a name, a number of fields (u32); of each its name and value |
| CODED | a name and the value that the codec made |
| PROTOBUF | a name and BYTES |

Bulk is in meta, behind the tag and a size (u64); in a part of the pack, whose size follows the tag; or in a buffer of
its own, the same. For an array the size follows from its dtype and shape, which come in place of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "ARRAY",
    "BYTES",
    "CODED",
    "COLUMNS",
    "COMPLEX",
    "DICT",
    "FALSE",
    "FLOAT",
    "INT",
    "LIST",
    "LONG_INT",
    "MESSAGE",
    "NONE",
    "NUMPY_BYTES",
    "NUMPY_STR",
    "ORDERED",
    "PROTOBUF",
    "RUN",
    "SCALAR",
    "STR",
    "TRUE",
    "TUPLE",
    "Bulk",
]


class Bulk(NamedTuple):
    """The three tags of a kind of bulk."""

    inline: bytes
    packed: bytes
    buffered: bytes


NONE: Final = b"N"
TRUE: Final = b"T"
FALSE: Final = b"F"
INT: Final = b"i"
LONG_INT: Final = b"I"
FLOAT: Final = b"f"
COMPLEX: Final = b"c"
LIST: Final = b"L"
TUPLE: Final = b"U"
RUN: Final = b"R"
DICT: Final = b"D"
COLUMNS: Final = b"K"
STR: Final = Bulk(b"S", b"1", b"s")
BYTES: Final = Bulk(b"B", b"2", b"b")
NUMPY_STR: Final = Bulk(b"X", b"3", b"x")
NUMPY_BYTES: Final = Bulk(b"Y", b"4", b"y")
ARRAY: Final = Bulk(b"A", b"0", b"a")
SCALAR: Final = b"G"
ORDERED: Final = b"O"
MESSAGE: Final = b"M"
CODED: Final = b"C"
PROTOBUF: Final = b"P"
