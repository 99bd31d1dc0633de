"""Where the set-up of a backup fails on one node: does that node end, or the job?

A node that joins may lack what `setup()` reads: a file, a mount, a library. A job that runs well without that node is
not to end for it. Where the node is needed, or where the job has committed nothing yet, the mistake is told at once.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from taskgraph.protocol.view import JobView

__all__ = ["RESTS_ON_NODE", "job_goes_on"]

RESTS_ON_NODE: Final = frozenset({"task builder", "setup", "restore"})
"""User code, by name, that rests on what is there on a node: files, mounts, libraries."""


def job_goes_on(view: JobView, me: str, task: int, *, suspects: Set[str], min_in_sync: int) -> bool:
    """Whether the job goes on as it is where `me` ends, which cannot set up its replica of `task`.

    That is so where an epoch is committed, `me` is primary of nothing, and every task of which it is in sync, or was
    to be, has its primary and members enough on other nodes that live, and stay.
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
