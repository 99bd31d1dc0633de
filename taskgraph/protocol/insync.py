"""Tracks, on the primary of a task, which nodes are in sync and must acknowledge each boundary.

    absent ──wish──► candidate ──acknowledged all──► admitting ──known written──► member
                        ▲                               │                            │
                        └────────known refused──────────┘                            │ suspect / not wished
                                                                                     ▼
    absent ◄──────────────────────known written────────────────────────────────  evicting

    marked ──acknowledged all──► admitting          marked ──suspect / not wished──► evicting

1. A boundary needs the acknowledgement of every node in `admitting`, `member`, `marked` and `evicting`: the node may
   take over from the moment when the admitting write may exist, until the evicting write is known to exist.
2. Members that a takeover reads are `member`. Members that an earlier term evicted are `marked`: only an eviction of
   the own term counts. After the next commit they cannot take over, so they are admitted again or evicted.
3. The caller calls `begin_admission` or `begin_eviction` before it sends the write, and `end_admission` or
   `end_eviction` when it knows the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

__all__ = ["InSyncSet", "MemberState"]

Key = tuple[int, int, int]
"""A boundary's (epoch, attempt, term)."""


class MemberState(StrEnum):
    """The state of a node in the in-sync set of a task."""

    CANDIDATE = "candidate"
    ADMITTING = "admitting"
    MEMBER = "member"
    MARKED = "marked"  # evicted by an earlier term
    EVICTING = "evicting"


_MUST_ACKNOWLEDGE = frozenset({MemberState.ADMITTING, MemberState.MEMBER, MemberState.MARKED, MemberState.EVICTING})


