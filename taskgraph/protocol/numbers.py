"""The numbers that a task reports in an epoch, as they are held until it commits.

The leader holds them of every task and every epoch that is not committed. So they are packed, 8 bytes for a number,
and their names are one object wherever the same ones are held: a dict of 100 numbers with names of its own takes
thirteen times as much, half of it names. A few are a dict all the same, which takes less time to make and to read.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from struct import Struct
from typing import Final
from weakref import WeakValueDictionary

__all__ = ["FEW", "Names", "Numbers", "held"]

FEW: Final = 4
"""So many take half a KiB as a dict."""


class Names:
    """Names of numbers that are reported together.

    Attributes:
        places: name -> its place among them.
        doubles: their numbers, in this order.
    """

    __slots__ = ("__weakref__", "doubles", "places")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.places: Final = {name: place for place, name in enumerate(names)}
        self.doubles: Final = Struct(f"!{len(names)}d")

    @staticmethod
    def of(names: tuple[str, ...]) -> Names:
        """The one object of these names."""
        known = _known.get(names)
        if known is None:
            known = _known[names] = Names(names)
        return known


_known: Final[WeakValueDictionary[tuple[str, ...], Names]] = WeakValueDictionary()
"""Those of which some numbers are held."""
_DOUBLE: Final = Struct("!d")


class Numbers(Mapping[str, float]):
    """What a task reported in an epoch. Nothing of it changes.

    Attributes:
        packed: big-endian doubles, as they travel.
    """

    __slots__ = ("names", "packed")

    def __init__(self, names: Names, packed: bytes) -> None:
        self.names: Final = names
        self.packed: Final = packed

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Numbers:
        if type(numbers) is Numbers:
            return numbers
        names = Names.of(tuple(numbers))
        return cls(names, names.doubles.pack(*numbers.values()))

    def same(self, other: object) -> bool:
        """True if the other object has the same bits under the same names."""
        return type(other) is Numbers and self.names is other.names and self.packed == other.packed

    def plain(self) -> dict[str, float]:
        """As it is encoded, or shown."""
        return dict(zip(self.names.places, self.names.doubles.unpack(self.packed), strict=True))

    def __getitem__(self, name: str) -> float:
        number: float = _DOUBLE.unpack_from(self.packed, 8 * self.names.places[name])[0]
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.places)

    def __len__(self) -> int:
        return len(self.names.places)

    # Of a mapping they are made of one look-up for each number.

    def items(self) -> ItemsView[str, float]:
        return self.plain().items()

    def values(self) -> ValuesView[float]:
        return self.plain().values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({self.plain()!r})"


def held(numbers: Mapping[str, float]) -> Mapping[str, float]:
    """These numbers as they are held; what is done to those later changes nothing."""
    return Numbers.of(numbers) if len(numbers) > FEW else dict(numbers)
