"""Encodes the memory order of an array's elements, with gaps, so that a restored array has the same order.

numpy and CuPy add in memory order, so the sum of an array in Fortran order, or of a column of a matrix, may differ in
its last bits from the sum of the same numbers in C order. A restored task would compute other results if its arrays had
another order than before. An order has a byte for each axis, the outermost in memory first: the axis's number,
`_BACKWARDS` if its stride is negative, and `_GAPPED` if gaps lie along the axis. C order without gaps is b"".

A restored array has gaps in the same places, but narrower ones: a state that is a column of a matrix does not take the
memory of the matrix. Sums depend on the places of gaps, not on their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.dtypes import as_void, copy_with_padding

__all__ = ["copy_in_order", "forward_axes", "in_c_order", "order_of", "restore_order"]

_BACKWARDS: Final = 0x80
_GAPPED: Final = 0x40
_AXIS: Final = 0x3F
"""An array has 64 axes at most."""


def order_of(shape: Sequence[int], strides: Sequence[int], itemsize: int = 0) -> bytes:
    """Returns the order of an array. Axes of one element come first, since their place makes no difference.

    Args:
        itemsize: bytes of an element, to record gaps; 0 ignores gaps.
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
    """Returns the axes whose stride differs from the span of the inner axes; none if elements share memory.

    The stride may be smaller than that span, since the gap after the last element may be cut off, as in rows of 160
    elements of which every third is taken.
    """
    gapped = set()
    within = used = itemsize  # the span of the inner axes with and without the gap after the last element
    for axis in reversed(order):
        step = abs(strides[axis])
        if step < used:
            return frozenset()
        if step != within:
            gapped.add(axis)
        within = step * shape[axis]
        used += step * (shape[axis] - 1)
    return frozenset(gapped)


def forward_axes(order: bytes) -> list[int]:
    """Returns the axes, the outermost in memory first; an empty list if an axis has a negative stride."""
    return [] if any(byte & _BACKWARDS for byte in order) else _axes(order)


def _axes(order: bytes) -> list[int]:
    return [byte & _AXIS for byte in order]


def in_c_order(array: Any, order: bytes) -> Any:
    """Returns a view of the array in C order, given the array's order."""
    return array[_direction_slices(order)].transpose(_axes(order))


def restore_order(array: Any, order: bytes) -> Any:
    """Reverses `in_c_order`. If the order has gaps, the result is a view of a copy with gaps.

    Raises:
        ValueError: the order does not fit the array.
        MemoryError: no memory for the gaps.
    """
    axes = _axes(order)
    if sorted(axes) != list(range(array.ndim)):
        raise ValueError(f"an array of {array.ndim} axes in the order {axes}")
    if any(byte & _GAPPED for byte in order):
        array = _copy_with_gaps(array, order)
    return array.transpose([axes.index(axis) for axis in range(len(axes))])[_direction_slices(order)]


def copy_in_order(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a writable copy of the array with the same memory order and gaps."""
    order = order_of(array.shape, array.strides, array.itemsize)
    copy = copy_with_padding(in_c_order(array, order) if order else array)
    found: NDArray[Any] = restore_order(copy, order) if order else copy
    return found


def _copy_with_gaps(array: NDArray[Any], order: bytes) -> NDArray[Any]:
    """Returns a copy with gaps of one element each. It takes at most three times the memory of the array."""
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
    as_void(spread)[...] = as_void(array)
    spread.flags.writeable = array.flags.writeable
    return spread


def _direction_slices(order: bytes) -> tuple[slice, ...]:
    """Returns a slice for each axis: reversed if the axis has a negative stride."""
    backwards = {byte & _AXIS for byte in order if byte & _BACKWARDS}
    return tuple([slice(None, None, -1 if axis in backwards else None) for axis in range(len(order))])
