"""What uncommitted epochs may hold, of a node and of each of its tasks."""

from __future__ import annotations

import pytest

from taskgraph.node.epochs.sharing import AHEAD_BYTES, Sharing

MIB = 1 << 20


def sharing(*largest: int) -> Sharing:
    """Of a node with so many tasks, whose largest epochs hold so much."""
    found = Sharing()
    found.primaries = len(largest)
    for held in largest:
        found.changed(0, held)
    return found


@pytest.mark.parametrize(
    ("largest", "shares"),
    [
        ([1 * MIB], [88 * MIB]),
        ([100 * MIB], [88 * MIB]),  # it is alone, and no more is ahead of the commit than one epoch at work
        ([1 * MIB] * 8, [11 * MIB] * 8),
        ([10 * MIB] * 8, [20 * MIB] * 8),  # two epochs each: 160 MiB, where their epochs hold 80
        ([100 * MIB] * 8, [88 * MIB] * 8),
        ([10 * MIB, 1, 1, 1], [80 * MIB, 22 * MIB, 22 * MIB, 22 * MIB]),  # one may have what others do not need
        ([10 * MIB, 10 * MIB, 1, 1], [40 * MIB, 40 * MIB, 22 * MIB, 22 * MIB]),
    ],
)
def test_shares(largest: list[int], shares: list[int]) -> None:
    found = sharing(*largest)
    assert [found.share(held) for held in largest] == shares


@pytest.mark.parametrize("tasks", [2, 10, 40, 200, 1000])
@pytest.mark.parametrize("held", [100, 64 << 10, MIB, 8 * MIB])
def test_all_of_a_node_hold_no_more_than_two_epochs_or_the_limit(tasks: int, held: int) -> None:
    """It was eight epochs of each task, 88 MiB at most: 800 MiB with ten tasks of 10 MiB."""
    found = sharing(*[held] * tasks)
    ahead = min(64, found.share(held) // held)
    assert ahead >= 2 and tasks * held * ahead <= max(AHEAD_BYTES, 2 * tasks * held)


def test_who_ends_needs_no_share() -> None:
    found = sharing(20 * MIB, 20 * MIB)
    assert found.epochs == 2
    found.changed(20 * MIB, 0)
    found.primaries = 1
    assert found.epochs == 4 and found.share(20 * MIB) == 88 * MIB
