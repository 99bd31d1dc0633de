"""Who succeeds a primary, and when one may try.

A takeover is safe at any time: its transaction decides, not this module. This module only makes it quick and
orderly: the first member in the order of admission acts as soon as its primary's node is suspected; the others act
one after another, later, so that a first in line who is dead too does not leave the task alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from taskgraph.protocol.view import JobView

__all__ = ["Move", "Succession", "held_alone", "stranded", "succession", "who_stays"]


class Move(StrEnum):
    """What a node should do about a task."""

    NOTHING = "nothing"
    TAKE_OVER = "take over"  # as a member, `rank` steps after the first in line
    FROM_NOTHING = "from nothing"  # no member is left (or there never was one)
    ROLL_BACK = "roll back"  # no member is left, its state is needed, and there is a checkpoint
    LOST = "lost"  # no member is left, its state is needed, and there is no checkpoint: the job fails


@dataclass(frozen=True, slots=True)
class Succession:
    """The decision, and what it rests on."""

    move: Move
    rank: int = 0


def succession(
    view: JobView,
    task: int,
    me: str,
    *,
    suspects: Set[str],
    gone: Set[str],
    wished: bool,
    stateful: bool,
    unseated: bool = False,
    dropped: bool = False,
) -> Succession:
    """Decides for one task.

    Args:
        suspects: nodes whose port refuses, whose lease ended, whose key is absent, or who are gone.
        gone: nodes that are gone for good. Only "gone" allows starting without any of the members.
        wished: placement wants this node to be the task's primary.
        stateful: a lost boundary cannot be made anew, but in epoch 0.
        unseated: placement wants no node to be the task's primary, since none that stays may hold it, and this node
            speaks for all: what is lost is lost without a successor, too.
        dropped: this node works for no term of the task, and begins none. Where it is the primary nevertheless, nobody
            works, and nobody else will try, since it is no suspect: it takes over from itself. The old term may have
            done things that this node knows nothing of any more, so it is not taken up again: there is a new one.
    """
    primary = view.primary_node(task)
    if view.epoch is None:
        return Succession(Move.NOTHING)
    if primary == me:
        return Succession(Move.TAKE_OVER if dropped else Move.NOTHING)
    if primary is not None and primary not in suspects:
        return Succession(Move.NOTHING)
    heirs = [node for node in view.in_sync(task) if node not in suspects]
    if me in heirs:
        return Succession(Move.TAKE_OVER, heirs.index(me))
    if heirs or not (wished or unseated):
        return Succession(Move.NOTHING)
    # Every member must be gone, and its node key with it: the transaction compares just that.
    if any(node not in gone or node in view.nodes for node in view.in_sync(task)):
        return Succession(Move.NOTHING)
    if stateful and view.epoch.record.epoch > 0:
        if view.checkpoint is None or view.checkpoint.record.epoch > view.epoch.record.epoch:
            return Succession(Move.LOST)
        return Succession(Move.ROLL_BACK if wished else Move.NOTHING)
    return Succession(Move.FROM_NOTHING if wished else Move.NOTHING)


def stranded(view: JobView) -> int | None:
    """A task with state whose primary is gone, and that somebody can take over now, but nobody after the next commit.

    Who can was evicted "until" the committed boundary: the write was on its way when the primary died. So that boundary
    is the last one of the task that is not lost.
    """
    for task, primary in view.primaries.items() if view.gone else ():
        if primary.record.node in view.gone and primary.record.stateful:
            heirs = [node for node in view.in_sync(task) if node not in view.gone]
            if heirs and all(view.members_of(task)[node].record.until is not None for node in heirs):
                return task
    return None


def who_stays(view: JobView, run: str, node: str) -> list[str]:
    """Nodes that are there to take over what one has that leaves."""
    return [other for other, record in view.live_nodes(run).items() if other != node and not record.draining]


def held_alone(view: JobView, tasks: int, node: str) -> list[int]:
    """Tasks whose state no node but this one has: one that is gone has nothing, whatever its keys say."""
    return [t for t in range(tasks) if view.primary_node(t) == node and not set(view.in_sync(t)) - {node, *view.gone}]
