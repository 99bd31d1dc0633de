"""Code that never returns fails a test with its stack, and Ctrl-C ends a run at once."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.testing import limited, threads
from taskgraph.testing.clock import Turn


class Endless(tg.Task):
    """Task 1 hangs in one place until the end of the test."""

    def __init__(self, where: str, end: threading.Event) -> None:
        self.where = where
        self.end = end

    def hang(self, where: str) -> None:
        while where == self.where and self.task_id == 1 and not self.end.is_set():
            time.sleep(0.001)

    def setup(self) -> None:
        self.hang("setup")

    def compose(self, epoch: tg.Epoch) -> None:
        self.hang("compose")
        epoch.processor(self.asks, outbound={"a": "peers"})
        epoch.processor(self.compute, outbound={"b": "peers"})
        epoch.processor(self.sync, inbound={"a": "peers", "b": "peers"})

    async def asks(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.hang("asks")
        outs.put("a", await epoch.request((self.task_id + 1) % self.tasks, "h"))

    def compute(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.hang("compute")
        outs.put("b", epoch.request((self.task_id + 1) % self.tasks, "ah").wait())

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.hang("sync")

    @tg.handles("h")
    def plain(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        self.hang("handler h")
        return 1

    @tg.handles("ah")
    async def awaited(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        self.hang("handler ah")
        return 1

    def snapshot(self) -> Any:
        self.hang("snapshot")

    def restore(self, state: Any) -> None:
        self.hang("restore")

    def on_commit(self, number: int, state: Any) -> None:
        self.hang("on_commit")

    def result(self) -> Any:
        self.hang("result")

    def teardown(self) -> None:
        self.hang("teardown")


HOOKS = ("setup", "compose", "sync", "snapshot", "restore", "on_commit", "result", "teardown")


@pytest.mark.parametrize("stuck_s", [5.0, None])
def test_every_place_is_there_and_ends(stuck_s: float | None) -> None:
    end = threading.Event()
    job = tg.Job(tasks=2, epochs=2, builder=lambda task: Endless("", end), topology=tg.full())
    assert tg.testing.run(job, stuck_s=stuck_s).epochs == 2


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """An event that is set at the end of the test, and ends hanging code."""
    before = set(threading.enumerate())
    event = threading.Event()
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("where", [*HOOKS, "compute", "asks", "handler h", "handler ah"])
def test_endless_code_is_named_with_its_stack(where: str, end: threading.Event) -> None:
    job = tg.Job(tasks=2, epochs=2, builder=lambda task: Endless(where, end), topology=tg.full(), name="endless")
    with pytest.raises(tg.JobTimeout) as caught:
        tg.testing.run(job, stuck_s=0.5)
    error, text = caught.value, str(caught.value)
    assert (error.job, error.task, error.where) == ("endless", 1, where)
    assert error.epoch is not None
    assert text.startswith(f"task 1, epoch {error.epoch}: {where!r} runs for more than 0.5 s without a wait")
    stack = error.traceback_text.splitlines()
    assert stack[0] == "Stack of its thread (most recent call last):"
    assert f'File "{__file__}"' in stack[1]  # it begins in the user's code
    assert ", in hang" in stack[-2]


def test_endless_topology_is_named(end: threading.Event) -> None:
    def links(task: int, tasks: int, epoch: int) -> list[int]:
        while epoch == 1 and not end.is_set():
            time.sleep(0.001)
        return [0, 1]

    job = tg.Job(tasks=2, epochs=2, builder=lambda task: Endless("", end), topology={"peers": links}, name="endless")
    with pytest.raises(tg.JobTimeout, match=r"task [01], epoch 1: 'compose' runs for") as caught:
        tg.testing.run(job, stuck_s=0.5)
    assert ", in links" in caught.value.traceback_text


def test_paused_process_is_not_stuck() -> None:
    turn = Turn()
    turn.give_to(7)
    assert turn.stuck_thread(0.3, 0.25) is None  # sees this turn for the first time
    assert turn.stuck_thread(0.3, 0.25) is None  # however long ago that was by the clock
    turn.give_to(None)
    turn.give_to(7)  # the same thread, but it gave back its turn meanwhile
    assert turn.stuck_thread(0.3, 0.25) is None
    assert turn.stuck_thread(0.3, 0.25) is None
    assert turn.stuck_thread(0.3, 0.25) == 7


class Busy(tg.Task):
    """Waits again and again for something that is there: the clock of the run stands still."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask if self.asks else self.spin, outbound={"a": "peers"})
        epoch.processor(self.sync, inbound={"a": "peers"})

    async def spin(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        while True:
            epoch.request(1 - self.task_id, "h").wait()

    @tg.handles("h")
    def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        return 1

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
def test_endless_wait_ends_by_the_real_clock(asks: bool) -> None:
    job = tg.Job(tasks=2, epochs=2, builder=lambda task: Busy(asks), topology=tg.full())
    began = time.monotonic()
    with pytest.raises(tg.JobTimeout, match=r"still ran after .* real seconds") as caught:
        tg.testing.run(job, stuck_s=0.3)
    assert re.search(r"\bask\b" if asks else "runs 'spin'", str(caught.value))
    assert time.monotonic() - began < 60


class Hangs(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.hang)

    async def hang(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.Event().wait()


@pytest.mark.slow
def test_hanging_run_ends_by_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "SPEED", 10**6)
    with pytest.raises(tg.JobTimeout, match=r"did not end within 2 s; it waits: .* 'hang'"):
        tg.testing.run(tg.Job(tasks=2, epochs=2, builder=Hangs), timeout_s=2, stuck_s=2)


class AsksForEver(tg.Task):
    """Each handler asks the next task's, and waits for the reply in a thread."""

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.flag(0)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.request(1, "pass").wait()

    @tg.handles("pass")
    def hand_on(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return epoch.request((self.task_id + 1) % self.tasks, "pass").wait()


def test_endless_requests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_THREADS", 20)
    before = set(threading.enumerate())
    with pytest.raises(tg.JobFailed, match=r"20 functions \(`def`\) wait for replies at one node") as caught:
        tg.testing.run(tg.Job(tasks=3, epochs=2, builder=AsksForEver))
    assert caught.value.where == "handler pass"
    assert set(threading.enumerate()) <= before


ENDLESS = """
import asyncio, signal, sys, time
import taskgraph as tg

signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored

class Endless(tg.Task):
    def compose(self, epoch):
        epoch.processor(getattr(self, sys.argv[1]))

    def plain(self, epoch, ins, outs):
        print("looping", flush=True)
        while True:
            pass

    async def blocks(self, epoch, ins, outs):
        self.plain(epoch, ins, outs)

    async def waits(self, epoch, ins, outs):
        print("looping", flush=True)
        while True:
            await asyncio.sleep(0)

try:
    tg.testing.run(tg.Job(tasks=1, epochs=1, builder=lambda task: Endless()))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "blocks", "waits"])
def test_one_ctrl_c_ends_a_hanging_run(how: str) -> None:
    command = [sys.executable, "-c", ENDLESS, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looping\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, wrong = process.communicate(timeout=30)
    assert (said, wrong, process.returncode) == ("interrupted\n", "", 0)
