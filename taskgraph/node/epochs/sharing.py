"""What the uncommitted epochs of a node's primaries may hold: items and boundaries stay until they commit."""

from __future__ import annotations

__all__ = ["AHEAD_BYTES", "EPOCH_BYTES", "Sharing"]

AHEAD_BYTES = 88 << 20
"""Of all primaries of a node. That is below 150 MiB with what a node takes besides."""
EPOCH_BYTES = 3 << 10
"""Of an epoch that holds nothing: the objects that it is made of."""
_LEAST, _MOST = 2, 8
"""So many of its epochs a task may have uncommitted at least, whatever its even share: as many as all tasks of the node
find room for. Commits of four cost little more than of more, and with two the next epoch is worked on meanwhile."""


class Sharing:
    """One node's.

    Attributes:
        primaries: how many there are.
        epochs: so many of its epochs each may have, at least.
    """

    def __init__(self) -> None:
        self.primaries = 0
        self.epochs = _MOST
        self._sum = 0  # of the largest epochs of all

    def changed(self, before: int, now: int) -> None:
        """The largest epoch of one of them, of those that may be uncommitted, holds so many bytes."""
        self._sum += now - before
        self.epochs = max(_LEAST, min(_MOST, AHEAD_BYTES // max(1, self._sum)))

    def share(self, largest: int) -> int:
        """What uncommitted epochs of one task may hold, in bytes, where its largest holds so many.

        An even share at least; and what some of its epochs hold, but no more than all may: tasks that wait for no other
        are as far ahead as they may, all of them at once.
        """
        return max(AHEAD_BYTES // max(1, self.primaries), min(AHEAD_BYTES, self.epochs * largest))
