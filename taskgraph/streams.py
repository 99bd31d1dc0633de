"""The standard streams of a process: all three are there, and what is written to them ends no job."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Untaken", "drop_unwritten", "make_good"]

_NAMES = ("stdin", "stdout", "stderr")


def make_good() -> None:
    """Makes the streams of a command such that a job does not end because of them.

    What standard error cannot take (a full disk, a terminal that is gone) is dropped. Characters that a stream's
    encoding has not are written as `\\xe4` or `\\ud800`.
    """
    _open_missing()
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
        if isinstance(out.buffer, io.FileIO):
            # With PYTHONUNBUFFERED nobody writes the rest of what a pipe took in part: a long `--json` was cut off.
            sys.stdout = _text(out, io.FileIO(out.fileno(), "w", closefd=False))
    if isinstance(err := sys.stderr, io.TextIOWrapper) and err is sys.__stderr__:
        sys.stderr = _text(err, _Dropping(err.fileno()))


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


def _open_missing() -> None:
    """Opens /dev/null in place of standard streams that are closed, as `<&-` and some batch systems leave them.

    Else what is opened next gets their numbers: libuv aborts when it closes such a one, and a child process that takes
    it over finds its own standard stream there.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) < len(_NAMES):
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (for the process)


def _text(like: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=like.encoding, errors=like.errors, line_buffering=True)


class _Dropping(io.FileIO):
    """What cannot be written to it is dropped, without an error: whom should it be told?

    Args:
        fd: what it writes to; stays open.
        failed: told of each write that failed.
    """

    def __init__(self, fd: int, failed: Callable[[OSError], object] | None = None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._failed = failed

    def write(self, data: Any) -> int:
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
