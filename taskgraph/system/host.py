"""Asks the operating system about the host and its processes."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "all_cores",
    "allowed_cores",
    "boot_id",
    "children",
    "command",
    "cores",
    "group_members",
    "has_proc",
    "is_alive",
    "is_first_process",
    "memory_bytes",
    "oom_kills",
    "state",
]


_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_bytes(own: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """Returns the memory that this process may use: the host's, or the lower limit of its control groups; 0: unknown.

    Args:
        own: the file that lists the groups of this process.
        mounted: the folder of their files.
    """
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    for file in _files_of_groups(own, mounted, "memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # it may say "max"
            found = min(found, int(file.read_text()))
    return found


def oom_kills(own: Path = _GROUPS, mounted: Path = _MOUNTED) -> int | None:
    """Counts the processes of this control group that the kernel killed because memory was used up; None: unknown.

    The arguments are those of `memory_bytes`.
    """
    for file in _files_of_groups(own, mounted, "memory", "memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _files_of_groups(own: Path, mounted: Path, controller: str, new: str, old: str) -> Iterator[Path]:
    """Yields the paths of a file of this process's control group, then of the groups above it.

    Args:
        controller: for example "memory".
        new: the file's name in control groups version 2.
        old: the name in version 1.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except (OSError, ValueError):
        return
    for _, controllers, group in lines:
        if controllers and controller not in controllers.split(","):
            continue
        folder, file = (mounted / controller, old) if controllers else (mounted, new)
        its = folder / group.lstrip("/")
        for place in (its, *its.parents):
            yield place / file
            if place == folder:
                break


def all_cores() -> int:
    """Counts the cores of the machine."""
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_NPROCESSORS_ONLN")  # `os.cpu_count` says what a user sets, as of Python 3.13
    return os.cpu_count() or 1


def cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_cores(own: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """Returns how many cores' time this process may use: `cores`, or the lower quota of its control groups.

    The arguments are those of `memory_bytes`.
    """
    found = cores()
    for file in _files_of_groups(own, mounted, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):  # it may say "max"
            said = file.read_text().split()
            if len(said) == 1:
                said += file.with_name("cpu.cfs_period_us").read_text().split()
            quota, period = (int(number) for number in said)
            if quota > 0 and period > 0:  # the old ones say -1 where there is no limit
                found = min(found, max(1, math.ceil(quota / period)))
    return found


def boot_id() -> str:
    """Returns eight hex digits that identify this boot of the host, or just the host if the boot is unknown."""
    since = platform.node()
    with contextlib.suppress(OSError):
        since = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(since.encode()).hexdigest()[:8]


def is_first_process() -> bool:
    """Says whether this is the first process of its container.

    The kernel drops signals that such a process does not handle if they come from inside, SIGKILL and SIGSTOP always.
    """
    return os.getpid() == 1


def is_alive(pid: int) -> bool:
    """Says whether a process of this id runs. A process that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return state(pid) != "Z"


def state(pid: int) -> str:
    """Returns a process's state as Linux's letter, e.g. "Z"; "": no such process, or another system."""
    return "".join(_stat(pid)[:1])


def has_proc() -> bool:
    """Returns True if /proc lists processes."""
    return bool(_stat(os.getpid()))


def group_members(number: int) -> dict[int, int]:
    """Returns {process: its parent} for the running processes of a group; empty on systems other than Linux."""
    found = {}
    for pid in _pids():
        does, parent, its_group = (_stat(pid) or ["Z", "0", "0"])[:3]
        if does not in "ZX" and int(its_group) == number:
            found[pid] = int(parent)
    return found


def children(session: int) -> set[int]:
    """Returns the children of this process in a session, also zombies; empty on systems other than Linux."""
    ours = [str(os.getpid()), str(session)]
    return {pid for pid in _pids() if _stat(pid)[1:4:2] == ours}


def _pids() -> list[int]:
    """Returns the ids of all processes; empty on systems other than Linux."""
    try:
        names = os.listdir("/proc") if sys.platform == "linux" else []
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit()]


def command(pid: int) -> str:
    """Returns the command line of a process; "": no such process, or another system."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Returns the fields of a process's /proc/PID/stat, from the state on; []: no such process, or no /proc. The name
    before the state may have blanks, and bytes that are no text.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []
