"""Values of a collective that are added up: encoded, decoded, added, and made trees again.

A single numpy array stays one. Every other tree becomes flat `Sums`. So 16-bit floats are added in float32, booleans as
int64. Arrays of a device are added on the host. If some tasks have numpy's array where others have a device's, the
result is one of the device on nodes that have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.api import DeviceArrayOnHost
from taskgraph.errors import JobError
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.sum_layouts import (
    Layout,
    copy_of,
    difference,
    element_counts,
    make_tree,
    read_only,
)
from taskgraph.graph.sums import Sums, add_arrays, encode_sums, join_slices, read_sums
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.elastic.tree import Span, halves
from taskgraph.protocol.messages import Encoded

__all__ = [
    "Partial",
    "add_along_tree",
    "add_two",
    "cut_share",
    "encode_result",
    "encode_slices",
    "has_only_layout",
    "join_parts",
    "make_partial",
    "pack",
    "unify_layouts",
    "unpack",
    "without_elements",
]

Partial = NDArray[Any] | Sums
"""What one task, or several together, contribute."""

_UFUNCS: Final[Mapping[str, np.ufunc]] = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


def make_partial(value: Any, op: str, allocate: Allocate) -> Partial:
    """Makes a task's contribution from what its user code returned. A lone array is not copied: `pack` does that.

    Args:
        value: a tree; for `op` "mean" (weight, tree).

    Raises:
        JobError: something in it cannot be added.
    """
    if op == "mean":
        return _weighted_sums(value, allocate)
    if type(value) is np.ndarray and _keeps_its_dtype(value.dtype):
        return value
    return Sums.of(value, allocate=allocate)


def _keeps_its_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iufc" and dtype != np.float16 and dtype.isnative


def _weighted_sums(value: Any, allocate: Allocate) -> Sums:
    """Makes a task's contribution to a mean from (weight, tree): the `Sums` of (weight, weight * tree)."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise JobError(f"for a mean return (weight, tree), as in (len(rows), gradient), not {type(value).__name__}")
    weight, tree = value
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
        raise JobError(f"the weight of a mean is a number, not {type(weight).__name__}: return (float(weight), tree)")
    if not math.isfinite(weight):
        raise JobError(f"the weight of a mean is {weight}")
    sums = _as_floats(Sums.of((float(weight), tree), allocate=allocate), allocate)
    with np.errstate(all="ignore"):
        for array in sums.arrays:
            array *= array.dtype.type(weight)
            if weight == 0:
                array.fill(0)  # the mean of no rows is nan, and counts nothing
    sums.arrays[0][0] = weight  # the first element is the weight itself
    return sums


def _as_floats(sums: Sums, allocate: Allocate) -> Sums:
    """Returns the sums with ints as float64, since a mean of ints is no int."""
    if all(array.dtype.kind in "fc" for array in sums.arrays):
        return sums
    at = {array.dtype: 0 for array in sums.arrays}
    arrays = {array.dtype: array for array in sums.arrays}
    found: dict[np.dtype[Any], list[NDArray[Any]]] = {}
    for dtype, size in element_counts(sums.layout):
        piece = arrays[dtype][at[dtype] : at[dtype] + size]
        at[dtype] += size
        if dtype.kind not in "fc":
            piece = piece.astype(np.float64)
        found.setdefault(piece.dtype, []).append(piece)
    return Sums(_float_layout(sums.layout), [np.concatenate(pieces) for pieces in found.values()])


def _float_layout(layout: Layout) -> Layout:
    kind = layout[0]
    if kind == "n":
        return ("n", "float") if layout[1] == "int" else layout
    if kind == "a":
        ints = np.dtype(layout[2]).kind not in "fc"
        return ("a", layout[1], np.dtype(np.float64).str, layout[3]) if ints else layout
    return (*layout[:-1], tuple(map(_float_layout, layout[-1])))


def pack(partial: Partial, what: str, allocate: Allocate) -> Encoded:
    """Encodes a contribution. `Sums` are not copied, so they must not change later."""
    if isinstance(partial, Sums):
        return encode_sums([partial], allocate, what)
    return encode(partial, what=what, allocate=allocate)


def unpack(value: Encoded) -> Partial:
    """Decodes a contribution that `pack` encoded; its arrays are read-only."""
    found = decode(value)
    return read_sums(found)[0] if isinstance(found, list) else found


def _layout(partial: Partial) -> Layout:
    if isinstance(partial, Sums):
        return partial.layout
    return ("a", "numpy", partial.dtype.str, partial.shape)


def _as_sums(partial: Partial) -> Sums:
    return partial if isinstance(partial, Sums) else Sums(_layout(partial), [partial.reshape(-1)])


def unify_layouts(partials: Mapping[int, Partial], op: str, what: str) -> dict[int, Partial]:
    """Returns {task: contribution}, all of one layout: if some differ, only in devices, all get a common layout.

    Raises:
        JobError: two of them differ; it names the place, and both tasks.
    """
    first, *others = partials
    layout = _layout(partials[first])
    if all(_layout(partials[task]) == layout for task in others):
        return dict(partials)
    for task in others:
        other = _layout(partials[task])
        found = difference(_without_devices(layout), _without_devices(other))
        if found is not None:
            path, one, two = found
            where = ".".join(path[1:] if op == "mean" else path) or "the value"  # a mean has (weight, tree)
            raise JobError(
                f"{what}: {where} is {one} in task {first}, and {two} in task {task}: give the same names, with the "
                f"same shapes and dtypes, in all tasks"
            )
        layout = _on_device_of_either(layout, other)
    return {task: Sums(layout, _as_sums(partial).arrays) for task, partial in partials.items()}


