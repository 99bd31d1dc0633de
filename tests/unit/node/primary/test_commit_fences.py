"""A commit is fenced by the view it was decided from, however long it takes until it is written."""

from __future__ import annotations

from cluster_kit import Counting, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult


def test_a_takeover_between_the_decision_and_the_write_makes_the_commit_fail() -> None:
    async def take_over_meanwhile(cluster: InProcessCluster, node: str) -> None:
        leader, other = cluster.node(node), holder(cluster, 1)
        assert other is not leader
        cluster.crash(other.id)
        await leader.keeper.wait_until(lambda view: view.term(1) == 2)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        return await cluster.result()

    given = job(Counting, epochs=6, settings=tg.Settings(epochs_ahead=0))
    result = play(given, scenario, nodes=3, stages={("commit", 0, 3): take_over_meanwhile})
    assert result.values == {0: 6, 1: 6}
    assert result.failovers >= 1
