"""What a replay compares besides puts and state: answers, requests, flags, reports, the end of the job, the result; and
what it makes of coroutines that run into each other."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from jobs_kit import fails, job, run, says

import taskgraph as tg

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
    """Task 1 asks task 0 for a number and tells it one; both count epochs in `seen`, which is no state."""

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


def test_an_answer_that_rests_on_what_is_forgotten() -> None:
    class Forgets(Asks):
        @tg.handles("get", pure=True)
        def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            return self.seen

    says(fails(job(Forgets)), "task 0, ", REPLAYED, "(the answer of 'get' to task 1)", NAMED)


def test_a_request_that_rests_on_what_is_forgotten() -> None:
    class Forgets(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            await epoch.request(0, "take", self.seen)

    says(fails(job(Forgets)), "task 1, ", REPLAYED, "(the request 'take' to task 0)", NAMED)


def test_a_request_that_is_not_sent_again() -> None:
    class Forgets(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if self.seen:
                await epoch.request(0, "take", 1.0)

    says(fails(job(Forgets)), "task 1, ", REPLAYED, "(the request 'take' to task 0)", NAMED)


@pytest.mark.parametrize("to", ["another task", "with another meta"])
def test_a_flag_that_rests_on_what_is_forgotten(to: str) -> None:
    class Forgets(Asks):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 1:
                epoch.flag(self.seen % 2) if to == "another task" else epoch.flag(0, self.seen)
            epoch.processor(self.update)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            pass

    says(fails(job(Forgets, epochs=3)), "task 1, ", REPLAYED, "(the flag to task 0", NAMED)


def test_an_end_of_the_job_that_rests_on_what_is_forgotten() -> None:
    class Patience(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            if self.seen == 2:
                epoch.finish()

    says(fails(job(Patience, epochs=None)), "task 0, ", REPLAYED, "(epoch.finish())", NAMED)


def test_a_report_that_rests_on_what_is_forgotten() -> None:
    class Forgets(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            epoch.report(seen=self.seen, total=self.total)

    says(fails(job(Forgets)), "task 0, ", REPLAYED, "(reported 'seen')", NAMED)


def test_a_report_and_an_end_that_rest_on_a_clock_are_no_mistake() -> None:
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
def test_a_result_that_rests_on_what_is_forgotten_and_cannot_travel(
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


def test_a_result_of_what_no_attribute_holds_is_told_too() -> None:
    kept = weakref.WeakKeyDictionary[tg.Task, float]()  # the id of one that is gone may be another one's

    class Forgets(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            kept[self] = self.total

        def result(self) -> Any:
            return kept.get(self)

    says(fails(job(Forgets)), "task 0, 'result'", "is another one: snapshot() forgets state")


def test_a_result_that_is_another_one_each_time_is_no_mistake() -> None:
    class Timed(Sums):
        def result(self) -> Any:
            return {"total": self.total, "at": time.perf_counter()}

    assert run(job(Timed)).values[0]["total"] == 2.0


def test_a_result_that_can_be_asked_for_once_is_no_mistake() -> None:
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
    """Each task asks the next one while it is asked itself."""

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


def test_an_object_that_was_made_for_a_replay_is_a_primarys() -> None:
    class Asserts(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert self.primary
            super().take(epoch, ins, outs)

    assert run(job(Asserts)).status == "finished"


def test_what_the_first_try_of_an_epoch_leaves_and_restore_does_not_take_back() -> None:
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
    says(error, "epoch 0: begun, restored and run again, as where an epoch starts again", "(state 'total')", "scratch")
    says(error, "an attribute keeps what the first try left in it (here: pending); keep")

    class TakesBack(Keeps):
        def restore(self, state: Any) -> None:
            super().restore(state)
            self.pending.clear()

    assert run(job(TakesBack)).status == "finished"


def test_an_attempt_that_a_value_rests_on() -> None:
    class Attempts(Sums):
        def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", float(epoch.attempt))

    says(fails(job(Attempts)), "replayed from its snapshot", "('x' to task 0)")


def test_code_that_fails_when_it_is_replayed_is_said_to_be_replayed() -> None:
    class Fails(Sums):
        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().take(epoch, ins, outs)
            assert self.seen == epoch.number + 1

    error = fails(job(Fails))
    assert error.where == "take"
    says(error, "epoch 1", "This was raised where strict mode runs the epoch again, on an object that was made anew")


def test_timers_of_coroutines_beside_the_job_are_due() -> None:
    """The clock of a test would stand but for that, however long the job computes."""

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


@pytest.mark.parametrize("order", range(6))
def test_a_second_choice_where_an_answer_takes_too_long_is_no_mistake(order: int) -> None:
    class Hedges(Ring):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            reply = epoch.request((self.task_id + 1) % self.tasks, "slow")

            async def answer() -> float:
                return await reply

            try:
                epoch.scratch.got = await asyncio.wait_for(answer(), 0.005)
            except TimeoutError:
                epoch.scratch.got = await epoch.request((self.task_id + 2) % self.tasks, "quick")

        @tg.handles("slow")
        async def slow(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            await asyncio.sleep(0.002 * sender)
            return 1.0

        @tg.handles("quick")
        def quick(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            return 1.0

    assert run(job(Hedges, tasks=4), order=order).values == dict.fromkeys(range(4), 2.0)


@pytest.mark.parametrize("order", range(6))
def test_an_answer_that_is_looked_for_and_not_waited_for_is_no_mistake(order: int) -> None:
    class Looks(Ring):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            reply = epoch.request((self.task_id + 1) % self.tasks, "one")
            await asyncio.sleep(0.001)
            epoch.scratch.got = await (epoch.request(0, "one") if reply.done else reply)

        @tg.handles("one")
        def one(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            return 1.0

    assert run(job(Looks, tasks=4), order=order).values == dict.fromkeys(range(4), 2.0)


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.08, 0.15])
@pytest.mark.parametrize("order", range(3))
def test_a_timer_that_is_due_when_an_answer_comes_or_long_after_it_is_no_mistake(after_s: float, order: int) -> None:
    class Hedges(Ring):
        def setup(self) -> None:
            super().setup()
            self.began = time.perf_counter()

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:  # type: ignore[override]
            try:
                epoch.scratch.got = epoch.request((self.task_id + 1) % self.tasks, "slow").wait(after_s)
            except TimeoutError:
                epoch.scratch.got = epoch.request((self.task_id + 2) % self.tasks, "quick").wait()

        @tg.handles("slow")
        async def slow(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            await asyncio.sleep(0.02)
            return 1.0

        @tg.handles("quick")
        def quick(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
            return 1.0

    assert run(job(Hedges, tasks=3, epochs=4), order=order).values == dict.fromkeys(range(3), 4.0)


def test_a_thread_of_ones_own_has_real_time_in_a_replay() -> None:
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
def test_code_that_waits_for_ever_when_it_is_replayed_is_named(style: str) -> None:
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


def test_what_threads_compute_for_a_coroutine_takes_real_time_in_a_replay() -> None:
    class InThread(Asks):
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            await super().on_flag(epoch, sender, meta)
            await asyncio.to_thread(time.sleep, 0.2)

    assert run(job(InThread)).status == "finished"


@pytest.mark.parametrize("where", ["on_flag", "handler get"])
def test_what_raises_where_a_message_is_handled_again_is_called_as_it_is_elsewhere(where: str) -> None:
    class Remembers(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.flag(self.task_id)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if where == "on_flag":
                self.remember(epoch.number)
            else:
                epoch.request(self.task_id, "get")

        @tg.handles("get")
        def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
            self.remember(epoch.number)

        def remember(self, number: int) -> None:
            if number == 0:
                self.kept = number  # not in the state
            else:
                assert self.kept == 0

    error = fails(job(Remembers, tasks=1, epochs=2))
    assert error.where == where
    says(error, f"task 0, epoch 1, {where!r}: AttributeError", "has no attribute 'kept'", "runs the epoch again")


def test_a_request_that_was_not_sent_before_is_told_by_the_message_in_words() -> None:
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
