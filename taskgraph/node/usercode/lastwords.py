"""Last words: a file that tells the launcher which user code a node's process ran when it died.

`os._exit`, a crash in an extension or the kernel's out-of-memory killer leave no traceback. The file is mapped: a call
of user code writes a few bytes without a system call, and the kernel keeps them however the process ends. One byte says
that the end is intended, and no fault of that code: the node sets it before it ends itself, and `taskgraph kill` and
`taskgraph chaos` set it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import os
import re
import signal
import struct
import sysconfig
from pathlib import Path
from typing import NamedTuple

from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import RunningCode

__all__ = [
    "IN_THREAD",
    "NOTHING",
    "LastCalls",
    "LastWords",
    "UnreturnedCall",
    "crash_place",
    "intend_end",
    "mark_intended",
    "read",
    "read_loop_call",
    "recreate_file",
    "start",
]

log = logging.getLogger("taskgraph.node")

_FILE = "running"
_THREADS = 64
"""Slots for calls in threads. If there are more calls, only the newest have slots."""
_WAITING = 16
"""Slots for waiting coroutines. They are separate, so that calls in threads, the likelier cause, keep their slots."""
_SLOTS = 1 + _THREADS + _WAITING
"""The first slot is for the call that the event loop runs."""
_SLOT_BYTES = 512
_NAME_LENGTH = 100
"""Characters of one call's name."""
_HEAD = struct.Struct("<QQq")
"""Head of a slot: the number of the call, 0 while the slot is free; the task; its epoch."""
_ORDER = struct.Struct("<Q")
IN_THREAD = 1 << 63
"""Flag in the task of the first slot: a thread runs the call, and the event loop waits a moment for it."""
NOTHING = bytes(_ORDER.size)
"""The beginning of a free slot."""
_INTENDED_AT = _SLOTS * _SLOT_BYTES
"""Position of the byte that says that the end is intended."""
_BYTES = _INTENDED_AT + 1


class _Slots(NamedTuple):
    """Slots for one kind of call."""

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
            # Written, not only truncated to that length: without room for a page later, the process would get SIGBUS.
            if os.write(descriptor, bytes(_BYTES)) < _BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / _FILE))
            self._map = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self.running = memoryview(self._map)[: len(NOTHING)]
        """The beginning of the first slot."""

    def note_on_loop(self, task: int, stamp: Stamp | None, where: str) -> None:
        """Notes that the event loop runs this call until `clear_on_loop`.

        Args:
            task: with `IN_THREAD` if a thread runs the call, and the loop waits for it.
        """
        self._calls = calls = self._calls + 1
        said = _HEAD.pack(calls, task, stamp.epoch if stamp is not None else -1) + encoded_name(where)
        self._map[: len(said)] = said

    def clear_on_loop(self) -> None:
        """Notes that the event loop no longer runs the call of `note_on_loop`."""
        self.running[:] = NOTHING

    def note_call(self, call: tuple[int, int], task: int, epoch: int, where: bytes) -> None:
        """Notes a call that runs in a thread, or that began to wait.

        Args:
            epoch: -1 if the task is in no epoch.
            where: the call's name, as `encoded_name` returns it.
        """
        taken, free = self._threads if self.running == NOTHING else self._waiting
        slot = taken[call] = free.pop() if free else taken.pop(next(iter(taken)))
        self._calls += 1
        at = slot * _SLOT_BYTES
        self._map[at : at + len(where) + _HEAD.size] = _HEAD.pack(self._calls, task, epoch) + where

    def clear_call(self, call: tuple[int, int]) -> None:
        """Frees the slot of a call that has returned."""
        for taken, free in (self._threads, self._waiting):
            slot = taken.pop(call, None)
            if slot is not None:  # otherwise it is of the other kind, or was overwritten
                free.append(slot)
                _ORDER.pack_into(self._map, slot * _SLOT_BYTES, 0)

    def intend_end(self) -> None:
        """Marks the end of this process as intended."""
        self._map[_INTENDED_AT] = 1


