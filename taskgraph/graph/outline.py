"""The arrays of an encoded value by name, without making anything of it: no user code runs, nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.decoding import Reader
from taskgraph.graph.orders import forwards
from taskgraph.graph.tags import CODED, COLUMNS, DICT, LIST, MESSAGE, ORDERED, PROTOBUF, RUN, TUPLE
from taskgraph.graph.values import value_end
from taskgraph.protocol.messages import Encoded

__all__ = ["Named", "outline"]

_INT_BITS: Final = 256
"""Of an integer that is a key: a larger one is named by its place."""


@dataclass(frozen=True, slots=True)
class Named:
    """One array of a value.

    Attributes:
        path: keys, indices and field names that lead to it, as texts.
        data: its elements in C order.
        buffer: which of the value's buffers that is; None for a small one, which lies in meta.
        part: where in that buffer it begins, if the buffer has several parts.
    """

    path: tuple[str, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: memoryview
    buffer: int | None
    part: int | None = None


def outline(encoded: Encoded) -> list[Named]:
    """The value's arrays, in the order they were encoded.

    Raises:
        DecodeError: the bytes are not a value.
    """
    # Where arrays lived is told after the value; it does not matter here, so the reader is told of no device.
    reader = _Outline(encoded)
    reader.whole()
    return reader.found


class _Outline(Reader):
    """A reader that keeps the way to each array, and makes no messages and no values of codecs."""

    __slots__ = ("_path", "found")

    def __init__(self, encoded: Encoded) -> None:
        super().__init__(encoded, 1, value_end(encoded.meta), frozenset(), None, False)
        self._path: list[str] = []
        self.found: list[Named] = []

    def _at_step(self, step: str) -> Any:
        self._path.append(step)
        found = self._value()
        self._path.pop()
        return found

    def steps(self) -> None:
        for index in range(self._count(1)):
            self._at_step(str(index))
        self._depth -= 1

    def skip_run(self) -> None:
        _, kind = self._run_of()
        self._run_parts(kind)

    def skip_columns(self) -> None:
        for _ in range(2):
            self._take(1)
            self.skip_run()

    def entries(self) -> None:
        for index in range(self._count(2)):
            key = self._value()
            self._at_step(f"key{index}" if (step := _step(key)) is None else step)
        self._depth -= 1

    def fields(self) -> None:
        self._text()
        count = int.from_bytes(self._take(4), "little")
        self._enter()
        for _ in range(count):
            self._at_step(self._text())
        self._depth -= 1

    def ordered(self) -> None:
        """Of one in Fortran's order there is a name for what lies there: `.T`; of one in C's it is its own, as gaps do
        not lie there. Of others there is none.
        """
        known = len(self.found)
        _, order = self._array_in_order()
        if (axes := forwards(order)) == list(range(len(order))):
            return
        if axes != list(reversed(range(len(order)))):
            del self.found[known:]
        for at in range(known, len(self.found)):
            self.found[at] = replace(self.found[at], path=(*self.found[at].path, "T"))

    def inner(self) -> None:
        self._text()  # of a codec or of a protobuf message: what follows is a value
        self._enter()
        self._value()
        self._depth -= 1

    def view(  # type: ignore[override]
        self,
        data: bytes | memoryview | NDArray[Any],
        at: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        writable: bool,
    ) -> None:
        """Takes note of an array instead of making it."""
        size = math.prod(shape) * dtype.itemsize
        buffer, part = None, False
        if isinstance(data, memoryview):
            buffer = self._next - 1
        elif not isinstance(data, bytes):
            buffer, part, data = self._pack_number, True, data.data
        self.found.append(
            Named(tuple(self._path), dtype, shape, memoryview(data)[at : at + size], buffer, at if part else None)
        )


def _step(key: object) -> str | None:
    """A key as a step of a path; None where it makes no text that somebody would want to read."""
    if isinstance(key, int):
        return str(key) if key.bit_length() <= _INT_BITS else None  # Python refuses to write thousands of digits
    return str(key) if isinstance(key, str | float | bytes) else None


_OWN: Final[dict[bytes, Callable[[_Outline], None]]] = {
    LIST: _Outline.steps,
    TUPLE: _Outline.steps,
    RUN: _Outline.skip_run,
    DICT: _Outline.entries,
    COLUMNS: _Outline.skip_columns,
    MESSAGE: _Outline.fields,
    ORDERED: _Outline.ordered,
    CODED: _Outline.inner,
    PROTOBUF: _Outline.inner,
}
_Outline.readers = tuple(_OWN.get(bytes((tag,)), read) for tag, read in enumerate(Reader.readers))
