"""Processes and ports of tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

_PORTS = range(15000, 32000)
"""Below those that a system gives to connections (32768 and up on Linux): none of them takes one meanwhile."""
_given: set[int] = set()

LIMIT_S = 100.0
"""What takes milliseconds may take so long on a busy machine. Who asks how long it takes measures it."""


def free_port() -> int:
    """A port that nobody listens on and that was not given before."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if port in _given:
            continue
        _given.add(port)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {_PORTS} is free")


async def kill(pid: int) -> None:
    """SIGKILL, and waits until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    await gone(pid)


async def gone(pid: int, limit_s: float = LIMIT_S) -> None:
    await becomes(lambda: not running(pid), limit_s)


async def becomes(true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Waits for what no event tells of: the state of a process, or of a lease that a thread renews."""
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop(*pids: int) -> None:
    """SIGSTOP, and waits until none of these processes does anything any more."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while running := [pid for pid in pids if not _stands(pid)]:  # each thread stops on its own: it may do a little more
        assert time.monotonic() < deadline, f"processes {running} do not stop"
        time.sleep(0.001)


@contextlib.contextmanager
def stopped(pid: int):
    """The process does not run within this block."""
    try:
        stop(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed meanwhile
            os.kill(pid, signal.SIGCONT)


def _stands(pid: int) -> bool:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}
