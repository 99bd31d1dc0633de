"""Sums of spans of parts, added up along the tree (`protocol.elastic.tree`), off the event loop.

User code's thread adds up the parts that it computes (`Merging`), and the total when it asks for it (`Total`). Large
sums are in the transport's memory, so that other processes of the host read them without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import xxhash

from taskgraph.graph.blocks import Allocate
from taskgraph.graph.sums import Sums
from taskgraph.protocol.elastic.tree import Span, cover, halves, parent
from taskgraph.protocol.messages import Encoded

__all__ = ["EncodedSums", "FinishedParts", "Merging", "Total", "chain_digest"]


def chain_digest(tag: bytes, total: Sums) -> bytes:
    """Returns the digest of all totals up to `total`, made from `tag`, the digest of the totals before it."""
    digest = xxhash.xxh3_128(tag)
    digest.update(repr(total.layout).encode())
    for array in total.arrays:
        digest.update(array.data)
    for part, value in total.collected.items():
        digest.update(b"%d" % part + value.digest)
    return digest.digest()


class Total:
    """The total of a position. It is added up when it is first read, in the thread that reads it.

    Args:
        make: adds it up, and returns it.
        nbytes: the memory of the sums that `make` adds up.
    """

    def __init__(self, make: Callable[[], Sums], nbytes: int) -> None:
        self._make: Callable[[], Sums] | None = make
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._sums: Sums | None = None

    @classmethod
    def of(cls, sums: Sums) -> Total:
        """Returns a total that is added up already: `sums`."""
        return cls(lambda: sums, sums.nbytes)

    @property
    def nbytes(self) -> int:
        """The memory that is taken by the total, or, until it is added up, by the sums that it is made of."""
        with self._lock:
            return self._nbytes if self._sums is None else self._sums.nbytes

    def sums(self) -> Sums:
        """Returns the total; the first call adds it up."""
        with self._lock:
            if self._sums is None:
                assert self._make is not None
                self._sums = self._make()
                self._make = None
            return self._sums


class EncodedSums(NamedTuple):
    """Encoded sums for the other workers of a view.

    Attributes:
        view: its number.
        values: worker -> the sums as that worker gets them, in the order of their spans.
    """

    view: int
    values: dict[str, Encoded]


class FinishedParts(NamedTuple):
    """Parts that user code has finished.

    Attributes:
        sums: span -> its sum.
        encoded: the sums, encoded in user code's thread if they are large; None: they are not encoded yet.
    """

    sums: dict[Span, Sums]
    encoded: EncodedSums | None


class Merging:
    """Adds up the sums of the parts that user code was dealt, along the tree, as it finishes them.

    Args:
        dealt: the numbers of these parts.
        of: the number of all parts of the position.
    """

    def __init__(self, dealt: Collection[int], of: int, allocate: Allocate) -> None:
        self._of = of
        self._targets = cover(frozenset(dealt), of)
        self._allocate = allocate
        self._held: dict[Span, Sums] = {}

    def add(self, part: int, sums: Sums) -> None:
        """Takes the sum of a finished part, and adds it to those of the spans around it that are complete now."""
        span = Span(part, part + 1)
        self._held[span] = sums
        while span not in self._targets:
            above = parent(span, self._of)
            assert above is not None
            first, second = halves(above)
            if not (first in self._held and second in self._held):
                return
            self._held[above] = self._held.pop(first).add_consuming(self._held.pop(second), self._allocate)
            span = above

    def take(self, encode: Callable[[Sequence[Sums]], EncodedSums | None]) -> FinishedParts | None:
        """Removes and returns the sums of complete spans; None: no span is complete.

        Args:
            encode: encodes the sums for the other workers; returns None if they are small.
        """
        sums = {span: self._held.pop(span) for span in self._targets if span in self._held}
        if not sums:
            return None
        return FinishedParts(sums, encode(list(sums.values())))
