"""Shared state: attributes that are equal on all tasks, kept by one task for all.

The record of a task's primary has the names that the task's class declares as shared, and whether the class has other
state. Tasks with the same names form a *group*; the lowest task of a group is its *keeper*.

    keeper              its boundary contains the shared state: backups and checkpoints get it
    other tasks         the primary has the shared state beside its boundary; backups and checkpoints get the rest.
                        A new primary asks the keeper's primary for the shared state of the committed boundary

Every done report carries the digest of the shared state of its boundary. The leader commits an epoch only if the
digests are equal in each group.
"""

from __future__ import annotations

from collections.abc import Mapping

from taskgraph.protocol.messages import Report
from taskgraph.protocol.view import JobView

__all__ = ["holds_state", "keeper_of", "unequal_tasks"]


def keeper_of(view: JobView, task: int) -> int | None:
    """Returns the keeper of a task's group; the task itself if it has no shared state.

    Returns None while it is not known: this task, or a lower one, has had no primary. Once known it stays.
    """
    own = view.primaries.get(task)
    if own is None:
        return None
    if not own.record.shared:
        return task
    for lower in range(task):
        primary = view.primaries.get(lower)
        if primary is None:
            return None
        if primary.record.shared == own.record.shared:
            return lower
    return task


def holds_state(view: JobView, task: int) -> bool:
    """True if a boundary of a task, other than boundary 0, has state that is lost if all its replicas are.

    False if the task has no primary yet, or has only shared state that another task keeps.
    """
    primary = view.primaries.get(task)
    if primary is None:
        return False
    return primary.record.stateful or (bool(primary.record.shared) and keeper_of(view, task) in (task, None))


def unequal_tasks(view: JobView, reports: Mapping[int, Report]) -> tuple[int, int] | None:
    """Returns two tasks of one group whose done reports have different digests of shared state; None: all are equal."""
    first: dict[tuple[str, ...], int] = {}
    for task in sorted(reports):
        primary = view.primaries.get(task)
        if primary is not None and primary.record.shared:
            lowest = first.setdefault(primary.record.shared, task)
            if reports[task].shared != reports[lowest].shared:
                return lowest, task
    return None
