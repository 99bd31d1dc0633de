"""What the host says of itself and of its processes, as far as it does."""

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
    "alive",
    "all_cores",
    "allowed_cores",
    "children",
    "command",
    "cores",
    "first",
    "group",
    "memory_bytes",
    "oom_kills",
    "running",
    "state",
    "tells",
]


_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_bytes(own: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """How much memory there is for this process: the host's, or less, where its control group, or one that holds that,
    is allowed less, as a container is. 0 where the host does not say.

    Args:
        own: in which groups this process is.
        mounted: where their files are.
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
    """How many processes of this one's control group the kernel has killed since memory was used up; None where it
    does not say. The arguments are those of `memory_bytes`."""
    for file in _files_of_groups(own, mounted, "memory", "memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _files_of_groups(own: Path, mounted: Path, controller: str, new: str, old: str) -> Iterator[Path]:
    """Where a file would be of the control group, of memory, say, that this process is in, and then of those that hold
    that: in a container the last one may be its own. It is called `new` by the new control groups, `old` by the old."""
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
    """How many cores the machine has, whether this process may use them or not."""
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_NPROCESSORS_ONLN")  # `os.cpu_count` says what a user sets, as of Python 3.13
    return os.cpu_count() or 1


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_cores(own: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """How many cores' time there is for this process: that of those it may use, or less, where its control group, or
    one that holds that, has a quota, as a container's limit is one: it runs on all of them, but not all the time.

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


def running() -> str:
    """Eight digits for the host since it was started, or its name where it does not tell since when."""
    since = platform.node()
    with contextlib.suppress(OSError):
        since = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(since.encode()).hexdigest()[:8]


def first() -> bool:
    """Whether this process is the first one of its container: what it does not handle of the signals that are sent from
    within, SIGKILL and SIGSTOP always, the kernel drops, and tells nobody."""
    return os.getpid() == 1


def alive(pid: int) -> bool:
    """Says whether a process of this id runs. A process that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return state(pid) != "Z"


def state(pid: int) -> str:
    """What a process does, in Linux's letter for it, e.g. "Z"; "" elsewhere, or without such a process."""
    return "".join(_stat(pid)[:1])


def tells() -> bool:
    """Whether it says anything of processes: not elsewhere than on Linux, nor where /proc is not there."""
    return bool(_stat(os.getpid()))


def group(number: int) -> dict[int, int]:
    """The processes of a group that have not ended, and each one's parent; none elsewhere than on Linux."""
    found = {}
    for pid in _pids():
        does, parent, its_group = (_stat(pid) or ["Z", "0", "0"])[:3]
        if does not in "ZX" and int(its_group) == number:
            found[pid] = int(parent)
    return found


def children(session: int) -> set[int]:
    """The children of this process that are of a session, also those that have ended and were not waited for; none
    elsewhere than on Linux."""
    ours = [str(os.getpid()), str(session)]
    return {pid for pid in _pids() if _stat(pid)[1:4:2] == ours}


def _pids() -> list[int]:
    """Of all processes; none elsewhere than on Linux."""
    try:
        names = os.listdir("/proc") if sys.platform == "linux" else []
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit()]


def command(pid: int) -> str:
    """The command line of a process; "" elsewhere, or without such a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """From the state on: what comes before may have blanks in it, and bytes that are no text."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []
