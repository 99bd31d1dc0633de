"""The memory, files, threads and asyncio tasks of this process."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one process.

    Attributes:
        memory_bytes: resident memory; on macOS its maximum so far, since the system says no more.
        files: open file descriptors.
        threads: all threads on Linux; elsewhere only Python's.
        coroutines: asyncio tasks.
    """

    memory_bytes: int = 0
    files: int = 0
    threads: int = 0
    coroutines: int = 0

    @classmethod
    def now(cls) -> Usage:
        """Measures this process; call it on the event loop."""
        try:
            status = Path("/proc/self/status").read_text()
            found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            memory, threads = int(found["VmRSS"].split()[0]) << 10, int(found["Threads"])
        except OSError:  # there is no such file, or no descriptor is free
            largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory, threads = largest if sys.platform == "darwin" else largest << 10, threading.active_count()
        try:
            files = len(os.listdir("/dev/fd"))
        except OSError:  # no descriptor is free
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(memory, files, threads, len(asyncio.all_tasks()))
