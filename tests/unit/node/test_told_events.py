"""What nodes tell of each other: the right epoch, and no news of those that leave because the job ended."""

from __future__ import annotations

import asyncio

from cluster_kit import Counting, holder, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event


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
