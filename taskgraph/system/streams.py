"""The standard streams of a process: all three exist, and writing to them neither ends a job nor blocks it."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = [
    "DroppingOutput",
    "bound_stderr_waits",
    "drop_unwritten",
    "open_missing",
    "prepare_streams",
    "wait_until_written",
]

_NAMES = ("stdin", "stdout", "stderr")
_QUEUE_BYTES = 256 * 1024
"""Text that waits for a slow reader of standard error: more than a screen, less than anybody reads."""
_PIECE_BYTES = 64 * 1024
_SLOW_S = 1.0
"""A reader that takes nothing for this time while the queue is full loses text until it reads again."""
_SETTLE_S = 2.0


def prepare_streams() -> None:
    """Makes the streams of a command such that a job does not end because of them.

    What standard error cannot take (a full disk, a terminal that is gone) is dropped. Characters that a stream's
    encoding lacks are written as `\\xe4` or `\\ud800`.
    """
    open_missing()
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
        if isinstance(out.buffer, io.FileIO):
            # With PYTHONUNBUFFERED Python does not write the rest of what a pipe took in part: a long `--json` was cut.
            sys.stdout = _text_stream(out, io.FileIO(out.fileno(), "w", closefd=False))
    if isinstance(err := sys.stderr, io.TextIOWrapper) and err is sys.__stderr__:
        sys.stderr = _text_stream(err, _DroppingFile(err.fileno()))


def bound_stderr_waits() -> None:
    """Makes writing to standard error, after `prepare_streams`, wait for a slow reader `_SLOW_S` at most, then drop.

    A halted terminal or a pipe that is not read would block the event loop: no signal and no timeout ended the job.
    """
    raw = _raw_stderr()
    if raw is not None and raw.writer is None:
        raw.writer = _Writer(raw.fileno())
        atexit.register(wait_until_written)


def wait_until_written() -> None:
    """Waits until standard error has taken what was written to it, but no longer than a moment."""
    raw = _raw_stderr()
    if raw is not None and raw.writer is not None:
        raw.writer.wait_until_written()


def _raw_stderr() -> _DroppingFile | None:
    """Returns the raw file of standard error that `prepare_streams` made; None: it made none."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    return raw if isinstance(raw, _DroppingFile) else None


def drop_unwritten() -> bool:
    """Flushes standard output; if it takes no text, drops that, since Python would fail with it again at its exit.

    Returns:
        True if something was dropped.
    """
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return True
    return False


def open_missing() -> None:
    """Opens /dev/null in place of standard streams that are closed, as `<&-`, a batch system or a driver leaves them.

    Otherwise the next file that is opened gets the number of such a stream: libuv aborts when it closes that, and a
    child process finds the file in place of its own stream.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) < len(_NAMES):
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (for the process)
        elif number and getattr(getattr(sys, name), "closed", False):  # its number may be another file's now
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _text_stream(like: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    """Makes a text stream of a raw file, written line by line, with the encoding of another stream."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=like.encoding, errors=like.errors, line_buffering=True)


class _DroppingFile(io.FileIO):
    """A file that drops what it cannot write, without an error.

    Args:
        fd: stays open when this is closed.
        failed: called with the error of each failed write.

    Attributes:
        writer: a thread that writes in the caller's place.
    """

    writer: _Writer | None = None

    def __init__(self, fd: int, failed: Callable[[OSError], object] | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._failed = failed

    def write(self, data: Any) -> int:
        """Writes data, or passes it to `writer`; returns a size in any case, as if it was written."""
        if self.writer is not None and self.writer.process == os.getpid():  # a forked child has no such thread
            return self.writer.put(data)
        try:
            return super().write(data) or len(data)
        except OSError as error:
            if self._failed is not None:
                self._failed(error)
            return len(data)


class DroppingOutput:
    """Makes both output streams of a node drop what they cannot write, as on a full disk; keeps the first error.

    What a task prints must not fail its job. Each line is written at once: users read it while the task runs, and a
    process that is killed must not lose it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._report: Callable[[str], object] | None = None
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):
                with contextlib.suppress(OSError):
                    stream.flush()
                setattr(sys, name, _text_stream(stream, _DroppingFile(stream.fileno(), self._failed)))

    def report_to(self, report: Callable[[str], object]) -> None:
        """Calls `report` with the text of the first failed write: now if there was one, else in the writing thread."""
        self._report = report
        if self._text:
            report(self._text)

    def _failed(self, error: OSError) -> None:
        """Keeps the first error as text, and reports it."""
        if self._text:
            return
        self._text = (
            f"{_path_of(1) or 'its output'} cannot be written: {error.strerror}; what this node and its tasks print is "
            f"dropped as long as that is so"
        )
        if self._report is not None:
            self._report(self._text)


def _path_of(fd: int) -> str:
    """Returns the path of an open file; "": it has none, or the system does not say."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


class _Writer:
    """Writes to a descriptor in a thread of its own, and drops what does not fit into its queue."""

    def __init__(self, descriptor: int) -> None:
        self.process = os.getpid()
        self._descriptor = descriptor
        self._queue = bytearray()
        self._changed = threading.Condition()
        self._stands = False
        threading.Thread(target=self._write, name="stderr", daemon=True).start()

    def put(self, data: Any) -> int:
        """Queues data, after a wait for room of at most `_SLOW_S`; then drops it. Returns its size in any case."""
        with self._changed:
            if not self._stands:  # a reader that is only slow loses nothing
                self._stands = not self._changed.wait_for(lambda: len(self._queue) < _QUEUE_BYTES, _SLOW_S)
            if not self._stands:
                self._queue += data
                self._changed.notify_all()
        return len(data)

    def wait_until_written(self) -> None:
        """Waits until the queue is written, at most `_SETTLE_S`; not if the reader takes nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._stands, _SETTLE_S)

    def _write(self) -> None:
        """Writes the queue, in a thread, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                piece = bytes(self._queue[:_PIECE_BYTES])
            try:
                written = os.write(self._descriptor, piece)
            except OSError:
                written = len(piece)
            with self._changed:
                del self._queue[:written]
                self._stands = False
                self._changed.notify_all()
