"""In which order an array's elements lie in memory: numpy, and CuPy, add up in that order.

So a sum of a state in Fortran's order may have other last bits than one of the same numbers in C's, and a successor
whose arrays came back in another order than its predecessor's would give other results. An order is a byte for each
axis, the outermost in memory first: the axis's number, and `_BACKWARDS` where it lies the other way round. C's is b"".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["in_c_order", "order_of", "put_back"]

_BACKWARDS: Final = 0x80


def order_of(shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """The order of an array. Axes of one element may be anywhere: they come first."""
    if 0 in shape:
        return b""
    sides = [axis for axis, extent in enumerate(shape) if extent != 1]
    order = sorted(sides, key=lambda axis: -abs(strides[axis]))
    if order == sides and all(strides[axis] >= 0 for axis in sides):
        return b""
    order = [axis for axis, extent in enumerate(shape) if extent == 1] + order
    return bytes(axis | (_BACKWARDS if shape[axis] != 1 and strides[axis] < 0 else 0) for axis in order)


def in_c_order(array: Any, order: bytes) -> Any:
    """A view of it whose order is C's."""
    return array[_steps(order)].transpose([byte & ~_BACKWARDS for byte in order])


def put_back(array: Any, order: bytes) -> Any:
    """The view of which `in_c_order` gave this one.

    Raises:
        ValueError: it is no order of such an array.
    """
    axes = [byte & ~_BACKWARDS for byte in order]
    if sorted(axes) != list(range(array.ndim)):
        raise ValueError(f"an array of {array.ndim} axes in the order {axes}")
    return array.transpose([axes.index(axis) for axis in range(len(axes))])[_steps(order)]


def _steps(order: bytes) -> tuple[slice, ...]:
    """By axis, the way it is gone through."""
    backwards = {byte & ~_BACKWARDS for byte in order if byte & _BACKWARDS}
    return tuple([slice(None, None, -1 if axis in backwards else None) for axis in range(len(order))])
