"""How long a leader waits for more epochs to commit together."""

from __future__ import annotations

import pytest

from taskgraph.node.gathering import Gathering


def waits(*commits: tuple[float, int], gather_s: float = 0.02) -> float:
    """How long it is to wait after commits, each (seconds since the one before, epochs in it)."""
    gathering, now = Gathering(gather_s), 100.0
    for since_s, epochs in commits:
        now += since_s
        gathering.committed(now, epochs, generation=7)
    return gathering.left_s(now)


def test_short_epochs_wait_for_gather_s() -> None:
    assert waits((0.0, 1)) == pytest.approx(0.02)
    assert waits((0.0, 1), (0.02, 8), (0.02, 8)) == pytest.approx(0.02)


def test_as_long_as_that_holds_two() -> None:
    assert waits((0.0, 1), (0.02, 2), (0.02, 2)) == pytest.approx(0.02)


def test_longer_ones_wait_for_four() -> None:
    assert waits((0.0, 1), (0.026, 2), (0.026, 2)) == pytest.approx(0.052)


def test_and_three_times_gather_s_at_most() -> None:
    assert waits((0.0, 1), (0.05, 2), (0.05, 2)) == pytest.approx(0.06)


def test_epochs_of_which_no_second_one_would_come_are_committed_as_they_come() -> None:
    assert waits((0.0, 1), (0.031, 1), (0.031, 1)) == pytest.approx(0.02)
    assert waits((0.0, 1), (1.0, 1), (1.0, 1)) == pytest.approx(0.02)


def test_one_pause_changes_nothing() -> None:
    steady = [(0.02, 8)] * 3
    assert waits((0.0, 1), *steady, (0.027, 1)) == pytest.approx(0.02)
    assert waits((0.0, 1), *steady, (0.027, 1), (0.02, 8)) == pytest.approx(0.02)


def test_the_first_two_commits_wait_no_longer_than_gather_s() -> None:
    """How long epochs take is not known before: the first ones may be slow, or a take-over's."""
    assert waits((0.0, 1), (0.02, 1)) == pytest.approx(0.02)


def test_nothing_waits_where_nothing_is_gathered() -> None:
    assert waits((0.0, 1), (0.005, 1), (0.005, 1), gather_s=0.0) == 0.0


def test_it_goes_on_with_time() -> None:
    gathering = Gathering(0.02)
    gathering.committed(100.0, 1, generation=7)
    assert gathering.left_s(100.015) == pytest.approx(0.005)
    assert gathering.left_s(100.03) < 0
    assert gathering.generation == 7
