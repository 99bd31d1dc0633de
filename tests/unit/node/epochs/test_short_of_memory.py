"""A node has no memory for items, for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import IN_STEP, holder, play, told

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.router import Router
from taskgraph.protocol.messages import Flag, Pull, Reason
from taskgraph.protocol.records import name_of

NO_MEMORY = "n2 has no memory for a reply of 72000019 bytes"


class Sends(tg.Task, state=["sum"]):
    """Task 0 sends task 1 an item and a flag."""

    def setup(self) -> None:
        self.sum = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.flagged = 0
        if self.task_id == 0:
            epoch.processor(self.give, outbound={"v": "next"})
        else:
            epoch.processor(self.take, inbound={"v": "last"})

    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.flag("next", 1)
        outs.put("v", epoch.number)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.flagged += meta

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.sum += int(ins["v"])

    def result(self) -> int:
        return self.sum


LINKS = {"next": lambda task, tasks, epoch: [1 - task] * (task == 0), "last": lambda task, tasks, epoch: [0] * task}


@pytest.mark.parametrize("settings", [IN_STEP, tg.Settings()])
@pytest.mark.parametrize("kind", [Pull, Flag])
@pytest.mark.parametrize(("for_s", "restarts"), [(0.1, 1), (6.0, 4), (150.0, 9)])
def test_pulls_without_memory_back_off(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], for_s: float, restarts: int, settings: tg.Settings
) -> None:
    began: list[float] = []
    call, begin = Router._call, Router.begin

    def is_short(message: object) -> bool:
        if not isinstance(message, kind) or message.stamp.epoch != 3:
            return False
        now = asyncio.get_running_loop().time()
        began.append(now)
        return now - began[0] < for_s

    async def calling(self: Router, peer: Any, message: Any, *args: Any) -> Any:
        if is_short(message):
            await asyncio.sleep(0.01)
            raise Refused(Reason.NO_MEMORY, NO_MEMORY)
        return await call(self, peer, message, *args)

    monkeypatch.setattr(Router, "_call", calling)
    monkeypatch.setattr(Router, "begin", lambda self, task, m, **o: None if is_short(m) else begin(self, task, m, **o))
    monkeypatch.setattr(Router, "begin_all", lambda *args: None)
    job = tg.Job(tasks=2, epochs=8, builder=lambda _: Sends(), topology=LINKS, settings=settings, backups=0)

    async def scenario(cluster: InProcessCluster) -> tuple[tg.JobResult, float, list[str]]:
        result = await cluster.result()
        return result, asyncio.get_running_loop().time(), told(cluster, "restart")

    result, ended, told_of = play(job, scenario, nodes=2)
    assert result.values == {0: 0, 1: sum(range(8))}
    assert 1 <= len(told_of) <= restarts and all(NO_MEMORY in text for text in told_of)
    assert ended - began[0] < for_s + 3.0, "it is asked for once a second"


class Pulls(Sends, state=["sum"]):
    """The same without a flag."""

    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("v", epoch.number)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Makes nodes, by name, have no memory for items from epoch 3 on."""
    call, poor = Router._call, set[str]()

    async def calling(self: Router, peer: Any, message: Any, *args: Any) -> Any:
        me = name_of(self._transport.node)  # type: ignore[attr-defined]
        if me in poor and isinstance(message, Pull) and message.stamp.epoch >= 3:
            raise Refused(Reason.NO_MEMORY, f"{me} has no memory for a reply of 72000019 bytes")
        return await call(self, peer, message, *args)

    monkeypatch.setattr(Router, "_call", calling)
    monkeypatch.setattr(Router, "begin", lambda *args, **options: None)
    monkeypatch.setattr(Router, "begin_all", lambda *args: None)
    return poor


@pytest.mark.parametrize("settings", [IN_STEP, tg.Settings()])
@pytest.mark.parametrize("remedy", ["memory", "drain"])
def test_short_node_waits_and_says_so(short: set[str], remedy: str, settings: tg.Settings) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 1)
        first = holder(cluster, 1)
        short.add(first.name)
        await asyncio.sleep(300)
        assert holder(cluster, 1) is first, "no backup took over"
        lack = f"{first.name} has no memory for a reply of 72000019 bytes"
        restarts = told(cluster, "restart")
        assert 5 <= len(restarts) <= 12 and all(lack in text for text in restarts)
        said = {wait for node in cluster.nodes for known in node.status().replicas for wait in known.waits}
        assert f"memory for 'v' from task 0: {lack}" in said
        if remedy == "drain":
            first.drain("a test asks for it")
        else:
            short.clear()
        assert (await cluster.result()).values == {0: 0, 1: sum(range(8))}
        assert (holder(cluster, 1) is first) == (remedy == "memory")

    job = tg.Job(tasks=2, epochs=8, builder=lambda _: Pulls(), topology=LINKS, settings=settings, backups=1)
    play(job, scenario, nodes=2)
