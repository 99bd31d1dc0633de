"""A failed job in one process ends at once, whatever its threads wait for, and names the mistake."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.launch.run import arun
from taskgraph.launch.supervise import FrontEndHooks
from taskgraph.observe.events import Event


class Asking(tg.Task):
    """Every task requests from its neighbor, in a thread, and waits for the reply."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"a": self.task_id})
        epoch.processor(self.sync, inbound={"a": self.task_id})

    @tg.handles("h")
    def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        if self.wrong == "raises":
            raise KeyError("zz")
        return {1}

    @tg.handles("async")
    async def answer_async(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return {1}

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        method = "async" if self.wrong == "async" else "h"
        outs.put("a", epoch.request((self.task_id + 1) % self.tasks, method, 1).wait())

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...


@pytest.mark.parametrize("wrong", ["set", "async", "raises"])
def test_wrong_handler_fails_the_job(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    made = tg.Job(tasks=3, epochs=2, builder=lambda task: Asking(wrong), name="asking")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(tg.JobFailed) as caught:
        tg.run(made, nodes=0, timeout_s=60)
    assert not isinstance(caught.value, tg.JobTimeout), str(caught.value)
    assert time.monotonic() - began < 30
    method = "async" if wrong == "async" else "h"
    assert caught.value.task in (0, 1, 2)
    assert (caught.value.epoch, caught.value.where) == (0, f"handler {method}")
    text = str(caught.value)
    assert f"task {caught.value.task}, epoch 0" in text
    assert __file__ in text
    if wrong == "raises":
        assert "KeyError: 'zz'" in text
    else:
        assert f"handler {method!r}: its answer: a value of type set cannot travel; send sorted(x)" in text
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert "serving" not in caplog.text


class Looping(tg.Task):
    """Task 1 computes until it is cancelled; `told` gets a line when it notices that. Task 0 may fail meanwhile."""

    def __init__(self, told: list[str], computes: threading.Event, fails: bool, task: int) -> None:
        self.told = told
        self.computes = computes
        self.fails = fails

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"a": self.task_id})
        epoch.processor(self.sync, inbound={"a": self.task_id})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1:
            self.computes.set()
            while not epoch.cancelled:
                time.sleep(0.001)
            self.told.append("cancelled")
        elif self.fails:
            self.computes.wait(60)
            raise KeyError("zz")
        outs.put("a", 1)

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...

    def teardown(self) -> None:
        self.told.append(f"teardown {self.task_id}")


@pytest.mark.parametrize("fails", [False, True])
def test_failed_job_ends_all_computes(fails: bool) -> None:
    for timeout_s in (100,) if fails else (2, 8, 32):  # how long it takes to begin depends on the machine
        seen: list[str] = []
        computes, began = threading.Event(), time.monotonic()
        job = tg.Job(
            tasks=2, epochs=2, backups=0, builder=functools.partial(Looping, seen, computes, fails), name="looping"
        )
        with pytest.raises(tg.JobFailed) as caught:
            tg.run(job, nodes=0, timeout_s=timeout_s)
        if computes.is_set():
            break
    assert time.monotonic() - began < 60
    assert sorted(seen) == ["cancelled", "teardown 0", "teardown 1"]
    timeout = (f"within {timeout_s} s", "task 1: sync waits for 'a' from task 1", "task 1 runs 'send' for")
    assert isinstance(caught.value, tg.JobTimeout) is not fails
    for said in ("task 0, epoch 0, 'send': KeyError: 'zz'",) if fails else timeout:
        assert said in str(caught.value)


class Unencodable(tg.Task, state=["count", "x"]):
    """Task 1 gets a state that cannot be encoded."""

    def setup(self) -> None:
        self.count = 0
        self.x: Any = None

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.sync)

    def sync(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1:
            self.x = {"k": [object()]}


@pytest.mark.parametrize(
    "run", [lambda job: tg.run(job, nodes=0, timeout_s=8), tg.testing.run], ids=["nodes=0", "test"]
)
def test_state_that_cannot_be_encoded_is_named(run: Any) -> None:
    with pytest.raises(tg.JobFailed) as caught:
        run(tg.Job(tasks=2, epochs=2, backups=0, builder=lambda task: Unencodable()))
    assert str(caught.value).startswith("state 'x' of task 1: a value of type object at ['k'][0] cannot travel; send")


ENDLESS = """
import signal, sys, time
import taskgraph as tg

WHERE = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored

class Endless(tg.Task):
    def setup(self):
        self.loop_in("setup")

    def compose(self, epoch):
        epoch.processor(self.send, outbound={"a": self.task_id})
        epoch.processor(self.sync, inbound={"a": self.task_id})

    def send(self, epoch, ins, outs):
        self.loop_in("send")
        epoch.request((self.task_id + 1) % 2, "h").wait()
        outs.put("a", 1)

    @tg.handles("h")
    def answer(self, epoch, sender, payload):
        self.loop_in("handler h")

    def sync(self, epoch, ins, outs): ...

    def snapshot(self):
        self.loop_in("snapshot")

    def restore(self, state): ...

    def loop_in(self, where):
        if where == WHERE and self.task_id == 1:
            print("looping", flush=True)
            while True:
                pass

    def teardown(self):
        print("teardown", self.task_id, flush=True)

began = time.process_time()  # of a busy machine a process has a part: it counts how often who hangs had its turn
try:
    job = tg.Job(tasks=2, epochs=2, backups=0, builder=lambda task: Endless())
    RUN
except tg.JobFailed as error:
    print(type(error).__name__, round(time.process_time() - began, 1), error, flush=True)
"""


def endless(run: str, where: str) -> subprocess.Popen[str]:
    """Starts a process of its own, since its code never returns."""
    command = [sys.executable, "-c", ENDLESS.replace("RUN", run), where]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["setup", "send", "handler h", "snapshot"])
