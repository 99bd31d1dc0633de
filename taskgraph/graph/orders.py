"""The order of an array's elements in memory, with gaps: numpy and CuPy add up in that order.

So a sum of an array in Fortran's order, or of a column of a matrix, may differ in its last bits from the sum of the
same numbers in C's order. A restored task would compute other results if its arrays had another order than before. An
order is a byte for each axis, the outermost in memory first: the axis's number, `_BACKWARDS` where it lies the other
way round, and `_GAPPED` where something lies between one step along it and what is within. C's without gaps is b"".

A restored array has gaps in the same places, but narrower ones: a state that is a column of a matrix does not take the
room of the matrix. Sums depend on where the gaps are, not on how wide they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.dtypes import opaque, whole_copy

__all__ = ["copied", "forwards", "in_c_order", "order_of", "put_back"]

_BACKWARDS: Final = 0x80
_GAPPED: Final = 0x40
_AXIS: Final = 0x3F
"""An array has 64 axes at most."""


def order_of(shape: Sequence[int], strides: Sequence[int], itemsize: int = 0) -> bytes:
    """Returns the order of an array. Axes of one element may be anywhere: they come first.

    Args:
        itemsize: where gaps count, too, bytes; 0: they do not.
    """
    if 0 in shape:
        return b""
    sides = [axis for axis, extent in enumerate(shape) if extent != 1]
    order = sorted(sides, key=lambda axis: -abs(strides[axis]))
    gapped = _gapped_axes(shape, strides, order, itemsize) if itemsize else frozenset()
    if order == sides and not gapped and all(strides[axis] >= 0 for axis in sides):
        return b""
    ones = [axis for axis, extent in enumerate(shape) if extent == 1]
    return bytes(ones) + bytes(
        axis | (_BACKWARDS if strides[axis] < 0 else 0) | (_GAPPED if axis in gapped else 0) for axis in order
    )


def _gapped_axes(shape: Sequence[int], strides: Sequence[int], order: list[int], itemsize: int) -> frozenset[int]:
    """Returns the axes along which a step is wider or narrower than all steps within; none if elements share memory.

    It may be less wide: of the steps within, the last one ends behind the last element, and its gap may be cut off, as
    in rows of 160 elements of which every third is taken.
    """
    gapped = set()
    within = used = itemsize  # what all steps within span, and what lies from the first element there to the last
    for axis in reversed(order):
        step = abs(strides[axis])
        if step < used:
            return frozenset()
        if step != within:
            gapped.add(axis)
        within = step * shape[axis]
        used += step * (shape[axis] - 1)
    return frozenset(gapped)


def forwards(order: bytes) -> list[int]:
    """The axes, the outermost in memory first; none where one of them lies the other way round."""
    return [] if any(byte & _BACKWARDS for byte in order) else _axes(order)


def _axes(order: bytes) -> list[int]:
    return [byte & _AXIS for byte in order]


def in_c_order(array: Any, order: bytes) -> Any:
    """A view of it whose order is C's."""
    return array[_steps(order)].transpose(_axes(order))


def put_back(array: Any, order: bytes) -> Any:
    """Undoes `in_c_order`. If the order has gaps, the result is a view of a copy with gaps.

    Raises:
        ValueError: it is no order of such an array.
        MemoryError: there is no room for the gaps.
    """
    axes = _axes(order)
    if sorted(axes) != list(range(array.ndim)):
        raise ValueError(f"an array of {array.ndim} axes in the order {axes}")
    if any(byte & _GAPPED for byte in order):
        array = _spread(array, order)
    return array.transpose([axes.index(axis) for axis in range(len(axes))])[_steps(order)]


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """A copy to write to that lies as the array does, with gaps where that has some."""
    order = order_of(array.shape, array.strides, array.itemsize)
    copy = whole_copy(in_c_order(array, order) if order else array)
    found: NDArray[Any] = put_back(copy, order) if order else copy
    return found


def _spread(array: NDArray[Any], order: bytes) -> NDArray[Any]:
    """A copy with gaps of one element each: however many axes have some, it takes three times the room at most."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"gaps in an array of {type(array).__name__}")
    if not array.nbytes:
        raise ValueError("gaps in an array of no bytes")
    strides, within = [0] * array.ndim, array.itemsize
    for at in reversed(range(array.ndim)):
        gapped = bool(order[at] & _GAPPED)
        if gapped and array.shape[at] == 1:
            raise ValueError(f"gaps along axis {at}, of one element")
        strides[at] = within + gapped * array.itemsize
        within = strides[at] * array.shape[at]
    room = np.empty(within, np.uint8)
    spread: NDArray[Any] = np.ndarray(array.shape, array.dtype, room, 0, tuple(strides))
    opaque(spread)[...] = opaque(array)
    spread.flags.writeable = array.flags.writeable
    return spread


def _steps(order: bytes) -> tuple[slice, ...]:
    """Returns a slice for each axis, in its direction."""
    backwards = {byte & _AXIS for byte in order if byte & _BACKWARDS}
    return tuple([slice(None, None, -1 if axis in backwards else None) for axis in range(len(order))])
