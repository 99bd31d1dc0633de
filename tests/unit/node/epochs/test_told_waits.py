"""What processors, handlers, holds and a starting primary wait for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import Counting, Gated, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Wait

__all__ = ["gated"]


def waits(cluster: InProcessCluster, task: int) -> list[tuple[str, str, int, str, tuple[tuple[str, int], ...]]]:
    (attempt,) = holder(cluster, task).roles.primaries[task].attempts
    found: tuple[Wait, ...] = attempt.waits()
    return [(each.processor, each.kind, each.task, each.name, each.provides) for each in found]


def test_waits_of_each_processor() -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    class Asks(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.has_run, outbound={"early": 1})
                epoch.processor(self.asks, outbound={"x": 1})
                epoch.processor(self.takes, inbound={"y": 1}, outbound={"z": 1})
                epoch.processor(self.beside, inbound={"y": 1}, outbound={"w": 1}, parallel=True)
            else:
                epoch.processor(self.gives, inbound={"early": 0}, outbound={"y": 0}, name="gives")
                epoch.processor(self.all, inbound={"x": 0, "z": 0, "w": 0})
            epoch.processor(self.count)

        async def has_run(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.hold("the weather")
            outs.put("early", 1)

        async def asks(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", await epoch.request(1, "what", 1))

        async def takes(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("z", ins["y"])

        async def beside(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("w", ins["y"])

        async def gives(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            asked.set()
            await gate.wait()
            outs.put("y", 1)

        def all(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            pass

        @tg.handles("what")
        async def what(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
            await gate.wait()
            return payload

    async def scenario(cluster: InProcessCluster) -> None:
        await asked.wait()
        await asyncio.sleep(1.0)  # of a clock that leaps once nothing else goes on
        assert waits(cluster, 0) == [
            ("asks", "reply", 1, "what", (("x", 1),)),
            ("takes", "item", 1, "y", (("z", 1),)),
            ("takes", "order", 0, "asks", (("z", 1),)),
            ("count", "order", 0, "takes", ()),
            ("beside", "item", 1, "y", (("w", 1),)),
            ("hold", "running", 0, "has_run: the weather", ()),
        ]
        assert waits(cluster, 1) == [
            ("gives", "running", 1, "gives", (("y", 0),)),
            ("all", "item", 0, "x", ()),
            ("all", "item", 0, "z", ()),
            ("all", "item", 0, "w", ()),
            ("all", "order", 1, "gives", ()),
            ("count", "order", 1, "all", ()),
            ("handler what", "running", 1, "handler what", ()),
        ]

    play(job(Asks, epochs=1), scenario, nodes=2)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_hanging_handler_is_named(kind: str) -> None:

    class Hangs(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.flag(self.task_id)
            epoch.processor(self.count)

        if kind == "def":

            def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
                epoch.request(self.task_id, "never").wait()

        else:

            async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
                await epoch.request(self.task_id, "never")

        @tg.handles("never")
        async def never(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            await asyncio.Event().wait()

    async def scenario(cluster: InProcessCluster) -> None:
        await asyncio.sleep(25.0)  # in epoch 0, where setup() may take long, the event comes after 10 s
        (text,) = told(cluster, "waits")
        (lines,) = (node.roles.leader.waits for node in cluster.nodes if node.roles.leader is not None)
        assert text.startswith("epoch 0 waits: task 0 handler 'never' is running, ")
        assert [line.rpartition(",")[0] for line in lines] == [
            "task 0 handler 'never' is running",
            "task 0 handler 'on_flag' awaits the reply of task 0 to 'never'",
        ]

    play(job(Hangs, tasks=1, epochs=1), scenario, nodes=1)


@pytest.mark.parametrize("hook", ["on_commit", "on_event"])
def test_taking_over_primary_names_its_hook(hook: str, gated: type[Gated]) -> None:
    began = asyncio.Event()

    class Waits(gated, state=["total"]):  # type: ignore[misc,valid-type]
        async def stands(self, where: str) -> None:
            if where == hook and self.gate.is_set():  # another is its primary then
                began.set()
                await asyncio.Event().wait()

        async def on_commit(self, number: int, state: Any) -> None:
            await self.stands("on_commit")

        async def on_event(self, event: tg.Event) -> None:
            await self.stands("on_event")

    async def scenario(cluster: InProcessCluster) -> None:
        await Waits.reached.wait()
        Waits.gate.set()
        cluster.crash(holder(cluster, 0).id)
        await began.wait()
        assert holder(cluster, 0).roles.primaries[0].waiting_for == hook

    play(job(Waits, tasks=1), scenario, nodes=2)