class InSyncSet:
    """The in-sync set of a task: the state of each node except the primary's own, which has every boundary."""

    def __init__(self, members: Iterable[str], *, marked: Iterable[str] = ()) -> None:
        """Args:
        members: the members that the takeover read, without the primary.
        marked: nodes that an earlier term evicted and that have the committed boundary.
        """
        self._marked = frozenset(marked)
        self._states: dict[str, MemberState] = dict.fromkeys(members, MemberState.MEMBER) | dict.fromkeys(
            self._marked, MemberState.MARKED
        )
        self._acked: dict[str, set[Key]] = {node: set() for node in self._states}
        self._current: list[Key] = []  # in order
        self.only_members = not self._marked
        """All nodes of the set are members: none is a candidate, marked, or being admitted or evicted."""

    def _set_state(self, node: str, state: MemberState | None) -> None:
        """Sets the state of a node; None removes the node."""
        if state is None:
            del self._states[node], self._acked[node]
        else:
            self._states[node] = state
        self.only_members = all(state is MemberState.MEMBER for state in self._states.values())

    # -- boundaries -------------------------------------------------------------------------------

    @property
    def current(self) -> tuple[Key, ...]:
        """The boundaries that a member must have: the committed one and the pending ones."""
        return tuple(self._current)

    def add(self, key: Key) -> bool:
        """Adds a boundary that members must acknowledge. Returns True if the set has nodes other than the primary."""
        current = self._current
        if not current or key > current[-1]:
            current.append(key)
        elif key not in current:
            current.append(key)
            current.sort()
        return bool(self._states)

    def drop_before(self, epoch: int) -> None:
        """Drops boundaries before `epoch`, which was read as committed."""
        current = self._current
        while current and current[0][0] < epoch:
            del current[0]
        for acked in self._acked.values():
            acked.intersection_update(self._current)

    def drop_pending(self, committed_epoch: int) -> None:
        """Drops the boundaries after `committed_epoch`, which are pending, since the attempt ended."""
        self._current = [key for key in self._current if key[0] <= committed_epoch]
        for acked in self._acked.values():
            acked.intersection_update(self._current)

    def forget_boundaries(self) -> None:
        """Drops all boundaries, since the job rolled back to a checkpoint."""
        self._current = []
        for acked in self._acked.values():
            acked.clear()

    # -- nodes ------------------------------------------------------------------------------------

    def state_of(self, node: str) -> MemberState | None:
        """Returns the state of a node; None: it is not in the set."""
        return self._states.get(node)

    def wishes_fulfilled(self, wished: Iterable[str], living: Collection[str]) -> bool:
        """True if all wished nodes are members and live. Only then may members that are not wished be evicted.

        Args:
            wished: the nodes that placement wants, also nodes that died since: placement may next want the member that
                was to be replaced by one of them.
        """
        return all(node in living and self._states.get(node) is MemberState.MEMBER for node in wished)

    def are_all_members(self, count: int) -> bool:
        """True if the set has `count` nodes besides the primary, and all are members."""
        return len(self._states) == count and self.only_members

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._states))

    def members(self) -> tuple[str, ...]:
        return tuple(sorted(n for n, p in self._states.items() if p is MemberState.MEMBER))

    def not_yet_members(self) -> tuple[str, ...]:
        """Returns the candidates, and the nodes whose admitting write may not exist yet."""
        return tuple(sorted(n for n, p in self._states.items() if p in (MemberState.CANDIDATE, MemberState.ADMITTING)))

    def invite(self, node: str) -> None:
        """Makes a node that is not in the set a candidate; does nothing if it is in the set."""
        if node not in self._states:
            self._acked[node] = set()
            self._set_state(node, MemberState.CANDIDATE)

    def drop_candidate(self, node: str) -> bool:
        """Drops a candidate. Returns False, and changes nothing, if the node is no candidate: it may be a member."""
        if self._states.get(node) is MemberState.CANDIDATE:
            self._set_state(node, None)
            return True
        return False

    # -- acknowledgements -------------------------------------------------------------------------

    def missing(self, node: str) -> tuple[Key, ...]:
        """Returns the current boundaries that `node` has not acknowledged, in order; () if it is not in the set."""
        if node not in self._states:
            return ()
        return tuple(key for key in self._current if key not in self._acked[node])

    def acknowledge(self, node: str, *keys: Key) -> None:
        """Notes that the node has stored these boundaries. Those that are not current do not count."""
        if node in self._acked:
            self._acked[node].update(set(keys).intersection(self._current))

    def acknowledged_before(self, node: str, key: Key) -> Key | None:
        """Returns the latest boundary before `key` that `node` has acknowledged, if there is one."""
        return max((acked for acked in self._acked.get(node, ()) if acked < key), default=None)

    def waits_for(self, key: Key) -> tuple[str, ...]:
        """Returns the nodes whose acknowledgement of boundary `key` is missing."""
        lacking = []
        for node, state in self._states.items():
            if state in _MUST_ACKNOWLEDGE and key not in self._acked[node]:
                lacking.append(node)
        lacking.sort()
        return tuple(lacking)

    def count_replicas_with(self, key: Key) -> int:
        """Returns the number of members that have boundary `key`, including the primary."""
        found = 1
        for node, state in self._states.items():
            if state is MemberState.MEMBER and key in self._acked[node]:
                found += 1
        return found

    # -- admission and eviction -------------------------------------------------------------------

    def may_admit(self, node: str) -> bool:
        """True if the node is a candidate or marked, and acknowledged all boundaries."""
        state = self._states.get(node)
        return state in (MemberState.CANDIDATE, MemberState.MARKED) and bool(self._current) and not self.missing(node)

    def begin_admission(self, node: str) -> None:
        """Notes that the admitting write is about to be sent."""
        if not self.may_admit(node):
            raise ValueError(f"{node} is {self._states.get(node)}, not a candidate with every boundary")
        self._set_state(node, MemberState.ADMITTING)

    def end_admission(self, node: str, written: bool) -> None:
        """Notes the known outcome of the admitting write: the node is a member now, or what it was before."""
        if self._states.get(node) is MemberState.ADMITTING:
            self._set_state_or_marked(node, written, MemberState.MEMBER if written else MemberState.CANDIDATE)

    def begin_eviction(self, node: str) -> None:
        """Notes that the evicting write is about to be sent. The node's acknowledgements are needed until it exists."""
        if self._states.get(node) not in (MemberState.MEMBER, MemberState.MARKED):
            raise ValueError(f"{node} is {self._states.get(node)}, not a member")
        self._set_state(node, MemberState.EVICTING)

    def end_eviction(self, node: str, written: bool) -> None:
        """Notes the known outcome of the evicting write: the node has left the set, or is what it was before."""
        if self._states.get(node) is MemberState.EVICTING:
            self._set_state_or_marked(node, written, None if written else MemberState.MEMBER)

    def _set_state_or_marked(self, node: str, written: bool, state: MemberState | None) -> None:
        """Sets a node's state by the known outcome of a write. A marked node stays marked if nothing was written."""
        if written:
            self._marked -= {node}
        self._set_state(node, MemberState.MARKED if node in self._marked else state)
