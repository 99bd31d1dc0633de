"""A node lacks memory for the items of its task: which backup takes the task?"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["GIVE_UP_S", "heir_of"]

GIVE_UP_S = 120.0
"""Time without memory before another node gets the task. Other users of the memory mostly end by then. Not sooner: the
other node may lack memory, too, and an error of user code there fails the job."""
_RARER = 4
"""The time grows by this factor each time that the backup gave the task up, too: so tasks move ever more rarely if no
node has memory."""


def heir_of(mine: int, others: Mapping[str, int], short_s: float) -> str | None:
    """Returns the backup that should lead the task, or None: this node keeps it.

    Args:
        mine: how often this node gave the task up.
        others: backup that can take over -> how often it gave the task up.
        short_s: seconds without memory.
    """
    if not others:
        return None
    heir = min(others, key=others.__getitem__)
    least = others[heir]
    return heir if mine <= least and short_s >= GIVE_UP_S * _RARER**least else None
