"""What the uncommitted epochs of a node's primaries may hold: items and boundaries stay until they commit."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["AHEAD_BYTES", "EPOCH_BYTES", "Share", "Sharing"]

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


class Share:
    """One task's, in one attempt: how far it may be ahead of the last commit.

    Args:
        ahead: so many epochs at most.
        at: the epoch at work.
        changed: is told what `far` is, where it may be another one.

    Attributes:
        bytes: what uncommitted epochs may hold: then no other begins.
        far: so many epochs of late may be uncommitted whatever each of them holds.
        most: what the largest of them holds, and of as many before as it may be ahead.
        recent: what the largest holds since that was looked at last.
        until: it is looked at again once that epoch is committed.
        epochs: of `sharing`, as it was made by.
    """

    __slots__ = ("_ahead", "_changed", "bytes", "epochs", "far", "most", "recent", "sharing", "until")

    def __init__(self, sharing: Sharing, ahead: int, at: int, changed: Callable[[int], object]) -> None:
        self.sharing = sharing
        self._ahead = ahead
        self._changed = changed
        self.epochs = sharing.epochs
        self.bytes = sharing.share(0)
        self.far = ahead
        self.most = 0
        self.recent = 0
        self.until = at + ahead

    def holds(self, epoch_bytes: int) -> None:
        """An epoch holds more than any `recent` one did."""
        self.recent = epoch_bytes
        if epoch_bytes > self.most:
            self._largest(epoch_bytes)

    def look_back(self, snapshotted: int) -> None:
        """What was snapshotted when it was looked back last is committed: how large that was counts no more.

        So one large epoch does not hold up all that come after it.
        """
        self.until = snapshotted + self._ahead
        recent, self.recent = self.recent, 0
        if recent < self.most:
            self._largest(recent)

    def _largest(self, held: int) -> None:
        self.sharing.changed(self.most, held)
        self.most = held
        self.make()

    def look(self) -> None:
        """There are more primaries on the node, or fewer."""
        if self.sharing.share(self.most) != self.bytes:
            self.make()

    def make(self) -> None:
        """Anew, as the tasks of the node need room by now."""
        self.epochs = self.sharing.epochs
        self.bytes = self.sharing.share(self.most)
        self.far = min(self._ahead, self.bytes // max(1, self.most))
        self._changed(self.far)

    def end(self) -> None:
        """Nothing of it is uncommitted any more."""
        self.sharing.changed(self.most, 0)
        self.most = 0
