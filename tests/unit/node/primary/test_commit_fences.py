"""A commit is fenced by the view it was decided from, however long it takes until it is written."""

from __future__ import annotations

import pytest
from cluster_kit import Counting, blindable, eyes, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult

__all__ = ["blindable"]


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


@pytest.mark.usefixtures("blindable")
def test_a_takeover_between_the_write_and_its_answer_comes_after_the_commit() -> None:
    """It passed for one of before, and the commits that followed waited for more to gather."""
    after: list[bool] = []

    async def answer_late(cluster: InProcessCluster, node: str) -> None:
        leader, other = cluster.node(node), holder(cluster, 1)
        assert other is not leader
        eyes(leader).answer_late(cluster.keys.epoch)

        async def take_over_meanwhile() -> None:
            await eyes(leader).written.wait()
            cluster.crash(other.id)
            await leader.keeper.wait_until(lambda view: view.term(1) == 2)
            eyes(leader).answer()

        leader.own(take_over_meanwhile(), "a takeover")

    async def look(cluster: InProcessCluster, node: str) -> None:
        leader = cluster.node(node)
        assert leader.roles.leader is not None
        after.append(leader.roles.leader._commit_of < leader.keeper.view.generation_revision)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        return await cluster.result()

    given = job(Counting, epochs=6, settings=tg.Settings(epochs_ahead=0))
    stages = {("commit", 0, 3): answer_late, ("committed", 0, 3): look}
    assert play(given, scenario, nodes=3, stages=stages).values == {0: 6, 1: 6}
    assert after == [True]
