"""The layout of a tree of numbers and arrays: what flat sums (`sums`) need to become that tree again.

Two trees can be added up if their layouts are equal; else `difference` says where they differ.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.arrays import empty
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.codecs import codec_named

__all__ = ["NUMBERS", "Layout", "copy_of", "difference", "element_counts", "empty_array", "make_tree", "read_only"]

Layout = tuple[Any, ...]
"""("n", type) of a number; ("a", library, dtype, shape) of an array; ("d", names, layouts), ("l", layouts) and
("t", layouts) of a dict, a list and a tuple; ("x", difference) of a sum of trees that differ."""

NUMBERS: Final[dict[type, tuple[str, type]]] = {
    bool: ("int", np.int64),
    int: ("int", np.int64),
    float: ("float", np.float64),
    complex: ("complex", np.complex128),
}
_DTYPES: Final = dict(NUMBERS.values())
_MADE: Final[dict[str, Callable[[Any], Any]]] = {"int": int, "float": float, "complex": complex}


def element_counts(layout: Layout) -> Iterator[tuple[np.dtype[Any], int]]:
    """Yields dtype and size of each number and array of a layout."""
    kind = layout[0]
    if kind == "n":
        yield np.dtype(_DTYPES[layout[1]]), 1
    elif kind == "a":
        yield np.dtype(layout[2]), math.prod(layout[3])
    else:
        for part in layout[-1]:
            yield from element_counts(part)


def empty_array(size: int, dtype: np.dtype[Any], allocate: Allocate | None) -> NDArray[Any]:
    """Makes a flat array, in memory of `allocate` if that has some."""
    return np.empty(size, dtype) if allocate is None else empty(size, dtype, allocate)


def read_only(array: NDArray[Any], library: str) -> NDArray[Any]:
    """Makes an array read-only, and returns it, whatever the library. `make_tree` takes this as `give`."""
    array.flags.writeable = False
    return array


def copy_of(allocate: Allocate | None, array: NDArray[Any], library: str) -> Any:
    """Returns a copy of a numpy array, as an array of the named library."""
    copy = empty_array(array.size, array.dtype, allocate).reshape(array.shape)
    np.copyto(copy, array)
    match library:
        case "numpy":
            return copy
        case "torch":
            return sys.modules["torch"].from_numpy(copy)
        case "cupy":
            return sys.modules["cupy"].asarray(copy)
    codec = codec_named(library)
    assert codec is not None  # user code has added such an array
    return codec.decode(copy)


def make_tree(
    layout: Layout,
    arrays: dict[np.dtype[Any], NDArray[Any]],
    at: dict[np.dtype[Any], int],
    give: Callable[[NDArray[Any], str], Any],
) -> Any:
    """Makes the tree of a layout.

    Args:
        arrays: dtype -> the flat elements.
        at: dtype -> the index of its next element; grows as elements are taken.
        give: makes an array of the tree, from a view of the elements and the name of its library.
    """
    kind = layout[0]
    if kind == "d":
        return {name: make_tree(part, arrays, at, give) for name, part in zip(layout[1], layout[2], strict=True)}
    if kind in ("l", "t"):
        items = [make_tree(part, arrays, at, give) for part in layout[1]]
        return items if kind == "l" else tuple(items)
    if kind == "n":
        dtype = np.dtype({"int": np.int64, "float": np.float64, "complex": np.complex128}[layout[1]])
        return _MADE[layout[1]](_next_elements(arrays, at, dtype, 1)[0])
    _, library, name, shape = layout
    size = int(np.prod(shape, dtype=np.int64))
    given = give(_next_elements(arrays, at, np.dtype(name), size).reshape(shape), library)
    return given[()] if library == "numpy" and not shape else given  # a scalar, as numpy's own sums are


def _next_elements(
    arrays: dict[np.dtype[Any], NDArray[Any]], at: dict[np.dtype[Any], int], dtype: np.dtype[Any], size: int
) -> NDArray[Any]:
    """Returns the next `size` elements of a dtype, and moves `at` on."""
    first = at[dtype]
    at[dtype] = first + size
    return arrays[dtype][first : first + size]


def difference(layout: Layout, other: Layout) -> tuple[tuple[str, ...], str, str] | None:
    """Returns the first place where two layouts differ: its path, and what each of them has there.

    None if the layouts are equal. "nothing" is what a layout has at a path that only the other one has.
    """
    if layout == other:
        return None
    first, second = dict(_leaves(layout, ())), dict(_leaves(other, ()))
    paths = sorted(
        first.keys() | second.keys(), key=lambda path: ("empty" in first.get(path, second.get(path, "")), path)
    )
    for path in paths:  # an empty dict is what the other layout's elements in it are missing from
        one, two = first.get(path, "nothing"), second.get(path, "nothing")
        if one != two:
            return path, one, two
    return (), "dicts, lists or tuples", "others"


def _leaves(layout: Layout, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields path and description of each number and array, and of each empty dict, list or tuple."""
    kind = layout[0]
    if kind == "n":
        yield path, f"{'an' if layout[1] == 'int' else 'a'} {layout[1]}"
    elif kind == "a":
        other = f"a {layout[1].removeprefix('arrays of ')} array"
        library = {"numpy": "an array", "torch": "a tensor"}.get(layout[1], other)
        yield path, f"{library} of {np.dtype(layout[2])} with shape {layout[3]}"
    else:
        names = layout[1] if kind == "d" else tuple(map(str, range(len(layout[1]))))
        if not names:
            yield path, {"d": "an empty dict", "l": "an empty list", "t": "an empty tuple"}[kind]
        for name, part in zip(names, layout[-1], strict=True):
            yield from _leaves(part, (*path, name))
