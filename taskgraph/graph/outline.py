"""Reads an encoded value without the types of users: no user code runs. `outline` lists its arrays by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from taskgraph.graph import layout
from taskgraph.graph.decoding import Reader, read_tree
from taskgraph.graph.orders import forward_axes
from taskgraph.graph.values import value_end
from taskgraph.protocol.messages import Encoded

__all__ = ["NamedArray", "decode_untyped", "outline"]

_INT_BITS: Final = 256
"""A key that is a larger integer is named by its position: Python refuses to write thousands of digits."""


@dataclass(frozen=True, slots=True)
class NamedArray:
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


def outline(encoded: Encoded) -> list[NamedArray]:
    """Lists the value's arrays, in the order of their encoding, without those of mixed memory order.

    Raises:
        DecodeError: the bytes are not a value.
    """
    # The trailer says which arrays were on a device, which does not matter here.
    tree = _OutlineReader(encoded, value_end(encoded.meta), frozenset(), None, False).read()
    return list(_walk(tree, ()))


def decode_untyped(encoded: Encoded) -> Any:
    """Decodes a value whose types need not be declared here.

    A message becomes a stub whose `fields` is a dict. A value of a codec becomes what the codec had made of it. Arrays
    are read-only views on the encoded bytes.

    Raises:
        DecodeError: the bytes are not a value.
    """
    return _UntypedReader(encoded, value_end(encoded.meta), frozenset(), None, False).read()


@dataclass(eq=False, slots=True)
class _ArrayStub:
    """Replaces an array in the outline of a value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: memoryview
    buffer: memoryview | None
    order: bytes = b""


@dataclass(eq=False, slots=True)
class _MessageStub:
    """Replaces a message in the outline of a value. Unlike a dict, it is hashable: messages can be keys."""

    fields: dict[str, Any]


class _UntypedReader(Reader):
    """Decodes a value with stubs in place of messages, and without codecs."""

    __slots__ = ()
    extensions: ClassVar = dict(Reader.extensions)

    def _payload_tree(self, payload: memoryview) -> Any:
        """Decodes what stands behind the name of a codec or a message, without calling the codec or the class."""
        return read_tree(memoryview(layout.read_name_and_payload(payload)[1]))

    def _message_stub(self, payload: memoryview) -> Any:
        fields = self._payload_tree(payload)
        return _MessageStub(fields if type(fields) is dict else {})


_UntypedReader.extensions |= {
    layout.MESSAGE_EXT: _UntypedReader._message_stub,
    layout.CODEC_EXT: _UntypedReader._payload_tree,
    layout.PROTOBUF_EXT: _UntypedReader._payload_tree,
}


class _OutlineReader(_UntypedReader):
    """Decodes a value with stubs in place of arrays, too."""

    __slots__ = ()

    def _make_array(
        self, data: Any, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int, number: int
    ) -> Any:
        self._check_bounds(data, at, dtype, nbytes)
        elements = memoryview(data if type(data) is bytes else data.data if isinstance(data, np.ndarray) else data)
        return _ArrayStub(dtype, shape, elements[at : at + nbytes], data if type(data) is memoryview else None)

    def _restore_order(self, array: Any, order: bytes) -> Any:
        array.order = order
        return array


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[NamedArray]:
    """Yields the arrays of a tree of stubs, with their paths; skips arrays of mixed order, which get no name."""
    if isinstance(tree, _ArrayStub):
        if (last := _named_order(tree.order)) is not None:
            yield NamedArray(path + last, tree.dtype, tree.shape, tree.data, tree.buffer)
        return
    if isinstance(tree, _MessageStub):
        tree = tree.fields
    if type(tree) is dict:
        for index, (key, value) in enumerate(tree.items()):
            yield from _walk(value, (*path, f"key{index}" if (step := _path_step(key)) is None else step))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            if type(value) is not float:
                yield from _walk(value, (*path, str(index)))


def _named_order(order: bytes) -> tuple[str, ...] | None:
    """Returns the last steps of an array's path: none in C order, `T` in Fortran order, since `name.T` is exported.

    Returns None for an array of mixed order, which gets no name. Gaps make no difference, since they are not written.
    """
    axes = forward_axes(order)
    if axes == list(range(len(order))):
        return ()
    return ("T",) if axes == list(reversed(range(len(order)))) else None


def _path_step(key: object) -> str | None:
    """Returns a dict's key as a step of a path; None if its text would not be readable."""
    if isinstance(key, int):
        return str(key) if key.bit_length() <= _INT_BITS else None
    return str(key) if isinstance(key, str | float | bytes) else None
