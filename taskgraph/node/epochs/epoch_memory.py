"""Limits the memory of uncommitted epochs on one node: items and boundaries stay until their epoch commits."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["AHEAD_BYTES", "EPOCH_BYTES", "EpochAllowance", "EpochMemoryShares"]

AHEAD_BYTES = 88 << 20
"""The most bytes for all primaries of a node, which then takes less than 150 MiB in all."""
EPOCH_BYTES = 3 << 10
"""Memory of an epoch without items and state: its Python objects."""
_LEAST, _MOST = 2, 8
"""Bounds on `EpochMemoryShares.epochs`: uncommitted epochs of a task regardless of its even share. With two, the next
epoch runs during a commit; more than eight save little."""


class EpochMemoryShares:
    """Divides a node's memory for uncommitted epochs among its primaries.

    Attributes:
        primaries: the number of primaries.
        epochs: the number of uncommitted epochs that each primary may have at least.
    """

    def __init__(self) -> None:
        self.primaries = 0
        self.epochs = _MOST
        self._sum = 0  # over all primaries, of the bytes of the largest epoch

    def note_largest(self, before: int, now: int) -> None:
        """Notes that the largest epoch of a primary now has `now` bytes instead of `before`."""
        self._sum += now - before
        self.epochs = max(_LEAST, min(_MOST, AHEAD_BYTES // max(1, self._sum)))

    def share_bytes(self, largest: int) -> int:
        """Returns how many bytes the uncommitted epochs of one task may take: an even share, or `epochs` epochs if that
        is more.

        Args:
            largest: bytes of the task's largest epoch.
        """
        return max(AHEAD_BYTES // max(1, self.primaries), min(AHEAD_BYTES, self.epochs * largest))


class EpochAllowance:
    """One task's share of `EpochMemoryShares`, until a restart: how many epochs it may be ahead of the last commit.

    Args:
        ahead: the most epochs, whatever their size (`Settings.epochs_ahead`).
        at: the first epoch.
        changed: called with `epochs_allowed` when it may have changed.

    Attributes:
        bytes: no epoch begins while the uncommitted epochs take more.
        epochs_allowed: the number of epochs that may be uncommitted, each of `largest_bytes` at most.
        largest_bytes: size of the largest epoch of the last two periods; a period is `ahead` epochs.
        period_bytes: size of the largest epoch of this period.
        until: the period ends when this epoch commits.
        epochs: `EpochMemoryShares.epochs` when `bytes` was computed.
    """

    __slots__ = (
        "_ahead",
        "_changed",
        "bytes",
        "epochs",
        "epochs_allowed",
        "largest_bytes",
        "memory",
        "period_bytes",
        "until",
    )

    def __init__(self, memory: EpochMemoryShares, ahead: int, at: int, changed: Callable[[int], object]) -> None:
        self.memory = memory
        self._ahead = ahead
        self._changed = changed
        self.epochs = memory.epochs
        self.bytes = memory.share_bytes(0)
        self.epochs_allowed = ahead
        self.largest_bytes = 0
        self.period_bytes = 0
        self.until = at + ahead

    def note_epoch(self, epoch_bytes: int) -> None:
        """Notes the size of an epoch that is larger than `period_bytes`."""
        self.period_bytes = epoch_bytes
        if epoch_bytes > self.largest_bytes:
            self._set_largest(epoch_bytes)

    def begin_period(self, snapshotted: int) -> None:
        """Begins another period, so that one large epoch does not slow down all later ones.

        Args:
            snapshotted: the first epoch whose snapshot is not taken yet.
        """
        self.until = snapshotted + self._ahead
        recent, self.period_bytes = self.period_bytes, 0
        if recent < self.largest_bytes:
            self._set_largest(recent)

    def _set_largest(self, held: int) -> None:
        self.memory.note_largest(self.largest_bytes, held)
        self.largest_bytes = held
        self.compute()

    def adapt(self) -> None:
        """Computes the share anew, if the number of primaries on the node has changed it."""
        if self.memory.share_bytes(self.largest_bytes) != self.bytes:
            self.compute()

    def compute(self) -> None:
        """Computes `bytes` and `epochs_allowed`, and calls `changed`."""
        self.epochs = self.memory.epochs
        self.bytes = self.memory.share_bytes(self.largest_bytes)
        self.epochs_allowed = min(self._ahead, self.bytes // max(1, self.largest_bytes))
        self._changed(self.epochs_allowed)

    def give_back_share(self) -> None:
        """Gives this task's share back to the node, since its work ends."""
        self.memory.note_largest(self.largest_bytes, 0)
        self.largest_bytes = 0
