"""Whether a node that has no memory for what its task pulls leaves that task to a backup, and to which one."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LEFT_S", "heir_of"]

LEFT_S = 120.0
"""After so long the task is left to another node: what else took memory has come and gone by then, as a rule. Not
sooner: the other node has no more than it had, and what code raises there for want of memory fails the job."""
_RARER = 4
"""Where that node left it, too, it is after so many times as long: so tasks go round ever more rarely where none has
memory, and a node that has some again is found in a few times as long as it took."""


def heir_of(mine: int, others: Mapping[str, int], short_s: float) -> str | None:
    """Who leads the task next; None: it is not left.

    Args:
        mine: how often this node left it before.
        others: of the backups that can take over now, how often each left it.
        short_s: for how long there has been no memory.
    """
    if not others:
        return None
    heir = min(others, key=others.__getitem__)
    least = others[heir]
    return heir if mine <= least and short_s >= LEFT_S * _RARER**least else None
