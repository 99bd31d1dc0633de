"""What nodes tell of each other: the right epoch, and no news of those that leave because the job ended."""

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


def test_an_eviction_right_after_a_take_over_tells_the_epoch_it_happened_in() -> None:
    async def crash(cluster: InProcessCluster, node: str) -> None:
        cluster.crash(node)
        await asyncio.Event().wait()  # a killed process does nothing more

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result()).values == {0: 5}
        assert [event.epoch for event in of_kind(cluster, "takeover")] == [3]
        evicted = of_kind(cluster, "evicted")
        assert evicted and all(event.epoch == 3 and not event.transient for event in evicted)

    play(job(Counting, tasks=1, epochs=5), scenario, nodes=3, stages={("compose", 0, 3): crash})


def test_a_death_that_its_launcher_tells_before_anybody_misses_the_node_is_told(gated: type[Gated]) -> None:
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
def test_a_death_is_told_once_by_whom_the_port_refuses(gated: type[Gated], when: str, text: str) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        speaker, *others = sorted(cluster.nodes, key=lambda node: node.id)
        idle = next(node for node in others if node is not holder(cluster, 0))
        if when == "before it is killed":
            speaker.suspicion.refused(idle.id)
        cluster.crash(idle.id)
        if when == "as soon as its death is read":
            while idle.id not in speaker.keeper.view.gone:  # noqa: ASYNC110
                await asyncio.sleep(0)
        speaker.suspicion.refused(idle.id)
        await asyncio.sleep(1)
        gated.gate.set()
        await cluster.result()
        assert [event.text for event in of_kind(cluster, "lost", "gone")] == [f"{idle.name} died: {text}"]

    play(job(gated, tasks=1, backups=0), scenario, nodes=3)


def test_who_leaves_after_the_jobs_end_is_no_news_that_is_kept() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        ended = len(cluster.events)
        first = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not first)
        cluster.crash(backup.id)
        first.suspicion.lost(backup.id)  # a session to it broke
        await asyncio.sleep(5)
        later = cluster.events[ended:]
        assert {event.kind for event in later if not event.transient} <= {"finished"}
        assert {"lost", "evicted"} & {event.kind for event in later}, "it was noticed"

    play(job(Counting, tasks=1), scenario, nodes=2)


def test_what_an_epoch_waits_for_is_news_where_it_takes_longer_than_those_before() -> None:
    class Long(Counting, state=["total"]):
        """Epochs of 3 s, one of 40, after a first one of 6."""

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep({0: 6, 6: 40}.get(epoch.number, 3))
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> list[int | None]:
        await cluster.result()
        return [event.epoch for event in of_kind(cluster, "waits")]

    assert play(job(Long, tasks=2, epochs=9), scenario, nodes=2) == [6], "the first epoch includes the setup"
