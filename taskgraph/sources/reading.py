"""What a source is, and what all consumers of sources need: its order, its rows, values as a source."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from taskgraph.errors import JobError, ValueNotEncodable
from taskgraph.graph.values import encode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Source",
    "Values",
    "as_source",
    "content_of",
    "is_source",
    "pass_order",
    "pieces_digest",
    "pieces_of",
    "rows_of",
]


class Source(Protocol):
    """Pieces that each node can read alone.

    A source may have an attribute `whole = True`: then a piece has one row, and user code that takes whole pieces gets
    the row itself in place of a list.
    """

    def pieces(self) -> Sequence[Any]:
        """Returns the pieces: values that travel, the same on every node, in a fixed order."""

    def read(self, piece: Any, /) -> Iterable[Any]:
        """Returns the rows of a piece, always the same, in the same order."""


class Values:
    """Values as a source: each is a piece with one row, the value itself."""

    whole = True

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def pieces(self) -> Sequence[Any]:
        return self._values

    def read(self, piece: Any, /) -> Iterable[Any]:
        return (piece,)


def is_source(of: Any) -> TypeGuard[Source]:
    """True if an object has `pieces()` and `read(piece)`."""
    return not isinstance(of, type) and all(callable(getattr(of, name, None)) for name in ("pieces", "read"))


def as_source(of: Source | Iterable[Any]) -> Source:
    """Returns a source as it is, and a range, a sequence or another iterable of values as a source.

    Raises:
        JobError: `of` is neither, or has no order that is the same on every node.
    """
    if isinstance(of, type):
        raise JobError(f"a source is an object, not the class {of.__name__}: write {of.__name__}()")
    if is_source(of):
        return of
    if isinstance(of, str | bytes):
        raise JobError(
            f"{of!r} is no source: name files as tg.files(url), tg.lines(url), tg.csv(url) or tg.parquet(url)"
        )
    if isinstance(of, Set | Mapping):
        raise JobError(f"a {type(of).__name__} is no source: give its values in a fixed order, as in sorted(values)")
    if not isinstance(of, Iterable):
        raise JobError(
            f"a {type(of).__name__} is no source: give a sequence of values, tg.files(url) or the like, or an object "
            f"with pieces() and read(piece)"
        )
    return Values(of if isinstance(of, range | list | tuple) else list(of))


def pieces_of(source: Source) -> Sequence[Any]:
    """Returns the pieces of a source. An iterable without an order by number, such as a generator, becomes a list.

    Raises:
        JobError: `pieces()` returns no iterable.
    """
    found = _check_iterable(source.pieces(), source, "pieces()", "a list of pieces")
    return found if hasattr(found, "__len__") and hasattr(found, "__getitem__") else list(found)


def _check_iterable(found: Any, source: Source, call: str, what: str) -> Any:
    if not isinstance(found, Iterable) and not hasattr(found, "__getitem__"):
        raise JobError(f"{type(source).__name__}.{call} returned {found!r}: it has to return {what}")
    return found


def pieces_digest(pieces: Sequence[Any]) -> str:
    """Returns 12 hexadecimal digits that differ if the pieces do. Of pieces that cannot travel it is the number."""
    try:
        return encode(str(pieces) if isinstance(pieces, range) else list(pieces)).digest.hex()[:12]
    except ValueNotEncodable:
        return encode(len(pieces)).digest.hex()[:12]


def pass_order(count: int, pass_number: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Returns the order of `count` numbers in a pass: int64, shape (count,), read-only; a pure function.

    With `shuffle` it is a permutation drawn by numpy's Philox generator, seeded with (seed, pass_number).
    """
    import numpy as np

    found = np.arange(count, dtype=np.int64)
    if shuffle:
        np.random.Generator(np.random.Philox([seed & (2**64 - 1), pass_number])).shuffle(found)
    found.setflags(write=False)
    return found


def rows_of(source: Source, piece: Any, *, buffer: int = 0, seed: int = 0) -> Iterator[Any]:
    """Yields the rows of a piece.

    Args:
        buffer: rows that are kept back, of which one is drawn at random each time; 0: the rows' own order.
        seed: the seed of these draws: the same seed gives the same order.
    """
    rows = iter(_check_iterable(source.read(piece), source, "read(piece)", "or yield its rows"))
    if buffer < 2:
        yield from rows
        return
    draws = random.Random(seed)
    kept = list(itertools.islice(rows, buffer))
    for row in rows:
        drawn = draws.randrange(buffer)
        yield kept[drawn]
        kept[drawn] = row
    draws.shuffle(kept)
    yield from kept


def content_of(source: Source, piece: Any, *, buffer: int = 0, seed: int = 0) -> Any:
    """Returns what user code that takes whole pieces gets: the list of the rows; or the row itself (`Source.whole`).

    Arguments as in `rows_of`.
    """
    rows = list(rows_of(source, piece, buffer=buffer, seed=seed))
    return rows[0] if getattr(source, "whole", False) else rows
