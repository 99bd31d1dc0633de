"""Records what user code did in each run of an epoch, and checks that committed runs fit together.

One `TaskExecution` is one execution of a task's processors, for one stamp and one term. When an epoch commits, the runs
of the committed terms must fit together: each processor ran once, and consumed each item once, as its producer put it.
The check uses the records of user code, not the sums that the leader compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from taskgraph.node.epochs.attempt import Attempt
from taskgraph.protocol.messages import Stamp
from taskgraph.testing.simulate.violation import Violation

if TYPE_CHECKING:
    from taskgraph.testing.simulate.workload import PlannedProcessor

__all__ = ["TaskExecution", "TaskExecutions", "Violation"]


@dataclass
class TaskExecution:
    """The record of one execution of a task's epoch."""

    task: int
    stamp: Stamp
    term: int
    steps: tuple[PlannedProcessor, ...]
    last_commit: int | None = None  # the epoch of the last `on_commit` before `compose`
    states_read: set[int] = field(default_factory=set)  # states that its code read
    compute_counts: Counter[str] = field(default_factory=Counter)
    consumed: dict[tuple[str, int], int] = field(default_factory=dict)
    puts: dict[tuple[str, int], int] = field(default_factory=dict)
    flags_sent: set[tuple[int, int]] = field(default_factory=set)  # (to, value)
    flags_received: Counter[tuple[int, int]] = field(default_factory=Counter)  # (sender, value)
    requests_sent: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (to, value, answer)
    requests_handled: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (sender, value, answer)
    end_state: int | None = None
    end_revision: int = 0  # the revision of etcd when the sync point ended
    late_messages: list[str] = field(default_factory=list)  # messages sent or handled after the sync point
    calls_finish: bool = False  # it called `epoch.finish`

    def __str__(self) -> str:
        return f"task {self.task} in epoch {self.stamp.epoch}, attempt {self.stamp.attempt}, term {self.term}"


