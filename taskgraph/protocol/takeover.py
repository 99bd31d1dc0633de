"""Decides which node takes over a task, and when it may try.

A takeover is safe at any time, since its transaction decides. This module makes it fast and orderly:

    primary                     members that are not suspected   a node's move
    lives                       -                                NOTHING (TAKE_OVER from itself if it dropped the term)
    suspected                   some                             members: TAKE_OVER, each later than the one before
    suspected, all members gone none                             the wished node: FROM_NOTHING, ROLL_BACK or LOST

The caller waits in proportion to `rank` before it sends the transaction, so that a dead first member does not leave the
task without a primary.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.view import JobView

__all__ = ["Succession", "TakeoverMove", "find_stranded_task", "remaining_nodes", "sole_copies", "succession"]


class TakeoverMove(StrEnum):
    """What one node does now for a task whose primary may have failed."""

    NOTHING = "nothing"
    TAKE_OVER = "take over"  # a member, `rank` steps after the first one
    FROM_NOTHING = "from nothing"  # no member is left (or there never was one)
    ROLL_BACK = "roll back"  # no member is left, its state is needed, and there is a checkpoint
    LOST = "lost"  # no member is left, its state is needed, and there is no checkpoint: the job fails


@dataclass(frozen=True, slots=True)
class Succession:
    """A node's move for a task. `rank`: its place among the members that may take over, 0 for the first."""

    move: TakeoverMove
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
    """Decides whether node `me` takes the task over now, rolls the job back, reports the task lost, or does nothing.

    Args:
        suspects: nodes that may be lost (`FailureDetector.suspects`).
        gone: nodes that ended for good. The state of a task is lost only if all its members are gone.
        wished: placement wants this node to be the primary.
        stateful: a lost boundary cannot be computed again, except boundary 0.
        unseated: no node is eligible as primary, and this node reports the lost task for all.
        dropped: this node has stopped working as the primary. No other node suspects it, so it takes over from itself,
            with a new term, since it may have lost state of the old term.
    """
    primary = view.primary_node(task)
    if view.epoch is None:
        return Succession(TakeoverMove.NOTHING)
    if primary == me:
        return Succession(TakeoverMove.TAKE_OVER if dropped else TakeoverMove.NOTHING)
    if primary is not None and primary not in suspects:
        return Succession(TakeoverMove.NOTHING)
    successors = [node for node in view.in_sync(task) if node not in suspects]
    if me in successors:
        return Succession(TakeoverMove.TAKE_OVER, successors.index(me))
    if successors or not (wished or unseated):
        return Succession(TakeoverMove.NOTHING)
    # All members and their node keys must be gone, as the transaction compares.
    if any(node not in gone or node in view.nodes for node in view.in_sync(task)):
        return Succession(TakeoverMove.NOTHING)
    if stateful and view.epoch.record.epoch > 0:
        if view.checkpoint is None or view.checkpoint.record.epoch > view.epoch.record.epoch:
            return Succession(TakeoverMove.LOST)
        return Succession(TakeoverMove.ROLL_BACK if wished else TakeoverMove.NOTHING)
    return Succession(TakeoverMove.FROM_NOTHING if wished else TakeoverMove.NOTHING)


def find_stranded_task(view: JobView) -> int | None:
    """Finds a stateful task with a gone primary that a node can take over now, but none after the next commit; None:
    there is none.

    Its only possible successors were evicted "until" the committed boundary, by a write that arrived late. The caller
    must not commit before the takeover, or the state is lost.
    """
    for task, primary in view.primaries.items() if view.gone else ():
        if primary.record.node in view.gone and holds_state(view, task):
            successors = [node for node in view.in_sync(task) if node not in view.gone]
            if successors and all(view.members_of(task)[node].record.until is not None for node in successors):
                return task
    return None


def remaining_nodes(view: JobView, run: str, node: str) -> list[str]:
    """Returns the live nodes of a run, other than `node`, that do not drain: they can take over the tasks of `node`."""
    return [other for other, record in view.live_nodes(run).items() if other != node and not record.draining]


def sole_copies(view: JobView, tasks: int, node: str) -> list[int]:
    """Returns the tasks whose primary is `node`, and that no other node has in sync, except gone ones."""
    return [
        t
        for t in range(tasks)
        if view.primary_node(t) == node and all(n == node or n in view.gone for n in view.in_sync(t))
    ]
