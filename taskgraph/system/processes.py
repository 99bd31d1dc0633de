"""Child processes: signals to them, children that another process forked for us, and what they leave behind."""

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
    "AdoptedChild",
    "Child",
    "adopting",
    "can_adopt",
    "end_children",
    "end_group",
    "end_session",
    "reap_session",
    "signal_child",
    "signal_name",
]

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
"""Options of Linux's `prctl`."""
_UNKNOWN = 255
"""The exit code of a child that other code has waited for; asyncio has the same."""
_ROUNDS = 10
"""Rounds to kill a group: its members may start others meanwhile."""
_AGAIN_S = 0.002
"""A killed process ends within about this time."""
_REAP_S, _REAP_AGAIN_S = 1.0, 0.02
"""Processes that were killed with a node, and trackers of its shared memory, end within this time; the poll."""
_TRACKER = "resource_tracker"
"""In the command lines of the trackers of `multiprocessing` and joblib."""


class Child(Protocol):
    """The interface that `asyncio.subprocess.Process` and `AdoptedChild` share."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGTERM"; "signal 40" for a real-time signal, which has a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_child(process: Child, number: signal.Signals) -> None:
    """Sends a signal to a child, unless it has ended.

    `process.send_signal` and `process.kill` poll the child first. This may take its exit code away from asyncio, which
    then prints a warning and returns 255. If asyncio has waited for the child already, its number may be that of
    another process, which is no child of ours.
    """
    if process.returncode is None and _is_child(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _is_child(pid: int) -> bool:
    """Returns True if this is a child that was not waited for, or if the system cannot say."""
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_group(leader: int) -> None:
    """Kills what is left of a process group. Call it as soon as the leader has ended.

    The system gives the number of a group to another one only when the group has no members, and not soon.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # mostly there is no group left; or it is not ours
        os.killpg(leader, 0)
        if sys.platform == "linux":
            _end_members(leader)
        else:
            os.killpg(leader, signal.SIGKILL)


def end_children() -> None:
    """Kills the children of this process in its process group, or the whole group if this process leads its session.

    The first process of a shell's pipeline leads a group, too, but the others are not its children.
    """
    if sys.platform == "linux" and _has_children():
        me = os.getpid()
        _end_members(os.getpgrp(), among=None if os.getsid(0) == me else me)


def _has_children() -> bool:
    """Returns True if this process has children, also zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_members(group: int, among: int | None = None) -> None:
    """Sends SIGKILL to the members of a group, except this process.

    Trackers of shared memory and semaphores are left: they end after the others, and clean up.

    Args:
        among: kills only the children of the process with this id; None: all members.
    """
    seen = {os.getpid()}
    for _ in range(_ROUNDS):
        members = host.group_members(group)
        new = {pid for pid in members if among in (None, members[pid])} - seen
        if not new:
            return
        for pid in new:
            if _TRACKER not in host.command(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        seen |= new


async def end_session(number: int) -> None:
    """Kills the children of this process that are in a session, and waits for them.

    The session's leader must have ended. A killed process leaves its own children to this process (`adopting`) before
    it can be waited for, so the loop ends when no child is left.
    """
    while members := host.children(session=number):
        for pid in members:
            _kill_and_reap(pid)
        await asyncio.sleep(_AGAIN_S)


async def reap_session(number: int) -> None:
    """Reaps the adopted children of a session as they end, for a moment; kills none.

    Args:
        number: the session's id.
    """
    until = time.monotonic() + _REAP_S
    while (members := host.children(session=number)) and time.monotonic() < until:
        for pid in members:
            _reap(pid)
        await asyncio.sleep(_REAP_AGAIN_S)


def _kill_and_reap(pid: int) -> None:
    """Kills a child without waiting for its end, and reaps it if it has ended.

    Call it again as long as the system lists the child.
    """
    with contextlib.suppress(ProcessLookupError):  # other code has waited for it
        os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> None:
    """Takes a child's exit code, if it has ended, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):  # other code has
        os.waitpid(pid, os.WNOHANG)


class AdoptedChild:
    """A child that asyncio did not start. Make it in a running event loop, as soon as the id is known."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pid = pid
        self._fd = os.pidfd_open(pid)  # it is readable when the process has ended
        self._loop.add_reader(self._fd, self._on_readable)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: a signal; None: the process runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return await asyncio.shield(self._ended)

    def _on_readable(self) -> None:
        """Sets the exit code once the child has ended; the event loop calls this when the pidfd is readable."""
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
"""The subreaper flag before the first `adopting`."""


def can_adopt() -> bool:
    """Returns True if this system supports `adopting` and `AdoptedChild`: subreapers and pidfds, on Linux."""
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
    """During the block, orphans of this process's descendants become its children, not those of the system.

    So a child that forks and ends at once starts a child of this process. The block is short: this process would have
    to wait for all other orphans, too.

    Raises:
        OSError: the system cannot do that; see `can_adopt`.
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
    """Returns whether this process adopts orphans (1) or not (0)."""
    found = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return found.value


def _set_subreaper(value: int) -> None:
    """Sets whether this process adopts orphans of its descendants."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(what: int, value: object) -> None:
    """Calls Linux's `prctl`; raises OSError."""
    none = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, none, none, none):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
