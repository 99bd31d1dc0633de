"""Which boundaries become checkpoints, and when one is complete.

    committed, a multiple of `every` ──► each primary writes its file ──► all told the leader ──► `checkpoint` is put

A file is written of a boundary that its primary read as committed; the leader counts files of one boundary, made in
one attempt of the current lineage. Who tells the leader, tells every new leader again, until etcd's pointer is there.
"""

from __future__ import annotations

from taskgraph.protocol.messages import Stamp, Written
from taskgraph.protocol.view import JobView

__all__ = ["Collected", "due", "files_needed", "is_open"]

_MOST = 4
"""Boundaries collected at a time: a primary writes one while another waits, so more cannot become complete."""


def due(view: JobView, boundary: Stamp, every: int) -> bool:
    """Whether a checkpoint is to be written of this boundary, read as committed."""
    return boundary.epoch > 0 and boundary.epoch % every == 0 and is_open(view, boundary)


def is_open(view: JobView, boundary: Stamp) -> bool:
    """Whether the boundary may still become the checkpoint: not undone, and after the one there is."""
    return (
        view.epoch is not None
        and boundary.attempt >= view.epoch.record.lineage
        and boundary.epoch > (view.checkpoint.record.epoch if view.checkpoint is not None else 0)
    )


def files_needed(view: JobView, tasks: int) -> frozenset[int] | None:
    """Tasks without whose file a checkpoint is not complete: those with state, and task 0 for what was reported.

    None while some task has no primary yet, and nobody knows whether it has state.
    """
    if any(task not in view.primaries for task in range(tasks)):
        return None
    return frozenset(task for task in range(tasks) if task == 0 or view.primaries[task].record.stateful)


class Collected:
    """What the leader was told of files written."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._files: dict[Stamp, dict[int, Written]] = {}

    def take(self, written: Written) -> None:
        self._files.setdefault(written.stamp, {})[written.task] = written

    def complete(self, view: JobView) -> tuple[Stamp, tuple[Written, ...]] | None:
        """The newest boundary all of whose files are written, if there is one to go on to."""
        self._files = {stamp: files for stamp, files in self._files.items() if is_open(view, stamp)}
        needed = files_needed(view, self._tasks)
        if needed is None or view.epoch is None:
            return None
        newest_first = sorted(self._files, reverse=True)
        for stamp in newest_first[_MOST:]:
            del self._files[stamp]
        for stamp in newest_first[:_MOST]:
            files = self._files[stamp]
            if stamp.epoch <= view.epoch.record.epoch and needed <= files.keys():
                return stamp, tuple(files[task] for task in sorted(needed))
        return None
