"""Arrays of the state that share their memory with what has another name there.

To change the one changes the other, on a worker that has made both itself. A newcomer loads them apart. So an array or
tensor must not share memory with another one, or with a module or an optimizer; within one name all may share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.errors import StateError

__all__ = ["refuse_shared_memory"]


class _Array(NamedTuple):
    """An array in memory: its device, first byte and end there; `plain`: it belongs to no object of PyTorch."""

    device: str
    begin: int
    end: int
    path: str
    value: Any
    plain: bool

    @property
    def name(self) -> str:
        return re.split(r"[.\[]", self.path, maxsplit=1)[0]


def refuse_shared_memory(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises StateError if an array shares memory with what has another name.

    Args:
        leaves: path and object of each leaf of the state.
    """
    torch = pytorch()
    found: list[_Array] = []
    objects: list[tuple[str, Any]] = []
    for path, leaf in leaves:
        if torch is not None and isinstance(leaf, torch.nn.Module | torch.optim.Optimizer):
            objects.append((path, leaf))
        elif torch is None or not isinstance(leaf, torch.nn.Parameter):
            found += _arrays(path, leaf, plain=True)
    if not found:
        return
    for path, each in objects:
        found += _arrays(path, each.state_dict(), plain=False)
    pairs = [(other, one) if other.plain else (one, other) for one, other in _sharing_pairs(found)]
    if pairs:
        raise _sharing_error(*min(pairs, key=lambda pair: (pair[0].path, pair[1].path)))


def _sharing_pairs(found: list[_Array]) -> Iterator[tuple[_Array, _Array]]:
    """Yields pairs with different names that share memory; one of each pair is plain."""
    found = sorted(found, key=lambda array: array[:3])
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            if other.device != one.device or other.begin >= one.end:
                break
            if one.name != other.name and (one.plain or other.plain) and _share_memory(one.value, other.value):
                yield one, other


def _sharing_error(plain: _Array, other: _Array) -> StateError:
    """Returns the error for two arrays that share memory."""
    example = f"{other.path}.{'copy' if isinstance(plain.value, np.ndarray) else 'clone'}()"
    if not other.plain:
        example = "{k: v.clone() for k, v in model.state_dict().items()}"
    return StateError(f"{plain.path} shares its memory with {other.path}: keep a copy, for example {example}")


def _arrays(path: str, value: Any, *, plain: bool) -> Iterator[_Array]:
    """Yields the arrays and tensors of a tree that have memory on a device."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _arrays(f"{path}.{name}", item, plain=plain)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _arrays(f"{path}[{index}]", item, plain=plain)
    elif isinstance(value, np.ndarray):
        if value.size:
            yield _Array("cpu", *np.lib.array_utils.byte_bounds(value), path, value, plain)
    elif (torch := pytorch()) is not None and isinstance(value, torch.Tensor):
        if not value.numel() or value.layout is not torch.strided or value.device.type == "meta":
            return
        steps = zip(value.shape, value.stride(), strict=True)
        items = 1 + sum((size - 1) * stride for size, stride in steps)
        begin = value.data_ptr()
        yield _Array(str(value.device), begin, begin + items * value.element_size(), path, value, plain)


def _share_memory(one: Any, other: Any) -> bool:
    """True if two arrays whose ranges of memory overlap have an element in common; for tensors always True."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    return True
