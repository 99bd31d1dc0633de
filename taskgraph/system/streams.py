"""The standard streams of a process: all three are there, and what is written to them ends no job."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Untaken", "drop_unwritten", "make_good", "never_wait", "open_missing", "settle"]

_NAMES = ("stdin", "stdout", "stderr")
_WAITING_BYTES = 256 * 1024
"""As much waits for a reader of standard error that is slow: more than a screen, less than anybody reads."""
_PIECE_BYTES = 64 * 1024
_SLOW_S = 1.0
"""A reader that takes nothing for so long, while as much waits, is given up until it takes something again."""
_SETTLE_S = 2.0


def make_good() -> None:
    """Makes the streams of a command such that a job does not end because of them.

    What standard error cannot take (a full disk, a terminal that is gone) is dropped. Characters that a stream's
    encoding has not are written as `\\xe4` or `\\ud800`.
    """
    open_missing()
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
        if isinstance(out.buffer, io.FileIO):
            # With PYTHONUNBUFFERED nobody writes the rest of what a pipe took in part: a long `--json` was cut off.
            sys.stdout = _text(out, io.FileIO(out.fileno(), "w", closefd=False))
    if isinstance(err := sys.stderr, io.TextIOWrapper) and err is sys.__stderr__:
        sys.stderr = _text(err, _Dropping(err.fileno()))


def never_wait() -> None:
    """From now on nobody who writes to standard error, as `make_good` made it, waits for its reader.

    A terminal that is halted, or a pipe that nobody reads, would hold up an event loop, and what it looks after.
    """
    raw = _raw_stderr()
    if raw is not None and raw.aside is None:
        raw.aside = _Aside(raw.fileno())
        atexit.register(settle)


def settle() -> None:
    """Waits for a moment until what was written to standard error is there: before more is written elsewhere."""
    raw = _raw_stderr()
    if raw is not None and raw.aside is not None:
        raw.aside.settle()


def _raw_stderr() -> _Dropping | None:
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Dropping) else None


def drop_unwritten() -> bool:
    """Drops what standard output does not take: at the end of the process it would fail once more.

    Returns:
        Whether there was something.
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
    """Opens /dev/null in place of standard streams that are closed, as `<&-` and some batch systems leave them, or a
    driver.

    Else what is opened next gets their numbers: libuv aborts when it closes such a one, and a child process that takes
    it over finds its own standard stream there.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) < len(_NAMES):
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (for the process)
        elif number and getattr(getattr(sys, name), "closed", False):  # what has its number now may be another file
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _text(like: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=like.encoding, errors=like.errors, line_buffering=True)


class _Dropping(io.FileIO):
    """What cannot be written to it is dropped, without an error: whom should it be told?

    Args:
        fd: what it writes to; stays open.
        failed: told of each write that failed.
    """

    aside: _Aside | None = None
    """Who writes in place of whoever has something to say."""

    def __init__(self, fd: int, failed: Callable[[OSError], object] | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._failed = failed

    def write(self, data: Any) -> int:
        if self.aside is not None and self.aside.process == os.getpid():  # a fork has no thread but its own
            return self.aside.put(data)
        try:
            return super().write(data) or len(data)
        except OSError as error:
            if self._failed is not None:
                self._failed(error)
            return len(data)


class Untaken:
    """Makes both output streams of a node drop what they cannot take, as on a full disk, and knows the first failure.

    What a task prints must not fail its job. It is written line by line: it is read while the task runs, and must not
    be lost with a process that is killed.
    """

    def __init__(self) -> None:
        self._told = ""
        self._tell: Callable[[str], object] | None = None
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):
                with contextlib.suppress(OSError):
                    stream.flush()
                setattr(sys, name, _text(stream, _Dropping(stream.fileno(), self._failed)))

    def tell(self, tell: Callable[[str], object]) -> None:
        """Has the first failure told, in whatever thread it is met."""
        self._tell = tell
        if self._told:
            tell(self._told)

    def _failed(self, error: OSError) -> None:
        if self._told:
            return
        self._told = (
            f"{_file(1) or 'its output'} takes nothing that this node and its tasks print: {error.strerror}; it is "
            f"dropped as long as that is so"
        )
        if self._tell is not None:
            self._tell(self._told)


def _file(fd: int) -> str:
    """The path of an open file, where it has one and the system tells."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
    return path if path.startswith("/") else ""


class _Aside:
    """Writes to a descriptor in a thread of its own. What it has no room for, since nobody reads, is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.process = os.getpid()
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._changed = threading.Condition()
        self._stands = False
        threading.Thread(target=self._write, name="stderr", daemon=True).start()

    def put(self, data: Any) -> int:
        with self._changed:
            if not self._stands:  # one that is only slow misses nothing
                self._stands = not self._changed.wait_for(lambda: len(self._waiting) < _WAITING_BYTES, _SLOW_S)
            if not self._stands:
                self._waiting += data
                self._changed.notify_all()
        return len(data)

    def settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._stands, _SETTLE_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = bytes(self._waiting[:_PIECE_BYTES])
            try:
                written = os.write(self._descriptor, piece)
            except OSError:
                written = len(piece)
            with self._changed:
                del self._waiting[:written]
                self._stands = False
                self._changed.notify_all()
