"""The handler of a pure request runs once, though the connection of its caller breaks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from cluster_kit import Counting, holder, job

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs.messenger import Messenger
from taskgraph.protocol.messages import Answer, Request

CANCEL_S = 0.02


class Asking(Counting, state=["total"]):
    """Task 0 sends a request to task 1, whose reply waits for `go`."""

    began: threading.Event
    go: threading.Event
    ran: list[int]

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"x": self.task_id})
        epoch.processor(self.add, inbound={"x": self.task_id})

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", await epoch.request(1, "get") if self.task_id == 0 else 0)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]


class Plain(Asking, state=["total"]):
    @tg.handles("get", pure=True)
    def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        self.ran.append(epoch.number)
        self.began.set()
        assert self.go.wait(20)
        return 1


class Awaiting(Asking, state=["total"]):
    @tg.handles("get", pure=True)
    async def get(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        self.ran.append(epoch.number)
        self.began.set()
        assert await asyncio.to_thread(self.go.wait, 20)
        return 1


class Asked:
    """Counts the requests that arrive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.again = asyncio.Condition()
        self._take = Messenger.take_request
        monkeypatch.setattr(Messenger, "take_request", lambda messenger, message: self._count(messenger, message))

    async def _count(self, messenger: Messenger, message: Request) -> Answer:
        async with self.again:
            self.times += 1
            self.again.notify_all()
        return await self._take(messenger, message)

    async def until(self, times: int) -> None:
        async with self.again, asyncio.timeout(10):
            await self.again.wait_for(lambda: self.times >= times)


@pytest.mark.parametrize("builder", [Plain, Awaiting])
async def test_broken_connections_do_not_repeat_handlers(
    builder: type[Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)

    class Fresh(builder, state=["total"]):  # type: ignore[misc, valid-type]
        began, go = threading.Event(), threading.Event()
        ran: list[int] = []  # noqa: RUF012

    cluster = InProcessCluster(job(Fresh, epochs=1, settings=tg.Settings(cancel_s=CANCEL_S)))
    try:
        await cluster.start(2)
        for times in (1, 2, 3):
            await asked.until(times)
            assert await asyncio.to_thread(Fresh.began.wait, 10)
            one, other = holder(cluster, 0).id, holder(cluster, 1).id
            cluster.network.cut(one, other)
            cluster.network.heal(one, other)
        await asked.until(4)
        await asyncio.sleep(3 * CANCEL_S)
        assert Fresh.ran == [0]
        Fresh.go.set()
        result = await cluster.result(20)
        assert (result.values, result.failovers, result.restarts) == ({0: 1, 1: 0}, 0, 0)
        assert Fresh.ran == [0]
    finally:
        Fresh.go.set()
        await cluster.stop()
