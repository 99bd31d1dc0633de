"""Threads of user code may wait for replies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jobs_kit import job, run, says

import taskgraph as tg


class Asks(tg.Task, state=["total"]):
    """Task 0 sends requests to task 1 and adds up the replies; subclasses say how."""

    total: int

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.ask, outbound={"sum": 0})
            epoch.processor(self.add, inbound={"sum": 0})

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> Any:
        raise NotImplementedError

    @tg.handles("double")
    def double(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
        return 2 * payload

    @tg.handles("late", pure=True)
    async def late(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
        await asyncio.sleep(5)
        return payload

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["sum"]

    def result(self) -> int:
        return self.total


class InAPool(Asks):
    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        with ThreadPoolExecutor(3) as pool:
            outs.put("sum", sum(pool.map(lambda one: epoch.request(1, "double", one).wait(), range(5))))


class BesideACoroutine(Asks):
    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        reply = epoch.request(1, "double", 8)
        in_executor = asyncio.get_running_loop().run_in_executor(None, reply.wait)
        outs.put("sum", await in_executor + await asyncio.to_thread(lambda: epoch.request(1, "double", 2).wait()))


class JoinedAfterAWait(Asks):
    """Joins a thread that already waits for a reply."""

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        answers: list[int] = []
        late = epoch.request(1, "late", 16)
        thread = threading.Thread(target=lambda: answers.append(late.wait()))
        thread.start()
        answers.append(epoch.request(1, "double", 2).wait())
        thread.join()
        outs.put("sum", sum(answers))


class GivesUp(Asks):
    gave_up = 0  # how often; not in a replay, where answers are there at once

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        late = epoch.request(1, "late", 20)
        with ThreadPoolExecutor(1) as pool:
            gave_up = isinstance(pool.submit(late.wait, timeout_s=1).exception(), TimeoutError)
        GivesUp.gave_up += gave_up
        outs.put("sum", late.wait())


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize("builder", [InAPool, BesideACoroutine, JoinedAfterAWait])
def test_user_thread_waits_for_a_reply(builder: type[Asks], order: int) -> None:
    assert run(job(builder, epochs=3), order=order, stuck_s=10).values == {0: 3 * 20, 1: 0}


class InAPoolOfItself(Asks):
    """Task 0 sends requests to itself from threads that its `def` waits for: no handler can run."""

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        replies = [epoch.request(0, "double", one) for one in range(3)]
        with ThreadPoolExecutor(3) as pool:
            outs.put("sum", sum(pool.map(lambda reply: reply.wait(), replies)))


class AllSentFirst(Asks):
    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        replies = [epoch.request(0, "double", one) for one in range(3)]
        outs.put("sum", sum(reply.wait() for reply in replies))


def test_handler_behind_waiting_def_is_named() -> None:
    assert run(job(AllSentFirst)).values[0] == 2 * 6
    with pytest.raises(tg.JobTimeout) as caught:
        run(job(InAPoolOfItself), timeout_s=2)
    says(
        caught.value,
        "task 0 handler 'double' waits for its turn: 'ask' runs, which has asked for replies",
        "have it send all requests first, and then call wait() itself",
    )


def test_user_thread_waits_in_simulated_time() -> None:
    before = GivesUp.gave_up
    assert run(job(GivesUp, epochs=3), strict=False).values == {0: 3 * 20, 1: 0}
    assert GivesUp.gave_up == before + 3


class LookedAtLate(concurrent.futures.Future[int]):
    """Whoever asks for its result gets the processor only when that has come."""

    def result(self, timeout: float | None = None) -> int:
        assert self.done() or concurrent.futures.wait([self], 30).done
        return super().result(timeout)


class InThreads(tg.Task, state=["total"]):
    """Each task sends requests to the next one from a thread and a coroutine of its own, under a hold."""

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.add)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        holds, scratch, other = [epoch.hold("a thread"), epoch.hold("a coroutine")], epoch.scratch, 1 - self.task_id

        def ask() -> None:
            with holds[0]:
                scratch.one = epoch.request(other, "get").wait()

        async def ask_too() -> None:
            with holds[1]:
                scratch.two = await epoch.request(other, "get")

        threading.Thread(target=ask).start()
        scratch.asking = asyncio.create_task(ask_too())

    @tg.handles("get")
    async def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        await asyncio.sleep(0.01)
        return 1

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += epoch.scratch.one + epoch.scratch.two

    def result(self) -> int:
        return self.total


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stage", ["processor", "sync"])
def test_threads_ended_by_a_kill_are_silent(stage: str, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    hook = threading.excepthook
    for order in range(4):
        job_ = job(InThreads, epochs=4)
        assert run(job_, kills={(0, 1): stage, (1, 2): stage}, order=order).values == {0: 8, 1: 8}
    gc.collect()
    assert "AttemptEnded" not in capfd.readouterr().err + caplog.text
    assert threading.excepthook is hook
