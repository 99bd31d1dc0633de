"""A commit is fenced by the view it was decided from, however late it is written. So is the end of a job that fails."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cluster_kit import Counting, blindable, eyes, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.services import NodeServices
from taskgraph.protocol.commit import Leader
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.messages import Report
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


class Crossed(tg.Task):
    """Each answers before it says."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.answer, inbound={"word": "peers"}, outbound={"answer": "peers"})
        epoch.processor(self.say, outbound={"word": "peers"})
        epoch.processor(self.hear, inbound={"answer": "peers"})

    def answer(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("answer", ins["word"])

    def say(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("word", epoch.number)

    def hear(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None: ...


@pytest.mark.parametrize("changes", ["epoch", "generation"])
@pytest.mark.parametrize("builder", [Crossed, Counting], ids=["cycle", "disagreement"])
def test_what_the_leader_fails_the_job_for_is_looked_for_anew_where_something_changed_before_it_is_written(
    builder: type[tg.Task], changes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart, or a takeover, that the leader has not read yet: what was found is of before that."""
    why: list[str] = []
    fail_job, take = NodeServices.fail_job, Leader.report

    async def fails(self: NodeServices, error: Any, *args: Any, **options: Any) -> bool:
        why.append(str(error))
        if len(why) == 1:
            view = self.keeper.view
            assert view.epoch is not None
            written = {"epoch": view.epoch.record.to_bytes(), "generation": b"another primary"}[changes]
            await self.coordinator.txn(Txn(success=(Put(getattr(view.keys, changes), written),)))
        return await fail_job(self, error, *args, **options)

    def disagrees(self: Leader, *reports: Report) -> bool:
        return take(self, *[msgspec.structs.replace(one, sent=one.sent + one.task) for one in reports])

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(tg.JobFailed, match=r"a cycle of waits|do not agree on what was exchanged"):
            await cluster.result()

    monkeypatch.setattr(NodeServices, "fail_job", fails)
    if builder is Counting:
        monkeypatch.setattr(Leader, "report", disagrees)
    play(job(builder), scenario, nodes=2)
    assert len(why) == 2 and why[0] == why[1]


def test_an_error_of_a_primary_that_is_replaced_before_it_is_written_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host is to blame, perhaps: what counts is what comes of the epoch at its successor."""
    raised: list[Any] = []
    fail_job = NodeServices.fail_job

    class Once(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.number == 1 and not raised:
                raised.append(self)
                raise OSError("a file that the other host has")
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        async def fails(self: NodeServices, *args: Any, **options: Any) -> bool:
            (other,) = (node for node in cluster.nodes if node is not self)
            await other.takeovers._become_primary(0, failure=True)
            return await fail_job(self, *args, **options)

        monkeypatch.setattr(NodeServices, "fail_job", fails)
        return await cluster.result()

    assert play(job(Once, tasks=1), scenario, nodes=2).values == {0: 3}
