"""The fixed binary tree along which parts are added.

The leaves are the parts. A span of more than one part has two halves; the first one has the largest power of two of
parts that leaves something for the second. The sum of a span is the sum of its first half plus that of its second half.
So the bits of a total depend neither on the number of workers nor on who computed which part.

    0..7                0..5
    0..3    4..7        0..3    4..5
    01  23  45  67      01  23
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Span", "cover", "halves", "parent"]


class Span(NamedTuple):
    """The parts `first` to `end - 1`: a node of the tree."""

    first: int
    end: int

    @property
    def parts(self) -> range:
        return range(self.first, self.end)

    def overlaps(self, other: Span) -> bool:
        return self.first < other.end and other.first < self.end


@lru_cache(maxsize=4096)
def halves(span: Span) -> tuple[Span, Span]:
    """Returns the children of a span of two parts or more."""
    middle = span.first + (1 << (span.end - span.first - 1).bit_length() - 1)
    return Span(span.first, middle), Span(middle, span.end)


@lru_cache(maxsize=4096)
def parent(span: Span, parts: int) -> Span | None:
    """Returns the parent of a span in the tree of `parts` parts; None for the root."""
    at = Span(0, parts)
    if span == at:
        return None
    while True:
        first, second = halves(at)
        if span in (first, second):
            return at
        at = first if span.first < first.end else second


def cover(parts: Collection[int], of: int) -> tuple[Span, ...]:
    """Returns the fewest spans that together have exactly these parts, in order, in the tree of `of` parts."""
    return _cover(frozenset(parts), of)


@lru_cache(maxsize=1024)
def _cover(there: frozenset[int], of: int) -> tuple[Span, ...]:
    found: list[Span] = []
    waiting = [Span(0, of)] if there else []
    while waiting:
        span = waiting.pop()
        count = sum(part in there for part in span.parts)
        if count == span.end - span.first:
            found.append(span)
        elif count:
            waiting += reversed(halves(span))
    return tuple(found)
