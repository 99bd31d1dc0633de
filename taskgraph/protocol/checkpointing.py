"""Which boundaries become checkpoints, and when one is complete.

    committed, a multiple of `every` ──► each primary writes its file ──► all told the leader ──► `checkpoint` is put

A file is written of a boundary that its primary read as committed; the leader counts files of one boundary, made in
one attempt of the current lineage. Who tells the leader, tells every new leader again, until etcd's pointer is there.
Each tells in the order in which it writes: who has told of a later one, or that it could not write its file, has none
of this one, and never will. Then the boundary is given up, and what others wrote of it may go.

Nor will who became primary when a later one was committed already: it writes those that are committed from then on. Of
task 0 that is the leader itself. So what is not complete yet of boundaries before a leader's own term becomes nothing
under any leader after it, whoever wrote what of it; and that can be said of files that nobody tells of.

Boundaries may come faster than the leader hears of them all. Then some are left out, here and by each primary that
tells, and all leave out the same ones (`sparse`), whatever each of them knows: else one told of those only that
another had left out, and none became complete.
"""

from __future__ import annotations

from collections.abc import Iterable

from taskgraph.protocol.messages import Stamp, Written
from taskgraph.protocol.view import JobView

__all__ = ["Collected", "due", "files_needed", "is_open", "sparse"]

_MOST = 16
"""Boundaries collected at a time. Some tasks tell later than others: by as many boundaries, and all are looked at."""
_PASSED_OVER = 1024
"""Of boundaries that were passed over so many are known, for files that are told of late."""
_GIVEN_UP = 16
"""Of boundaries that were given up so many are known, for files that come late."""


def sparse(boundaries: Iterable[Stamp], most: int) -> list[Stamp]:
    """So many of these boundaries, in order: those whose epochs are multiples of the largest powers of two.

    Of any two of whoever goes by this, each with as many boundaries of late as it happens to have, both keep those
    that lie far apart, and then the newest of those that lie closer.
    """
    return sorted(sorted(boundaries, key=lambda at: (at.epoch & -at.epoch, at))[-most:])


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
        self._given_up: dict[Stamp, int | None] = {}  # and a task that could not write its file
        self._passed_over: set[Stamp] = set()  # there were too many, or a later one is whole
        self._becoming: Stamp | None = None  # what `complete` named last: its manifest may be on its way
        self._began: dict[int, Stamp] = {}  # what was at work when a task's primary of now began, or before that

    def take(self, written: Written) -> None:
        stamp, task = written.stamp, written.task
        if self._is_before(stamp, task):
            return  # by a primary before, too late: that it would not come may have been acted upon
        self._last[task] = max(stamp, self._last.get(task, stamp))
        if stamp in self._passed_over and written.size:
            return
        files = self._files.setdefault(stamp, {})
        if written.size or task not in files:  # else a primary before has written it
            files[task] = written
        if len(self._files) > 2 * _MOST:  # whoever is to look waits for the place
            self._keep(sparse(self._files, _MOST))

    def began(self, task: int, at: Stamp) -> None:
        """A task has another primary, which began when `at` was at work, or later: it writes nothing of before."""
        self._began[task] = at

    def _is_before(self, stamp: Stamp, task: int) -> bool:
        """Whether the task's primary of now began after that boundary."""
        at = self._began.get(task)
        return at is not None and stamp.epoch < at.epoch and stamp.attempt <= at.attempt

    def never(self, view: JobView, stamp: Stamp) -> int | None:
        """A task for want of whose file the boundary becomes a checkpoint under no leader, this one or a later one.

        None where it may still become one, as far as can be said. Whether there is a later checkpoint does not matter.
        """
        if view.epoch is not None and stamp.attempt < view.epoch.record.lineage:
            return 0  # undone
        if stamp == self._becoming:
            return None  # though there may have been too many since to know that it is whole
        files, needed = self._files.get(stamp, {}), files_needed(view, self._tasks) or ()
        lacking = (t for t in sorted(needed) if self._is_before(stamp, t) and not (t in files and files[t].size))
        return next(lacking, None)

    def give_up(self, view: JobView) -> dict[Stamp, int | None]:
        """Boundaries that never become a checkpoint, oldest first, each with a task that could not write its file.

        None where nothing failed, and yet a task has no file of it: it left this one out, or its primary was another
        one then. One is given up once, and named again when one more file of it was written. What only comes too late
        for a later one goes with that. None is given up before a later epoch was read as committed: from then on it is
        nothing to leaders after this one either, however late its files are removed.
        """
        self._forget_closed(view)
        needed = files_needed(view, self._tasks)
        if needed is None:
            return {}
        whole = self._newest_whole(view, needed)
        for stamp, files in self._files.items():
            if view.epoch is None or stamp.epoch >= view.epoch.record.epoch:
                continue  # else a leader after it, which begins no later, may be told of all files
            failed = [task for task, written in files.items() if not written.size and task in needed]
            if failed:
                self._given_up[stamp] = min(failed)
            elif (whole is None or stamp > whole) and self._is_lacking(stamp, needed - files.keys()):
                self._given_up.setdefault(stamp, None)
        found = {stamp: self._given_up[stamp] for stamp in sorted(self._files) if stamp in self._given_up}
        for stamp in found:
            del self._files[stamp]
        self._passed_over -= found.keys()
        self._given_up = {stamp: self._given_up[stamp] for stamp in sorted(self._given_up)[-_GIVEN_UP:]}
        return found

    def _is_lacking(self, stamp: Stamp, untold: Iterable[int]) -> bool:
        """Whether one of these tasks, which did not tell of a file of this boundary, never will."""
        return any(self._last.get(task, stamp) > stamp or self._is_before(stamp, task) for task in untold)

    def complete(self, view: JobView) -> tuple[Stamp, tuple[Written, ...]] | None:
        """The newest boundary all of whose files are written, if there is one to go on to."""
        self._forget_closed(view)
        self._becoming = None
        needed = files_needed(view, self._tasks)
        if needed is None:
            return None
        whole = self._becoming = self._newest_whole(view, needed)
        kept = sparse((stamp for stamp in self._files if whole is None or stamp > whole), _MOST)
        if whole is not None:
            kept.append(whole)
        self._keep(kept)
        return None if whole is None else (whole, tuple(self._files[whole][task] for task in sorted(needed)))

    def _keep(self, kept: Iterable[Stamp]) -> None:
        """The others are passed over."""
        files = {stamp: self._files[stamp] for stamp in kept}
        self._passed_over |= self._files.keys() - files.keys()
        self._passed_over.difference_update(sorted(self._passed_over)[:-_PASSED_OVER])
        self._files = files

    def _newest_whole(self, view: JobView, needed: frozenset[int]) -> Stamp | None:
        at = view.epoch
        return max(
            (
                stamp
                for stamp, files in self._files.items()
                if at is not None
                and stamp.epoch <= at.record.epoch
                and stamp not in self._given_up
                and needed <= files.keys()
                and all(files[task].size for task in needed)
            ),
            default=None,
        )

    def _forget_closed(self, view: JobView) -> None:
        self._files = {stamp: files for stamp, files in self._files.items() if is_open(view, stamp)}
        self._passed_over = {stamp for stamp in self._passed_over if is_open(view, stamp)}
