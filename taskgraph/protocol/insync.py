"""The in-sync set, as its primary keeps it: whom a boundary needs acknowledgements from.

    absent ──wish──► candidate ──acknowledged all──► admitting ──known written──► member
                        ▲                               │                            │
                        └────────known refused──────────┘                            │ suspect / not wished
                                                                                     ▼
    absent ◄──────────────────────known written────────────────────────────────  evicting

    marked ──acknowledged all──► admitting          marked ──suspect / not wished──► evicting

A boundary needs the acknowledgement of every node in `admitting`, `member` and `evicting`: from the moment the
admitting write may exist until the moment the evicting write is known to exist, that node may take over.
Members found at a takeover are `member`. Those an earlier term marked as evicted are `marked`: acknowledgements are
needed from them like from a member, as only an eviction of one's own term counts, but once the epoch moves on their
key makes them nobody's heirs. So they are admitted anew or evicted, whichever placement wants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

__all__ = ["InSync", "Place"]

Key = tuple[int, int, int]
"""A boundary's (epoch, attempt, term)."""


class Place(StrEnum):
    """Where a node stands with regard to the in-sync set."""

    CANDIDATE = "candidate"
    ADMITTING = "admitting"
    MEMBER = "member"
    MARKED = "marked"  # evicted by an earlier term
    EVICTING = "evicting"


_COUNTS = frozenset({Place.ADMITTING, Place.MEMBER, Place.MARKED, Place.EVICTING})


class InSync:
    """Other nodes than the primary's own; the primary's own copy is implied."""

    def __init__(self, members: Iterable[str], *, marked: Iterable[str] = ()) -> None:
        """Args:
        members: the members read by the takeover, without oneself.
        marked: those of them, or others, that an earlier term evicted and that hold the committed boundary.
        """
        self._marked = frozenset(marked)
        self._place: dict[str, Place] = dict.fromkeys(members, Place.MEMBER) | dict.fromkeys(self._marked, Place.MARKED)
        self._acked: dict[str, set[Key]] = {node: set() for node in self._place}
        self._current: list[Key] = []  # in order
        self.steady = not self._marked
        """Whether every other node is a member: nobody is on the way in or out."""

    def _put(self, node: str, place: Place | None) -> None:
        """`node` stands there from now on; None: nowhere."""
        if place is None:
            del self._place[node], self._acked[node]
        else:
            self._place[node] = place
        self.steady = all(place is Place.MEMBER for place in self._place.values())

    # -- what is there to hold --------------------------------------------------------------------

    @property
    def current(self) -> tuple[Key, ...]:
        """Boundaries a member must hold: the committed one and the pending ones."""
        return tuple(self._current)

    def add(self, key: Key) -> bool:
        """A boundary more to hold. Returns whether any other node is anything: member, candidate, on the way out."""
        current = self._current
        if not current or key > current[-1]:
            current.append(key)
        elif key not in current:
            current.append(key)
            current.sort()
        return bool(self._place)

    def keep_from(self, epoch: int) -> None:
        """`epoch` was read as committed: boundaries below it are history."""
        current = self._current
        while current and current[0][0] < epoch:
            del current[0]
        for acked in self._acked.values():
            acked.intersection_update(self._current)

    def drop_pending(self, committed_epoch: int) -> None:
        """The attempt ended: only the committed boundary remains."""
        self._current = [key for key in self._current if key[0] <= committed_epoch]
        for acked in self._acked.values():
            acked.intersection_update(self._current)

    def forget_boundaries(self) -> None:
        """The job went back to a checkpoint: none of the boundaries there were counts any more."""
        self._current = []
        for acked in self._acked.values():
            acked.clear()

    # -- who --------------------------------------------------------------------------------------

    def place(self, node: str) -> Place | None:
        return self._place.get(node)

    def fulfilled(self, wished: Iterable[str], living: Collection[str]) -> bool:
        """Whether everyone who is wished for is a member and lives: only then others may go.

        Args:
            wished: other nodes that placement wants, also those that died since: who was to go for one of them is the
                next to be wished for.
        """
        return all(node in living and self._place.get(node) is Place.MEMBER for node in wished)

    def all_members(self, count: int) -> bool:
        """Whether there are that many other nodes, and every one is a member."""
        return len(self._place) == count and self.steady

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._place))

    def members(self) -> tuple[str, ...]:
        return tuple(sorted(n for n, p in self._place.items() if p is Place.MEMBER))

    def candidates(self) -> tuple[str, ...]:
        return tuple(sorted(n for n, p in self._place.items() if p in (Place.CANDIDATE, Place.ADMITTING)))

    def invite(self, node: str) -> None:
        """A node is wished for: it becomes a candidate, unless it already is something."""
        if node not in self._place:
            self._acked[node] = set()
            self._put(node, Place.CANDIDATE)

    def dismiss(self, node: str) -> bool:
        """A candidate is not wished for any more. Returns whether it was forgotten: not while it may be a member."""
        if self._place.get(node) is Place.CANDIDATE:
            self._put(node, None)
            return True
        return False

    # -- acknowledgements -------------------------------------------------------------------------

    def missing(self, node: str) -> tuple[Key, ...]:
        """What `node` has yet to acknowledge, in order."""
        if node not in self._place:
            return ()
        return tuple(key for key in self._current if key not in self._acked[node])

    def acknowledge(self, node: str, *keys: Key) -> None:
        if node in self._acked:
            self._acked[node].update(set(keys).intersection(self._current))

    def waits_for(self, key: Key) -> tuple[str, ...]:
        """Nodes whose acknowledgement of `key` is needed and not there."""
        lacking = []
        for node, place in self._place.items():
            if place in _COUNTS and key not in self._acked[node]:
                lacking.append(node)
        lacking.sort()
        return tuple(lacking)

    def holders(self, key: Key) -> int:
        """How many replicas, the primary included, hold `key` and are known to be members."""
        found = 1
        for node, place in self._place.items():
            if place is Place.MEMBER and key in self._acked[node]:
                found += 1
        return found

    # -- admission and eviction -------------------------------------------------------------------

    def may_admit(self, node: str) -> bool:
        """A candidate, or one marked, that acknowledged the committed and every pending boundary."""
        place = self._place.get(node)
        return place in (Place.CANDIDATE, Place.MARKED) and bool(self._current) and not self.missing(node)

    def admitting(self, node: str) -> None:
        """The admitting write is about to be sent."""
        if not self.may_admit(node):
            raise ValueError(f"{node} is {self._place.get(node)}, not a candidate that holds every boundary")
        self._put(node, Place.ADMITTING)

    def admitted(self, node: str, written: bool) -> None:
        """It is known whether the admitting write happened."""
        if self._place.get(node) is Place.ADMITTING:
            self._settle(node, written, Place.MEMBER if written else Place.CANDIDATE)

    def evicting(self, node: str) -> None:
        """The evicting write is about to be sent; the acknowledgement is needed until it is known to have happened."""
        if self._place.get(node) not in (Place.MEMBER, Place.MARKED):
            raise ValueError(f"{node} is {self._place.get(node)}, not a member")
        self._put(node, Place.EVICTING)

    def evicted(self, node: str, written: bool) -> None:
        if self._place.get(node) is Place.EVICTING:
            self._settle(node, written, None if written else Place.MEMBER)

    def _settle(self, node: str, written: bool, place: Place | None) -> None:
        """What became of the write about `node`, and where it stands then; one that was marked is marked again."""
        if written:
            self._marked -= {node}
        self._put(node, Place.MARKED if node in self._marked else place)
