"""To whom a node leaves a task, having no memory for what it pulls."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from taskgraph.protocol.shortage import GIVE_UP_S, heir_of


@pytest.mark.parametrize(
    ("mine", "others", "short_s", "heir"),
    [
        (0, {}, 100 * GIVE_UP_S, None),  # nobody can take over
        (0, {"b": 0}, GIVE_UP_S - 0.1, None),
        (0, {"b": 0}, GIVE_UP_S, "b"),
        (0, {"b": 1, "c": 0}, GIVE_UP_S, "c"),  # who left it less often
        (1, {"b": 0}, GIVE_UP_S, None),  # it left it already: the hand-over is on its way
        (0, {"b": 1}, 4 * GIVE_UP_S - 0.1, None),  # b had none, either: ever more rarely
        (0, {"b": 1}, 4 * GIVE_UP_S, "b"),
        (2, {"b": 2}, 16 * GIVE_UP_S, "b"),
    ],
)
def test_heir_after_lack_of_memory(mine: int, others: Mapping[str, int], short_s: float, heir: str | None) -> None:
    assert heir_of(mine, others, short_s) == heir
