"""Which snapshots a replica holds.

Boundary e is a task's state after epoch e - 1, with the reports that travel in it. A member holds the committed
boundary and every boundary it acknowledged that may still commit (invariant I3), keyed by (epoch, attempt, term).

Which of several pending boundaries of one epoch is the committed one? The one with the highest (attempt, term):
a primary of a later term or attempt began from the boundary *before* it, read in etcd, so the earlier ones were not
committed by then and are void since; and a commit needs the acknowledgement of every member, so the member holds
the one that counted.

A boundary is freed only when a later epoch was *read* from etcd; what a peer says frees nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.messages import Encoded, Stamp

__all__ = ["Boundaries", "Boundary"]


@frozen
class Boundary:
    """A task's snapshot. `stamp.epoch` is its number, `stamp.attempt` the attempt it was made in.

    Attributes:
        log: the reports that travel in `value`, where they are at hand.
        key: its (epoch, attempt, term).
    """

    stamp: Stamp
    term: int
    value: Encoded
    log: Mapping[int, Mapping[int, Mapping[str, float]]] | None = field(compare=False, repr=False)
    key: tuple[int, int, int] = field(compare=False, repr=False)

    def __init__(
        self,
        stamp: Stamp,
        term: int,
        value: Encoded,
        log: Mapping[int, Mapping[int, Mapping[str, float]]] | None = None,
    ) -> None:
        self.stamp, self.term, self.value, self.log = stamp, term, value, log  # type: ignore[misc]
        attempt, epoch = stamp
        self.key = (epoch, attempt, term)  # type: ignore[misc]  # once: it is asked for many times an epoch


class Boundaries:
    """The boundaries one replica holds."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], Boundary] = {}
        self.committed: Boundary | None = None
        """The boundary of the last epoch read as committed, if this replica holds it."""
        self._floor = 0

    @property
    def pending(self) -> tuple[Boundary, ...]:
        return tuple(self._held[key] for key in sorted(self._held))

    def hold(self, boundary: Boundary, *, committed: bool) -> bool:
        """Keeps a boundary. `committed`: its primary read it as committed, so it replaces what was held for it.

        Returns whether it is here, or is history since a committed one is. Any other must not be acknowledged.
        """
        if boundary.stamp.attempt < self._floor:
            return False  # of epochs that were undone
        if committed:
            if self.committed is None or boundary.stamp.epoch >= self.committed.stamp.epoch:
                self.committed = boundary
                self._held = {k: b for k, b in self._held.items() if b.stamp.epoch > boundary.stamp.epoch}
            return True
        key = boundary.key
        if self.committed is not None:
            known = self.committed.key
            if key[0] <= known[0]:
                if key[0] < known[0] or key == known:
                    return True  # history, or the same one again
                if key < known:
                    return False  # never let a pending boundary near a committed one of a later term or attempt
                # Its primary began from the boundary before, read in etcd: what is held here did not commit. It was
                # taken for the committed one by a replica that was evicted by then, and now is asked to come back.
                self.committed = None
        self._held[key] = boundary
        return True

    def until(self, epoch: int) -> tuple[Boundary, ...]:
        """The boundaries that a read of `epoch` as committed commits, in order, as far as they are here.

        Several epochs may be committed at once. What was said above of the committed one holds for each of them.
        """
        first = self.committed.stamp.epoch if self.committed is not None else -1
        best: dict[int, Boundary] = {}
        for key in sorted(self._held):
            if first < key[0] <= epoch:
                best[key[0]] = self._held[key]
        return tuple(best.values())

    def read_epoch(self, epoch: int) -> Boundary | None:
        """`epoch` was read as committed from etcd. Returns the boundary that became the committed one now, if any."""
        if self.committed is not None and self.committed.stamp.epoch >= epoch:
            return None
        best, later = None, {}
        for key, boundary in self._held.items():
            if key[0] > epoch:
                later[key] = boundary
            elif key[0] == epoch and (best is None or key > best):
                best = key
        if best is None:
            return None  # not a member at that time: what it holds below is of no use to anyone who reads the view
        self.committed, self._held = self._held[best], later
        return self.committed

    def holds(self, epoch: int) -> bool:
        """Whether the committed boundary of `epoch` is here."""
        return self.committed is not None and self.committed.stamp.epoch == epoch

    def drop_pending(self) -> None:
        """The attempt they were made in is over and was not committed."""
        self._held.clear()

    def roll_back(self, lineage: int) -> None:
        """The job went back to a checkpoint: what was made in an attempt before `lineage` is of epochs undone.

        Also boundary c itself, which comes back from the checkpoint, as one of attempt `lineage`.
        """
        self._floor = max(self._floor, lineage)
        self._held = {key: b for key, b in self._held.items() if b.stamp.attempt >= self._floor}
        if self.committed is not None and self.committed.stamp.attempt < self._floor:
            self.committed = None

    def clear(self) -> None:
        """Everything goes: the replica is no member any more, or boundary 0 is made anew."""
        self._held.clear()
        self.committed = None
