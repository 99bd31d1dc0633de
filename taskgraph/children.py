"""Signals to processes that asyncio started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

__all__ = ["tell_child"]


def tell_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal to a child; nothing, where it has ended.

    `process.send_signal` and `process.kill` look first whether the child has ended, and so may take its exit code from
    asyncio, which is waiting for it, prints a warning, and tells 255 instead. Until asyncio has told the exit code, the
    child's number is not given to another process.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
