"""How the arrays of a segment lie in one block of bytes.

    ids         int64, of shape (n,)
    steps       int64, of shape (n,), if the optimizer counts steps
    rows        of the table's dtype, of shape (n, width)
    slots       like the rows, one after another, in the optimizer's order

All are in the machine's byte order. n follows from the length of the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.arrays import immutable_copy
from taskgraph.tables.options import TableOptions

__all__ = ["SegmentLayout", "viewed_block"]

Array = NDArray[Any]
Block = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The layout of the segments of one table.

    Attributes:
        fields: name -> dtype and width of an array, in order; width 0: of one dimension.
        row_bytes: bytes of a row, with its id and slots.
    """

    fields: Mapping[str, tuple[np.dtype[Any], int]]
    row_bytes: int

    @classmethod
    def of(cls, table: TableOptions) -> SegmentLayout:
        """Returns the layout of a table."""
        names = sorted(("ids", "rows", *table.rule.slots), key=lambda name: (name not in _COUNTS, name != "rows"))
        fields = {
            name: (np.dtype(np.int64), 0) if name in _COUNTS else (table.numpy_dtype, table.width) for name in names
        }
        return cls(fields, sum(dtype.itemsize * max(1, width) for dtype, width in fields.values()))

    def empty(self, name: str, count: int) -> Array:
        """Makes the array `name` for `count` rows; its values are not set."""
        dtype, width = self.fields[name]
        return np.empty((count, width) if width else count, dtype)

    def pack(self, segment: Mapping[str, Array]) -> dict[str, Array]:
        """Copies the arrays of a segment into a block of bytes that never changes, and returns views of them in it."""
        return self.unpack(immutable_copy([segment[name] for name in self.fields]))

    def unpack(self, block: Block) -> dict[str, Array]:
        """Returns name -> array of a segment, as views of its block."""
        count = block.nbytes // self.row_bytes
        parts, at = {}, 0
        for name, (dtype, width) in self.fields.items():
            shape = (count, width) if width else (count,)
            parts[name] = np.ndarray(shape, dtype, block, at)  # its base is the block
            at += parts[name].nbytes
        return parts


_COUNTS = ("ids", "steps")


def viewed_block(segment: Mapping[str, Array]) -> Block:
    """Returns the block that the arrays of a packed segment are views of."""
    return cast(Block, segment["ids"].base)
