"""A ledger of what user code saw in each run; the framework keeps no such ledger.

One `Run` is one execution of a task's processors, for one stamp and one term. When an epoch commits, the runs of the
terms that count must fit together: each processor ran once, consumed each item once, and consumed what the counted run
of its producer put. This is compared with what the tasks themselves saw, not with the sums that the leader compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taskgraph.node.epochs.attempt import Attempt
from taskgraph.protocol.messages import Stamp
from taskgraph.testing.simulate.workload import Step

__all__ = ["Run", "Runs", "Violation"]


class Violation(AssertionError):
    """A promise of the protocol was broken."""


@dataclass
class Run:
    """One execution of a task's epoch."""

    task: int
    stamp: Stamp
    term: int
    steps: tuple[Step, ...]
    last_commit: int | None = None  # the epoch of the last `on_commit` before this run was composed
    saw: set[int] = field(default_factory=set)  # states that it worked from
    ran: Counter[str] = field(default_factory=Counter)
    consumed: dict[tuple[str, int], int] = field(default_factory=dict)
    puts: dict[tuple[str, int], int] = field(default_factory=dict)
    flagged: set[tuple[int, int]] = field(default_factory=set)  # (to, value)
    heard: Counter[tuple[int, int]] = field(default_factory=Counter)  # (sender, value)
    asked: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (to, value, answer)
    handled: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (sender, value, answer)
    ended: int | None = None
    ended_at: int = 0  # the revision of etcd at that time
    late: list[str] = field(default_factory=list)  # what it sent or took after its sync point
    finishes: bool = False  # it said that the job ends with it

    def __str__(self) -> str:
        return f"task {self.task} in epoch {self.stamp.epoch}, attempt {self.stamp.attempt}, term {self.term}"


