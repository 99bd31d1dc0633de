"""The standard streams of a process: all three are there, and what is written to them ends no job."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

__all__ = ["drop_unwritten", "make_good"]

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
        sys.stderr = _text(err, _Dropping(err.fileno(), "w", closefd=False))


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
    """What cannot be written to it is dropped, without an error: whom should it be told?"""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)
