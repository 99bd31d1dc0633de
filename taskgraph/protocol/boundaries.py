"""Stores the boundaries of a replica.

Boundary e is the snapshot of a task after epoch e - 1, with its reports. A member stores the committed boundary and
every boundary that it acknowledged and that may still commit (invariant I3). The key is (epoch, attempt, term).

    state       next        by
    pending     committed   its epoch is read as committed, and its (attempt, term) is the highest of that epoch
    pending     freed       a later epoch is read as committed; its attempt ended (`drop_pending`); a roll-back
    committed   freed       a later epoch is read as committed; a roll-back

Why the highest (attempt, term)? A primary of a later term or attempt started from the boundary *before*, which it read
in etcd. So earlier pending boundaries did not commit, and never will. A commit needs the acknowledgement of every
member, so each member has the committed one.

The caller calls `note_committed` only for epochs read from etcd: messages of peers free nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.messages import Encoded, Stamp

__all__ = ["Boundaries", "Boundary"]


@frozen
class Boundary:
    """A snapshot of a task between two epochs. `stamp` has its number (as epoch) and the attempt that computed it.

    Attributes:
        value: the state; without the shared state if another task is its keeper.
        log: the reports in `value`, epoch -> task -> numbers; None: they are not decoded.
        shared: on the primary, the shared state that `value` leaves out; None: on a backup, or nothing is left out.
        key: (epoch, attempt, term).
    """

    stamp: Stamp
    term: int
    value: Encoded
    log: Mapping[int, Mapping[int, Mapping[str, float]]] | None = field(compare=False, repr=False)
    shared: Encoded | None = field(compare=False, repr=False)
    key: tuple[int, int, int] = field(compare=False, repr=False)

    def __init__(
        self,
        stamp: Stamp,
        term: int,
        value: Encoded,
        log: Mapping[int, Mapping[int, Mapping[str, float]]] | None = None,
        shared: Encoded | None = None,
    ) -> None:
        self.stamp, self.term, self.value, self.log = stamp, term, value, log  # type: ignore[misc]
        self.shared = shared  # type: ignore[misc]
        attempt, epoch = stamp
        self.key = (epoch, attempt, term)  # type: ignore[misc]  # computed once, used many times an epoch


class Boundaries:
    """The boundaries that one replica stores."""

    def __init__(self) -> None:
        self._stored: dict[tuple[int, int, int], Boundary] = {}
        self.committed: Boundary | None = None
        """The boundary of the last epoch read as committed, if this replica has it."""
        self._floor = 0

    @property
    def pending(self) -> tuple[Boundary, ...]:
        return tuple(self._stored[key] for key in sorted(self._stored))

    def store(self, boundary: Boundary, *, committed: bool) -> bool:
        """Stores a boundary. `committed`: its primary read it as committed, so it replaces pending ones up to it.

        Returns False if a roll-back undid it, or a later term or attempt committed: then it must not be acknowledged.
        """
        if boundary.stamp.attempt < self._floor:
            return False  # a roll-back undid its epoch
        if committed:
            if self.committed is None or boundary.stamp.epoch >= self.committed.stamp.epoch:
                self.committed = boundary
                self._stored = {k: b for k, b in self._stored.items() if b.stamp.epoch > boundary.stamp.epoch}
            return True
        key = boundary.key
        if self.committed is not None:
            known = self.committed.key
            if key[0] <= known[0]:
                if key[0] < known[0] or key == known:
                    return True  # older, or stored before
                if key < known:
                    return False  # it must not replace a committed one of a later term or attempt
                # Its primary started from the boundary before, read in etcd, so the stored one did not commit. This
                # replica was evicted when it took the stored one for committed, and is invited again now.
                self.committed = None
        self._stored[key] = boundary
        return True

    def find(self, digest: bytes) -> Boundary | None:
        """Returns a stored boundary whose value has this digest, if there is one."""
        stored = [*self._stored.values(), *([self.committed] if self.committed is not None else [])]
        return next((boundary for boundary in stored if boundary.value.digest == digest), None)

    def committing_at(self, epoch: int) -> tuple[Boundary, ...]:
        """Returns the pending boundaries that `note_committed(epoch)` would take for committed, in order.

        Several epochs may commit at once. Of each, the boundary of the highest (attempt, term) counts.
        """
        first = self.committed.stamp.epoch if self.committed is not None else -1
        best: dict[int, Boundary] = {}
        for key in sorted(self._stored):
            if first < key[0] <= epoch:
                best[key[0]] = self._stored[key]
        return tuple(best.values())

    def note_committed(self, epoch: int) -> Boundary | None:
        """Handles an epoch read from etcd as committed: its boundary becomes the committed one, earlier ones are freed.

        Returns that boundary; None, and nothing changes, if it is not pending here.
        """
        if self.committed is not None and self.committed.stamp.epoch >= epoch:
            return None
        best, later = None, {}
        for key, boundary in self._stored.items():
            if key[0] > epoch:
                later[key] = boundary
            elif key[0] == epoch and (best is None or key > best):
                best = key
        if best is None:
            return None  # the replica was not a member then: its older boundaries are useless
        self.committed, self._stored = self._stored[best], later
        return self.committed

    def has_committed(self, epoch: int) -> bool:
        """True if the stored committed boundary is boundary `epoch`."""
        return self.committed is not None and self.committed.stamp.epoch == epoch

    def drop_pending(self) -> None:
        """Frees pending boundaries: their attempt ended without a commit."""
        self._stored.clear()

    def roll_back(self, lineage: int) -> None:
        """Frees all boundaries of attempts before `lineage`, since the job rolled back to a checkpoint.

        The boundary of the checkpoint is freed, too: it is restored as a boundary of attempt `lineage`.
        """
        self._floor = max(self._floor, lineage)
        self._stored = {key: b for key, b in self._stored.items() if b.stamp.attempt >= self._floor}
        if self.committed is not None and self.committed.stamp.attempt < self._floor:
            self.committed = None

    def clear(self) -> None:
        """Frees all boundaries: the replica is not a member, or boundary 0 is created again."""
        self._stored.clear()
        self.committed = None