class Runs:
    """`workload.Recorder`.

    Args:
        overlapped: called where code of an epoch ran while an earlier one of the same task was not through.
        torn_down: called where an object of a task was.
        revision: that etcd is at.
    """

    def __init__(
        self, overlapped: Callable[[], None], torn_down: Callable[[], None], revision: Callable[[], int]
    ) -> None:
        self._overlapped = overlapped
        self._torn_down = torn_down
        self._revision = revision
        self._runs: dict[tuple[int, Stamp, int], Run] = {}
        self._composed: dict[tuple[int, int, int], int] = {}  # (task, attempt, term) -> the last epoch
        self._commit_calls: list[tuple[int, int, int | None]] = []

    # -- called by user code ------------------------------------------------------------------------

    def composed(self, epoch: Any, steps: tuple[Step, ...], last_commit: int | None) -> None:
        work = epoch._work
        if not isinstance(work, Attempt):
            return
        key = (work.task, work.stamp, work.term)
        if key in self._runs:
            raise Violation(f"{self._runs[key]} was composed twice")
        of = (work.task, work.stamp.attempt, work.term)
        if work.number < (last := self._composed.get(of, work.number)):
            raise Violation(f"task {work.task}, term {work.term}: epoch {last} began before epoch {work.number}")
        self._composed[of] = work.number
        self._runs[key] = Run(*key, steps, last_commit)

    def began(self, epoch: Any, steps: tuple[Step, ...]) -> None:
        """Records like `composed`, for a task whose `compose` is not called in every epoch: called by each compute."""
        work = epoch._work
        if isinstance(work, Attempt):
            key = (work.task, work.stamp, work.term)
            if key not in self._runs:
                self._runs[key] = Run(*key, steps)

    def _of(self, epoch: Any) -> Run:
        work = epoch._work
        if not isinstance(work, Attempt):
            return Run(work.task, Stamp(0, 0), 0, ())  # strict mode's replay counts for nothing
        return self._runs[(work.task, work.stamp, work.term)]

    def saw(self, epoch: Any, state: int) -> None:
        self._of(epoch).saw.add(state)

    def ran(self, epoch: Any, step: Step, consumed: dict[tuple[str, int], int]) -> None:
        run = self._of(epoch)
        run.ran[step.name] += 1
        before = self._runs.get((run.task, Stamp(run.stamp.attempt, run.stamp.epoch - 1), run.term))
        if before is not None and before.ended is None:
            self._overlapped()
        for channel, value in consumed.items():
            if channel in run.consumed:
                raise Violation(f"{run}: {step.name} consumed {channel} again")
            run.consumed[channel] = value

    def put(self, epoch: Any, tag: str, to: int, value: int) -> None:
        self._of(epoch).puts[(tag, to)] = value

    def flagged(self, epoch: Any, to: int, value: int) -> None:
        self._open(epoch, f"flagged task {to}").flagged.add((to, value))

    def heard_flag(self, epoch: Any, sender: int, value: int) -> None:
        self._open(epoch, f"heard a flag of task {sender}").heard[(sender, value)] += 1

    def asked(self, epoch: Any, to: int, value: int, answer: int) -> None:
        self._open(epoch, f"asked task {to}").asked[(to, value, answer)] += 1

    def handled(self, epoch: Any, sender: int, value: int, answer: int) -> None:
        self._open(epoch, f"answered task {sender}").handled[(sender, value, answer)] += 1

    def _open(self, epoch: Any, what: str) -> Run:
        """Its run does something with a message, which is to be in the state that its sync point makes."""
        run = self._of(epoch)
        if run.ended is not None:
            run.late.append(what)
        return run

    def ended(self, epoch: Any, state: int) -> None:
        run = self._of(epoch)
        run.ended, run.ended_at = state, self._revision()

    def finished(self, epoch: Any) -> None:
        self._of(epoch).finishes = True

    def on_committed(self, task: int, number: int, state: int | None) -> None:
        self._commit_calls.append((task, number, state))

    def torn_down(self, task: int) -> None:
        self._torn_down()

    # -- asked when a job ends --------------------------------------------------------------------

    def finishing(self, stamp: Stamp, terms: Mapping[int, int]) -> bool:
        """True if a task said that the job ends with this epoch, of the runs of these terms."""
        runs = (self._runs.get((task, stamp, term)) for task, term in terms.items())
        return any(run is not None and run.finishes for run in runs)

    def ended_at(self, stamp: Stamp, terms: Mapping[int, int]) -> dict[int, int]:
        """Task -> the revision of etcd when its sync point had run, of the runs of these terms."""
        runs = {task: self._runs.get((task, stamp, term)) for task, term in terms.items()}
        return {task: run.ended_at for task, run in runs.items() if run is not None and run.ended is not None}

    # -- asked when an epoch restarts -------------------------------------------------------------

    def several_under_way(self, stamp: Stamp, terms: Mapping[int, int]) -> bool:
        """True if a task has begun several epochs at this stamp or after it, in its current term, and ended none."""
        under_way = Counter(
            run.task
            for run in self._runs.values()
            if run.ended is None
            and run.term == terms.get(run.task)
            and run.stamp.attempt == stamp.attempt
            and run.stamp.epoch >= stamp.epoch
        )
        return max(under_way.values(), default=0) > 1

    # -- asked by the checks ----------------------------------------------------------------------

    def commit_calls(self) -> list[tuple[int, int, int | None]]:
        """Calls of `on_commit` since the last call of this method: (task, epoch, state)."""
        calls, self._commit_calls = self._commit_calls, []
        return calls

    def committed(self, stamp: Stamp, terms: dict[int, int], states: dict[int, int], base: int) -> dict[int, int]:
        """Checks an epoch that committed with these terms. Returns task -> state after it.

        Args:
            states: task -> the state of the boundary before.
            base: the boundary that the job went back to last.

        Raises:
            Violation: the runs that count are not one execution from that boundary.
        """
        runs: dict[int, Run] = {}
        for task, term in terms.items():
            run = self._runs.get((task, stamp, term))
            if run is None:
                raise Violation(f"epoch {stamp.epoch} committed without a run of task {task} in term {term}")
            runs[task] = run
        for run in runs.values():
            for state in sorted(run.saw - {states[run.task]}):
                raise Violation(f"{run} worked from state {state:x}, not from the boundary {states[run.task]:x}")
            # A primary that survived a roll-back got `on_commit` for this boundary before, and for later ones since.
            undone = run.last_commit is not None and stamp.epoch == base <= run.last_commit
            if run.last_commit not in (None, stamp.epoch - 1) and not undone:
                raise Violation(f"{run} began when on_commit had been called last with epoch {run.last_commit}")
            _check_whole(run)
            for (tag, producer), value in run.consumed.items():
                put = runs[producer].puts.get((tag, run.task))
                if put != value:
                    other = "nothing" if put is None else f"{put:x}"
                    raise Violation(f"{run} counts with {tag!r} = {value:x}, but {runs[producer]} put {other}")
            _check_messages(run, runs)
        return {task: run.ended for task, run in runs.items() if run.ended is not None}


def _check_whole(run: Run) -> None:
    for step in run.steps:
        if run.ran[step.name] != 1:
            raise Violation(f"{run}: {step.name} ran {run.ran[step.name]} times")
        for tag, producers in step.inbound:
            for producer in producers:
                if (tag, producer) not in run.consumed:
                    raise Violation(f"{run}: {step.name} did not consume {tag!r} of task {producer}")
    if run.ended is None:
        raise Violation(f"{run} counts, and its sync point did not run")
    if run.late:
        raise Violation(f"{run} counts, and when its sync point had run it {', '.join(run.late)}")


def _check_messages(run: Run, runs: dict[int, Run]) -> None:
    for to, value in sorted(run.flagged):
        heard = runs[to].heard[(run.task, value)]
        if heard != 1:
            raise Violation(f"{run} sent a flag to {runs[to]}, which heard it {heard} times")
    for sender, value in sorted(run.heard):
        if (run.task, value) not in runs[sender].flagged:
            raise Violation(f"{run} counts a flag that {runs[sender]} did not send")
    for (to, value, answer), count in sorted(run.asked.items()):
        handled = runs[to].handled[(run.task, value, answer)]
        if handled != count:
            raise Violation(f"{run} asked {runs[to]} {count} times with effects that happened {handled} times")
    for (sender, value, answer), count in sorted(run.handled.items()):
        asked = runs[sender].asked[(run.task, value, answer)]
        if asked != count:
            raise Violation(f"{run} counts {count} effects that {runs[sender]} asked for {asked} times")
