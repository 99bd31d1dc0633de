"""Passes on what the nodes of this host print, line by line, and reads their logs afterwards.

A node's standard output and error go to one file, which outlives it. What the framework tells there below a warning is
shown elsewhere, too (the progress, `taskgraph events`), and is left out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

__all__ = ["LogTails", "has_user_lines", "showing_task_logs"]

_LINE = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} taskgraph(?!\.task\.)[.\w]* "
"""The beginning of the framework's own lines, in the format of `node.process.log_to_stderr`. Lines of a task's logger,
`self.log`, are the user's."""
_OURS = re.compile(_LINE + rb"(DEBUG|INFO) ")
_OURS_OF_ANY_LEVEL = re.compile(_LINE + rb"[A-Z]+ ")
_CHUNK = 64 * 1024
"""Read of one file at a time, so that a task that prints without end does not keep the others waiting."""
_LONGEST = 64 * 1024
"""A line without an end is passed on in pieces."""


@contextlib.contextmanager
def showing_task_logs(show: Callable[[str], None]) -> Iterator[None]:
    """Shows what tasks of this process log with `self.log`, unless the user's program has set up logging."""
    logger, loop = logging.getLogger("taskgraph.task"), asyncio.get_running_loop()
    handler = _Handler(lambda line: loop.call_soon_threadsafe(show, line))
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    before = logger.level
    alone = not logger.hasHandlers()
    if alone:
        logger.addHandler(handler)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(before)
        if alone:
            logger.removeHandler(handler)


class _Handler(logging.Handler):
    """Passes each log record, as text, to a function."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(self.format(record))
        except Exception:  # as every handler does: a wrong call of a logger ends no program
            self.handleError(record)


class LogTails:
    """Follows logs. Files are opened once, so they may be moved.

    Args:
        logs: returns the logs of all nodes so far, by name. A node may start and end between two calls.
        ended: returns the names of nodes that ended: their logs are read to the end, and closed.
        show: takes `node | line`.
    """

    def __init__(
        self,
        logs: Callable[[], Mapping[str, Path]],
        ended: Callable[[], Container[str]],
        show: Callable[[str], None],
    ) -> None:
        self._logs = logs
        self._ended = ended
        self._show = show
        self._width = 0
        self._opened: set[str] = set()
        self._files: dict[str, BinaryIO] = {}
        self._rest: dict[str, bytes] = {}
        self._open()

    def _open(self) -> None:
        """Opens the logs of nodes that are new."""
        for name, path in self._logs().items():
            if name not in self._opened:
                self._opened.add(name)
                self._width = max(self._width, len(name))
                with contextlib.suppress(FileNotFoundError):
                    self._files[name], self._rest[name] = path.open("rb"), b""

    def poll(self) -> bool:
        """Shows the new lines of all logs; returns True if there may be more now."""
        more, over = False, self._ended()  # before reading: an ended node writes no more
        self._open()
        for name, file in list(self._files.items()):
            data = file.read(_CHUNK)
            more = more or len(data) == _CHUNK
            *lines, rest = (self._rest[name] + data).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            self._rest[name] = rest
            for line in lines:
                self._pass_on(name, line)
            if not data and name in over:
                self._close_file(name)
        return more

    def _close_file(self, name: str) -> None:
        """Closes the log of a node that has ended, and passes on its last line, which may lack a line end."""
        self._files.pop(name).close()
        if rest := self._rest.pop(name):
            self._pass_on(name, rest)

    def _pass_on(self, name: str, line: bytes) -> None:
        """Shows a line, or the part of it before a line of the framework."""
        ours = _OURS.search(line)  # perhaps after output without a line end
        line = line[: ours.start()] if ours else line
        if line or not ours:
            self._show(f"{name.ljust(self._width)} | {line.decode(errors='replace').rstrip()}")

    def close(self) -> None:
        """Shows the rest of all logs, and closes the files."""
        try:
            while self.poll():
                pass
            for name in list(self._files):
                self._close_file(name)
        finally:
            for file in self._files.values():
                file.close()


def has_user_lines(folder: Path) -> bool:
    """True if the ends of the nodes' logs in a folder have lines that are not the framework's own."""
    return any(
        line and not _OURS_OF_ANY_LEVEL.match(line)
        for path in sorted(folder.glob("n*.log"))
        for line in _last_lines(path)
    )


def _last_lines(path: Path) -> Iterator[bytes]:
    """Yields the last lines of a log; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _CHUNK))
            part = file.readline() if file.tell() else b""
            yield from file.read().split(b"\n")
            if len(part) == _CHUNK:
                yield part  # part of a line longer than any of ours
    except FileNotFoundError:  # another run of the job makes room
        return
