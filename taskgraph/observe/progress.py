"""The progress of a run: one live line on a terminal, plain lines where output is piped.

Piped, every durable event is a line; commits are lines too: all of them in a job of up to `_FEW` epochs, or while
they are fewer than `_FEW_PER_S` a second, else one a second, and always the last; that the job ended comes after it.

When a node dies, each of its tasks is taken over, loses a member and gets another: what is the same of several tasks
within a moment is told once.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from taskgraph.observe.events import Event
from taskgraph.observe.format import clock_text, holders, ids_text, last_text
from taskgraph.observe.screen import cut, one_line, printable, takes_codes
from taskgraph.protocol.records import State
from taskgraph.protocol.view import JobView
from taskgraph.results import EpochReport

__all__ = ["Progress", "numbers_text"]

_FEW_PER_S = 20.0
_FEW = 100
_REFRESH_S = 0.1
_WINDOW = 200
_MERGE_S = 0.3
_LOST_S = 5.0
"""Each node that misses another one tells it for itself."""
_ENDING_S = 2.0
"""That a job ended comes from etcd, its last commits from its leader: the end waits this long to be told last."""
_MERGED = ("lost", "takeover", "hand-over", "evicted", "admitted", "slow", "teardown failed")
_ONCE = ("unheld", "sockets")
"""What nodes tell each for itself, and of one task of many: the first one tells what is the matter."""
_OF_A_NODE = ("paused", "resumed", "raised")
"""What a node tells of itself, without its name: `taskgraph events` has a column for that."""
_ENDS = (State.FINISHED, State.FAILED, State.CANCELLED)
_DEPARTURES = ("lost", "gone", "evicted", "drain")
"""No news once the job ended: its nodes leave then, one after the other, and each is missed by those that stay."""


class Progress:
    """Shows one job. `event` takes every event, `tick` is called now and then."""

    def __init__(
        self,
        name: str,
        tasks: int,
        epochs: int | None,
        backups: int = 0,
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._epochs = epochs
        self._backups = backups
        self._out = out or sys.stderr
        self._live = takes_codes(self._out)
        self._few = epochs is not None and epochs <= _FEW
        self._clock = clock
        self._times: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._epoch = -1
        self._first = 0
        self._numbers: Mapping[str, str | int | float] = {}
        self._lost: dict[str, float] = {}
        self._shown_at = float("-inf")
        self._held: Event | None = None
        self._view: JobView | None = None
        self._closed = False
        self._ended = False
        self._over = False
        self._ending: Event | None = None
        self._ending_since = 0.0
        self._once: set[str] = set()
        self._merging: dict[tuple[str, str], list[Event]] = {}
        self._merging_since = 0.0
        self._printed: deque[int] = deque(maxlen=_FEW)

    def _write(self, text: str) -> None:
        """To whoever still reads it: a job does not end because nobody looks, or because the disk is full."""
        if self._closed:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._closed = True

    def follow(self, view: JobView) -> None:
        """Takes nodes and replicas from this view, and where the run begins."""
        self._view = view
        self._first = view.epoch.record.base if view.epoch is not None else 0

    def event(self, event: Event) -> None:
        """Something happened."""
        if event.kind == "commit":
            self._commit(event)
            return
        if event.transient or (self._over and event.kind in _DEPARTURES):
            return
        self._over = self._over or event.kind in _ENDS
        if event.kind in _ONCE:
            if (what := _of_its_task(event)) in self._once:
                return
            self._once.add(what)
        if event.kind in _MERGED:
            if not self._merging:
                self._merging_since = self._clock()
            self._merging.setdefault((event.kind, _of_its_task(event)), []).append(event)
            self._flush_merged()
            return
        self._flush_merged(now=True)
        if event.kind not in _ENDS:
            self._tell(event.at, f"{event.node}: {event.text}" if event.kind in _OF_A_NODE else event.text)
        else:  # why it failed is said at the end, with the traceback
            self._ending = event if event.kind != State.FAILED else None
            self._ending_since = self._clock()

    def _flush_ending(self) -> None:
        if self._ending is not None:
            ending, self._ending = self._ending, None
            self._tell(ending.at, ending.text)

    def _tell(self, at: float, text: str) -> None:
        self._line(f"{clock_text(at)} {one_line(text)}")

    def _flush_merged(self, *, now: bool = False) -> None:
        if not self._merging or (not now and self._clock() - self._merging_since < _MERGE_S):
            return
        merged, self._merging = self._merging, {}
        # By when they happened: nodes tell what they see each for itself, and one of them is read after the other.
        for (kind, text), events in sorted(merged.items(), key=lambda item: min(event.at for event in item[1])):
            if kind == "lost" and self._told_lost(text):
                continue
            tasks = sorted({event.task for event in events if event.task is not None})
            whose = f"task {tasks[0]}: " if len(tasks) == 1 else f"tasks {ids_text(tasks)}: " if tasks else ""
            self._tell(min(event.at for event in events), whose + text)

    def _told_lost(self, text: str) -> bool:
        """Whether another node told just now that it misses this one, from whatever it knows that."""
        what, now = text.partition(":")[0], self._clock()
        self._lost = {told: at for told, at in self._lost.items() if now - at < _LOST_S}  # in a long job there are many
        before, self._lost[what] = what in self._lost, now
        return before

    def line(self, text: str) -> None:
        """Something to be read among what happens, such as a line that a task printed."""
        self._flush_merged(now=True)
        self._line(printable(text) if self._out.isatty() else text)

    def _line(self, text: str) -> None:
        if self._live:
            self._write(f"\r\x1b[2K{text}\n")
            self._refresh(force=True)
        else:
            self._flush_held()
            self._write(f"{text}\n")

    def _commit(self, event: Event) -> None:
        epoch = event.epoch or 0
        if epoch <= self._epoch:
            return  # a new leader tells the last one again
        self._epoch, self._numbers = epoch, event.fields
        self._times.append((self._clock(), epoch))
        if self._live:
            self._refresh(force=False)
        elif self._few or self._rate() < _FEW_PER_S or self._clock() - self._shown_at >= 1.0:
            self._held = None
            self._print_commit(event)
        else:
            self._held = event

    def _print_commit(self, event: Event) -> None:
        self._shown_at = self._clock()
        self._print_numbers(event.epoch or 0, event.fields)

    def _print_numbers(self, epoch: int, numbers: Mapping[str, str | int | float]) -> None:
        self._printed.append(epoch)
        self._write(f"epoch {epoch}{last_text(self._epochs)}{one_line(numbers_text(numbers))}\n")

    def _flush_held(self) -> None:
        if self._held is not None:
            self._print_commit(self._held)
            self._held = None

    def tick(self) -> None:
        """Refreshes the live line; tells what waited for more of its kind."""
        self._flush_merged()
        if self._clock() - self._ending_since >= _ENDING_S:
            self._flush_ending()
        if self._live and not self._ended:
            self._refresh(force=True)

    def end(self, reports: Sequence[EpochReport] = ()) -> None:
        """The job ended: the last epoch stays to be seen.

        Commits are told once, by the leader, and those of a leader that was killed may have been told to nobody: the
        result's `reports` has them all.
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
        self._flush_held()
        for report in reports if self._few else reports[-1:]:
            if report.epoch >= self._first and report.epoch not in self._printed:
                self._print_numbers(report.epoch, dict(report.numbers))
        self._flush_ending()

    def _rate(self) -> float:
        if len(self._times) < 2:
            return 0.0
        (t0, e0), (t1, e1) = self._times[0], self._times[-1]
        return (e1 - e0) / (t1 - t0) if t1 > t0 else 0.0

    def text(self) -> str:
        """The live line."""
        parts = [self._name]
        if self._epoch >= 0:
            parts.append(f"epoch {self._epoch}{last_text(self._epochs)}")
            parts.append(f"{self._rate():.1f}/s")
        else:
            parts.append("starting")
        view = self._view
        if view is not None and view.epoch is not None and not self._over:  # its nodes leave then
            parts.append(f"nodes {len(view.nodes.keys() - view.gone.keys())}")
            wanted = self._backups + 1
            in_sync = sum(min(len(holders(view, task)), wanted) for task in range(self._tasks))
            parts.append(f"in sync {in_sync}/{self._tasks * wanted}")
        numbers = one_line(numbers_text(self._numbers).strip())
        if numbers:
            parts.append(numbers)
        return "  ".join(parts)

    def _refresh(self, *, force: bool) -> None:
        now = self._clock()
        if not force and now - self._shown_at < _REFRESH_S:
            return
        self._shown_at = now
        line = cut(self.text(), max(1, shutil.get_terminal_size().columns - 1))
        self._write(f"\r\x1b[2K{line}")


def numbers_text(numbers: Mapping[str, str | int | float]) -> str:
    """`  loss=0.5  slope=3` for a commit's reports."""
    return "".join(
        f"  {key}={value:.6g}" if isinstance(value, float) else f"  {key}={value}" for key, value in numbers.items()
    )


def _of_its_task(event: Event) -> str:
    """The text without whose it is."""
    return event.text.removeprefix(f"task {event.task}: ") if event.task is not None else event.text
