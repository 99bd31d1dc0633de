"""What user code a node's process runs, where its launcher finds it once the process is dead.

`os._exit`, a crash in an extension or the kernel's out-of-memory killer leave no traceback. What is written here is a
few bytes of a mapped file: no system call for each call of user code, and the kernel keeps them whatever ends the
process. That an end is not the doing of what runs is written there, too: by the node that ends itself, and by who
kills it (`taskgraph kill`, `taskgraph chaos`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import os
import re
import struct
import sysconfig
from pathlib import Path
from typing import NamedTuple

from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import Ran

__all__ = [
    "IN_THREAD",
    "NOTHING",
    "Call",
    "LastWords",
    "Left",
    "crashed_at",
    "listen",
    "listen_anew",
    "mean",
    "meant",
    "on_loop",
    "read",
]

log = logging.getLogger("taskgraph.node")

_FILE = "running"
_THREADS = 64
"""Calls in threads that are named: as many as the threads of a node with few tasks. Where there are more, the last to
begin are the likelier ones."""
_WAITING = 16
"""Coroutines that are named while they wait, likewise. There may be one for every task and epoch in flight: their slots
are their own, so that they take none from what threads run, which is likelier to end a process than what waits."""
_SLOTS = 1 + _THREADS + _WAITING
"""The first one is of the call that the event loop runs."""
_SLOT_BYTES = 512
_LONG = 100
"""Characters of one call's name."""
_HEAD = struct.Struct("<QQq")
"""What a slot begins with: a number that grows with every call, 0 while the slot is free; the task; its epoch."""
_ORDER = struct.Struct("<Q")
IN_THREAD = 1 << 63
"""Beside the task of what the event loop runs: a thread runs it, and the loop waits a moment for that."""
NOTHING = bytes(_ORDER.size)
"""What a slot begins with while it is free."""
_MEANT_AT = _SLOTS * _SLOT_BYTES
"""One byte: whether the end of the process is meant."""
_BYTES = _MEANT_AT + 1


class _Slots(NamedTuple):
    """Those for one kind of call."""

    taken: dict[tuple[int, int], int]  # in the order their calls began
    free: list[int]


class LastWords:
    """The calls under way in this process: slots in a file, each of some numbers and a text."""

    def __init__(self, folder: Path) -> None:
        self._threads = _Slots({}, list(range(1, 1 + _THREADS)))
        self._waiting = _Slots({}, list(range(1 + _THREADS, _SLOTS)))
        self._calls = 0
        descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Written, not only made as long: where a page finds no room later, the process dies of SIGBUS.
            if os.write(descriptor, bytes(_BYTES)) < _BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / _FILE))
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self.running = memoryview(self._map)[: len(NOTHING)]
        """What the slot of the event loop's call begins with."""

    def runs(self, task: int, stamp: Stamp | None, where: str) -> None:
        """The event loop runs this, and nothing else before `ran`: most calls neither wait nor need a thread.

        Args:
            task: with `IN_THREAD` where the loop only waits for it.
        """
        self._calls = calls = self._calls + 1
        said = _HEAD.pack(calls, task, stamp.epoch if stamp is not None else -1) + named(where)
        self._map[: len(said)] = said

    def ran(self) -> None:
        self.running[:] = NOTHING

    def began(self, call: tuple[int, int], task: int, epoch: int, where: bytes) -> None:
        """A call in a thread; or what the event loop runs begins to wait.

        Args:
            epoch: -1 where the task has none at work here.
            where: as `named` makes it.
        """
        taken, free = self._threads if self.running == NOTHING else self._waiting
        slot = taken[call] = free.pop() if free else taken.pop(next(iter(taken)))
        self._calls += 1
        at = slot * _SLOT_BYTES
        self._map[at : at + len(where) + _HEAD.size] = _HEAD.pack(self._calls, task, epoch) + where

    def ended(self, call: tuple[int, int]) -> None:
        for taken, free in (self._threads, self._waiting):
            slot = taken.pop(call, None)
            if slot is not None:  # else it is of the other kind, or had to make room
                free.append(slot)
                _ORDER.pack_into(self._map, slot * _SLOT_BYTES, 0)

    def mean(self) -> None:
        self._map[_MEANT_AT] = 1


