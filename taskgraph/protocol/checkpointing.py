"""Decides which boundaries become checkpoints, and when a checkpoint is complete.

    boundary     next        by
    committed    collecting  its number is a multiple of `every`, and a primary reports its file
    collecting   complete    the files of all needed tasks are reported: the leader puts `checkpoint` in etcd
    collecting   given up    a needed file cannot be written, or will never be
    collecting   left out    there are too many boundaries (`select_sparse`), or a later one is complete

Rules:

1. A primary writes a file only for a boundary that it read as committed. The files of a checkpoint belong to one
   attempt of the current lineage.
2. A primary reports its files to every new leader again, until the pointer is in etcd, in the order of writing. After
   a report for a later boundary no file for this one follows.
3. A primary writes only boundaries that commit after its term began. The leader is the primary of task 0, so no later
   leader completes a boundary that is incomplete and older than this leader's term.
4. If boundaries come too fast, the leader and all primaries leave out the same ones. Otherwise no boundary might get
   the files of all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

from taskgraph.protocol.messages import Stamp, WrittenFile
from taskgraph.protocol.shared import holds_state
from taskgraph.protocol.view import JobView

__all__ = ["CheckpointCollector", "files_needed", "is_due", "is_open", "select_sparse"]

_MAX_COLLECTED = 16
"""Boundaries that are collected at a time, so a task may report this many boundaries later than others."""
_MAX_LEFT_OUT = 1024
"""How many left-out boundaries are remembered, for late reports."""
_MAX_GIVEN_UP = 16
"""How many given-up boundaries are remembered, for late reports."""


def select_sparse(boundaries: Iterable[Stamp], most: int) -> list[Stamp]:
    """Selects up to `most` boundaries, in order: those whose epochs are multiples of the largest powers of two.

    So nodes that know different boundaries select the same ones.
    """
    return sorted(sorted(boundaries, key=lambda at: (at.epoch & -at.epoch, at))[-most:])


def is_due(view: JobView, boundary: Stamp, every: int) -> bool:
    """True if a checkpoint has to be written of this committed boundary: of each `every`-th epoch, and still useful."""
    return boundary.epoch % every == 0 and is_open(view, boundary)


def is_open(view: JobView, boundary: Stamp) -> bool:
    """True if the boundary may still become the checkpoint: not undone by a roll-back, and later than the current one.

    Boundary 0 never is.
    """
    return (
        view.epoch is not None
        and boundary.attempt >= view.epoch.record.lineage
        and boundary.epoch > (view.checkpoint.record.epoch if view.checkpoint is not None else 0)
    )


def files_needed(view: JobView, tasks: int) -> frozenset[int] | None:
    """Returns the tasks whose files a checkpoint needs: tasks with state, and task 0, whose file has the reports.

    Returns None while a task has no primary, since it is not known whether the task has state.
    """
    if any(task not in view.primaries for task in range(tasks)):
        return None
    return frozenset(task for task in range(tasks) if task == 0 or holds_state(view, task))


class CheckpointCollector:
    """Collects, on the leader, the checkpoint files that primaries report, and finds complete checkpoints."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._files: dict[Stamp, dict[int, WrittenFile]] = {}
        self._last_report: dict[int, Stamp] = {}  # the last report of each task
        self._given_up: dict[Stamp, int | None] = {}  # -> a task that failed to write its file, if any
        self._left_out: set[Stamp] = set()  # left out
        self._completed: Stamp | None = None  # returned by `find_complete`; its manifest may be written
        self._primary_began_at: dict[int, Stamp] = {}  # the stamp at which the current primary of a task began

    def note_file(self, written: WrittenFile) -> None:
        """Handles a primary's report of a file that it wrote, or could not write (size 0)."""
        stamp, task = written.stamp, written.task
        if self._primary_began_after(stamp, task):
            return  # a late report of an earlier primary
        self._last_report[task] = max(stamp, self._last_report.get(task, stamp))
        if stamp in self._left_out and written.size:
            return
        files = self._files.setdefault(stamp, {})
        if written.size or task not in files:  # otherwise an earlier primary has written it
            files[task] = written
        if len(self._files) > 2 * _MAX_COLLECTED:  # the next `find_complete` may be late
            self._keep_only(select_sparse(self._files, _MAX_COLLECTED))

    def note_primary(self, task: int, at: Stamp) -> None:
        """Notes that a task has a new primary, whose term began at `at` or later: it writes no files of boundaries
        before `at`."""
        self._primary_began_at[task] = at

    def _primary_began_after(self, stamp: Stamp, task: int) -> bool:
        """True if the task's current primary began after the boundary, so it writes no file of it."""
        at = self._primary_began_at.get(task)
        return at is not None and stamp.epoch < at.epoch and stamp.attempt <= at.attempt

    def blocking_task(self, view: JobView, stamp: Stamp) -> int | None:
        """Returns a task without a file of boundary `stamp`, whose primary began later and so writes none: no leader
        can complete this checkpoint, and its other files are useless.

        Returns 0 also if a roll-back undid the boundary; None if it is complete, or may still become a checkpoint.
        """
        if view.epoch is not None and stamp.attempt < view.epoch.record.lineage:
            return 0  # undone
        if stamp == self._completed:
            return None  # it is complete
        files, needed = self._files.get(stamp, {}), files_needed(view, self._tasks) or ()
        lacking = (
            t for t in sorted(needed) if self._primary_began_after(stamp, t) and not (t in files and files[t].size)
        )
        return next(lacking, None)

    def give_up(self, view: JobView) -> dict[Stamp, int | None]:
        """Gives up boundaries that can never become a checkpoint; returns each with a task that failed to write.

        The task is None if no write failed: a task left the boundary out, or its primary changed. A boundary is
        returned again when another file of it arrives. No boundary is given up before a later epoch is read as
        committed: from then on no later leader can complete it, either.
        """
        self._forget_closed(view)
        needed = files_needed(view, self._tasks)
        if needed is None:
            return {}
        whole = self._newest_complete(view, needed)
        for stamp, files in self._files.items():
            if view.epoch is None or stamp.epoch >= view.epoch.record.epoch:
                continue  # a later leader, which begins no later, might get all files
            failed = [task for task, written in files.items() if not written.size and task in needed]
            if failed:
                self._given_up[stamp] = min(failed)
            elif (whole is None or stamp > whole) and self._will_lack_file(stamp, needed - files.keys()):
                self._given_up.setdefault(stamp, None)
        found = {stamp: self._given_up[stamp] for stamp in sorted(self._files) if stamp in self._given_up}
        for stamp in found:
            del self._files[stamp]
        self._left_out -= found.keys()
        self._given_up = {stamp: self._given_up[stamp] for stamp in sorted(self._given_up)[-_MAX_GIVEN_UP:]}
        return found

    def _will_lack_file(self, stamp: Stamp, tasks: Iterable[int]) -> bool:
        """True if one of these tasks will never report a file of this boundary."""
        return any(
            self._last_report.get(task, stamp) > stamp or self._primary_began_after(stamp, task) for task in tasks
        )

    def find_complete(self, view: JobView) -> tuple[Stamp, tuple[WrittenFile, ...]] | None:
        """Returns the newest boundary with all needed files, and these files; None if there is none yet. Older
        boundaries are left out, and incomplete ones if there are too many."""
        self._forget_closed(view)
        self._completed = None
        needed = files_needed(view, self._tasks)
        if needed is None:
            return None
        whole = self._completed = self._newest_complete(view, needed)
        kept = select_sparse((stamp for stamp in self._files if whole is None or stamp > whole), _MAX_COLLECTED)
        if whole is not None:
            kept.append(whole)
        self._keep_only(kept)
        return None if whole is None else (whole, tuple(self._files[whole][task] for task in sorted(needed)))

    def _keep_only(self, kept: Iterable[Stamp]) -> None:
        """Keeps the files of these boundaries; all other boundaries are left out, and never become checkpoints."""
        files = {stamp: self._files[stamp] for stamp in kept}
        self._left_out |= self._files.keys() - files.keys()
        self._left_out.difference_update(sorted(self._left_out)[:-_MAX_LEFT_OUT])
        self._files = files

    def _newest_complete(self, view: JobView, needed: frozenset[int]) -> Stamp | None:
        """Returns the newest committed boundary with the files of all needed tasks, if there is one."""
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
        """Forgets boundaries that can no longer become the checkpoint (`is_open`)."""
        self._files = {stamp: files for stamp, files in self._files.items() if is_open(view, stamp)}
        self._left_out = {stamp for stamp in self._left_out if is_open(view, stamp)}