def test_endless_code_does_not_keep_the_process(where: str) -> None:
    for timeout_s in (1, 4, 16):  # how long it takes to get there depends on the machine
        with endless(f"tg.run(job, nodes=0, timeout_s={timeout_s})", where) as process:
            said, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        if "looping" in said:
            break
    kind, took_s = said.splitlines()[-1].split()[:2]
    assert kind == "JobTimeout", said
    assert float(took_s) < timeout_s + 8, said  # its loop takes turns with the one that hangs; 11 s and more before
    assert f"task 1 runs {where!r} for" in said
    assert "teardown 0" in said
    assert "teardown 1" not in said  # its own code still runs


@pytest.mark.slow
@pytest.mark.parametrize("where", ["setup", "handler h"])
def test_one_ctrl_c_ends_endless_code(where: str) -> None:
    with endless("tg.run(job, nodes=0)", where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looping\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    assert process.returncode in (-signal.SIGINT, 130)


async def test_beginning_is_reported_before_the_first_commit() -> None:
    class Idle(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None: ...

    events: list[Event] = []
    await arun(tg.Job(tasks=2, epochs=2, builder=Idle, name="idle"), nodes=0, hooks=FrontEndHooks(events.append))
    said = [event.kind for event in events if event.kind in ("began", "commit", "finished")]
    assert said == ["began", "commit", "commit", "finished"]


class Tells(tg.Task, state=["total"]):
    def setup(self) -> None:
        print(f"setup {self.task_id}")
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.add)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1
        epoch.report(total=self.total)


def test_one_process_sets_each_task_up_once(capsys: pytest.CaptureFixture[str]) -> None:
    tg.run(tg.Job(tasks=2, epochs=1, backups=1, builder=Tells), nodes=0)
    said = capsys.readouterr()
    assert sorted(said.out.split("\n")) == ["", "setup 0", "setup 1"] and not said.err
    tg.run(tg.Job(tasks=1, epochs=1, builder=Tells, settings=tg.Settings(min_in_sync=2)), nodes=0, timeout_s=30)
    assert capsys.readouterr().out == "setup 0\n" * 2, "as many as must be in sync"


@pytest.mark.parametrize(
    "run", [lambda job: tg.run(job, nodes=0, timeout_s=8), tg.testing.run], ids=["nodes=0", "test"]
)
@pytest.mark.parametrize(
    ("how", "said"), [("cancels all", "a cancel of all tasks"), ("stops the loop", "stopped the event loop")]
)
def test_code_that_ends_its_event_loop_fails_the_job(how: str, said: str, run: Any) -> None:

    class Ends(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.end)

        async def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if how == "stops the loop":
                asyncio.get_running_loop().stop()
            else:
                for each in asyncio.all_tasks():
                    each.cancel()
            await asyncio.sleep(0.01)

    with pytest.raises(tg.JobFailed, match=f"job 'ends': code of the job .*{said}") as caught:
        run(tg.Job(tasks=1, epochs=1, builder=Ends, name="ends"))
    assert caught.value.job == "ends"


class Keeping(tg.Task, state=["n"]):
    """Keeps one checkpoint; `over` is set after the last epoch, and after `began` if there is one."""

    def __init__(self, over: threading.Event, began: threading.Event | None) -> None:
        self.over = over
        self.began = began

    def setup(self) -> None:
        self.n = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.n += 1

    def result(self) -> int:
        assert self.began is None or self.began.wait(60)
        self.over.set()
        return self.n


def keeping(place: Path, over: threading.Event, settings: tg.Settings, began: threading.Event | None = None) -> tg.Job:
    return tg.Job(
        tasks=1,
        epochs=3,
        builder=lambda task: Keeping(over, began),
        name="keeping",
        checkpoint=place.as_uri(),
        checkpoint_every=2,
        settings=settings,
    )


def test_checkpoint_is_written_before_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late file would reappear in a directory that the caller removes."""
    over, writes, fsync, began, ended = threading.Event(), threading.Event(), os.fsync, [0], [0]

    def slow(descriptor: int) -> None:
        began[0] += 1
        writes.set()
        over.wait(60)
        time.sleep(0.3)  # the job has ended long before that
        fsync(descriptor)
        ended[0] += 1

    monkeypatch.setattr(os, "fsync", slow)
    assert tg.run(keeping(tmp_path, over, tg.Settings(), began=writes), nodes=0, timeout_s=60).values == {0: 3}
    left = [path.name for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert began[0] > 0, "nothing was written"
    assert (began, left) == (ended, [])


def test_hanging_checkpoint_directory_does_not_keep_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, writes, written, fsync = threading.Event(), threading.Event(), threading.Event(), os.fsync

    def hangs(descriptor: int) -> None:
        writes.set()
        goes_on.wait(60)
        written.set()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", hangs)
    try:
        job = keeping(tmp_path, threading.Event(), tg.Settings(call_s=1.0), began=writes)
        assert tg.run(job, nodes=0, timeout_s=60).values == {0: 3}
        assert not written.is_set()
    finally:
        goes_on.set()
