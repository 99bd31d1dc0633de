"""Trees of numbers and arrays as sums: flat arrays, one for each dtype, with the layout of the tree.

Sums of equal layout are added element by element. 16-bit floats are summed in float32, booleans and ints as int64;
every other dtype keeps its own. A sum becomes a tree again of the libraries and types it was made of. A tree may have
sums in it, in place of the trees that they were made of.

What parts collect travels with the sums, and is not added up.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taskgraph.device.lookup import device_of
from taskgraph.errors import JobError, StepError
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.libraries import codec_of_library
from taskgraph.graph.refusals import library_of
from taskgraph.graph.sum_layouts import (
    NUMBERS,
    Layout,
    copy_of,
    difference,
    element_counts,
    empty_array,
    make_tree,
    read_only,
)
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.elastic.tree import Span, halves
from taskgraph.protocol.messages import Encoded

__all__ = ["Sums", "add_arrays", "add_up", "decode_sums", "encode_sums", "join_slices", "read_sums"]

_UNLIKE: Final = "x"


class Sums:
    """The sum of the trees of some parts.

    Attributes:
        layout: the layout of the tree.
        arrays: flat and C-contiguous, one for each dtype, in the order of the dtypes' first elements in the tree.
        collected: part -> the encoded tree that it collected, in the order of the parts.
        workers: the name of the worker that computed the sum; if trees differ, of a worker with each of the two; or
            empty: not known.
    """

    __slots__ = ("arrays", "collected", "layout", "workers")

    def __init__(
        self, layout: Layout, arrays: Sequence[NDArray[Any]], collected: Mapping[int, Encoded] | None = None
    ) -> None:
        self.layout = layout
        self.arrays = tuple(arrays)
        self.collected = dict(collected or {})
        self.workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, tree: Any, collected: Mapping[int, Encoded] | None = None, allocate: Allocate | None = None) -> Sums:
        """Makes the sum of a tree. Copies its arrays, but uses those of sums in it: no other code may use these.

        Raises:
            JobError: something in the tree cannot be summed.
        """
        found = _Elements()
        layout = _take_tree(tree, found, "")
        return cls(layout, found.joined(allocate), collected)

    @property
    def nbytes(self) -> int:
        """The memory of the arrays and of what was collected."""
        return sum(array.nbytes for array in self.arrays) + self._collected_bytes

    @classmethod
    def zeros(cls, layout: Layout) -> Sums:
        """Makes the sum of no parts, with a layout."""
        sizes: dict[np.dtype[Any], int] = {}
        for dtype, size in element_counts(layout):
            sizes[dtype] = sizes.get(dtype, 0) + size
        return cls(layout, [np.zeros(size, dtype) for dtype, size in sizes.items()])

    def without_arrays(self) -> Sums:
        """Returns sums with the layout and the collected trees, but no elements."""
        return self._with((), self.collected)

    def _with(self, arrays: Sequence[NDArray[Any]], collected: Mapping[int, Encoded]) -> Sums:
        """Returns sums of the same layout and workers, with these arrays and collected trees."""
        sums = Sums(self.layout, arrays, collected)
        sums.workers = self.workers
        return sums

    def slice(self, index: int, count: int) -> Sums:
        """Returns the elements of one of `count` ranges, with the layout of all. No copy: this sum is read-only now."""
        arrays = []
        for array in self.arrays:
            array.flags.writeable = False
            arrays.append(array[array.size * index // count : array.size * (index + 1) // count])
        return self._with(arrays, self.collected)

    @property
    def has_unlike_layouts(self) -> bool:
        """True if the added trees had different layouts: the sum has no elements, and cannot become a tree."""
        return bool(self.layout[0] == _UNLIKE)

    def add_consuming(self, other: Sums, allocate: Allocate | None = None, by: np.ufunc = np.add) -> Sums:
        """Returns the sum of two sums, of which `other` has the later parts; see `has_unlike_layouts`.

        Adds into the arrays of this sum, which must not be used then, unless they are read-only (sent or received).

        Args:
            by: adds two arrays, or takes their minimum or maximum.
        """
        if self.layout != other.layout:
            unlike = next((each for each in (self, other) if each.has_unlike_layouts), None)
            if unlike is None:
                unlike = Sums((_UNLIKE, difference(self.layout, other.layout)), ())
                unlike.workers = (*self.workers, *other.workers)
            return unlike._with((), {**self.collected, **other.collected})
        arrays = [add_arrays(a, b, allocate, by) for a, b in zip(self.arrays, other.arrays, strict=True)]
        return self._with(arrays, {**self.collected, **other.collected})

    @property
    def is_large(self) -> bool:
        """True if an array, or what was collected, is too large to be encoded, sent and added up on the event loop."""
        return any(array.nbytes >= INLINE_BYTES for array in self.arrays) or self._collected_bytes >= INLINE_BYTES

    @property
    def _collected_bytes(self) -> int:
        return sum(value.size_bytes for value in self.collected.values())

    def tree(self, views: Container[str] = (), allocate: Allocate | None = None) -> Any:
        """Makes the tree. Its arrays are copies.

        Raises:
            StepError: the trees that were added up differ.

        Args:
            views: names in the tree, a dict, whose arrays are read-only numpy views.
            allocate: gives memory for large copies.
        """
        if self.has_unlike_layouts:
            path, first, second = self.layout[1]
            raise StepError(
                f"{'.'.join(path) or 'what they add'} is {self.difference_text(first, second)}: add the same names "
                f"with the same shapes and dtypes, on all workers"
            )
        at = {array.dtype: 0 for array in self.arrays}
        arrays = {array.dtype: array for array in self.arrays}
        if not views:
            return make_tree(self.layout, arrays, at, partial(copy_of, allocate))
        _, names, parts = self.layout
        return {
            name: make_tree(part, arrays, at, read_only if name in views else partial(copy_of, allocate))
            for name, part in zip(names, parts, strict=True)
        }

    def difference_text(self, first: str, second: str) -> str:
        """Says, of a sum of trees that differ, in whose parts something is `first`, and in whose `second`."""
        both = len(self.workers) == 2
        one, other = (f"the parts of {name}" for name in self.workers) if both else ("some parts", "others")
        return f"{first} in {one}, and {second} in {other}"

    @property
    def all_finite(self) -> bool:
        """True if no element is nan or infinite."""
        return all(_is_finite(array) for array in self.arrays)


def add_up(held: Mapping[Span, Sums], span: Span, allocate: Allocate | None = None) -> Sums:
    """Returns the sum of a span: adds the sums in `held` along the tree, and uses them up as `add_consuming` does."""
    if span in held:
        return held[span]
    first, second = halves(span)
    return add_up(held, first, allocate).add_consuming(add_up(held, second, allocate), allocate)


def join_slices(whole: Sums, slices: Sequence[Sums], allocate: Allocate | None = None) -> Sums:
    """Joins the slices of a sum; `whole` has its layout, and what was collected."""
    pieces = zip(*(each.arrays for each in slices), strict=True)
    return Sums(whole.layout, [_concatenated(arrays, allocate) for arrays in pieces], whole.collected)


def _is_finite(array: NDArray[Any]) -> bool:
    if array.dtype.kind in "iu":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


class _Elements:
    """The elements of a tree: flat arrays by dtype, in the order of the tree."""

    def __init__(self) -> None:
        self._found: dict[np.dtype[Any], list[NDArray[Any]]] = {}
        self._constant: set[int] = set()  # ids of arrays that do not change later

    def put(self, flat: NDArray[Any], constant: bool = False) -> None:
        """Adds a flat array to those of its dtype; `constant`: its memory does not change later."""
        self._found.setdefault(flat.dtype, []).append(flat)
        if constant:
            self._constant.add(id(flat))

    def joined(self, allocate: Allocate | None) -> list[NDArray[Any]]:
        """Returns one array for each dtype: copies, unless the only one does not change later."""
        return [
            flat[0] if len(flat) == 1 and id(flat[0]) in self._constant else _concatenated(flat, allocate)
            for flat in self._found.values()
        ]


def _concatenated(flat: Sequence[NDArray[Any]], allocate: Allocate | None) -> NDArray[Any]:
    whole = empty_array(sum(array.size for array in flat), flat[0].dtype, allocate)
    np.concatenate(flat, out=whole)
    return whole


def add_arrays(
    first: NDArray[Any], second: NDArray[Any], allocate: Allocate | None = None, by: np.ufunc = np.add
) -> NDArray[Any]:
    """Adds two arrays of one shape and dtype: to `first` if it can be written to, else to a new array."""
    writable = first.flags.writeable
    out = first if writable else empty_array(first.size, first.dtype, allocate).reshape(first.shape)
    with np.errstate(all="ignore"):  # inf and nan are `nonfinite` of run.steps
        by(first, second, out=out)
    return out


def _take_tree(tree: Any, found: _Elements, where: str) -> Layout:
    """Returns the layout of a tree, and puts its elements into `found`."""
    if type(tree) is Sums:
        for array in tree.arrays:
            found.put(array, constant=True)
        return tree.layout
    known = NUMBERS.get(type(tree))
    if known is not None:
        name, dtype = known
        if name == "int" and not -(2**63) <= tree < 2**63:
            raise JobError(f"{where or 'a value'} is {tree}: ints are summed with 64 bits; add it as a float")
        found.put(np.array([tree], dtype), constant=True)
        return ("n", name)
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            raise JobError(f"{where or 'a dict'} has keys that are no texts: sums have names")
        names = sorted(tree)
        return ("d", tuple(names), tuple(_take_tree(tree[name], found, f"{where}[{name!r}]") for name in names))
    if isinstance(tree, list | tuple):
        kind = "l" if isinstance(tree, list) else "t"
        return (kind, tuple(_take_tree(item, found, f"{where}[{i}]") for i, item in enumerate(tree)))
    library, array = _as_numpy(tree, where)
    if array.dtype == np.bool_:
        array = array.astype(np.int64)
    elif array.dtype == np.float16:
        array = array.astype(np.float32)
    elif array.dtype.kind not in "iufc":
        raise JobError(f"{where or 'a value'} has dtype {array.dtype}: only numbers can be summed")
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    found.put(array.reshape(-1))
    return ("a", library, array.dtype.str, tuple(array.shape))


def _as_numpy(value: Any, where: str) -> tuple[str, NDArray[Any]]:
    """Returns the library of an array, and its elements on the host. Raises JobError if the value is no array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        return "torch", tensor.cpu().contiguous().numpy()
    if isinstance(value, np.ma.MaskedArray):
        raise JobError(f"{where or 'a value'} is a masked array, and a sum has no mask: add value.filled(0)")
    if isinstance(value, np.ndarray | np.generic):
        return "numpy", np.asarray(value)
    library = "cupy"
    if (codec := codec_of_library(value)) is not None:
        library, value = codec.name, codec.encode(value)
    if (device := device_of(value)) is not None:
        value = device.to_host(value)
    if isinstance(value, np.ndarray):
        return library, value
    if name := library_of(value):
        raise JobError(f"{where or 'a value'} is an array of {name}: tg.arrays({name}) in the driver lets it be summed")
    kind = "None (does the function that gives it lack a `return`?)" if value is None else f"a {type(value).__name__}"
    raise JobError(
        f"{where or 'a value'} is {kind}: a sum is made of numbers, arrays, and dicts, lists and tuples of them"
    )


