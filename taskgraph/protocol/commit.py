"""The leader's decisions in one epoch: seal, commit, restart or fail.

    every task reports idle or done ──► sums equal? ──no──► something is under way (idle tasks) or diverged (all done)
                                            │yes
                          some idle ────────┼──────── all done
                              ▼                           ▼
                         seal those                    commit

Tasks may work ahead of the last commit (`epochs_ahead`). Their reports of later epochs of the attempt are kept, and
what is complete and adds up is committed together: each epoch by its own sums, in order.

A report counts only if its stamp is the one at work and its term is the task's current one. An idle task may still
take flags and requests; a done task takes nothing more. Tasks that can take neither (they have no handler and no
`on_flag`) report done at once and need no seal.

Two sums over everything sent and everything received make one comparison cover every edge of the epoch. If all are
done and the sums differ, some edge does not agree. Where a term changed since the epoch began, a takeover
recomputed something differently, and the epoch restarts. Where none changed, it is a bug of the job or ours: the
job fails by name. If some are idle, one of them may be at work again with what it took since it reported: ledgers tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskgraph.protocol.messages import Report, Stamp
from taskgraph.protocol.takeover import stranded
from taskgraph.protocol.view import JobView

__all__ = ["DIFFERENTLY", "Action", "Commit", "Diverged", "Leader", "Restart", "SealTasks", "WaitFor"]

_MASK = (1 << 128) - 1
_CAUSE = "there is state that no snapshot holds, or a task is not deterministic: tg.testing.run tells which"
"""Of what comes out differently on another primary."""
DIFFERENTLY = f"a new primary recomputed something differently ({_CAUSE})"


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Nothing to do; `tasks` have not reported, or are not quiet yet."""

    tasks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class SealTasks:
    """Everything is quiet: seal these idle tasks at the versions they reported."""

    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """All done, all edges agree.

    Attributes:
        finished: the last of them is the job's last epoch.
        epochs: how many, the one at work and those that follow it.
        awaited: somebody goes on only when this is committed.
    """

    finished: bool
    epochs: int = 1
    awaited: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    """The attempt cannot be completed."""

    why: str


@dataclass(frozen=True, slots=True)
class Diverged:
    """Some edge seems not to agree: ask every task for its ledger.

    Attributes:
        replaced: a term changed since, which explains it: the epoch restarts. Else the job fails by name.
    """

    replaced: bool = False


Action = WaitFor | SealTasks | Commit | Restart | Diverged


def _later(report: Report, known: Report) -> bool:
    """Whether it says more. What was told in vain is told again, and may arrive both times, the first one last."""
    return not known.done and (report.done or report.version >= known.version)


class _Told:
    """What the tasks reported of one epoch.

    Attributes:
        reports: task -> the latest.
        rows: task -> the numbers in it, where it has some.
        done: how many of them are dones.
        finishing: how many of them say that the job ends with this epoch.
        kept: the numbers that a boundary of task 0 has of this epoch, once it has.
    """

    __slots__ = ("done", "finishing", "kept", "reports", "rows")

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}
        self.rows: dict[int, Mapping[str, float]] = {}
        self.done = self.finishing = 0
        self.kept: Mapping[int, Mapping[str, float]] | None = None


_NOTHING = _Told()


