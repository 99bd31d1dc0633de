"""What uncommitted epochs may hold, of a node and of each of its tasks."""

from __future__ import annotations

import pytest

from taskgraph.node.epochs.sharing import AHEAD_BYTES, Share, Sharing

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


def test_a_large_epoch_holds_up_what_may_be_uncommitted_with_it_and_no_more() -> None:
    """A task that may be four epochs ahead, of a node with another one."""
    found, told = sharing(0, 0), list[int]()
    one = Share(found, 4, 10, told.append)
    assert (one.far, one.bytes, one.until) == (4, 44 * MIB, 14)
    one.holds(1 * MIB)
    assert (one.far, one.bytes, told) == (4, 44 * MIB, [4]), "an even share is room for more"
    one.holds(40 * MIB)
    assert (one.far, one.bytes, told) == (2, 80 * MIB, [4, 2])
    one.holds(41 * MIB - 1)
    one.look_back(15)
    assert (one.far, one.until, one.most) == (2, 19, 41 * MIB - 1), "it may be uncommitted still"
    one.look_back(20)
    assert (one.far, one.until, one.most, one.bytes) == (4, 24, 0, 44 * MIB)


def test_a_share_is_made_anew_where_there_are_more_tasks_and_given_back_at_the_end() -> None:
    found, told = sharing(0), list[int]()
    one = Share(found, 4, 0, told.append)
    one.holds(20 * MIB)
    assert (one.bytes, told) == (88 * MIB, [4])
    one.look()
    assert told == [4], "as many as before"
    found.primaries = 8
    one.look()
    assert (one.far, one.bytes) == (4, 80 * MIB) and told == [4, 4]
    another = Share(found, 4, 0, told.append)
    another.holds(20 * MIB)
    assert one.epochs != found.epochs, "the other one needs room, too: who is asked next makes its share anew"
    one.make()
    assert (one.epochs, one.far, one.bytes) == (2, 2, 40 * MIB)
    another.end()
    assert found.epochs == 4
