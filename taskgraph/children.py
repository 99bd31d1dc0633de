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
