"""Decides if a node is ready: nothing of the job is lost, and nothing less safe than possible, because of this node.

A supervisor that takes nodes away one by one waits for this in between (`taskgraph node --ready-file`).
"""

from __future__ import annotations

from collections.abc import Mapping

from taskgraph.protocol.assignment import Wish
from taskgraph.protocol.view import JobView

__all__ = ["are_tasks_in_sync", "is_registered", "is_worker_in_sync"]


def is_registered(view: JobView, node: str) -> bool:
    """True if the node takes part in the job, and was not asked to leave."""
    known = view.nodes.get(node)
    return known is not None and node not in view.gone and not known.record.draining


def are_tasks_in_sync(view: JobView, node: str, wishes: Mapping[int, Wish]) -> bool:
    """True if all wanted replicas are in sync of each task that has, or should have, a replica on this node.

    Args:
        wishes: the placement of this view. It wants as many backups as the living nodes can have.
    """
    if not view.primaries:  # the job has not begun: there is nothing to lose
        return True
    for task, wish in wishes.items():
        wanted = {each for each in (wish.primary, *wish.backups) if each is not None}
        members = view.members_of(task)
        active = {each for each in members if members[each].record.until is None}
        if (node in wanted or node in active) and not wanted <= active:
            return False
    return True


def is_worker_in_sync(view: JobView, node: str) -> bool:
    """True if the node is a worker of the elastic job, or the job has not begun."""
    return view.workers is None or any(worker == node for worker, _ in view.workers.record.workers)
