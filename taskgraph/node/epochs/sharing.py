"""Limits the memory of uncommitted epochs on one node: items and boundaries stay until their epoch commits."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["AHEAD_BYTES", "EPOCH_BYTES", "Share", "Sharing"]

AHEAD_BYTES = 88 << 20
"""Limit for all primaries of a node. With everything else a node then takes less than 150 MiB."""
EPOCH_BYTES = 3 << 10
"""Memory of an epoch without items and state: its Python objects."""
_LEAST, _MOST = 2, 8
"""Bounds on the uncommitted epochs that every task may have, whatever its even share. With two, the next epoch runs
during a commit; more than eight save little."""


class Sharing:
    """Divides a node's memory among its primaries.

    Attributes:
        primaries: their number.
        epochs: uncommitted epochs that each may have at least.
    """

    def __init__(self) -> None:
        self.primaries = 0
        self.epochs = _MOST
        self._sum = 0  # over all primaries, of the bytes of the largest epoch

    def changed(self, before: int, now: int) -> None:
        """Notes the bytes of the largest epoch of one primary."""
        self._sum += now - before
        self.epochs = max(_LEAST, min(_MOST, AHEAD_BYTES // max(1, self._sum)))

    def share(self, largest: int) -> int:
        """Returns how many bytes the uncommitted epochs of one task may hold.

        That is an even share, or the room for `epochs` epochs if that is more.

        Args:
            largest: bytes of the task's largest epoch.
        """
        return max(AHEAD_BYTES // max(1, self.primaries), min(AHEAD_BYTES, self.epochs * largest))


class Share:
    """The share of one task in one attempt: how far it may be ahead of the last commit.

    Args:
        ahead: the limit in epochs.
        at: the epoch at work.
        changed: called with `far` when it may have changed.

    Attributes:
        bytes: no epoch begins while the uncommitted ones hold more.
        far: epochs that may be uncommitted, as none of the recent ones is larger than `most`.
        most: bytes of the largest epoch of the last two periods; a period is `ahead` epochs.
        recent: bytes of the largest epoch of this period.
        until: the period ends when this epoch commits.
        epochs: `Sharing.epochs` when `bytes` was computed.
    """

    __slots__ = (
        "_ahead",
        "_changed",
        "bytes",
        "epochs",
        "epochs_allowed",
        "largest_bytes",
        "period_bytes",
        "sharing",
        "until",
    )

    def __init__(self, sharing: Sharing, ahead: int, at: int, changed: Callable[[int], object]) -> None:
        self.sharing = sharing
        self._ahead = ahead
        self._changed = changed
        self.epochs = sharing.epochs
        self.bytes = sharing.share(0)
        self.epochs_allowed = ahead
        self.largest_bytes = 0
        self.period_bytes = 0
        self.until = at + ahead

    def note_epoch(self, epoch_bytes: int) -> None:
        """Notes an epoch that is larger than `recent`."""
        self.period_bytes = epoch_bytes
        if epoch_bytes > self.largest_bytes:
            self._largest(epoch_bytes)

    def look_back(self, snapshotted: int) -> None:
        """Begins another period, so that one large epoch does not slow down all later ones."""
        self.until = snapshotted + self._ahead
        recent, self.period_bytes = self.period_bytes, 0
        if recent < self.largest_bytes:
            self._largest(recent)

    def _largest(self, held: int) -> None:
        self.sharing.changed(self.largest_bytes, held)
        self.largest_bytes = held
        self.make()

    def look(self) -> None:
        """Adapts to the number of primaries on the node."""
        if self.sharing.share(self.largest_bytes) != self.bytes:
            self.make()

    def make(self) -> None:
        """Computes the share from what the tasks of the node need now."""
        self.epochs = self.sharing.epochs
        self.bytes = self.sharing.share(self.largest_bytes)
        self.epochs_allowed = min(self._ahead, self.bytes // max(1, self.largest_bytes))
        self._changed(self.epochs_allowed)

    def end(self) -> None:
        """Gives the share back."""
        self.sharing.changed(self.largest_bytes, 0)
        self.largest_bytes = 0
