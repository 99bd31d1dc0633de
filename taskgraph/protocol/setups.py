"""Decides whether a node ends, or the job, if the node cannot set up a backup.

A joining node may lack a file, a mount or a library that `setup()` reads. A job that does not need the node continues.
Otherwise, and before the first commit, the job fails at once.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from taskgraph.protocol.view import JobView

__all__ = ["NODE_DEPENDENT_CODE", "can_job_continue"]

NODE_DEPENDENT_CODE: Final = frozenset({"task builder", "setup", "restore"})
"""User code whose errors may depend on files, mounts and libraries of the node."""


def can_job_continue(view: JobView, me: str, task: int, *, suspects: Set[str], min_in_sync: int) -> bool:
    """True if the job can continue without node `me`, which cannot set up its replica of `task`.

    That is so if an epoch is committed, `me` is no primary, and `task` and every task that has `me` in sync have a
    living primary and, on other nodes that stay, `min_in_sync` replicas in sync (at least 1).
    """
    if not view.running or view.stamp is None or view.stamp.epoch == 0:
        return False
    concerned = {task, *(each for each in view.primaries if me in view.in_sync(each))}
    for each in concerned | view.primaries.keys():
        primary = view.primary_node(each)
        if primary == me:
            return False
        if each in concerned:
            alive = {n for n in view.in_sync(each) if n in view.nodes and n not in view.gone and n not in suspects}
            staying = [n for n in alive - {me} if not view.nodes[n].record.draining]
            if primary not in alive or len(staying) < max(1, min_in_sync):
                return False
    return True
