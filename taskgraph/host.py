"""What the host says of itself and of its processes, as far as it does."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["began", "cores", "memory_bytes", "state"]


def memory_bytes() -> int:
    """How much memory the host has; 0 where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


if hasattr(os, "sched_getaffinity"):

    def cores() -> int:
        """How many cores this process may use."""
        return len(os.sched_getaffinity(0))

else:

    def cores() -> int:
        """How many cores this process may use."""
        return os.cpu_count() or 1


def state(pid: int) -> str:
    """What a process does, in Linux's letter for it, e.g. "Z"; "" elsewhere, or without such a process."""
    return "".join(_stat(pid)[:1])


def began(pid: int) -> str:
    """When a process began, in the kernel's words; "" elsewhere, or without such a process."""
    return "".join(_stat(pid)[19:20])


def _stat(pid: int) -> list[str]:
    """From the state on: what comes before may have blanks in it, and bytes that are no text."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []
