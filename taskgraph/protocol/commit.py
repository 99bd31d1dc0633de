"""Decides for the leader whether to seal tasks, commit, restart the epoch or fail the job.

    every task reports idle or done ──► sums equal? ──no──► something is under way (idle tasks) or diverged (all done)
                                            │yes
                          some idle ────────┼──────── all done
                              ▼                           ▼
                         seal those                    commit

    state of a task    accepts               next state
    working            all messages          idle, or done if it has neither handlers nor `on_flag`
    idle               flags and requests    working; done after the seal
    done               no messages           -

1. A report counts only if it is of the current attempt, of the epoch at work or one that tasks may be ahead with, and
   of the current term of its task.
2. Tasks may be `epochs_ahead` epochs ahead of the last commit. Complete epochs commit together, each by its own sums.
3. Two sums (see `sums`) compare all edges of an epoch at once. If all tasks are done and the sums differ, an edge does
   not agree. If a term changed since the epoch began, a takeover recomputed something differently: the epoch restarts.
   Otherwise the job or taskgraph has a bug: the job fails, and names the edge.
4. State that tasks share is equal: the digests in their done reports are. If they differ, the epoch does not commit.
   It restarts if a term changed since it began, as in 3; otherwise the job fails.
5. If the sums differ while tasks are idle, one of them may be working again. The ledgers of all tasks tell.

The caller calls `begin` for each stamp read from etcd, passes reports and requests, calls `decide` when `ready` is True
or a restart was requested, and carries the action out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskgraph.protocol.messages import Report, Stamp
from taskgraph.protocol.shared import unequal_tasks
from taskgraph.protocol.sums import decode_sum, total
from taskgraph.protocol.takeover import find_stranded_task
from taskgraph.protocol.view import JobView

__all__ = [
    "DIFFERENT_RESULTS_TEXT",
    "Action",
    "Commit",
    "KeepWaiting",
    "Leader",
    "Restart",
    "SealTasks",
    "UnequalSharedState",
    "UnequalSums",
]

_CAUSE = "there is state that no snapshot holds, or a task is not deterministic: tg.testing.run tells which"
"""Likely causes of different results on a new primary."""
DIFFERENT_RESULTS_TEXT = f"a new primary recomputed something differently ({_CAUSE})"


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """There is nothing to do until `tasks` report again; (): the leader's own view is behind. `why`: for users."""

    tasks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class SealTasks:
    """All tasks are idle or done: seal idle ones. `versions`: (task, the version in its report) of each."""

    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """All tasks are done, and all edges agree.

    Attributes:
        finished: the last epoch of the commit is the last one of the job.
        epochs: number of epochs, from the one at work on.
        awaited: a task cannot go on without this commit (`Report.ahead` is False).
    """

    finished: bool
    epochs: int = 1
    awaited: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    """The epoch cannot complete in this attempt: begin the next attempt. `why`: for users."""

    why: str


@dataclass(frozen=True, slots=True)
class UnequalSums:
    """The sums differ, so an edge seems to disagree: ask all tasks for their ledgers, which tell if one does.

    Attributes:
        replaced: a term changed, which would explain the difference: then the epoch restarts. Otherwise the job fails.
    """

    replaced: bool = False


@dataclass(frozen=True, slots=True)
class UnequalSharedState:
    """All tasks are done and all edges agree, but the shared state of these two tasks differs: the job fails."""

    tasks: tuple[int, int]


Action = KeepWaiting | SealTasks | Commit | Restart | UnequalSums | UnequalSharedState


def _is_newer(report: Report, known: Report) -> bool:
    """True if the report is newer than the known one of the same term. Reports are repeated, and may arrive late."""
    return not known.done and (report.done or report.version >= known.version)


class _EpochReports:
    """The reports of one epoch.

    Attributes:
        reports: task -> its latest report.
        rows: task -> the numbers of `epoch.report` in that report, if any.
        done: number of tasks that are done.
        finishing: number of tasks that want the job to end with this epoch.
        kept: the numbers of this epoch that a boundary of task 0 contains (`Leader.keep_numbers`); None: none does.
        shared: at least one report has a digest of shared state.
    """

    __slots__ = ("done", "finishing", "kept", "reports", "rows", "shared")

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}
        self.rows: dict[int, Mapping[str, float]] = {}
        self.done = self.finishing = 0
        self.kept: Mapping[int, Mapping[str, float]] | None = None
        self.shared = False