@functools.lru_cache(maxsize=1024)
def encoded_name(text: str) -> bytes:
    """Returns a call's name as it is in the file."""
    return text[:_NAME_LENGTH].encode() + b"\0"


class UnreturnedCall(NamedTuple):
    """A call that has not returned.

    Attributes:
        order: its number: if an event loop shows the same number later, it has run nothing else meanwhile.
        in_thread: a thread runs it, and the event loop waits for it. If that lasts longer than a moment, the thread
            holds the GIL.
    """

    order: int
    ran: RunningCode
    in_thread: bool


def _call_at(data: bytes, at: int) -> UnreturnedCall | None:
    """Reads the slot at position `at`; None if it is free."""
    order, task, epoch = _HEAD.unpack_from(data, at)
    if not order:
        return None
    where = data[at + _HEAD.size : at + _SLOT_BYTES].partition(b"\0")[0]
    return UnreturnedCall(
        order, RunningCode(where.decode(errors="replace"), task & ~IN_THREAD, epoch), bool(task & IN_THREAD)
    )


class LastCalls(NamedTuple):
    """The last words of a process: its calls that had not returned, oldest first, and whether its end was intended."""

    ran: tuple[RunningCode, ...]
    intended: bool


def read(folder: Path) -> LastCalls | None:
    """Reads the last words in a node's folder; None: the node removed them as it left in good order, or wrote none."""
    try:
        data = (folder / _FILE).read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES:  # it died before the file was complete
        return None
    calls = [call for at in range(0, _INTENDED_AT, _SLOT_BYTES) if (call := _call_at(data, at)) is not None]
    return LastCalls(tuple(call.ran for call in sorted(calls)), bool(data[_INTENDED_AT]))


def read_loop_call(folder: Path) -> UnreturnedCall | None:
    """Returns the call that the event loop of a living process runs now; None if it runs none."""
    try:
        with (folder / _FILE).open("rb") as file:
            data = file.read(_SLOT_BYTES)
    except OSError:
        return None
    return _call_at(data, 0) if len(data) == _SLOT_BYTES else None


def mark_intended(folder: Path) -> None:
    """Marks the end of another process on this host as intended."""
    # The process may end, and its folder be removed, at this moment.
    with contextlib.suppress(FileNotFoundError), (folder / _FILE).open("r+b") as file:
        file.seek(_INTENDED_AT)
        file.write(b"\1")


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
_PACKAGE_DIR = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LIBRARIES = (f"{sysconfig.get_path('stdlib')}{os.sep}", f"{os.sep}site-packages{os.sep}")
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""The signals for which `faulthandler` writes a stack."""


def crash_place(log_tail: str, number: int) -> str:
    """Returns the Python line at which a node crashed, from `faulthandler`'s output in its log; "" if there is none.

    A crash inside a library is named by the line that called the library.

    Args:
        number: the signal that ended the node. The log may also have the stack of a child of the node, which inherits
            `faulthandler`, so after another signal no line is named.
    """
    if number not in _CRASHES or "Fatal Python error: " not in log_tail:
        return ""
    stack = _FRAME.findall(log_tail.rpartition("Fatal Python error: ")[2])
    users = [frame for frame in stack if not frame[0].startswith(_PACKAGE_DIR)]
    own = [frame for frame in users if not any(library in frame[0] for library in _LIBRARIES)]
    for path, line in (own or users)[:1]:
        return f"{path}, line {line}"
    return ""


here: LastWords | None = None
"""The last words of this process, if it is the process of a node with a launcher."""


def start(folder: Path) -> None:
    """Makes this process write its last words, if there is room for the file."""
    global here
    try:
        here = LastWords(folder)
    except OSError as error:
        log.warning("if this process dies, the code that it ran will not be known: %s", error)


def recreate_file(folder: Path) -> None:
    """Makes the file again if another program removed it. Calls that run at that time are not in it."""
    if here is not None and not (folder / _FILE).exists():
        start(folder)


def intend_end() -> None:
    """Marks the end of this process as intended."""
    if here is not None:
        here.intend_end()
