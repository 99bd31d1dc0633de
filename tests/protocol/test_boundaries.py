"""Which of the boundaries a member holds is the committed one, and when one is freed."""

from __future__ import annotations

import itertools

import pytest
from protocol_kit import boundary

from taskgraph.protocol.boundaries import Boundaries


def holding(*pending: tuple[int, int, int], committed: int | None = None) -> Boundaries:
    held = Boundaries()
    if committed is not None:
        held.store(boundary(committed), committed=True)
    for epoch, attempt, term in pending:
        held.store(boundary(epoch, attempt, term), committed=False)
    return held


def keys(held: Boundaries) -> list[tuple[int, int, int]]:
    return [b.key for b in held.pending]


def test_new_replica_has_no_boundary() -> None:
    held = Boundaries()
    assert held.committed is None
    assert held.pending == ()
    assert not held.has_committed(0)
    assert held.note_committed(0) is None


def test_read_epoch_commits_its_boundary() -> None:
    held = holding((1, 1, 1), committed=0)
    assert held.has_committed(0)
    became = held.note_committed(1)
    assert became is not None
    assert became.key == (1, 1, 1)
    assert held.committed is became
    assert held.has_committed(1)
    assert held.pending == ()
    assert held.note_committed(1) is None, "it became so once"


@pytest.mark.parametrize("order", list(itertools.permutations([(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 3)])))
def test_boundary_of_the_highest_attempt_and_term_commits(
    order: tuple[tuple[int, int, int], ...],
) -> None:
    held = holding(*order, committed=0)
    assert held.note_committed(1) is not None
    assert held.committed is not None
    assert held.committed.key == (1, 2, 3)


def test_read_epoch_frees_earlier_boundaries() -> None:
    held = holding((1, 1, 1), (2, 1, 1), committed=0)
    held.note_committed(1)
    assert keys(held) == [(2, 1, 1)]


def test_epoch_read_twice_frees_nothing() -> None:
    held = holding((1, 1, 1), committed=0)
    assert held.note_committed(0) is None
    assert keys(held) == [(1, 1, 1)]


def test_epoch_without_a_boundary_changes_nothing() -> None:
    held = holding((1, 1, 1), committed=0)
    assert held.note_committed(2) is None
    assert held.has_committed(0)


@pytest.mark.parametrize(
    ("late", "acknowledged"), [((2, 9, 9), True), ((3, 1, 9), False), ((3, 2, 1), False), ((3, 2, 2), True)]
)
def test_pending_never_replaces_committed(late: tuple[int, int, int], acknowledged: bool) -> None:
    """Not one of an earlier epoch, attempt or term, nor the same one again. Who offers history, or what is here, again,
    since an answer was lost, is acknowledged: it would offer it for ever."""
    held = holding((4, 2, 2))
    held.store(boundary(3, 2, 2), committed=True)
    assert held.store(boundary(*late, b"late"), committed=False) is acknowledged
    assert keys(held) == [(4, 2, 2)]
    assert held.committed is not None
    assert held.committed.key == (3, 2, 2)
    assert held.committed.value.meta == b""


@pytest.mark.parametrize("later", [(1, 1, 2), (1, 2, 1)])
def test_later_term_corrects_the_committed_boundary(
    later: tuple[int, int, int],
) -> None:
    """An evicted replica reads that an epoch committed, holds a boundary of it that did not, and is invited again."""
    held = holding((1, 1, 1), committed=0)
    assert held.note_committed(1) is not None, "the best it has: it was evicted before there was a later one"
    held.store(boundary(*later, b"offered"), committed=False)
    assert not held.has_committed(1), "what it held did not commit: its successor began from the boundary before"
    assert held.note_committed(1) is not None
    assert held.committed is not None
    assert (held.committed.key, held.committed.value.meta) == (later, b"offered")


def test_committed_replaces_pending_of_its_epoch() -> None:
    held = holding((1, 1, 1), (1, 2, 1), (2, 2, 1), committed=0)
    held.store(boundary(1, 2, 2), committed=True)
    assert held.committed is not None
    assert held.committed.key == (1, 2, 2)
    assert keys(held) == [(2, 2, 1)]


def test_older_committed_boundary_changes_nothing() -> None:
    held = holding((3, 1, 1), committed=2)
    held.store(boundary(1), committed=True)
    assert held.has_committed(2)
    assert keys(held) == [(3, 1, 1)]


def test_committed_boundary_of_a_successor_counts() -> None:
    held = holding(committed=0)
    held.store(boundary(0, 1, 2, b"made anew"), committed=True)
    assert held.committed is not None
    assert held.committed.value.meta == b"made anew"


def test_pending_boundaries_end_with_their_attempt() -> None:
    held = holding((1, 1, 1), committed=0)
    held.drop_pending()
    assert held.pending == ()
    assert held.has_committed(0)
    assert held.note_committed(1) is None


@pytest.mark.parametrize("committed", [True, False])
def test_roll_back_drops_older_and_late_boundaries(committed: bool) -> None:
    """Boundaries of undone epochs must not be acknowledged; those of the new lineage are stored."""
    held = holding((4, 1, 1), (4, 3, 2), committed=3)
    held.roll_back(3)
    assert held.committed is None and keys(held) == [(4, 3, 2)]
    assert not held.store(boundary(3, 2, 9), committed=committed)
    assert not held.store(boundary(5, 2, 9), committed=committed)
    assert held.committed is None and keys(held) == [(4, 3, 2)]
    assert held.store(boundary(3, 3, 2), committed=committed)
    held.roll_back(2)
    assert not held.store(boundary(5, 2, 9), committed=committed), "a lineage is never taken back"


def test_clear_drops_everything() -> None:
    held = holding((1, 1, 1), committed=0)
    held.clear()
    assert held.committed is None
    assert held.pending == ()
