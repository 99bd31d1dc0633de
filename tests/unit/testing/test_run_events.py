"""Event-driven jobs with flags, requests and holds: effects count exactly once, with and without failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jobs_kit import Kills, job, run

import taskgraph as tg
from taskgraph.testing import STAGES

KILLS: list[Kills] = [{}, *({(task, 1): stage} for task in (0, 1) for stage in STAGES[:5])]
KILLS += [
    {(0, 1): "commit"},
    {(0, 1): "committed"},
    {(0, 1): "sync", (1, 2): "done"},
    {(1, 0): "compose", (0, 2): "done"},
]


class Events(tg.Task, state=["total"]):
    total: int

    def setup(self) -> None:
        self.total = 0

    def result(self) -> Any:
        return self.total


class Bank(Events):
    """Tasks other than 0 push amounts to task 0, whose handler collects them; a sync point books them."""

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id:
            epoch.processor(self.send, outbound={"sent": 0})
        else:
            epoch.processor(self.book, inbound={"sent": "peers"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        amount = 10**self.task_id
        balance = epoch.request(0, "push", amount).wait()
        assert balance % (10 * amount) >= amount
        outs.put("sent", None)

    @tg.handles("push")
    def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        pushed = vars(epoch.scratch).setdefault("pushed", [])
        pushed.append(payload)
        return self.total + sum(pushed)

    def book(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(epoch.scratch.pushed)


class AsyncBank(Bank):
    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        assert await epoch.request(0, "push", 10**self.task_id) > 0
        outs.put("sent", None)

    @tg.handles("push")
    async def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        vars(epoch.scratch).setdefault("pushed", []).append(payload)
        return self.total + sum(epoch.scratch.pushed)


@pytest.mark.parametrize("kills", KILLS, ids=str)
@pytest.mark.parametrize("builder", [Bank, AsyncBank])
def test_effects_of_requests_count_once(builder: type[tg.Task], kills: Kills) -> None:
    result = run(job(builder, tasks=3, epochs=3), kills=kills, order=KILLS.index(kills))
    assert result.values == {0: 330, 1: 0, 2: 0}


class Wave(Events):
    """Flags run down a chain; every task counts those it got."""

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.flag("right", {"hop": 1})
        epoch.processor(self.count)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.hops = (sender, meta["hop"])
        if self.task_id:
            epoch.flag("right", {"hop": meta["hop"] + 1})

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        sender, hop = epoch.scratch.hops
        assert sender == (self.task_id - 1) % self.tasks
        self.total += hop


class AsyncWave(Wave):
    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:  # type: ignore[override]
        super().on_flag(epoch, sender, meta)


@pytest.mark.parametrize("kills", KILLS, ids=str)
@pytest.mark.parametrize("builder", [Wave, AsyncWave])
def test_flags_alone_drive_an_epoch(builder: type[tg.Task], kills: Kills) -> None:
    result = run(job(builder, tasks=4, epochs=3, topology=tg.ring()), kills=kills, order=KILLS.index(kills))
    assert result.values == {0: 12, 1: 3, 2: 6, 3: 9}


def test_equal_flags_are_one() -> None:
    class Twice(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                for meta in (1, 1, 2, [1], 1):
                    epoch.flag(1, meta)
            epoch.processor(self.count)

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            vars(epoch.scratch).setdefault("got", []).append(meta)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            got = vars(epoch.scratch).get("got", [])
            self.total += len(got)

    assert run(job(Twice, epochs=2)).values == {0: 0, 1: 6}


@pytest.mark.parametrize("kills", KILLS, ids=str)
def test_pure_requests_read_the_boundary_state(kills: Kills) -> None:
    class Asking(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.ask, outbound={"x": self.task_id})
            epoch.processor(self.add, inbound={"x": self.task_id})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            replies = [epoch.request(peer, "total") for peer in epoch.neighbors("peers")]
            outs.put("x", sum(reply.wait() for reply in replies))

        @tg.handles("total", pure=True)
        def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
            assert payload is None
            return self.total + self.task_id

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins["x"]

    expected = [0, 0, 0]
    for _ in range(3):
        given = [total + task for task, total in enumerate(expected)]
        expected = [total + sum(given) - given[task] for task, total in enumerate(expected)]
    result = run(job(Asking, tasks=3, epochs=3), kills=kills, order=KILLS.index(kills))
    assert list(result.values.values()) == expected


def test_chained_requests_are_replayed() -> None:

    class Steps(tg.Task, state=["got"]):
        def setup(self) -> None:
            self.got: list[int] = []

        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.ask, outbound={"got": 0})
                epoch.processor(self.keep, inbound={"got": 0})

        async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            async def both(n: int) -> int:
                found: int = await epoch.request(1, "step", await epoch.request(1, "step", n))
                return found

            outs.put("got", await asyncio.gather(*[both(n) for n in range(4)]))

        @tg.handles("step", pure=True)
        async def step(self, epoch: tg.Epoch, sender: int, n: int) -> int:
            await asyncio.sleep(1 / (1 + n % 10))
            return n + 10

        def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.got = ins["got"]

        def result(self) -> list[int]:
            return self.got

    assert run(job(Steps)).values[0] == [20, 21, 22, 23]


def test_handlers_ask_other_tasks_in_turn() -> None:
    class Relay(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.begin, outbound={"x": 0})
                epoch.processor(self.take, inbound={"x": 0})

        def begin(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", epoch.request(1, "on", [0]).wait())

        @tg.handles("on")
        def on(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
            path = [*payload, self.task_id]
            right = (self.task_id + 1) % self.tasks
            # Task 0 answers while its own processor waits for the reply.
            return path if self.task_id == 0 else epoch.request(right, "on", path).wait()

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert ins["x"] == [0, 1, 2, 3, 0]
            self.total += 1

    for stage in STAGES[:5]:
        assert run(job(Relay, tasks=4, epochs=3), kills={(2, 1): stage}).values[0] == 3


def test_a_hold_keeps_the_epoch_open() -> None:
    class CurrentReplicas(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.scratch.hold = epoch.hold("until task 1 has answered")
                epoch.flag(1, "please")
            epoch.processor(self.count)

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            epoch.scratch.got = meta
            if self.task_id == 1:
                epoch.flag(0, "thanks")
            else:
                epoch.scratch.hold.release()
                epoch.scratch.hold.release()

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert epoch.scratch.got == ("please" if self.task_id else "thanks")
            self.total += 1

    for order in range(3):
        result = run(job(CurrentReplicas, epochs=3), kills={(0, 1): "sync"}, order=order)
        assert result.values == {0: 3, 1: 3}


def test_finish_in_a_handler() -> None:
    class Countdown(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id:
                epoch.flag(0, epoch.number)
            epoch.processor(self.count)

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            if meta == 3:
                epoch.finish()

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1

    for stage in STAGES:
        result = run(job(Countdown, epochs=None), kills={(0, 3): stage})
        assert result.values == {0: 4, 1: 4}


@pytest.mark.parametrize("order", range(3))
def test_def_and_async_def_never_overlap(order: int) -> None:
    class Careful(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.scratch.inside = False
            epoch.processor(self.ask, outbound={"x": self.task_id})
            epoch.processor(self.ask_too, outbound={"y": self.task_id})
            epoch.processor(self.count, inbound={"x": self.task_id, "y": self.task_id})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            for peer in epoch.neighbors("peers"):
                epoch.request(peer, "touch").wait()
                self.touch_scratch(epoch)
            outs.put("x", None)

        async def ask_too(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            for peer in epoch.neighbors("peers"):
                await epoch.request(peer, "touch")
                self.touch_scratch(epoch)
            outs.put("y", None)

        @tg.handles("touch")
        def touch(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
            self.touch_scratch(epoch)

        def touch_scratch(self, epoch: tg.Epoch) -> None:
            assert not epoch.scratch.inside
            epoch.scratch.inside = True
            epoch.scratch.touched = getattr(epoch.scratch, "touched", 0) + 1
            epoch.scratch.inside = False

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += epoch.scratch.touched

    assert run(job(Careful, tasks=3, epochs=2), order=order).values == dict.fromkeys(range(3), 16)


def test_reply_wait_has_a_timeout() -> None:
    class Impatient(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.ask, outbound={"x": 0})
                epoch.processor(self.take, inbound={"x": 0})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            reply = epoch.request(1, "slow")
            assert not reply.done
            try:
                reply.wait(timeout_s=0.5)
            except TimeoutError:
                outs.put("x", reply.wait())

        @tg.handles("slow", pure=True)
        async def slow(self, epoch: tg.Epoch, sender: int, payload: Any) -> str:
            await asyncio.sleep(5.0)
            return "at last"

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert ins["x"] == "at last"
            self.total += 1

    assert run(job(Impatient, epochs=1), strict=False).values[0] == 1


def test_reply_is_awaited_again_after_timeout() -> None:
    class Impatient(Events):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.ask, outbound={"x": 0})
                epoch.processor(self.take, inbound={"x": 0})

        async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            async def wait() -> Any:
                return await reply

            reply = epoch.request(1, "slow")
            given_up, patient = asyncio.create_task(wait()), asyncio.create_task(wait())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reply, 0.5)
            given_up.cancel()
            outs.put("x", [await reply, await patient])

        @tg.handles("slow", pure=True)
        async def slow(self, epoch: tg.Epoch, sender: int, payload: Any) -> str:
            await asyncio.sleep(5.0)
            return "at last"

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert ins["x"] == ["at last", "at last"]
            self.total += 1

    assert run(job(Impatient, epochs=1), strict=False).values[0] == 1
