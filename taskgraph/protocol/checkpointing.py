"""Which boundaries become checkpoints, and when one is complete.

    committed, a multiple of `every` ──► each primary writes its file ──► all told the leader ──► `checkpoint` is put

A file is written of a boundary that its primary read as committed; the leader counts files of one boundary, made in
one attempt of the current lineage. Who tells the leader, tells every new leader again, until etcd's pointer is there.
Each tells in the order in which it writes: who has told of a later one, or that it could not write its file, has none
of this one, and never will. Then the boundary is given up, and what others wrote of it may go.
"""

from __future__ import annotations

from taskgraph.protocol.messages import Stamp, Written
from taskgraph.protocol.view import JobView

__all__ = ["Collected", "due", "files_needed", "is_open"]

_MOST = 4
"""Boundaries collected at a time: a primary writes one while another waits, so more cannot become complete."""
_GIVEN_UP = 16
"""Of boundaries that were given up so many are known, for files that come late."""


def due(view: JobView, boundary: Stamp, every: int) -> bool:
    """Whether a checkpoint is to be written of this boundary, read as committed."""
    return boundary.epoch % every == 0 and is_open(view, boundary)


def is_open(view: JobView, boundary: Stamp) -> bool:
    """Whether the boundary may still become the checkpoint: not undone, and after the one there is (0 never may)."""
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
        self._last: dict[int, Stamp] = {}  # what each task told of last
        self._given_up: dict[Stamp, int] = {}  # and a task without a file of it

    def take(self, written: Written) -> None:
        files, task = self._files.setdefault(written.stamp, {}), written.task
        if written.size or task not in files:  # else a primary before has written it
            files[task] = written
        self._last[task] = max(written.stamp, self._last.get(task, written.stamp))

    def give_up(self, view: JobView) -> dict[Stamp, int]:
        """Boundaries that never become a checkpoint, and a task that has no file of each; oldest first.

        One is given up once, and named again when one more file of it was written.
        """
        self._files = {stamp: files for stamp, files in self._files.items() if is_open(view, stamp)}
        needed = files_needed(view, self._tasks)
        if needed is None:
            return {}
        for stamp, files in self._files.items():
            lacking = [task for task in sorted(needed) if self._lacks(task, stamp, files)]
            if lacking and stamp not in self._given_up:
                self._given_up[stamp] = lacking[0]
        found = {stamp: self._given_up[stamp] for stamp in sorted(self._files) if stamp in self._given_up}
        for stamp in found:
            del self._files[stamp]
        self._given_up = {stamp: self._given_up[stamp] for stamp in sorted(self._given_up)[-_GIVEN_UP:]}
        return found

    def _lacks(self, task: int, stamp: Stamp, files: dict[int, Written]) -> bool:
        """Whether the task has no file of this boundary, and never will."""
        told = files.get(task)
        return self._last.get(task, stamp) > stamp if told is None else not told.size

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
            files = {task: written for task, written in self._files[stamp].items() if written.size}
            if stamp in self._given_up:
                continue
            if stamp.epoch <= view.epoch.record.epoch and needed <= files.keys():
                return stamp, tuple(files[task] for task in sorted(needed))
        return None