@functools.lru_cache(maxsize=1024)
def named(text: str) -> bytes:
    """A call's name as it stands in the file."""
    return text[:_LONG].encode() + b"\0"


class Call(NamedTuple):
    """One under way.

    Attributes:
        order: its number. One that is the same again later is the same call: of an event loop, nothing else went on
            there meanwhile.
        in_thread: the event loop waits for a thread that runs it. It waits for no more than a moment: if it is there
            still, the thread keeps the interpreter's lock.
    """

    order: int
    ran: Ran
    in_thread: bool


def _call_at(data: bytes, at: int) -> Call | None:
    """That of the slot which begins there, if it is taken."""
    order, task, epoch = _HEAD.unpack_from(data, at)
    if not order:
        return None
    where = data[at + _HEAD.size : at + _SLOT_BYTES].partition(b"\0")[0]
    return Call(order, Ran(where.decode(errors="replace"), task & ~IN_THREAD, epoch), bool(task & IN_THREAD))


class Left(NamedTuple):
    """What a process left: the calls under way, in the order they began, and whether its end was meant."""

    ran: tuple[Ran, ...]
    meant: bool


def read(folder: Path) -> Left | None:
    """What the process left that ended whose folder this is; None where it left in good order, or told nothing."""
    try:
        data = (folder / _FILE).read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES:  # it ended before it came to do anything
        return None
    calls = [call for at in range(0, _MEANT_AT, _SLOT_BYTES) if (call := _call_at(data, at)) is not None]
    return Left(tuple(call.ran for call in sorted(calls)), bool(data[_MEANT_AT]))


def on_loop(folder: Path) -> Call | None:
    """What a living process's event loop runs at this moment; None where that is none of ours."""
    try:
        with (folder / _FILE).open("rb") as file:
            data = file.read(_SLOT_BYTES)
    except OSError:
        return None
    return _call_at(data, 0) if len(data) == _SLOT_BYTES else None


def meant(folder: Path) -> None:
    """Says of another process, of this host, that it is ended on purpose."""
    # It may end, and its folder with it, at this very moment; nothing is left to say then.
    with contextlib.suppress(FileNotFoundError), (folder / _FILE).open("r+b") as file:
        file.seek(_MEANT_AT)
        file.write(b"\1")


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LIBRARIES = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{os.sep}site-packages{os.sep}")


def crashed_at(log_tail: str) -> str:
    """Finds the line of Python that crashed a node in what `faulthandler` wrote to the node's log; "": nothing.

    A crash inside a library is named by the line that called the library.
    """
    stack = _FRAME.findall(log_tail.rpartition("Fatal Python error: ")[2]) if "Fatal Python error: " in log_tail else []
    users = [frame for frame in stack if not frame[0].startswith(_OURS)]
    own = [frame for frame in users if not any(library in frame[0] for library in _LIBRARIES)]
    for path, line in (own or users)[:1]:
        return f"{path}, line {line}"
    return ""


here: LastWords | None = None
"""Of this process, where it is a node's: nodes that share one have no launcher that would see it end."""


def listen(folder: Path) -> None:
    """From now on this process writes down what it runs, unless there is no room for it."""
    global here
    try:
        here = LastWords(folder)
    except OSError as error:
        log.warning("what runs here when this process dies will not be known: %s", error)


def listen_anew(folder: Path) -> None:
    """The same, where something removed that file; what was under way then is not known any more."""
    if here is not None and not (folder / _FILE).exists():
        listen(folder)


def mean() -> None:
    """This process is about to end itself, or was told to end: that is not the doing of what it runs."""
    if here is not None:
        here.mean()
