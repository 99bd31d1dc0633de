"""The arrays of an encoded value by name, without making the value: no user code runs, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from taskgraph.graph import layout
from taskgraph.graph.decoding import Reader, read_tree
from taskgraph.graph.orders import forwards
from taskgraph.graph.values import value_end
from taskgraph.protocol.messages import Encoded

__all__ = ["Named", "outline"]

_INT_BITS: Final = 256
"""A key that is a larger integer is named by its position: Python refuses to write thousands of digits."""


@dataclass(frozen=True, slots=True)
class Named:
    """One array of a value, with its path.

    Attributes:
        path: keys, indices and field names that lead to it, as texts.
        data: its elements in C order.
        buffer: the buffer of the value that is this array; None for a small array.
    """

    path: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: memoryview
    buffer: memoryview | None


def outline(encoded: Encoded) -> list[Named]:
    """The value's arrays, in the order of their encoding.

    Raises:
        DecodeError: the bytes are not a value.
    """
    # The trailer says which arrays were on a device, which does not matter here.
    tree = _Outline(encoded, value_end(encoded.meta), frozenset(), None, False).whole()
    return list(_walk(tree, ()))


@dataclass(eq=False, slots=True)
class _Array:
    """Stands for an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: memoryview
    buffer: memoryview | None
    order: bytes = b""


@dataclass(eq=False, slots=True)
class _Message:
    """Stands for a message; may be a dict's key, as a dict may not."""

    fields: dict[str, Any]


class _Outline(Reader):
    """A reader that makes no arrays, no messages and no values of codecs."""

    __slots__ = ()
    extensions: ClassVar = dict(Reader.extensions)

    def _array_of(
        self, data: Any, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int, number: int
    ) -> Any:
        self._check(data, at, dtype, nbytes)
        elements = memoryview(data if type(data) is bytes else data.data if isinstance(data, np.ndarray) else data)
        return _Array(dtype, shape, elements[at : at + nbytes], data if type(data) is memoryview else None)

    def _in_order(self, array: Any, order: bytes) -> Any:
        array.order = order
        return array

    def _inner(self, payload: memoryview) -> Any:
        """The value behind the name of a codec or a protobuf message."""
        return read_tree(memoryview(layout.read_named(payload)[1]))

    def _fields_of(self, payload: memoryview) -> Any:
        fields = self._inner(payload)
        return _Message(fields if type(fields) is dict else {})


_Outline.extensions |= {
    layout.MESSAGE_EXT: _Outline._fields_of,
    layout.CODEC_EXT: _Outline._inner,
    layout.PROTOBUF_EXT: _Outline._inner,
}


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[Named]:
    if isinstance(tree, _Array):
        if (last := _named_order(tree.order)) is not None:
            yield Named(path + last, tree.dtype, tree.shape, tree.data, tree.buffer)
        return
    if isinstance(tree, _Message):
        tree = tree.fields
    if type(tree) is dict:
        for index, (key, value) in enumerate(tree.items()):
            yield from _walk(value, (*path, f"key{index}" if (step := _step(key)) is None else step))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            if type(value) is not float:
                yield from _walk(value, (*path, str(index)))


def _named_order(order: bytes) -> tuple[str, ...] | None:
    """The last step of an array's path: an array in Fortran's order is exported as `name.T`.

    None: an array of mixed order, which has no name. Gaps make no difference, since they are not written.
    """
    axes = forwards(order)
    if axes == list(range(len(order))):
        return ()
    return ("T",) if axes == list(reversed(range(len(order)))) else None


def _step(key: object) -> str | None:
    """A key as a step of a path; None if it makes no text that a person would want to read."""
    if isinstance(key, int):
        return str(key) if key.bit_length() <= _INT_BITS else None
    return str(key) if isinstance(key, str | float | bytes) else None
