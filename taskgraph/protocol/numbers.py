"""Packs the numbers that a task reports in an epoch, until the epoch commits.

The leader keeps them for every task and every epoch that is not committed. So many numbers are packed, with 8 bytes
each, and reports with the same names share one object for the names. A dict of 100 numbers takes thirteen times as
much. Up to `FEW` numbers stay a dict, which is faster.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from struct import Struct
from typing import Final
from weakref import WeakValueDictionary

__all__ = ["FEW", "NumberNames", "Numbers", "compact"]

FEW: Final = 4
"""The most numbers that stay a dict. A dict of this size takes half a KiB."""


class NumberNames:
    """The names of numbers that are reported together.

    Attributes:
        places: name -> index.
        doubles: the layout of the packed numbers.
    """

    __slots__ = ("__weakref__", "doubles", "places")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.places: Final = {name: place for place, name in enumerate(names)}
        self.doubles: Final = Struct(f"!{len(names)}d")

    @staticmethod
    def of(names: tuple[str, ...]) -> NumberNames:
        """Returns the shared `NumberNames` object for these names."""
        known = _known.get(names)
        if known is None:
            known = _known[names] = NumberNames(names)
        return known


_known: Final[WeakValueDictionary[tuple[str, ...], NumberNames]] = WeakValueDictionary()
"""The `NumberNames` objects in use, by their names."""
_DOUBLE: Final = Struct("!d")


class Numbers(Mapping[str, float]):
    """An immutable mapping from names to packed numbers.

    Attributes:
        packed: big-endian doubles.
    """

    __slots__ = ("names", "packed")

    def __init__(self, names: NumberNames, packed: bytes) -> None:
        self.names: Final = names
        self.packed: Final = packed

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Numbers:
        if type(numbers) is Numbers:
            return numbers
        names = NumberNames.of(tuple(numbers))
        return cls(names, names.doubles.pack(*numbers.values()))

    def same(self, other: object) -> bool:
        """True if the other object is a `Numbers` with the same bits under the same names, in the same order."""
        return type(other) is Numbers and self.names is other.names and self.packed == other.packed

    def plain(self) -> dict[str, float]:
        """Returns the numbers as a dict."""
        return dict(zip(self.names.places, self.names.doubles.unpack(self.packed), strict=True))

    def __getitem__(self, name: str) -> float:
        number: float = _DOUBLE.unpack_from(self.packed, 8 * self.names.places[name])[0]
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.places)

    def __len__(self) -> int:
        return len(self.names.places)

    # Faster than those of `Mapping`, which look each name up.

    def items(self) -> ItemsView[str, float]:
        return self.plain().items()

    def values(self) -> ValuesView[float]:
        return self.plain().values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({self.plain()!r})"


def compact(numbers: Mapping[str, float]) -> Mapping[str, float]:
    """Returns numbers in a form that saves memory: packed, or a new dict of up to `FEW` numbers."""
    return Numbers.of(numbers) if len(numbers) > FEW else dict(numbers)
