"""What a replay compares besides puts and state: answers, requests, flags, reports, the job's end and its result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from jobs_kit import fails, job, run, says

import taskgraph as tg
from taskgraph.node.epochs import replaying

REPLAYED = "epoch 1: replayed from its snapshot, the epoch came out differently"
NAMED = "attributes that differ and are not in the snapshot: seen;"


class Sums(tg.Task, state=["total"]):
    """Task 1 sends a number, task 0 adds it up; both count epochs in `seen`, which is no state."""

    def setup(self) -> None:
        self.total = 0.0
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 1:
            epoch.processor(self.send, outbound={"x": 0})
        else:
            epoch.processor(self.take, inbound={"x": 1})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1.0)

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]
        self.seen += 1


class Asks(tg.Task, state=["total"]):
    """Task 1 asks task 0 for a number; both count epochs in `seen`, which is no state."""

    def setup(self) -> None:
        self.total = 0.0
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 1:
            epoch.flag(1)
        epoch.processor(self.update)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.got = await epoch.request(0, "get")

    @tg.handles("get", pure=True)
    def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
        return 1.0

    @tg.handles("take")
    def take(self, epoch: tg.Epoch, sender: int, payload: float) -> None:
        epoch.scratch.got = payload

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += getattr(epoch.scratch, "got", 0.0)
        self.seen += 1


def test_answer_by_forgotten_state() -> None:
    class Forgets(Asks):
        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            return self.seen

    says(fails(job(Forgets)), "task 0, ", REPLAYED, "(the answer of 'get' to task 1)", NAMED)


def test_request_by_forgotten_state() -> None:
    class Forgets(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            await epoch.request(0, "take", self.seen)

    says(fails(job(Forgets)), "task 1, ", REPLAYED, "(the request 'take' to task 0)", NAMED)


def test_missing_request_in_a_replay_is_named() -> None:
    class Forgets(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if self.seen:
                await epoch.request(0, "take", 1.0)

    says(fails(job(Forgets)), "task 1, ", REPLAYED, "(the request 'take' to task 0)", NAMED)


@pytest.mark.parametrize("to", ["another task", "with another meta"])
def test_flag_by_forgotten_state(to: str) -> None:
    class Forgets(Asks):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 1:
                epoch.flag(self.seen % 2) if to == "another task" else epoch.flag(0, self.seen)
            epoch.processor(self.update)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            pass

    says(fails(job(Forgets, epochs=3)), "task 1, ", REPLAYED, "(the flag to task 0", NAMED)


def test_finish_by_forgotten_state() -> None:
    class Patience(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            if self.seen == 2:
                epoch.finish()

    says(fails(job(Patience, epochs=None)), "task 0, ", REPLAYED, "(epoch.finish())", NAMED)


def test_report_by_forgotten_state() -> None:
    class Forgets(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            epoch.report(seen=self.seen, total=self.total)

    says(fails(job(Forgets)), "task 0, ", REPLAYED, "(reported 'seen')", NAMED)


def test_reports_of_a_clock_pass() -> None:
    until = time.perf_counter() + 0.3

    class Timed(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            began = time.perf_counter()
            super().take(epoch, ins, outs)
            epoch.report(seconds=time.perf_counter() - began)
            if time.perf_counter() > until:
                epoch.finish()

    assert run(job(Timed, epochs=None)).status == "finished"


class Own:
    def __init__(self) -> None:
        self.count = 0


@pytest.mark.parametrize(
    ("made", "add", "told"),
    [
        (deque, lambda it: it.append(1), list),
        (Counter, lambda it: it.update(a=1), dict),
        (Own, lambda it: vars(it).update(count=it.count + 1), lambda it: it.count),
    ],
    ids=["deque", "Counter", "own"],
)
def test_result_by_forgotten_state_that_cannot_travel(
    made: Callable[[], Any], add: Callable[[Any], None], told: Callable[[Any], Any]
) -> None:
    class Forgets(Sums):
        def setup(self) -> None:
            super().setup()
            self.kept = made()

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            add(self.kept)

        def result(self) -> Any:
            return told(self.kept) if self.task_id == 0 else None

    says(fails(job(Forgets)), "task 0, 'result'", "is another one: snapshot() forgets state", ": kept, seen;")


def test_result_that_works_once_passes() -> None:
    class Once(Sums):
        def setup(self) -> None:
            super().setup()
            self.log_file = deque(["open"])

        def result(self) -> Any:
            self.log_file.pop()
            return [self.total, id(self.log_file)]

    assert run(job(Once)).values[0][0] == 2.0


# -- coroutines that run into each other -------------------------------------------------------------------------------


class Ring(tg.Task, state=["total"]):
    """Each task sends a request to the next one while it gets one itself."""

    def setup(self) -> None:
        self.total = 0.0
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.add)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.got = await epoch.request((self.task_id + 1) % self.tasks, "get")

    @tg.handles("get")
    def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
        return self.task_id + 1.0

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += epoch.scratch.got
        self.seen += 1

    def result(self) -> float:
        return self.total


def test_interleaved_epochs_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Each task is asked while it waits for a reply."""

    class Forgets(Ring):
        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().add(epoch, ins, outs)
            self.total += self.seen

    run(job(Forgets, tasks=3))
    skipped = [record.message for record in caplog.records if "strict mode skips this epoch" in record.message]
    assert len(skipped) == len({text.split(",")[0] for text in skipped}) > 0


