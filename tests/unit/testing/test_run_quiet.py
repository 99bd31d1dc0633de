"""Messages between a task's report that it is quiet and the seal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jobs_kit import job, run

import taskgraph as tg


class Late(tg.Task, state=["heard"]):
    """Task 2 flags task 1 when all others are quiet; the handler of the flag takes long."""

    heard: int

    def setup(self) -> None:
        self.heard = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 2:
            epoch.processor(self.send, outbound={"sent": 2})
            epoch.processor(self.end, inbound={"sent": 2})
        else:
            epoch.processor(self.book)

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(1)
        epoch.flag(1, "wake up")
        outs.put("sent", None)

    def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert ins["sent"] is None

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        await asyncio.sleep(2)
        epoch.scratch.heard = 1

    def book(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.heard += getattr(epoch.scratch, "heard", 0)

    def result(self) -> int:
        return self.heard


@pytest.mark.parametrize("order", range(4))
def test_long_flag_is_no_divergence(order: int) -> None:
    result = run(job(Late, tasks=3, epochs=2), order=order, nodes=3)
    assert result.values == {0: 0, 1: 2, 2: 0}
    assert result.restarts == 0


class Asking(tg.Task, state=["total"]):
    """Every task asks all others for their totals; some are quiet by then."""

    total: int

    def setup(self) -> None:
        self.total = self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"begun": self.task_id})
        epoch.processor(self.add, inbound={"begun": self.task_id})

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("begun", None)
        epoch.scratch.sum = 0
        for peer in epoch.neighbors("peers"):
            epoch.scratch.sum += await epoch.request(peer, "total")

    @tg.handles("total", pure=True)
    async def answer(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        return self.total

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total = (self.total + epoch.scratch.sum) % 1000

    def result(self) -> int:
        return self.total


@pytest.mark.parametrize("order", range(5))
def test_pure_request_to_a_quiet_task(order: int) -> None:
    result = run(job(Asking, tasks=6, epochs=10), order=order, nodes=3, strict=False)
    totals = list(range(6))
    for _ in range(10):
        totals = [sum(totals) % 1000] * 6
    assert list(result.values.values()) == totals
    assert result.restarts == 0


class Nested(tg.Task):
    """Every task asks the next one, whose handler asks the one after it."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"sum": self.task_id})
        epoch.processor(self.end, inbound={"sum": self.task_id})

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        asked = [epoch.request((self.task_id + 1) % self.tasks, "ask_on", 2) for _ in range(4)]
        outs.put("sum", sum(await asyncio.gather(*asked)))

    @tg.handles("ask_on")
    async def ask_on(self, epoch: tg.Epoch, sender: int, hops: int) -> int:
        if hops == 0:
            return 1
        answer: int = await epoch.request((self.task_id + 1) % self.tasks, "ask_on", hops - 1)
        return answer

    def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.report(sum=ins["sum"])


def test_overloaded_node_is_named() -> None:
    nested = job(Nested, tasks=3, epochs=1, settings=tg.Settings(max_parked=12))
    with pytest.raises(tg.JobTimeout, match=r"takes no more calls: 12 wait there already.*max_parked"):
        tg.run(nested, nodes=0, timeout_s=0.5)
