"""What an attempt says that it waits for: its processors, its handlers, and whoever keeps the epoch open."""

from __future__ import annotations

import asyncio

from cluster_kit import Counting, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Wait


def waits(cluster: InProcessCluster, task: int) -> list[tuple[str, str, int, str, tuple[tuple[str, int], ...]]]:
    (attempt,) = holder(cluster, task).roles.primaries[task].attempts
    found: tuple[Wait, ...] = attempt.waits()
    return [(each.processor, each.kind, each.task, each.name, each.provides) for each in found]


def test_each_processor_says_for_what_it_waits_and_what_it_will_put() -> None:
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
        ]

    play(job(Asks, epochs=1), scenario, nodes=2)