_NOTHING = _EpochReports()


class Leader:
    """The leader's state of the epoch at work and of the epochs that tasks are ahead with.

    Args:
        ahead: the most epochs that a task may be ahead of the one at work.

    Attributes:
        stamp: attempt and epoch at work, as read from etcd; None before `begin`.
        ready: every task reported on the epoch at work. Before that only a restart can be decided.
        enough: the number of complete epochs that are committed without waiting for more.
        urgent: commit without waiting for more: `enough` are complete, or a task waits for the commit.
    """

    def __init__(self, tasks: int, epochs: int | None, *, ahead: int = 0) -> None:
        self._tasks = tasks
        self._epochs = epochs
        self._ahead = ahead
        self.set_ahead(ahead)
        self.stamp: Stamp | None = None
        self.ready = False
        self.urgent = False
        self._reports: dict[int, _EpochReports] = {}  # by epoch: the one at work, and later ones
        self._awaited_epochs: set[int] = set()  # epochs whose commit a task waits for
        self._sealed: dict[int, tuple[int, int]] = {}  # task -> (term, version) of an accepted seal
        self._restart: tuple[int, str] | None = None  # the latest epoch that cannot complete, and why

    def set_ahead(self, ahead: int) -> None:
        """Sets `enough` to half of `ahead`, so tasks that may be `ahead` epochs ahead can go on during a commit."""
        self.enough = max(1, (ahead + 1) // 2)

    def begin(self, stamp: Stamp) -> None:
        """Begins the epoch of `stamp`, which was read from etcd. Drops reports of other attempts and earlier epochs."""
        if self.stamp == stamp:
            return
        if self.stamp is None or stamp.attempt != self.stamp.attempt:
            self._reports, self._awaited_epochs, self._restart = {}, set(), None
        self.stamp = stamp
        self._sealed = {}
        for epoch in [epoch for epoch in self._reports if epoch < stamp.epoch]:
            del self._reports[epoch]
            self._awaited_epochs.discard(epoch)
        self._update_ready()
        if self._restart is not None and self._restart[0] < stamp.epoch:
            self._restart = None

    def takes(self, stamp: Stamp) -> bool:
        """True if messages of `stamp` count: it is the epoch at work, or one that tasks may be ahead with."""
        at = self.stamp
        return at is not None and stamp.attempt == at.attempt and at.epoch <= stamp.epoch <= at.epoch + self._ahead

    def receive_reports(self, *reports: Report) -> bool:
        """Takes the reports of one message. Returns True if one of them is new and valid."""
        if self.stamp is None:
            return False
        attempt, first = self.stamp
        last, tasks, counts, look = first + self._ahead, self._tasks, False, False
        for report in reports:
            (in_attempt, epoch), task = report.stamp, report.task
            if in_attempt != attempt or not first <= epoch <= last or not 0 <= task < tasks:
                continue
            found = self._reports.get(epoch)
            if found is None:
                found = self._reports[epoch] = _EpochReports()
            known = found.reports.get(task)
            if known is not None:
                if report.term < known.term or (report.term == known.term and not _is_newer(report, known)):
                    continue
                if report == known:  # repeated
                    continue
                found.done -= known.done
                found.finishing -= known.finish
                found.rows.pop(task, None)
                kept = None if found.kept is None else found.kept.get(task, {})
                if kept is not None and report.done and not _numbers_equal(report.numbers or {}, kept):
                    self._note_restart(epoch, f"the new primary of task {task} reports other numbers ({_CAUSE})")
            counts = True
            found.reports[task] = report
            found.done += report.done
            if report.numbers:
                found.rows[task] = report.numbers
            if report.finish:
                found.finishing += 1
            if report.shared:
                found.shared = True
            if not report.ahead:
                self._awaited_epochs.add(epoch)
            if len(found.reports) == tasks:
                look = True
        if look:
            self._update_ready()
        return counts

    def _update_ready(self) -> None:
        """Computes `ready` and `urgent` again, after a report or a new stamp."""
        assert self.stamp is not None
        at = self.stamp.epoch
        self.ready = self.has_all_reports(at)
        # As in `_commit`: a task that is done with the next epoch no longer waits.
        waits = any(
            self.has_all_reports(epoch) and not self.has_all_reports(epoch + 1) for epoch in self._awaited_epochs
        )
        self.urgent = waits or self.has_all_reports(at + self.enough - 1)

    def commit_waits_only_for_task_0(self) -> bool:
        """True if a task waits for the commit of an epoch in which all tasks but task 0 are done."""
        return any(self._lacks_only_task_0(self._reports.get(epoch, _NOTHING)) for epoch in self._awaited_epochs)

    def request_restart(self, stamp: Stamp, why: str) -> bool:
        """Notes that a node cannot complete the epoch in this attempt: `decide` returns a `Restart`. Returns False, and
        notes nothing, unless `takes(stamp)`."""
        if not self.takes(stamp):
            return False
        self._note_restart(stamp.epoch, why)
        return True

    def _note_restart(self, epoch: int, why: str) -> None:
        """Notes that an epoch cannot complete. Keeps the latest such epoch: earlier epochs may be about to commit, and
        a restart undoes all others."""
        if self._restart is None or epoch > self._restart[0]:
            self._restart = (epoch, why)

    def note_sealed(self, task: int, term: int, version: int) -> None:
        """Notes that the task accepted the seal of this version: `decide` does not ask for it again."""
        self._sealed[task] = (term, version)

    def reports(self, epoch: int | None = None) -> dict[int, Report]:
        """Returns the reports of an epoch; None: of the epoch at work."""
        if epoch is None:
            epoch = self.stamp.epoch if self.stamp is not None else 0
        found = self._reports.get(epoch)
        return dict(found.reports) if found is not None else {}

    def numbers(self, epoch: int, own: Mapping[str, float] | None = None) -> dict[int, Mapping[str, float]] | None:
        """Returns task -> the numbers that it reported in an epoch, for tasks with some; None while a task is not done.

        Args:
            own: the numbers that task 0 will report, if it has computed the epoch; then it need not be done.
        """
        found = self._reports.get(epoch, _NOTHING)
        all_done = found.done == self._tasks
        if not all_done and (own is None or not self._lacks_only_task_0(found)):
            return None
        rows = dict(found.rows)  # reports do not change
        if own and not all_done:
            rows[0] = own
        return rows

    def keep_numbers(self, epoch: int, own: Mapping[str, float]) -> dict[int, Mapping[str, float]] | None:
        """Returns `numbers` for a boundary of task 0, and keeps them: a report with others then restarts the epoch."""
        rows = self.numbers(epoch, own)
        if rows is not None and epoch in self._reports:  # with one task, there may be no report
            self._reports[epoch].kept = rows
        return rows

    def _lacks_only_task_0(self, found: _EpochReports) -> bool:
        """True if all tasks but task 0 are done."""
        own = found.reports.get(0)
        return found.done == self._tasks - 1 and (own is None or not own.done)

    def has_all_reports(self, epoch: int) -> bool:
        """True if every task has reported on the epoch, idle or done."""
        found = self._reports.get(epoch)
        return found is not None and len(found.reports) == self._tasks

    def unreported(self, view: JobView) -> tuple[int, ...]:
        """Returns the tasks that have not reported on the epoch at work in their current term."""
        reports = self.reports()
        return tuple([t for t in range(self._tasks) if (r := reports.get(t)) is None or r.term != view.term(t)])

    def blocking(self, view: JobView) -> tuple[int, ...]:
        """Returns the tasks that the epoch at work waits for: those without a report in their current term; else those
        that are not done; else a task that would be lost after the commit (`find_stranded_task`)."""
        if missing := self.unreported(view):
            return missing
        if idle := tuple([task for task, report in self.reports().items() if not report.done]):
            return idle
        task = find_stranded_task(view)
        return () if task is None else (task,)

    def decide(self, view: JobView, *, settled: bool = False) -> Action:
        """Decides what to do now; changes nothing.

        Args:
            settled: no report arrived for a while. Then no message is on its way, since a sender is idle only after all
                its messages were acknowledged.
        """
        if self.stamp is None or view.stamp != self.stamp or view.epoch is None:
            return KeepWaiting((), "the epoch at work has not been read yet")
        if self._restart is not None:
            return Restart(self._restart[1])
        terms = self._terms(view)
        if self._agrees(self.stamp.epoch, terms):
            if (unequal := self._unequal_tasks(self.stamp.epoch, view)) is not None:
                return (
                    Restart(DIFFERENT_RESULTS_TEXT) if self._was_primary_replaced(view) else UnequalSharedState(unequal)
                )
            if (task := find_stranded_task(view)) is not None:
                return KeepWaiting((task,), "its primary is gone, and no backup could take over after the commit")
            return self._commit(view, terms)
        if missing := self.unreported(view):
            return KeepWaiting(missing, "not finished with the epoch")
        reports = list(self.reports().values())
        idle = [r for r in reports if not r.done]
        if idle:
            if not _sums_agree(reports) and not settled:
                return KeepWaiting(tuple(r.task for r in idle), "a message is still on its way")
            if not _sums_agree(reports):
                return UnequalSums(self._was_primary_replaced(view))
            open_seals = tuple((r.task, r.version) for r in idle if self._sealed.get(r.task) != (r.term, r.version))
            if open_seals:
                return SealTasks(open_seals)
            return KeepWaiting(tuple(r.task for r in idle), "sealed, not done yet")
        return Restart(DIFFERENT_RESULTS_TEXT) if self._was_primary_replaced(view) else UnequalSums()

    def _terms(self, view: JobView) -> dict[int, int]:
        """Returns the current term of every task, 0 before its first primary."""
        terms = dict.fromkeys(range(self._tasks), 0)
        for task, primary in view.primaries.items():
            terms[task] = primary.record.term
        return terms

    def _agrees(self, epoch: int, terms: dict[int, int]) -> bool:
        """True if all tasks are done with the epoch, in their current terms, and all edges agree."""
        found = self._reports.get(epoch)
        if found is None or found.done != self._tasks:
            return False
        difference = 0
        for task, report in found.reports.items():
            if report.term != terms[task]:
                return False
            difference += decode_sum(report.sent) - decode_sum(report.received)
        return total([difference]) == 0

    def _unequal_tasks(self, epoch: int, view: JobView) -> tuple[int, int] | None:
        """Returns two tasks whose shared state differs after the epoch, with which all tasks are done; else None."""
        found = self._reports[epoch]
        return unequal_tasks(view, found.reports) if found.shared else None

    def _can_commit(self, epoch: int, view: JobView, terms: dict[int, int]) -> bool:
        return self._agrees(epoch, terms) and self._unequal_tasks(epoch, view) is None

    def _commit(self, view: JobView, terms: dict[int, int]) -> Commit:
        """Returns the commit of the epoch at work and of the epochs after it that can commit, up to the job's last."""
        assert self.stamp is not None
        last = self.stamp.epoch
        while not (finished := self._is_last(last)) and self._can_commit(last + 1, view, terms):
            last += 1
        awaited = False in [report.ahead for report in self._reports[last].reports.values()]
        return Commit(finished, last - self.stamp.epoch + 1, awaited)

    def _is_last(self, epoch: int) -> bool:
        """True if the job ends with this epoch."""
        return self._reports[epoch].finishing > 0 or (self._epochs is not None and epoch + 1 >= self._epochs)

    def _was_primary_replaced(self, view: JobView) -> bool:
        """True if a takeover explains a difference: a term changed since the epoch, or the attempt, began."""
        return view.term_changed(in_attempt=self._ahead > 0)


def _numbers_equal(numbers: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Compares numbers; NaN equals NaN here."""
    return numbers.keys() == others.keys() and all(
        number == (other := others[name]) or (number != number and other != other) for name, number in numbers.items()
    )


def _sums_agree(reports: list[Report]) -> bool:
    """True if all edges agree: everything sent was received."""
    return total(decode_sum(r.sent) for r in reports) == total(decode_sum(r.received) for r in reports)
