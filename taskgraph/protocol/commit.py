"""The leader's decisions in one epoch: seal, commit, restart or fail.

    every task reports idle or done ──► sums equal? ──no──► something is under way (idle tasks) or diverged (all done)
                                            │yes
                          some idle ────────┼──────── all done
                              ▼                           ▼
                         seal those                    commit

A report counts only if its stamp is the one at work and its term is the task's current one. An idle task may still
take flags and requests; a done task takes nothing more. Tasks that can take neither (they have no handler and no
`on_flag`) report done at once and need no seal.

Two sums over everything sent and everything received make one comparison cover every edge of the epoch. If all are
done and the sums differ, some edge does not agree. Where a term changed since the epoch began, a take-over
recomputed something differently, and the epoch restarts. Where none changed, it is a bug of the job or ours: the
job fails by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskgraph.protocol.messages import Report, Stamp
from taskgraph.protocol.view import JobView

__all__ = ["Action", "Commit", "Diverged", "Leader", "Restart", "SealTasks", "WaitFor"]

_MASK = (1 << 128) - 1


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
    """All done, all edges agree. `finished`: it is the job's last epoch."""

    finished: bool


@dataclass(frozen=True, slots=True)
class Restart:
    """The attempt cannot be completed."""

    why: str


@dataclass(frozen=True, slots=True)
class Diverged:
    """All done, some edge does not agree, and no term changed: ask every task for its ledger and fail by name."""


Action = WaitFor | SealTasks | Commit | Restart | Diverged


def _later(report: Report, known: Report) -> bool:
    """Whether it says more. What was told in vain is told again, and may arrive both times, the first one last."""
    return not known.done and (report.done or report.version >= known.version)


class Leader:
    """What the primary of task 0 knows of the epoch at work."""

    def __init__(self, tasks: int, epochs: int | None) -> None:
        self._tasks = tasks
        self._epochs = epochs
        self.stamp: Stamp | None = None
        self._reports: dict[int, Report] = {}
        self._sealed: dict[int, tuple[int, int]] = {}  # task -> (term, version) a seal was answered for
        self._restart: str | None = None

    def begin(self, stamp: Stamp) -> None:
        """`stamp` was read from etcd; what belongs to another is void."""
        if self.stamp != stamp:
            self.stamp = stamp
            self._reports = {}
            self._sealed = {}
            self._restart = None

    def report(self, report: Report) -> bool:
        """Takes a report. Returns whether it is of the epoch at work (an older one is void, a later one cannot be)."""
        if report.stamp != self.stamp:
            return False
        known = self._reports.get(report.task)
        if known is None or report.term > known.term or (report.term == known.term and _later(report, known)):
            self._reports[report.task] = report
        return True

    def request_restart(self, stamp: Stamp, why: str) -> bool:
        """Someone says that the attempt at `stamp` cannot be completed. Others than the one at work are ignored."""
        if stamp != self.stamp:
            return False
        self._restart = self._restart or why
        return True

    def sealed(self, task: int, term: int, version: int) -> None:
        """The task accepted the seal: it is not sent again."""
        self._sealed[task] = (term, version)

    def reports(self) -> dict[int, Report]:
        """What counts at the moment, for the numbers in it."""
        return dict(self._reports)

    @property
    def complete(self) -> bool:
        """Whether every task has reported something. Before that only a restart can be decided."""
        return len(self._reports) == self._tasks

    def missing(self, view: JobView) -> tuple[int, ...]:
        """Tasks without a report of their current term."""
        return tuple(t for t in range(self._tasks) if (r := self._reports.get(t)) is None or r.term != view.term(t))

    def decide(self, view: JobView, *, settled: bool = False) -> Action:
        """What to do now, from the reports and a view of etcd.

        Args:
            settled: no report came for a while. Idle tasks whose sums stay unequal then are not waiting for anything
                on its way: a sender is not idle before what it sent was acknowledged.
        """
        if self.stamp is None or view.stamp != self.stamp or view.epoch is None:
            return WaitFor((), "the epoch at work has not been read yet")
        if self._restart is not None:
            return Restart(self._restart)
        if missing := self.missing(view):
            return WaitFor(missing, "not finished with the epoch")
        reports = [self._reports[t] for t in range(self._tasks)]
        equal = sum(r.sent for r in reports) & _MASK == sum(r.received for r in reports) & _MASK
        idle = [r for r in reports if not r.done]
        if idle:
            if not equal and not settled:
                return WaitFor(tuple(r.task for r in idle), "something sent is not received yet")
            if not equal:
                return self._unequal(view)
            open_seals = tuple((r.task, r.version) for r in idle if self._sealed.get(r.task) != (r.term, r.version))
            if open_seals:
                return SealTasks(open_seals)
            return WaitFor(tuple(r.task for r in idle), "sealed, not done yet")
        if equal:
            last = self._epochs is not None and self.stamp.epoch + 1 >= self._epochs
            return Commit(finished=last or any(r.finish for r in reports))
        return self._unequal(view)

    @staticmethod
    def _unequal(view: JobView) -> Action:
        if view.term_changed():
            return Restart("a new primary recomputed something differently (the tasks are not deterministic)")
        return Diverged()