def encode_sums(
    sums: Sequence[Sums],
    allocate: Allocate | None = None,
    what: str = "the sums of an elastic step",
    *,
    adopt: bool = True,
) -> Encoded:
    """Encodes sums to send them.

    Args:
        adopt: the sums do not change later, so that they need no copy.
    """
    return encode(
        [[_packed_layout(s.layout), list(s.arrays), _packed_trees(s.collected)] for s in sums],
        what=what,
        adopt=adopt,
        allocate=allocate,
    )


def decode_sums(value: Encoded) -> list[Sums]:
    """Returns the sums of a value of `encode_sums`."""
    return read_sums(decode(value))


def read_sums(decoded: Any) -> list[Sums]:
    """Returns the sums of a decoded value of `encode_sums`."""
    return [
        Sums(_unpacked_layout(layout), arrays, {part: _unpacked(*packed) for part, packed in collected.items()})
        for layout, arrays, collected in decoded
    ]


@lru_cache(maxsize=256)
def _packed_layout(layout: Layout) -> bytes:
    return encode(layout).meta


@lru_cache(maxsize=256)
def _unpacked_layout(packed: bytes) -> Layout:
    layout: Layout = decode(Encoded(packed, (), b""))
    return layout


_Packed = tuple[bytes, list[NDArray[np.uint8]], bytes]


def _packed_trees(collected: Mapping[int, Encoded]) -> dict[int, _Packed]:
    return {part: _packed(tree) for part, tree in collected.items()}


def _packed(tree: Encoded) -> _Packed:
    """Returns an encoded tree as a value that can be encoded again within another one."""
    return bytes(tree.meta), [np.frombuffer(buffer, np.uint8) for buffer in tree.buffers], tree.digest


def _unpacked(meta: bytes, buffers: Sequence[NDArray[np.uint8]], digest: bytes) -> Encoded:
    """Returns the encoded tree of what `_packed` returned."""
    return Encoded(meta, tuple(buffer.data for buffer in buffers), digest)
