"""Processes of ours: signals to them, those that another process forked for us, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from taskgraph.system import host

__all__ = [
    "Adopted",
    "Child",
    "adopting",
    "can_adopt",
    "end_group",
    "end_mine",
    "end_session",
    "reap_session",
    "signal_name",
    "tell_child",
]

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
"""Of Linux's prctl."""
_UNKNOWN = 255
"""The exit code of a child that somebody else has waited for; asyncio says the same."""
_ROUNDS = 10
"""As often it is looked whether members of a group that were ended have started others meanwhile."""
_AGAIN_S = 0.002
"""Who was killed ends within about as long."""
_REAP_S, _REAP_AGAIN_S = 1.0, 0.02
"""What was killed with a node, and what tracks its shared memory, ends within this time; how often it is looked."""
_TRACKER = "resource_tracker"
"""In the command line of the helper of `multiprocessing`, and of joblib's."""


class Child(Protocol):
    """What `asyncio.subprocess.Process` and `Adopted` have in common."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


def signal_name(number: int) -> str:
    """What a signal is called that ended a process; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tell_child(process: Child, number: signal.Signals) -> None:
    """Sends a signal to a child; nothing, where it has ended.

    `process.send_signal` and `process.kill` look first whether the child has ended, and so may take its exit code from
    asyncio, which is waiting for it, prints a warning, and tells 255 instead.

    A thread of asyncio's may have waited for it already, and the event loop not have heard of that: then its number may
    be another process's, which is no child of ours.
    """
    if process.returncode is None and _is_child(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _is_child(pid: int) -> bool:
    """Whether it is a child that was not waited for. Elsewhere than on Linux some Pythons cannot say."""
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_group(leader: int) -> None:
    """Ends at once what is left of a process group, as soon as its leader has ended.

    The number of a group that has members is no other's, and one that has just become free is the last to be given
    again.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no group, which is the rule; or not ours
        os.killpg(leader, 0)
        if sys.platform == "linux":
            _end_members(leader)
        else:
            os.killpg(leader, signal.SIGKILL)


def end_mine() -> None:
    """Ends at once the children of this process that are in its process group; all of it, where it leads its session.

    Of a shell's pipeline the first process leads a group, too, and the others are no children of it.
    """
    if sys.platform == "linux" and _has_children():
        me = os.getpid()
        _end_members(os.getpgrp(), among=None if os.getsid(0) == me else me)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_members(group: int, among: int | None = None) -> None:
    """SIGKILL for the members of a group but ourselves.

    What tracks their shared memory and semaphores is left: it ends when they have, and removes what they forgot.

    Args:
        among: the children of this process only.
    """
    told = {os.getpid()}
    for _ in range(_ROUNDS):
        members = host.group(group)
        new = {pid for pid in members if among in (None, members[pid])} - told
        if not new:
            return
        for pid in new:
            if _TRACKER not in host.command(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        told |= new


async def end_session(number: int) -> None:
    """Ends at once the children of this process that are in a session of ours, and waits for them.

    Who started them must have ended. One that is killed leaves us its own children (`adopting`) before it can be waited
    for: once there are none, none comes.
    """
    while members := host.children(session=number):
        for pid in members:
            _kill_and_reap(pid)
        await asyncio.sleep(_AGAIN_S)


async def reap_session(number: int) -> None:
    """Waits for children of this process that are in a session of ours, and that end by themselves within a moment.

    Who started them has ended, while we adopted what our descendants leave.
    """
    until = time.monotonic() + _REAP_S
    while (members := host.children(session=number)) and time.monotonic() < until:
        for pid in members:
            _reap(pid)
        await asyncio.sleep(_REAP_AGAIN_S)


def _kill_and_reap(pid: int) -> None:
    """To be called again, as it does not wait for the end."""
    with contextlib.suppress(ProcessLookupError):  # somebody else has waited for it
        os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # somebody else has
        os.waitpid(pid, os.WNOHANG)


class Adopted:
    """A child of ours that asyncio did not start. Made in a running event loop, as soon as its id is known."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pid = pid
        self._fd = os.pidfd_open(pid)  # it is readable when the process has ended
        self._loop.add_reader(self._fd, self._look)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative: the signal that ended it; None: it has not ended yet."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Returns its exit code when it has ended."""
        return await asyncio.shield(self._ended)

    def _look(self) -> None:
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            code = _UNKNOWN
        else:
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._ended.set_result(code)


_adopting_lock = threading.Lock()
_adopting = 0
_adopted_before = 0
"""What held when the first began."""


def can_adopt() -> bool:
    """Whether this system lets a process adopt the orphans of its children, and wait for any process."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        _subreaper()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Within, what our descendants leave behind when they end becomes ours, instead of the system's.

    A child whose own child is an orphan at once thereby starts a process that is ours. Only for as long as that takes:
    who is nobody's at other times is none of our business, and we would have to wait for it.

    Raises:
        OSError: the system does not do that. See `can_adopt`.
    """
    global _adopting, _adopted_before
    with _adopting_lock:
        if not _adopting:
            _adopted_before = _subreaper()
            _set_subreaper(1)
        _adopting += 1
    try:
        yield
    finally:
        with _adopting_lock:
            _adopting -= 1
            if not _adopting:
                _set_subreaper(_adopted_before)


def _subreaper() -> int:
    found = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return found.value


def _set_subreaper(value: int) -> None:
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(what: int, value: object) -> None:
    none = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, none, none, none):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
