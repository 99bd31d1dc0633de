"""Code that never returns does not hang a test: it is named, with its stack; and a Ctrl-C ends a run at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
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
from taskgraph.node.epochs import attempt
from taskgraph.node.epochs.mailbox import Mailbox
from taskgraph.node.usercode.actor import in_user_code
from taskgraph.testing import cluster, threads
from taskgraph.testing.clock import FastForwardLoop, Turn
from taskgraph.testing.guard import Idle
from taskgraph.testing.threads import LockStepThreads


class Endless(tg.Task):
    """Task 1 hangs in one place, until the test has seen it: nothing is left of it then."""

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
    """Set at the end of the test; what it left behind ends."""
    before = set(threading.enumerate())
    event = threading.Event()
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("where", [*HOOKS, "compute", "asks", "handler h", "handler ah"])
def test_what_never_returns_is_named_with_its_stack(where: str, end: threading.Event) -> None:
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


def test_a_topology_that_never_returns_is_in_the_stack(end: threading.Event) -> None:
    def links(task: int, tasks: int, epoch: int) -> list[int]:
        while epoch == 1 and not end.is_set():
            time.sleep(0.001)
        return [0, 1]

    job = tg.Job(tasks=2, epochs=2, builder=lambda task: Endless("", end), topology={"peers": links}, name="endless")
    with pytest.raises(tg.JobTimeout, match=r"task [01], epoch 1: 'compose' runs for") as caught:
        tg.testing.run(job, stuck_s=0.5)
    assert ", in links" in caught.value.traceback_text


def test_a_pause_of_the_whole_process_is_nobodys_fault() -> None:
    """A long collection of garbage stops the guard as well: whoever had the turn gets it counted as one look."""
    turn = Turn()
    turn.take(7)
    assert turn.stuck(0.3, 0.25) is None  # sees this turn for the first time
    assert turn.stuck(0.3, 0.25) is None  # however long ago that was by the clock
    turn.take(None)
    turn.take(7)  # the same thread, but it gave back its turn meanwhile
    assert turn.stuck(0.3, 0.25) is None
    assert turn.stuck(0.3, 0.25) is None
    assert turn.stuck(0.3, 0.25) == 7


class Busy(tg.Task):
    """Waits again and again for what is there already: the clock of the run stands still."""

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
def test_what_never_stops_waiting_ends_by_the_real_clock(asks: bool) -> None:
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
def test_what_hangs_ends_by_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the run goes on by less than 1,000 s in a second: it took several times as long as it should."""
    monkeypatch.setattr(cluster, "SPEED", 10**6)
    with pytest.raises(tg.JobTimeout, match=r"did not end within 2 s; it waits: .* 'hang'"):
        tg.testing.run(tg.Job(tasks=2, epochs=2, builder=Hangs), timeout_s=2, stuck_s=2)


def test_only_a_wait_in_one_go_counts() -> None:
    loop, progress = FastForwardLoop(), [1]
    idle = Idle(1.0, lambda: progress[0], lambda: None)
    try:

        def looks(leaps_s: float) -> bool:
            loop.stand_still(leaps_s)
            return idle.too_long(loop, sys._getframe(), 0.5)

        def waited() -> list[bool]:
            return [looks(100.0) for _ in range(3)]

        assert waited() == [False] * 3, "the first look has none before it"
        assert not looks(0.4), "its clock hardly leaps: it works on messages"
        assert waited() == [False, False, True]
        progress[0] += 1
        assert waited() == [False] * 3, "an epoch was committed"
        assert waited() == [True] * 3
    finally:
        loop.close()


class Looks(tg.Task):
    """Whether it is seen that its code runs."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.plain, outbound={"x": self.task_id})
        epoch.processor(self.resumed, inbound={"x": self.task_id})

    def plain(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", in_user_code(sys._getframe()))

    async def resumed(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.1)
        epoch.report(plain=ins["x"], resumed=in_user_code(sys._getframe()))


def test_time_in_which_user_code_runs_does_not_count() -> None:
    result = tg.testing.run(tg.Job(tasks=1, epochs=1, builder=Looks))
    assert result.reports[0].numbers == {"plain": 1, "resumed": 1}
    assert not in_user_code(sys._getframe())


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


def test_handlers_that_ask_without_an_end_fail_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were thousands of threads, which took minutes to end, and no word of why."""
    monkeypatch.setattr(threads, "_MOST", 20)
    before = set(threading.enumerate())
    with pytest.raises(tg.JobFailed, match=r"20 functions \(`def`\) wait for replies at one node") as caught:
        tg.testing.run(tg.Job(tasks=3, epochs=2, builder=AsksForEver))
    assert caught.value.where == "handler pass"
    assert set(threading.enumerate()) <= before