class Leader:
    """What the primary of task 0 knows of the epoch at work, and of those that tasks are ahead with.

    Args:
        ahead: how many epochs a task may be ahead of the one at work.

    Attributes:
        stamp: the epoch at work and its attempt, as they were read.
        ready: every task has reported something of the epoch at work. Before, only a restart can be decided.
        pressing: there is no use in waiting for more to commit with what everybody has reported: either that is enough
            for a commit, or somebody does not go on without one.
    """

    def __init__(self, tasks: int, epochs: int | None, *, ahead: int = 0) -> None:
        self._tasks = tasks
        self._epochs = epochs
        self._ahead = ahead
        self.gather_by(ahead)
        self.stamp: Stamp | None = None
        self.ready = False
        self.pressing = False
        self._told: dict[int, _Told] = {}  # of epochs: the one at work, and those ahead of it
        self._awaited: set[int] = set()  # epochs whose commit somebody waits for
        self._sealed: dict[int, tuple[int, int]] = {}  # task -> (term, version) a seal was answered for
        self._restart: tuple[int, str] | None = None  # the latest epoch that cannot be completed, and why

    def gather_by(self, ahead: int) -> None:
        """Tasks may be so many epochs ahead: half of that is enough for a commit; while it is written, they work on."""
        self.enough = max(1, (ahead + 1) // 2)

    def begin(self, stamp: Stamp) -> None:
        """`stamp` was read from etcd; what belongs to another attempt or an earlier epoch is void."""
        if self.stamp == stamp:
            return
        if self.stamp is None or stamp.attempt != self.stamp.attempt:
            self._told, self._awaited, self._restart = {}, set(), None
        self.stamp = stamp
        self._sealed = {}
        for epoch in [epoch for epoch in self._told if epoch < stamp.epoch]:
            del self._told[epoch]
            self._awaited.discard(epoch)
        self._look()
        if self._restart is not None and self._restart[0] < stamp.epoch:
            self._restart = None

    def takes(self, stamp: Stamp) -> bool:
        """Whether something of `stamp` counts: of the epoch at work, or of one that tasks may be ahead with."""
        at = self.stamp
        return at is not None and stamp.attempt == at.attempt and at.epoch <= stamp.epoch <= at.epoch + self._ahead

    def report(self, *reports: Report) -> bool:
        """Takes reports, of one message. Returns whether any counts: one of an epoch that is over is void, and one
        that says no more than what is known is no news.

        All in one place: there is one of every task and epoch.
        """
        if self.stamp is None:
            return False
        attempt, first = self.stamp
        last, tasks, counts, look = first + self._ahead, self._tasks, False, False
        for report in reports:
            (in_attempt, epoch), task = report.stamp, report.task
            if in_attempt != attempt or not first <= epoch <= last or not 0 <= task < tasks:
                continue
            told = self._told.get(epoch)
            if told is None:
                told = self._told[epoch] = _Told()
            known = told.reports.get(task)
            if known is not None:
                if report.term < known.term or (report.term == known.term and not _later(report, known)):
                    continue
                if report == known:  # idle, and told again, since an epoch stands still
                    continue
                told.done -= known.done
                told.finishing -= known.finish
                told.rows.pop(task, None)
                if told.kept is not None and report.done and not _same(report.numbers or {}, told.kept.get(task, {})):
                    self._must_restart(epoch, f"the new primary of task {task} reports other numbers ({_CAUSE})")
            counts = True
            told.reports[task] = report
            told.done += report.done
            if report.numbers:
                told.rows[task] = report.numbers
            if report.finish:
                told.finishing += 1
            if not report.ahead:
                self._awaited.add(epoch)
            if len(told.reports) == tasks:
                look = True
        if look:
            self._look()
        return counts

    def _look(self) -> None:
        """What is complete has changed, or who waits for it, or which epoch is at work."""
        assert self.stamp is not None
        at = self.stamp.epoch
        self.ready = self.complete(at)
        # Who waited for an epoch, and is done with the next one, has gone on since: as `_commit` looks at it.
        waits = any(self.complete(epoch) and not self.complete(epoch + 1) for epoch in self._awaited)
        self.pressing = waits or self.complete(at + self.enough - 1)

    def lacks_task_0(self) -> bool:
        """Whether somebody waits for the commit of an epoch of which nothing is lacking but task 0's done."""
        return any(self._lacks_task_0(self._told.get(epoch, _NOTHING)) for epoch in self._awaited)

    def request_restart(self, stamp: Stamp, why: str) -> bool:
        """Someone says that the attempt cannot complete the epoch of `stamp`. Returns whether that counts."""
        if not self.takes(stamp):
            return False
        self._must_restart(stamp.epoch, why)
        return True

    def _must_restart(self, epoch: int, why: str) -> None:
        """That epoch cannot be completed. Of several the latest is kept: a commit of those before it may be on its way,
        and a restart, which comes at once, undoes all that are not committed."""
        if self._restart is None or epoch > self._restart[0]:
            self._restart = (epoch, why)

    def sealed(self, task: int, term: int, version: int) -> None:
        """The task accepted the seal: it is not sent again."""
        self._sealed[task] = (term, version)

    def reports(self, epoch: int | None = None) -> dict[int, Report]:
        """What counts at the moment. Without a number: of the epoch at work."""
        if epoch is None:
            epoch = self.stamp.epoch if self.stamp is not None else 0
        told = self._told.get(epoch)
        return dict(told.reports) if told is not None else {}

    def numbers(self, epoch: int, own: Mapping[str, float] | None = None) -> dict[int, Mapping[str, float]] | None:
        """task -> what it reported in that epoch, of tasks that did; None while not all of them are done with it.

        Args:
            own: what task 0 will report, where it has worked the epoch through: that it is not done yet does not count.
        """
        told = self._told.get(epoch, _NOTHING)
        all_done = told.done == self._tasks
        if not all_done and (own is None or not self._lacks_task_0(told)):
            return None
        rows = dict(told.rows)  # what is in a report does not change
        if own and not all_done:
            rows[0] = own
        return rows

    def keep_numbers(self, epoch: int, own: Mapping[str, float]) -> dict[int, Mapping[str, float]] | None:
        """The same, for a boundary of task 0: the epoch is not committed with others any more, in this attempt."""
        rows = self.numbers(epoch, own)
        if rows is not None and epoch in self._told:  # a single task may be the first to say anything of it
            self._told[epoch].kept = rows
        return rows

    def _lacks_task_0(self, told: _Told) -> bool:
        """Whether all but task 0 are done."""
        own = told.reports.get(0)
        return told.done == self._tasks - 1 and (own is None or not own.done)

    def complete(self, epoch: int) -> bool:
        """Whether every task has reported something of it."""
        told = self._told.get(epoch)
        return told is not None and len(told.reports) == self._tasks

    def missing(self, view: JobView) -> tuple[int, ...]:
        """Tasks without a report of their current term."""
        reports = self.reports()
        return tuple([t for t in range(self._tasks) if (r := reports.get(t)) is None or r.term != view.term(t)])

    def lacking(self, view: JobView) -> tuple[int, ...]:
        """Tasks that the epoch at work waits for: those without a report, or without one that says that they are done;
        or one that must have a successor first."""
        if missing := self.missing(view):
            return missing
        if idle := tuple([task for task, report in self.reports().items() if not report.done]):
            return idle
        task = stranded(view)
        return () if task is None else (task,)

    def decide(self, view: JobView, *, settled: bool = False) -> Action:
        """What to do now, from the reports and a view of etcd.

        Args:
            settled: no report came for a while. Idle tasks whose sums stay unequal then are not waiting for anything
                on its way: a sender is not idle before what it sent was acknowledged.
        """
        if self.stamp is None or view.stamp != self.stamp or view.epoch is None:
            return WaitFor((), "the epoch at work has not been read yet")
        if self._restart is not None:
            return Restart(self._restart[1])
        terms = self._terms(view)
        if self._can_commit(self.stamp.epoch, terms):
            if (task := stranded(view)) is not None:
                return WaitFor((task,), "its primary is gone, and nobody could succeed it after the commit")
            return self._commit(terms)
        if missing := self.missing(view):
            return WaitFor(missing, "not finished with the epoch")
        reports = list(self.reports().values())
        idle = [r for r in reports if not r.done]
        if idle:
            if not _agree(reports) and not settled:
                return WaitFor(tuple(r.task for r in idle), "something sent is not received yet")
            if not _agree(reports):
                return Diverged(self._replaced(view))
            open_seals = tuple((r.task, r.version) for r in idle if self._sealed.get(r.task) != (r.term, r.version))
            if open_seals:
                return SealTasks(open_seals)
            return WaitFor(tuple(r.task for r in idle), "sealed, not done yet")
        return Restart(DIFFERENTLY) if self._replaced(view) else Diverged()

    def _terms(self, view: JobView) -> dict[int, int]:
        """The current term of every task, 0 before its first primary."""
        terms = dict.fromkeys(range(self._tasks), 0)
        for task, primary in view.primaries.items():
            terms[task] = primary.record.term
        return terms

    def _can_commit(self, epoch: int, terms: dict[int, int]) -> bool:
        """Whether all are done with it, in their current terms, and everything that was sent was received."""
        told = self._told.get(epoch)
        if told is None or told.done != self._tasks:
            return False
        difference = 0
        for task, report in told.reports.items():
            if report.term != terms[task]:
                return False
            difference += report.sent - report.received
        return not difference & _MASK

    def _commit(self, terms: dict[int, int]) -> Commit:
        """The epoch at work can be committed; so can those after it that are complete, up to the job's last one."""
        assert self.stamp is not None
        last = self.stamp.epoch
        while not (finished := self._is_last(last)) and self._can_commit(last + 1, terms):
            last += 1
        awaited = False in [report.ahead for report in self._told[last].reports.values()]
        return Commit(finished, last - self.stamp.epoch + 1, awaited)

    def _is_last(self, epoch: int) -> bool:
        return self._told[epoch].finishing > 0 or (self._epochs is not None and epoch + 1 >= self._epochs)

    def _replaced(self, view: JobView) -> bool:
        return view.term_changed(in_attempt=self._ahead > 0)


def _same(numbers: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Whether they are equal, where NaN is equal to NaN."""
    return numbers.keys() == others.keys() and all(
        number == (other := others[name]) or (number != number and other != other) for name, number in numbers.items()
    )


def _agree(reports: list[Report]) -> bool:
    """Whether everything that was sent was received, as it was sent."""
    return sum([r.sent for r in reports]) & _MASK == sum([r.received for r in reports]) & _MASK
