"""Signals that end a command: to one process or to its whole group, once or several times."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.commands.common import obey_ending_signals, on_ending_signals
from taskgraph.commands.joining import _on_signals
from taskgraph.launch import supervise
from taskgraph.launch.forkserver import NotStarted
from taskgraph.launch.supervise import _start_unless
from taskgraph.system import signals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `signals` reads."""
    now = [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture(autouse=True)
async def handlers() -> AsyncIterator[None]:
    """Restores this process's handlers."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, handler)


async def send(*numbers: signal.Signals) -> None:
    """Sends signals to this process, each once the one before was handled."""
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)  # the loop calls handlers before timers that are due later


async def test_doubled_sigterm_is_one_order(clock: list[float]) -> None:
    leave, work = asyncio.Event(), asyncio.get_running_loop().create_future()
    follower: Any = SimpleNamespace(view=SimpleNamespace(running=True), finished=False)
    _on_signals(work, leave, follower, 60.0)
    await send(signal.SIGTERM, signal.SIGTERM)
    assert leave.is_set() and not work.cancelled()
    clock[0] += 1.0
    await send(signal.SIGTERM)
    assert work.cancelled()


async def test_first_order_after_the_job_finished_only_warns(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    orders: list[str] = []
    obey_ending_signals(finished=lambda: True, obeyed=lambda: bool(orders), obey=lambda: orders.append("end"))
    await send(signal.SIGINT)
    assert "its results are being collected; once more to end without them" in capsys.readouterr().err
    await send(signal.SIGHUP)
    assert orders == [], "closing the terminal after that is no second order"
    await send(signal.SIGINT)
    assert orders == ["end"]


@pytest.mark.parametrize("nohup", [True, False])
async def test_nohup_keeps_a_command_running(nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    heard: list[int] = []
    on_ending_signals(heard.append)
    await send(signal.SIGHUP)
    assert heard == ([] if nohup else [signal.SIGHUP])


async def test_ending_launcher_starts_no_more_nodes() -> None:
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


@pytest.mark.parametrize("signalled", [True, False])
async def test_signal_to_the_group_is_no_failed_start(signalled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server gets the same signal, and may end first."""
    monkeypatch.setattr(supervise, "_SAME_SIGNAL_S", 30.0 if signalled else 0.1)
    leave = asyncio.Event()

    async def start(count: int) -> None:
        if signalled:
            asyncio.get_running_loop().call_later(0.01, leave.set)
        raise NotStarted("the fork server has ended")

    nodes: Any = SimpleNamespace(start=start)
    if signalled:
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
