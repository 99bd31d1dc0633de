"""Runs: many values of one plain type, as a list, a tuple, or the keys of a dict have them, written and read at once.

One by one a number takes some 140 ns to write and as much to read; in a run it is 10.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from taskgraph.errors import DecodeError
from taskgraph.graph.tags import FLOAT, INT, STR, TRUE

__all__ = ["LEAST", "PARTS", "packed", "unpacked"]

LEAST: Final = 16
"""Fewer parts are written one by one."""
PARTS: Final = {FLOAT: 1, INT: 1, TRUE: 1, STR.inline: 2}
"""By the kind of a run, how many values it is written as."""

_KINDS: Final = {float: FLOAT, int: INT, bool: TRUE, str: STR.inline}
_NUMBERS: Final = {FLOAT: "d", INT: "q"}
_OF_LENGTHS: Final = "Q"


def packed(items: Sequence[Any]) -> tuple[bytes, tuple[Any, ...]] | None:
    """The kind of a run, and the values it is written as; None where these are no run, or too few.

    Args:
        items: nobody may change it meanwhile.
    """
    if len(items) < LEAST:
        return None
    kind = _KINDS.get(type(items[0]))
    if kind is None or len(set(map(type, items))) > 1:
        return None
    if kind == STR.inline:
        return kind, (_numbers(_OF_LENGTHS, [len(item) for item in items]), "".join(items))
    if kind == TRUE:
        return kind, (bytes(items),)
    try:
        return kind, (_numbers(_NUMBERS[kind], items),)
    except struct.error:  # an integer of more than 64 bits
        return None


def unpacked(kind: bytes, parts: Sequence[Any]) -> Sequence[Any]:
    """What was `packed`, as a list or a tuple.

    Raises:
        DecodeError: these are no parts of a run.
    """
    data = parts[0]
    if type(data) is not bytes:
        raise DecodeError(f"a run of kind {kind!r} without its bytes")
    return _UNPACK[kind](data, *parts[1:])


def _numbers(code: str, items: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(items)}{code}", *items)


def _read_numbers(code: str, data: bytes) -> tuple[Any, ...]:
    count, rest = divmod(len(data), 8)
    if rest:
        raise DecodeError(f"a run of numbers of 8 bytes has {len(data)} bytes")
    return struct.unpack(f"<{count}{code}", data)


def _read_bools(data: bytes) -> list[bool]:
    if data.count(0) + data.count(1) != len(data):
        raise DecodeError("a run of bools has others than 0 and 1")
    return list(map(bool, data))


def _read_texts(data: bytes, text: Any) -> list[str]:
    lengths = _read_numbers(_OF_LENGTHS, data)
    if type(text) is not str or sum(lengths) != len(text):
        raise DecodeError("the texts of a run are not as long as it says")
    return [text[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


_UNPACK: Final[dict[bytes, Callable[..., Sequence[Any]]]] = {
    FLOAT: lambda data: _read_numbers("d", data),
    INT: lambda data: _read_numbers("q", data),
    TRUE: _read_bools,
    STR.inline: _read_texts,
}
