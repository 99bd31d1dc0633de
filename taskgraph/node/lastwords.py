"""What user code a node's process runs, where its launcher finds it once the process is dead.

`os._exit`, a crash in an extension or the kernel's out-of-memory killer leave no traceback. What is written here is a
few bytes of a mapped file: no system call for each call of user code, and the kernel keeps them whatever ends the
process.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from pathlib import Path

__all__ = ["LastWords", "begin", "end", "listen", "read"]

_BYTES = mmap.PAGESIZE
_FILE = "running"
_MOST = 4
"""Calls that are named; others may have been under way besides, and the last to begin are the likelier ones."""
_SLOT_BYTES = 512
_LONG = 100
"""Characters of one call's name."""
_ORDER = struct.Struct("<Q")
"""What a slot begins with: a number that grows with every call, 0 while the slot is free."""


class LastWords:
    """The calls under way in this process: `_MOST` slots in a file, each a number and a text."""

    def __init__(self, folder: Path) -> None:
        self._slots: dict[tuple[int, int], int] = {}  # in the order they began
        self._free = list(range(_MOST))
        self._calls = 0
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, _BYTES)
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)

    def began(self, call: tuple[int, int], text: bytes) -> None:
        """`text` as `named` makes it."""
        slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
        self._slots[call] = slot
        self._calls += 1
        at = slot * _SLOT_BYTES
        self._map[at : at + len(text) + 8] = _ORDER.pack(self._calls) + text

    def ended(self, call: tuple[int, int]) -> None:
        slot = self._slots.pop(call, None)
        if slot is not None:  # else it had to make room
            self._free.append(slot)
            _ORDER.pack_into(self._map, slot * _SLOT_BYTES, 0)


@functools.lru_cache(maxsize=1024)
def named(text: str) -> bytes:
    """A call's name as it stands in the file."""
    return text[:_LONG].encode() + b"\0"


def read(folder: Path) -> tuple[str, ...]:
    """What ran when the process ended whose folder this is; () where that is not known, or nothing did."""
    try:
        data = (folder / _FILE).read_bytes()
    except OSError:
        return ()
    found = []
    for at in range(0, min(len(data), _MOST * _SLOT_BYTES) - 8, _SLOT_BYTES):
        (order,) = _ORDER.unpack_from(data, at)
        if order:
            text = data[at + 8 : at + _SLOT_BYTES].partition(b"\0")[0]
            found.append((order, text.decode(errors="replace")))
    return tuple(text for _, text in sorted(found))


_here: LastWords | None = None
"""Of this process, where it is a node's: nodes that share one have no launcher that would see it end."""


def listen(folder: Path) -> None:
    """From now on this process writes down what it runs."""
    global _here
    _here = LastWords(folder)


def begin(call: tuple[int, int], task: int, where: str) -> None:
    """User code of a task begins."""
    if _here is not None:
        _here.began(call, named(f"{where!r} of task {task}"))


def end(call: tuple[int, int]) -> None:
    """It returned."""
    if _here is not None:
        _here.ended(call)
