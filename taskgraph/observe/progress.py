"""The progress of a run: one live line on a terminal, plain lines in a pipe.

In a pipe every durable event is a line. Commits are lines, too: all of them in a job of up to `_FEW` epochs, or below
`_FEW_PER_S` a second, else one a second, and always the last. The end of the job comes after the last commit.

When a node fails, its tasks are taken over and get new backups. All this is one line, the event `failover`, with what
the failure cost (`observe/incidents.py`). Other events that differ only in the task are merged within a moment.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from taskgraph.observe.events import Event
from taskgraph.observe.format import clock_text, counted, few_nodes_text, holders, ids_text, last_epoch_text
from taskgraph.observe.incidents import FAILOVER
from taskgraph.observe.screen import cut, one_line, printable, takes_codes, wrap
from taskgraph.protocol.records import JobStatus
from taskgraph.protocol.view import JobView
from taskgraph.results import EpochReport

__all__ = ["ProgressDisplay", "numbers_text"]

_FEW_PER_S = 20.0
_FEW = 100
_REFRESH_S = 0.1
_WINDOW = 200
_MERGE_S = 0.3
_SETTLED_S = 10.0
"""Time after the report of a failure in which tasks may still move between nodes because of it."""
_WARN_S = 1.0
"""How long nodes must be too few for the backups before a warning."""
_ENDING_S = 2.0
"""How long the end of the job, which comes from etcd, waits for the last commits, which come from the leader."""
_MERGED_KINDS = ("hand-over", "admitted", "slow", "teardown failed")
_MOVE_KINDS = ("hand-over", "admitted")
"""Not printed until a failure is reported: its line includes them."""
_HIDDEN_KINDS = ("lost", "takeover", "evicted")
"""Only `taskgraph events` shows them: the line of a failure sums them up."""
_KINDS_SHOWN_ONCE = ("unheld", "sockets")
"""Printed for the first task only: the other tasks of the same class report the same."""
_NODE_KINDS = ("paused", "resumed", "raised")
"""Events whose text does not name the node."""
_END_KINDS = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELLED)
_DEPARTURE_KINDS = ("gone", "drain")
"""Not printed after the end of the job, when its nodes leave."""


class ProgressDisplay:
    """Shows the progress of one job. The caller passes every event to `event`, and calls `tick` often."""

    def __init__(
        self,
        name: str,
        tasks: int,
        epochs: int | None,
        backups: int = 0,
        *,
        elastic: bool = False,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._epochs = epochs
        self._backups = backups
        self._elastic = elastic
        self._out = out or sys.stderr
        self._live = takes_codes(self._out)
        self._has_few_epochs = epochs is not None and epochs <= _FEW
        self._clock = clock
        self._times: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._epoch = -1
        self._first = 0
        self._numbers: Mapping[str, str | int | float] = {}
        self._failed = set[str]()  # nodes whose failure is not reported yet
        self._settled_at = float("-inf")
        self.failures = 0
        self._most_nodes = 0
        self._few_since: float | None = None
        self._warned = False
        self._shown_at = float("-inf")
        self._delayed: Event | None = None
        self._view: JobView | None = None
        self._closed = False
        self._ended = False
        self._job_over = False
        self._ending: Event | None = None
        self._ending_since = 0.0
        self._shown_once: set[str] = set()
        self._merging: dict[tuple[str, str], list[Event]] = {}
        self._merging_since = 0.0
        self._printed: deque[int] = deque(maxlen=_FEW)

    def _write(self, text: str) -> None:
        """Writes a text to `out`. After an error, later calls write nothing: the job goes on without a reader."""
        if self._closed:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._closed = True

    def set_view(self, view: JobView) -> None:
        """Sets the view from which the shown nodes and replicas are taken, and the run's first epoch."""
        self._view = view
        self._first = view.epoch.record.base if view.epoch is not None else 0

    def event(self, event: Event) -> None:
        """Takes an event of the job, and by its kind prints it, hides it, or keeps it to be merged with others."""
        if event.kind == "commit":
            self._on_commit(event)
            return
        if event.transient or (self._job_over and event.kind in _DEPARTURE_KINDS):
            return
        self._job_over = self._job_over or event.kind in _END_KINDS
        if event.kind == "lost":
            self._failed.add(str(event.fields.get("lost")))
        if event.kind in _HIDDEN_KINDS or (event.kind in _MOVE_KINDS and self._is_moving):
            return
        if event.kind == FAILOVER:
            self._failed.discard(str(event.fields.get("node")))
            self._settled_at = self._clock() + _SETTLED_S
            self.failures += 1
        if event.kind in _KINDS_SHOWN_ONCE:
            if (what := _text_without_task(event)) in self._shown_once:
                return
            self._shown_once.add(what)
        if event.kind in _MERGED_KINDS:
            if not self._merging:
                self._merging_since = self._clock()
            self._merging.setdefault((event.kind, _text_without_task(event)), []).append(event)
            self._flush_merged()
            return
        self._flush_merged(now=True)
        if event.kind not in _END_KINDS:
            self._print_event(event.at, f"{event.node}: {event.text}" if event.kind in _NODE_KINDS else event.text)
        else:  # the command prints a failure itself, with the traceback
            self._ending = event if event.kind != JobStatus.FAILED else None
            self._ending_since = self._clock()

    def _flush_ending(self) -> None:
        """Prints the end of the job, if it waits to be printed."""
        if self._ending is not None:
            ending, self._ending = self._ending, None
            self._print_event(ending.at, ending.text)

    def _print_event(self, at: float, text: str) -> None:
        """Prints the text of an event with its time."""
        when = clock_text(at).partition(".")[0]
        lines = [one_line(text)]
        if self._live:
            columns = max(40, shutil.get_terminal_size().columns - len(when) - 2)
            lines = wrap(lines[0], columns)
        self._print_line(f"{when} " + f"\n{' ' * len(when)} ".join(lines))

    def _flush_merged(self, *, now: bool = False) -> None:
        """Prints the events that wait to be merged, merged, if they have waited long enough. `now`: in any case."""
        if not self._merging or (not now and self._clock() - self._merging_since < _MERGE_S):
            return
        merged, self._merging = self._merging, {}
        # In the order of what happened: events of different nodes arrive in any order.
        for (_, text), events in sorted(merged.items(), key=lambda item: min(event.at for event in item[1])):
            tasks = sorted({event.task for event in events if event.task is not None})
            whose = f"task {tasks[0]}: " if len(tasks) == 1 else f"tasks {ids_text(tasks)}: " if tasks else ""
            self._print_event(min(event.at for event in events), whose + text)

    @property
    def _unit(self) -> str:
        return "step" if self._elastic or (self._view is not None and self._view.workers is not None) else "epoch"

    @property
    def _is_moving(self) -> bool:
        """True while tasks move because a node failed."""
        return bool(self._failed) or self._clock() < self._settled_at

    def _warn_of_few_nodes(self) -> None:
        """Warns once when too few nodes are left for the backups, unless the job began with too few."""
        view = self._view
        if view is None or not view.running or not self._backups or self._epoch < 0 or self._failed:
            return
        nodes = sum(node not in view.gone for node in view.nodes)
        self._most_nodes = max(self._most_nodes, nodes)
        if nodes > self._backups or self._most_nodes <= self._backups:
            self._few_since = None
            self._warned = False
            return
        now = self._clock()
        self._few_since = now if self._few_since is None else self._few_since
        if not self._warned and now - self._few_since >= _WARN_S:
            self._warned = True
            self._print_event(time.time(), few_nodes_text(self._name, nodes, self._backups))

    def line(self, text: str) -> None:
        """Prints a line among the events, such as one that a task printed."""
        self._flush_merged(now=True)
        self._print_line(printable(text) if self._out.isatty() else text)

    def _print_line(self, text: str) -> None:
        """Prints a line above the live line, or after a commit that waits to be printed."""
        if self._live:
            self._write(f"\r\x1b[2K{text}\n")
            self._refresh(force=True)
        else:
            self._flush_delayed()
            self._write(f"{text}\n")

    def _on_commit(self, event: Event) -> None:
        """Shows a commit in the live line or as a line, or keeps it for `_flush_delayed`; ignores a repeated one."""
        epoch = event.epoch or 0
        if epoch < self._epoch or (epoch == self._epoch and not event.fields.keys() > self._numbers.keys()):
            return  # a new leader repeats the last commit; a step may report several times
        self._epoch, self._numbers = epoch, event.fields
        self._times.append((self._clock(), epoch))
        if self._live:
            self._refresh(force=False)
        elif self._has_few_epochs or self._epochs_per_s() < _FEW_PER_S or self._clock() - self._shown_at >= 1.0:
            self._delayed = None
            self._print_commit(event)
        else:
            self._delayed = event

    def _print_commit(self, event: Event) -> None:
        """Prints the line of a commit."""
        self._shown_at = self._clock()
        self._print_numbers(event.epoch or 0, event.fields)

    def _print_numbers(self, epoch: int, numbers: Mapping[str, str | int | float]) -> None:
        self._printed.append(epoch)
        self._write(f"{self._unit} {epoch}{last_epoch_text(self._epochs)}{one_line(numbers_text(numbers))}\n")

    def _flush_delayed(self) -> None:
        """Prints the commit that waits to be printed, if there is one."""
        if self._delayed is not None:
            self._print_commit(self._delayed)
            self._delayed = None

    def tick(self) -> None:
        """Called periodically: prints events that waited to be merged, warns of few nodes, refreshes the live line."""
        self._flush_merged()
        self._warn_of_few_nodes()
        if self._clock() - self._ending_since >= _ENDING_S:
            self._flush_ending()
        if self._live and not self._ended:
            self._refresh(force=True)

    def end(self, reports: Sequence[EpochReport] = ()) -> None:
        """Prints the last epoch and the end of the job.

        Args:
            reports: of the result. A leader that was killed may not have sent its last commits.
        """
        if self._ended:
            return
        self._flush_merged(now=True)
        self._ended = True
        if reports and reports[-1].epoch > self._epoch:
            self._epoch, self._numbers = reports[-1].epoch, dict(reports[-1].numbers)
        if self._live:
            self._flush_ending()
            self._refresh(force=True)
            self._write("\n")
            return
        self._flush_delayed()
        for report in reports if self._has_few_epochs else reports[-1:]:
            if report.epoch >= self._first and report.epoch not in self._printed:
                self._print_numbers(report.epoch, dict(report.numbers))
        self._flush_ending()

    def _epochs_per_s(self) -> float:
        """Returns the rate of the last commits; 0.0 before the second one."""
        if len(self._times) < 2:
            return 0.0
        (t0, e0), (t1, e1) = self._times[0], self._times[-1]
        return (e1 - e0) / (t1 - t0) if t1 > t0 else 0.0

    def text(self) -> str:
        """Returns the live line."""
        parts = [self._name]
        view = self._view
        if self._epoch >= 0:
            parts += [f"{self._unit} {self._epoch}{last_epoch_text(self._epochs)}", f"{self._epochs_per_s():.1f}/s"]
        elif view is None or (not view.primaries and view.workers is None):
            parts.append("starting")
        elif view.workers is not None:
            parts.append(f"no report of a step yet  {counted(len(view.workers.record.workers), 'worker')}")
        if view is not None and view.epoch is not None and not self._job_over:  # nodes leave when the job is over
            nodes = sum(node not in view.gone for node in view.nodes)
            ready = sum(1 for task in range(self._tasks) if len(holders(view, task)) > self._backups)
            if self._epoch >= 0:
                parts.append(counted(nodes, "node"))
                if self._backups:
                    parts.append(f"{ready}/{self._tasks} backed up")
            elif view.primaries:
                parts.append(f"setting up: {ready} of {self._tasks} tasks on {counted(nodes, 'node')}")
        numbers = one_line(numbers_text(self._numbers).strip())
        if numbers:
            parts.append(numbers)
        return "  ".join(parts)

    def _refresh(self, *, force: bool) -> None:
        """Writes the live line again; without `force` only some time after the last time."""
        now = self._clock()
        if not force and now - self._shown_at < _REFRESH_S:
            return
        self._shown_at = now
        line = cut(self.text(), max(1, shutil.get_terminal_size().columns - 1))
        self._write(f"\r\x1b[2K{line}")


def numbers_text(numbers: Mapping[str, str | int | float]) -> str:
    """Formats the numbers of a commit's reports: `  loss=0.5  slope=3`."""
    return "".join(
        f"  {key}={value:.6g}" if isinstance(value, float) else f"  {key}={value}" for key, value in numbers.items()
    )


def _text_without_task(event: Event) -> str:
    """Returns an event's text without the task at its beginning, so that alike events compare equal."""
    return event.text.removeprefix(f"task {event.task}: ") if event.task is not None else event.text
