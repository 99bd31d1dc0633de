"""One line of progress of a map on a terminal; in a pipe a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Final, TextIO

from taskgraph.observe.events import Event
from taskgraph.observe.format import counted
from taskgraph.observe.screen import cut, one_line, takes_codes
from taskgraph.protocol.view import JobView
from taskgraph.results import Failed

__all__ = ["MapProgress", "progress_text"]

_REFRESH_S: Final = 0.1
_LINE_S: Final = 5.0
"""Time between two lines in a pipe."""
_WINDOW_S: Final = 10.0
"""The rate is that of the last seconds in which pieces were computed."""
_NAME: Final = 10
_SHOWN: Final = ("gone", "lost", "failover", "returned", "excluded", "no memory")
"""Events that are lines of their own."""


class MapProgress:
    """Shows the progress of one map.

    Args:
        total: how many pieces there are.
        before: how many were done before this call.
        on: show it.
    """

    def __init__(
        self,
        name: str,
        total: int,
        before: int,
        on: bool,
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on = on
        self._name = name
        self._total = total
        self._done = before
        self._out = out or sys.stderr
        self._live = on and takes_codes(self._out)
        self._clock = clock
        self._shown_at = clock()
        self._times = deque([(clock(), before)])
        self._errors: Collection[Failed] = ()
        self._workers = 0

    def __enter__(self) -> MapProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            self._write(f"\r\x1b[2K{self._text()}\n" if self._live else f"{self._text()}\n")

    def show_if_wrong(self, event: Event) -> None:
        """Shows an event of the job if its kind is in `_SHOWN`: something went wrong."""
        if event.kind in _SHOWN and self.on:
            text = one_line(event.text)
            self._write(f"\r\x1b[2K{text}\n" if self._live else f"{text}\n")

    def set_workers(self, view: JobView) -> None:
        """Sets the number of workers that the line shows: that of this view."""
        self._workers = 0 if view.workers is None else len(view.workers.record.workers)

    def count_done(self) -> None:
        """Counts one more piece as done."""
        self._done += 1

    def tick(self, errors: Collection[Failed]) -> None:
        """Writes the line anew if that is due; call it often.

        Args:
            errors: the last error of each piece that raised.
        """
        self._errors, now = errors, self._clock()
        if not self.on or now - self._shown_at < (_REFRESH_S if self._live else _LINE_S):
            return
        self._shown_at = now
        if self._done == self._times[-1][1] and len(self._times) == 1:
            self._times.clear()  # nodes start: the rate begins with the first piece
        self._times.append((now, self._done))
        while self._times[0][0] < now - _WINDOW_S:
            self._times.popleft()
        self._write(f"\r\x1b[2K{self._text()}" if self._live else f"{self._text()}\n")

    def _text(self) -> str:
        """Returns the line as it is now."""
        (began, before), now = self._times[0], self._clock()
        rate = (self._done - before) / (now - began) if now > began else 0.0
        columns = shutil.get_terminal_size().columns - 1 if self._live else 200
        errors = Counter(error_name(each.traceback) for each in self._errors)
        return progress_text(self._name, self._done, self._total, rate, self._workers, errors, columns)

    def _write(self, text: str) -> None:
        """Writes a text to `out`. After an error, later calls write nothing: the map goes on without a reader."""
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self.on = False


def progress_text(
    name: str, done: int, total: int, rate: float, workers: int, errors: Counter[str], columns: int
) -> str:
    """Returns the line: `squares  1200/10000  12%  530 pieces/s  0:16 left  4 nodes  2 failed: 2 ValueError`.

    Args:
        rate: pieces a second.
        errors: the name of an exception -> in how many pieces it was the last one.
        columns: the line has no more characters. A long name is cut first, down to ten of them.
    """
    parts = [f"{done}/{total}"]
    if total:
        parts.append(f"{100 * done // total}%")
    if rate:
        parts.append(f"{rate:.3g} pieces/s" if rate < 100 else f"{rate:.0f} pieces/s")
        if done < total:
            parts.append(f"{_duration((total - done) / rate)} left")
    if workers:
        parts.append(counted(workers, "node"))
    if errors:
        names = ", ".join(f"{count} {kind}" for kind, count in errors.most_common())
        parts.append(f"{errors.total()} failed: {names}")
    rest = one_line("  ".join(parts))
    return cut(f"{cut(one_line(name), max(_NAME, columns - len(rest) - 2))}  {rest}", max(1, columns))


def error_name(traceback: str) -> str:
    """Returns the name of the exception that a traceback ends with."""
    lines = [line for line in traceback.rstrip().splitlines() if line and not line[0].isspace()]
    return lines[-1].partition(":")[0].rpartition(".")[2] if lines else "error"


def _duration(seconds: float) -> str:
    """Formats a duration: `0:07`, `4:12`, `1:04:12`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
