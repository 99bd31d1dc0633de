"""Whoever ends a job on a host may signal a launcher alone, or it and all that it started, and that several times."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.commands.joining import _on_signals
from taskgraph.launch.forkserver import NotStarted
from taskgraph.launch.supervise import _start_unless
from taskgraph.system import signals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the time is, by `signals`."""
    now = [100.0]
    with monkeypatch.context() as patched:
        patched.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
        yield now


async def test_doubled_sigterm_is_one_order(clock: list[float]) -> None:
    """It ended them at once."""
    leave, work = asyncio.Event(), asyncio.get_running_loop().create_future()
    follower: Any = SimpleNamespace(view=SimpleNamespace(running=True), finished=False)
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[None] = asyncio.Queue()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)
    _on_signals(work, leave, follower, 60.0)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            loop.call_later(0.01, heard.put_nowait, None)  # the loop calls handlers before what is due later
            await heard.get()
        assert leave.is_set() and not work.cancelled()
        clock[0] += 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await work
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def test_ending_launcher_starts_no_more_nodes() -> None:
    """It went on starting them, and then told those that had been there to leave once more."""
    leave, stopped = asyncio.Event(), asyncio.Event()

    async def start(count: int) -> None:
        leave.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    nodes: Any = SimpleNamespace(start=start)
    async with asyncio.timeout(30):
        await _start_unless(leave, nodes, 2)
    assert stopped.is_set()


@pytest.mark.parametrize("told", [True, False])
async def test_signal_to_the_group_is_no_failed_start(told: bool) -> None:
    """What they are forked from gets the same signal, and may be gone before the launcher's is looked at."""
    leave = asyncio.Event()

    async def start(count: int) -> None:
        if told:
            asyncio.get_running_loop().call_later(0.01, leave.set)
        raise NotStarted("the fork server has ended")

    nodes: Any = SimpleNamespace(start=start)
    if told:
        await _start_unless(leave, nodes, 2)
    else:
        with pytest.raises(NotStarted):
            await _start_unless(leave, nodes, 2)


_ENTRY = """
import os, signal, sys
import taskgraph.cli
signal.signal(signal.SIGTERM, signal.SIG_DFL)
taskgraph.cli.main = lambda: os.kill(os.getpid(), signal.SIGTERM)
from taskgraph.__main__ import entry
entry()
"""


def test_beginning_command_obeys_sigterm() -> None:
    """The first process of a container gets no signal that it has no handler for."""
    done = subprocess.run([sys.executable, "-c", _ENTRY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "taskgraph: interrupted\n")