def test_leftover_of_the_first_try_is_named() -> None:
    class Keeps(Asks):
        def setup(self) -> None:
            super().setup()
            self.pending: list[float] = []

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            self.pending.append(1.0)

        def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += sum(self.pending)
            self.pending.clear()

    error = fails(job(Keeps))
    says(error, "epoch 0: a restart of the epoch comes out differently", "(state 'total')", "scratch")
    says(error, "the first try left something in an attribute (here: pending); keep")

    class TakesBack(Keeps):
        def restore(self, state: Any) -> None:
            super().restore(state)
            self.pending.clear()

    assert run(job(TakesBack)).status == "finished"


def test_value_by_attempt_number() -> None:
    class Attempts(Sums):
        def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", float(epoch.attempt))

    says(fails(job(Attempts)), "replayed from its snapshot", "('x' to task 0)")


def test_failure_in_a_replay_says_so() -> None:
    class Fails(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            assert self.seen == epoch.number + 1

    error = fails(job(Fails))
    assert error.where == "take"
    says(error, "epoch 1", "This was raised where strict mode runs the epoch again, on an object that was made anew")


def test_background_timers_are_due() -> None:
    """The clock of a test advances with each of the first epochs."""

    class Ticks(Sums):
        async def setup(self) -> None:  # type: ignore[override]
            super().setup()
            self.ticking = asyncio.create_task(self.tick())

        async def tick(self) -> None:
            while True:
                await asyncio.sleep(0.3)
                self.total += 1000

        async def teardown(self) -> None:  # type: ignore[override]
            self.ticking.cancel()

    says(fails(job(Ticks, epochs=5)), "total")


@pytest.mark.parametrize("order", range(2))
def test_replies_take_as_long_in_a_replay(order: int) -> None:
    """A timeout, and a look at `reply.done`, come out as they did."""

    class Hedges(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            slow = epoch.request(0, "slow")
            await asyncio.sleep(0.001)
            assert not slow.done
            try:
                epoch.scratch.got = await asyncio.wait_for(asyncio.ensure_future(self.answer(slow)), 0.005)
            except TimeoutError:
                epoch.scratch.got = await epoch.request(0, "get")

        async def answer(self, reply: tg.Reply) -> Any:
            return await reply

        @tg.handles("slow")
        async def slow(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            await asyncio.sleep(0.02)
            return 2.0

        def result(self) -> float:
            return self.total

    assert run(job(Hedges), order=order).values == {0: 0.0, 1: 2.0}


def test_user_thread_has_real_time_in_a_replay() -> None:
    class Works(Sums):
        def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1.0)

        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)
            if self.task_id == 1:
                epoch.processor(self.end)

        def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += epoch.scratch.made

    class Begins(Works):
        def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            hold, scratch = epoch.hold("a thread works"), epoch.scratch

            def work() -> None:
                with hold:
                    time.sleep(0.2)
                    scratch.made = 1.0

            threading.Thread(target=work).start()
            super().send(epoch, ins, outs)

    assert run(job(Begins)).status == "finished"


@pytest.mark.parametrize("style", ["with a request", "without one"])
def test_endless_replay_is_named(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_THREADS_S", 0.2)

    class Waits(Asks):
        def setup(self) -> None:
            super().setup()
            self.ready = asyncio.Event()

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if epoch.number == 0:
                self.ready.set()
            if style == "with a request":
                await super().on_flag(epoch, sender, meta)
            await self.ready.wait()

    error = fails(job(Waits))
    says(error, "task 1, ", REPLAYED, "' does not end)", "snapshot() forgets state")


def test_to_thread_has_real_time_in_a_replay() -> None:
    class InThread(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            await super().on_flag(epoch, sender, meta)
            await asyncio.to_thread(time.sleep, 0.2)

    assert run(job(InThread)).status == "finished"


def test_new_request_in_a_replay_is_named() -> None:
    class Remembers(tg.Task):
        def setup(self) -> None:
            self.asked = False

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.flag(self.task_id)
            epoch.processor(self.remember)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if not self.asked:
                await epoch.request(self.task_id, "get")

        def remember(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.asked = True  # not in the state

        @tg.handles("get")
        def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

    says(fails(job(Remembers, tasks=1, epochs=2)), "on_flag (flagged by task 0) sent a request 'get' to task 0 that it")