class AwaitsForEver(AsksForEver):
    """Likewise on the event loop."""

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        await epoch.request(1, "pass")

    @tg.handles("pass")
    async def hand_on(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return await epoch.request((self.task_id + 1) % self.tasks, "pass")


def test_so_do_those_that_are_coroutines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run took all of its time, and told the stack of the event loop."""
    monkeypatch.setattr(attempt, "_MAX_WAITING", 20)
    with pytest.raises(
        tg.JobFailed, match=r"20 coroutines of the task wait for replies already, .* ask for ever"
    ) as caught:
        tg.testing.run(tg.Job(tasks=3, epochs=2, builder=AwaitsForEver))
    assert caught.value.where == "handler pass"


class Opens(tg.Task):
    """Others wait at task 0 until it has asked for what it then tells them."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        if self.task_id:
            replies = [epoch.request(0, "wait", number) for number in range(20)]
            assert [await reply for reply in replies] == ["open"] * 20
        else:
            await asyncio.sleep(1)
            word = await epoch.request(1, "word")
            self.opened(epoch).set_result(word)

    def opened(self, epoch: tg.Epoch) -> asyncio.Future[Any]:
        if not hasattr(epoch.scratch, "opened"):
            epoch.scratch.opened = asyncio.get_running_loop().create_future()
        opened: asyncio.Future[Any] = epoch.scratch.opened
        return opened

    @tg.handles("wait")
    async def wait(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return await asyncio.shield(self.opened(epoch))

    @tg.handles("word")
    async def word(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return "open"


def test_many_that_wait_for_something_else_than_replies_are_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one request of the task that they waited for was refused."""
    monkeypatch.setattr(attempt, "_MAX_WAITING", 20)
    assert tg.testing.run(tg.Job(tasks=3, epochs=2, builder=Opens)).epochs == 2


class AsksMany(tg.Task):
    """Each task asks the next one for many things at once."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        replies = [epoch.request((self.task_id + 1) % self.tasks, "word") for _ in range(300)]
        assert [await reply for reply in replies] == ["said"] * 300

    @tg.handles("word")
    async def word(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return "said"


def test_a_request_is_sent_without_a_look_at_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of thousands that a handler asks at once took ten times as long."""
    looked, awaited = 0, Mailbox.awaited.fget
    assert awaited is not None

    def counted(mailbox: Mailbox) -> list[tuple[str, int, str]]:
        nonlocal looked
        looked += len(waiting := awaited(mailbox))
        return waiting

    monkeypatch.setattr(Mailbox, "awaited", property(counted))
    assert tg.testing.run(tg.Job(tasks=2, epochs=1, builder=AsksMany)).epochs == 1
    assert looked < 10 * 300, "what tells what a task waits for may look, now and then"


async def test_threads_end_together_and_nobody_is_blamed_for_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    end, join = threads._Worker.end, threads._Worker.join
    monkeypatch.setattr(threads._Worker, "end", lambda worker: (told.append("end"), end(worker)))
    monkeypatch.setattr(threads._Worker, "join", lambda worker: (told.append(f"join {turn.frame}"), join(worker)))
    turn = Turn()
    pool, replies = LockStepThreads(turn), [concurrent.futures.Future[None]() for _ in range(3)]
    waits = [pool.run(functools.partial(pool.block, reply, None)) for reply in replies]
    await asyncio.sleep(0)
    for reply in replies:
        reply.set_result(None)
    await asyncio.gather(*waits)
    pool.close()
    assert told == ["end"] * 3 + ["join None"] * 3


def test_what_it_raises_in_its_thread_is_raised_here() -> None:
    class Wrong(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            raise KeyError("zz")

    with pytest.raises(tg.JobFailed, match="task 0, epoch 0, 'compose': KeyError: 'zz'"):
        tg.testing.run(tg.Job(tasks=1, epochs=1, builder=lambda task: Wrong()))


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
def test_one_ctrl_c_ends_a_run_that_hangs(how: str) -> None:
    command = [sys.executable, "-c", ENDLESS, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looping\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, wrong = process.communicate(timeout=30)
    assert (said, wrong, process.returncode) == ("interrupted\n", "", 0)


_COLLECTS = """
import gc, threading, time
from taskgraph.testing.clock import frame_of

class Odd:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.001)

def begin():
    while time.monotonic() < end:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()

end = time.monotonic() + 1.0
threads = [threading.Thread(target=begin) for _ in range(2)]
for thread in threads:
    thread.start()
gc.set_threshold(1)
while time.monotonic() < end:
    Odd()
    assert frame_of(threading.get_ident()) is not None
for thread in threads:
    thread.join()
print("ended", gc.isenabled())
"""


def test_to_look_at_a_thread_while_garbage_is_collected_and_others_begin_holds_up_nobody() -> None:
    """With Python 3.11.7 the whole process stood still, with every run in it and its time limits."""
    done = subprocess.run([sys.executable, "-c", _COLLECTS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended True\n", "")