class TaskExecutions:
    """All runs of a job: implements `workload.Recorder`.

    Args:
        on_overlap: called when code of an epoch runs before the task's earlier epoch has ended.
        on_torn_down: called when a task's `teardown` runs.
        revision: returns etcd's revision.
    """

    def __init__(
        self, on_overlap: Callable[[], None], on_torn_down: Callable[[], None], revision: Callable[[], int]
    ) -> None:
        self._on_overlap = on_overlap
        self._on_torn_down = on_torn_down
        self._revision = revision
        self._runs: dict[tuple[int, Stamp, int], TaskExecution] = {}
        self._last_epochs: dict[tuple[int, int, int], int] = {}  # (task, attempt, term) -> the last epoch
        self._commit_calls: list[tuple[int, int, int | None]] = []

    # -- called by user code ------------------------------------------------------------------------

    def on_compose(self, epoch: Any, steps: tuple[PlannedProcessor, ...], last_commit: int | None) -> None:
        work = epoch._work
        if not isinstance(work, Attempt):
            return
        key = (work.task, work.stamp, work.term)
        if key in self._runs:
            raise Violation(f"{self._runs[key]} was composed twice")
        of = (work.task, work.stamp.attempt, work.term)
        if work.number < (last := self._last_epochs.get(of, work.number)):
            raise Violation(f"task {work.task}, term {work.term}: epoch {last} began before epoch {work.number}")
        self._last_epochs[of] = work.number
        self._runs[key] = TaskExecution(*key, steps, last_commit)

    def on_epoch_begin(self, epoch: Any, steps: tuple[PlannedProcessor, ...]) -> None:
        """Records a run like `on_compose`, for a task without `compose` in every epoch. Each compute calls it."""
        work = epoch._work
        if isinstance(work, Attempt):
            key = (work.task, work.stamp, work.term)
            if key not in self._runs:
                self._runs[key] = TaskExecution(*key, steps)

    def _run_of(self, epoch: Any) -> TaskExecution:
        """Returns the record of the run whose code calls; for a replay of strict mode, one that is not kept."""
        work = epoch._work
        if not isinstance(work, Attempt):
            return TaskExecution(work.task, Stamp(0, 0), 0, ())  # strict mode's replay is not recorded
        return self._runs[(work.task, work.stamp, work.term)]

    def on_state_read(self, epoch: Any, state: int) -> None:
        self._run_of(epoch).states_read.add(state)

    def on_compute(self, epoch: Any, step: PlannedProcessor, consumed: dict[tuple[str, int], int]) -> None:
        run = self._run_of(epoch)
        run.compute_counts[step.name] += 1
        before = self._runs.get((run.task, Stamp(run.stamp.attempt, run.stamp.epoch - 1), run.term))
        if before is not None and before.end_state is None:
            self._on_overlap()
        for channel, value in consumed.items():
            if channel in run.consumed:
                raise Violation(f"{run}: {step.name} consumed {channel} again")
            run.consumed[channel] = value

    def on_put(self, epoch: Any, tag: str, to: int, value: int) -> None:
        self._run_of(epoch).puts[(tag, to)] = value

    def on_flag_sent(self, epoch: Any, to: int, value: int) -> None:
        self._run_for_message(epoch, f"flagged task {to}").flags_sent.add((to, value))

    def on_flag_received(self, epoch: Any, sender: int, value: int) -> None:
        self._run_for_message(epoch, f"heard a flag of task {sender}").flags_received[(sender, value)] += 1

    def on_request_answered(self, epoch: Any, to: int, value: int, answer: int) -> None:
        self._run_for_message(epoch, f"asked task {to}").requests_sent[(to, value, answer)] += 1

    def on_request_handled(self, epoch: Any, sender: int, value: int, answer: int) -> None:
        self._run_for_message(epoch, f"answered task {sender}").requests_handled[(sender, value, answer)] += 1

    def _run_for_message(self, epoch: Any, what: str) -> TaskExecution:
        """Returns the record of the run that sent or handled a message. Notes the message if the run had ended."""
        run = self._run_of(epoch)
        if run.end_state is not None:
            run.late_messages.append(what)
        return run

    def on_epoch_end(self, epoch: Any, state: int) -> None:
        run = self._run_of(epoch)
        run.end_state, run.end_revision = state, self._revision()

    def on_finish_call(self, epoch: Any) -> None:
        self._run_of(epoch).calls_finish = True

    def on_commit_call(self, task: int, number: int, state: int | None) -> None:
        self._commit_calls.append((task, number, state))

    def on_teardown(self, task: int) -> None:
        self._on_torn_down()

    # -- queries when a job ends --------------------------------------------------------------------

    def finish_was_called(self, stamp: Stamp, terms: Mapping[int, int]) -> bool:
        """True if a task called `epoch.finish` in this epoch, in its term of `terms` (task -> term)."""
        runs = (self._runs.get((task, stamp, term)) for task, term in terms.items())
        return any(run is not None and run.calls_finish for run in runs)

    def end_revisions(self, stamp: Stamp, terms: Mapping[int, int]) -> dict[int, int]:
        """Returns task -> etcd's revision when its run of this term ended. Leaves out tasks whose run has not ended."""
        runs = {task: self._runs.get((task, stamp, term)) for task, term in terms.items()}
        return {task: run.end_revision for task, run in runs.items() if run is not None and run.end_state is not None}

    # -- queries when an epoch restarts -------------------------------------------------------------

    def has_several_under_way(self, stamp: Stamp, terms: Mapping[int, int]) -> bool:
        """True if a task has several unfinished runs in its current term, at this stamp or later."""
        under_way = Counter(
            run.task
            for run in self._runs.values()
            if run.end_state is None
            and run.term == terms.get(run.task)
            and run.stamp.attempt == stamp.attempt
            and run.stamp.epoch >= stamp.epoch
        )
        return max(under_way.values(), default=0) > 1

    # -- queries of the checks ----------------------------------------------------------------------

    def take_commit_calls(self) -> list[tuple[int, int, int | None]]:
        """Returns the calls of `on_commit` since this method was last called: (task, epoch, state)."""
        calls, self._commit_calls = self._commit_calls, []
        return calls

    def check_commit(self, stamp: Stamp, terms: dict[int, int], states: dict[int, int], base: int) -> dict[int, int]:
        """Checks an epoch that committed with these terms. Returns task -> state after the epoch.

        Args:
            states: task -> state before the epoch.
            base: the boundary of the last roll-back.

        Raises:
            Violation: the runs of these terms are not one execution from these states.
        """
        runs: dict[int, TaskExecution] = {}
        for task, term in terms.items():
            run = self._runs.get((task, stamp, term))
            if run is None:
                raise Violation(f"epoch {stamp.epoch} committed without a run of task {task} in term {term}")
            runs[task] = run
        for run in runs.values():
            for state in sorted(run.states_read - {states[run.task]}):
                raise Violation(f"{run} worked from state {state:x}, not from the boundary {states[run.task]:x}")
            # A primary that survived a roll-back may have had `on_commit` for epochs that were undone.
            undone = run.last_commit is not None and stamp.epoch == base <= run.last_commit
            if run.last_commit not in (None, stamp.epoch - 1) and not undone:
                raise Violation(f"{run} began when on_commit had been called last with epoch {run.last_commit}")
            _check_complete(run)
            for (tag, producer), value in run.consumed.items():
                put = runs[producer].puts.get((tag, run.task))
                if put != value:
                    other = "nothing" if put is None else f"{put:x}"
                    raise Violation(f"{run} counts with {tag!r} = {value:x}, but {runs[producer]} put {other}")
            _check_messages(run, runs)
        return {task: run.end_state for task, run in runs.items() if run.end_state is not None}


def _check_complete(run: TaskExecution) -> None:
    """Raises Violation unless each step ran once with all of its items, the sync point last."""
    for step in run.steps:
        if run.compute_counts[step.name] != 1:
            raise Violation(f"{run}: {step.name} ran {run.compute_counts[step.name]} times")
        for tag, producers in step.inbound:
            for producer in producers:
                if (tag, producer) not in run.consumed:
                    raise Violation(f"{run}: {step.name} did not consume {tag!r} of task {producer}")
    if run.end_state is None:
        raise Violation(f"{run} counts, and its sync point did not run")
    if run.late_messages:
        raise Violation(f"{run} counts, and when its sync point had run it {', '.join(run.late_messages)}")


def _check_messages(run: TaskExecution, runs: dict[int, TaskExecution]) -> None:
    """Raises Violation unless the flags and requests of a run are those that the other tasks' runs have."""
    for to, value in sorted(run.flags_sent):
        heard = runs[to].flags_received[(run.task, value)]
        if heard != 1:
            raise Violation(f"{run} sent a flag to {runs[to]}, which heard it {heard} times")
    for sender, value in sorted(run.flags_received):
        if (run.task, value) not in runs[sender].flags_sent:
            raise Violation(f"{run} counts a flag that {runs[sender]} did not send")
    for (to, value, answer), count in sorted(run.requests_sent.items()):
        handled = runs[to].requests_handled[(run.task, value, answer)]
        if handled != count:
            raise Violation(f"{run} asked {runs[to]} {count} times with effects that happened {handled} times")
    for (sender, value, answer), count in sorted(run.requests_handled.items()):
        asked = runs[sender].requests_sent[(run.task, value, answer)]
        if asked != count:
            raise Violation(f"{run} counts {count} effects that {runs[sender]} asked for {asked} times")