def _without_devices(layout: Layout) -> Layout:
    kind = layout[0]
    if kind == "n":
        return layout
    if kind == "a":
        return ("a", "numpy", *layout[2:]) if layout[1] == "cupy" else layout
    return (*layout[:-1], tuple(map(_without_devices, layout[-1])))


def _on_device_of_either(layout: Layout, other: Layout) -> Layout:
    """Joins two layouts that differ in devices only: an array is on a device if it is there in either."""
    kind = layout[0]
    if kind == "n":
        return layout
    if kind == "a":
        return layout if layout[1] == "cupy" else other
    return (*layout[:-1], tuple(map(_on_device_of_either, layout[-1], other[-1])))


def add_two(first: Partial, second: Partial, op: str, allocate: Allocate) -> Partial:
    """Adds two contributions of one layout, or takes their minimum or maximum."""
    if isinstance(first, Sums) and isinstance(second, Sums):
        return first.add_consuming(second, allocate, _UFUNCS[op])
    assert not isinstance(first, Sums) and not isinstance(second, Sums)
    return add_arrays(first, second, allocate, _UFUNCS[op])


def add_along_tree(partials: Sequence[Partial], op: str, allocate: Allocate) -> Partial:
    """Adds the contributions of all members, in their order, along the tree."""
    return _add_span(Span(0, len(partials)), partials, op, allocate)


def _add_span(span: Span, partials: Sequence[Partial], op: str, allocate: Allocate) -> Partial:
    if span.end - span.first == 1:
        return partials[span.first]
    first, second = (_add_span(half, partials, op, allocate) for half in halves(span))
    return add_two(first, second, op, allocate)


def encode_slices(partial: Partial, count: int, what: str, allocate: Allocate) -> list[Encoded]:
    """Cuts a contribution into `count` slices of its elements, and encodes each with the layout of the whole."""
    whole, adopt = _as_sums(partial), isinstance(partial, Sums)
    return [encode_sums([whole.slice(index, count)], allocate, what, adopt=adopt) for index in range(count)]


def without_elements(partial: Partial) -> Sums:
    """Returns a contribution's layout, as `Sums` without elements."""
    return Sums(_layout(partial), ())


def has_only_layout(partial: Partial) -> bool:
    """True for `without_elements` of a contribution that has elements."""
    return isinstance(partial, Sums) and not partial.arrays and any(element_counts(partial.layout))


def join_parts(parts: Sequence[Partial], allocate: Allocate) -> Sums:
    """Joins the slices of a sum, in their order, to the whole sum."""
    pieces = [_as_sums(part) for part in parts]
    return join_slices(pieces[0].without_arrays(), pieces, allocate)


def encode_result(partial: Partial, op: str, what: str, allocate: Allocate) -> Encoded:
    """Encodes the sum of all contributions as the tree that user code gets; of a mean, divided by the weight.

    Raises:
        JobError: the weights of a mean add up to 0.
        ValueNotEncodable: arrays of a library whose arrays do not travel yet.
    """
    if not isinstance(partial, Sums):
        return encode(partial, what=what, adopt=True, allocate=allocate)
    layout, arrays = partial.layout, partial.arrays
    if op == "mean":
        weight = float(arrays[0][0])
        if weight == 0:
            raise JobError(f"{what}: the weights of all tasks add up to 0, so there is no mean")
        with np.errstate(all="ignore"):
            arrays = tuple([array / array.dtype.type(weight) for array in arrays])
    made = make_tree(
        layout, {array.dtype: array for array in arrays}, {array.dtype: 0 for array in arrays}, _array_maker(allocate)
    )
    return encode(made[1] if op == "mean" else made, what=what, adopt=True, allocate=allocate)


def _array_maker(allocate: Allocate) -> Callable[[NDArray[Any], str], Any]:
    def make_array(array: NDArray[Any], library: str) -> Any:
        if library == "numpy":
            return read_only(array, library)
        return DeviceArrayOnHost(read_only(array, library)) if library == "cupy" else copy_of(allocate, array, library)

    return make_array


def cut_share(value: Any, op: str, index: int, count: int) -> Any:
    """Cuts a value's share for the member at `index` of `count`: `tg.shard` of the first axis of each array.

    Raises:
        JobError: something in the value has no first axis.
    """
    if op == "mean" and isinstance(value, tuple) and len(value) == 2:
        return value[0], _cut_tree(value[1], index, count, "")
    return _cut_tree(value, index, count, "")


def _cut_tree(tree: Any, index: int, count: int, where: str) -> Any:
    if isinstance(tree, dict):
        return {name: _cut_tree(part, index, count, f"{where}[{name!r}]") for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_cut_tree(part, index, count, f"{where}[{i}]") for i, part in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    shape = getattr(tree, "shape", ())
    if not shape:
        raise JobError(
            f"{where or 'the value'} is a {type(tree).__name__} without an axis, and each task gets a share of the "
            f"first axis: give arrays here, and numbers to an allreduce"
        )
    rows = int(shape[0])
    return tree[rows * index // count : rows * (index + 1) // count]  # as tg.shard
