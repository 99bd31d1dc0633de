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
from taskgraph.protocol import shortage
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
    monkeypatch.setattr(shortage, "GIVE_UP_S", 30.0)
    return poor


def pulling(settings: tg.Settings = IN_STEP, *, backups: int = 1) -> tg.Job:
    return tg.Job(
        tasks=2, epochs=8, builder=lambda _: Pulls(), topology=LINKS, settings=settings, backups=backups, min_nodes=3
    )


async def led_by(cluster: InProcessCluster, task: int) -> str:
    """The node that works on the task, once an epoch is committed."""
    await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 1)
    return name_of(holder(cluster, task).id)


def left(cluster: InProcessCluster) -> list[str]:
    """What was told of tasks that nodes left to others."""
    return [text for text in told(cluster, "waits") if " leaves task " in text]


@pytest.mark.parametrize("settings", [IN_STEP, tg.Settings()])
def test_backup_with_memory_takes_the_task(short: set[str], settings: tg.Settings) -> None:

    async def scenario(cluster: InProcessCluster) -> None:
        short.add(first := await led_by(cluster, 1))
        assert (await cluster.result()).values == {0: 0, 1: sum(range(8))}
        assert 30 < asyncio.get_running_loop().time() < 60
        (why,) = left(cluster)
        assert why.startswith(f"{first} leaves task 1 to n")
        assert ", as it had no memory for 'v' from task 0 for 3" in why
        assert why.endswith(f" s: {first} has no memory for a reply of 72000019 bytes")
        assert await led_by(cluster, 1) != first
        assert all(holder(cluster, task).name != first for task in range(2)), "it is given no other task in return"

    play(pulling(settings), scenario, nodes=3)


def test_task_without_backup_stays(short: set[str]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        short.add(first := await led_by(cluster, 1))
        await asyncio.sleep(300)
        assert await led_by(cluster, 1) == first and not left(cluster)
        short.clear()
        assert (await cluster.result()).values == {0: 0, 1: sum(range(8))}

    play(pulling(backups=0), scenario, nodes=3)


def test_task_without_memory_anywhere_backs_off(short: set[str]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        short.update(f"n{n}" for n in range(1, 4))
        await asyncio.sleep(570)
        assert len(left(cluster)) == 2, "after half a minute, after two minutes more, and then not within eight"
        short.clear()
        assert (await cluster.result()).values == {0: 0, 1: sum(range(8))}

    play(pulling(), scenario, nodes=3)
