"""What user code a node's process runs, where its launcher finds it once the process is dead.

`os._exit`, a crash in an extension or the kernel's out-of-memory killer leave no traceback. What is written here is a
few bytes of a mapped file: no system call for each call of user code, and the kernel keeps them whatever ends the
process.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

__all__ = ["LastWords", "begin", "end", "listen", "read"]

_BYTES = mmap.PAGESIZE
_FILE = "running"
_MOST = 4
"""Calls that are named; others may have been under way besides, and the last to begin are the likelier ones."""
_LONG = 100
"""Characters of one call's name."""


class LastWords:
    """The calls under way in this process."""

    def __init__(self, folder: Path) -> None:
        self._running: dict[tuple[int, int], str] = {}
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)

    def began(self, call: tuple[int, int], text: str) -> None:
        self._running[call] = text[:_LONG]
        self._write()

    def ended(self, call: tuple[int, int]) -> None:
        if self._running.pop(call, None) is not None:
            self._write()

    def _write(self) -> None:
        text = "\n".join(list(self._running.values())[-_MOST:]).encode()[: _BYTES - 1]
        self._map[: len(text) + 1] = text + b"\0"


def read(folder: Path) -> tuple[str, ...]:
    """What ran when the process ended whose folder this is; () where that is not known, or nothing did."""
    try:
        data = (folder / _FILE).read_bytes()
    except OSError:
        return ()
    text = data.partition(b"\0")[0].decode(errors="replace")
    return tuple(text.split("\n")) if text else ()


_here: LastWords | None = None
"""Of this process, where it is a node's: nodes that share one have no launcher that would see it end."""


def listen(folder: Path) -> None:
    """From now on this process writes down what it runs."""
    global _here
    _here = LastWords(folder)


def begin(call: tuple[int, int], task: int, where: str) -> None:
    """User code of a task begins."""
    if _here is not None:
        _here.began(call, f"{where!r} of task {task}")


def end(call: tuple[int, int]) -> None:
    """It returned."""
    if _here is not None:
        _here.ended(call)
