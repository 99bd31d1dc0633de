"""Events about deaths and waits."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, Gated, gated, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event

__all__ = ["gated"]


def of_kind(cluster: InProcessCluster, *kinds: str) -> list[Event]:
    return [event for event in cluster.events if event.kind in kinds]


def test_launchers_report_of_death_is_event(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        idle = next(node for node in cluster.nodes if node is not holder(cluster, 0))
        cluster.crash(idle.id)
        await asyncio.sleep(1)
        gated.gate.set()
        await cluster.result()
        assert [event.text for event in of_kind(cluster, "lost", "gone")] == [f"{idle.name} died: killed"]

    play(job(gated, tasks=1, backups=0), scenario, nodes=3)


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("before it is killed", "its port refuses connections"),
        ("before its death is read", "its port refuses connections"),
        ("as soon as its death is read", "killed"),
    ],
)
def test_refusing_port_is_one_event(gated: type[Gated], when: str, text: str) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        speaker, *others = sorted(cluster.nodes, key=lambda node: node.id)
        idle = next(node for node in others if node is not holder(cluster, 0))
        if when == "before it is killed":
            speaker.suspicion.note_port_refused(idle.id)
        cluster.crash(idle.id)
        if when == "as soon as its death is read":
            while idle.id not in speaker.keeper.view.gone:  # noqa: ASYNC110
                await asyncio.sleep(0)
        speaker.suspicion.note_port_refused(idle.id)
        await asyncio.sleep(1)
        gated.gate.set()
        await cluster.result()
        assert [event.text for event in of_kind(cluster, "lost", "gone")] == [f"{idle.name} died: {text}"]

    play(job(gated, tasks=1, backups=0), scenario, nodes=3)


def test_unusually_long_wait_is_event() -> None:
    class Long(Counting, state=["total"]):
        """Epochs take 3 s, one takes 40 s, the first one 6 s."""

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep({0: 6, 6: 40}.get(epoch.number, 3))
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> list[int | None]:
        await cluster.result()
        return [event.epoch for event in of_kind(cluster, "waits")]

    assert play(job(Long, tasks=2, epochs=9), scenario, nodes=2) == [6], "the first epoch includes the setup"
