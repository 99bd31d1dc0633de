"""How often the leader decides: its decisions look at every task, so they must not be as many as reports or events.

And how much it tells of what it found, and that it loses nothing of what it is told too early.
"""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import IN_STEP, Counting, Gated, blindable, eyes, gated, holder, job, play, until_attempt

import taskgraph as tg
from taskgraph.errors import first_of
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary import leader
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.protocol.commit import Action, Commit, Leader
from taskgraph.protocol.cycles import Edge
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.view import JobView

__all__ = ["blindable", "gated"]

EPOCHS = 40


def test_it_decides_once_for_an_epoch_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[Action] = []
    decide = Leader.decide

    def counted(self: Leader, view: JobView, *, settled: bool = False) -> Action:
        decisions.append(decide(self, view, settled=settled))
        return decisions[-1]

    monkeypatch.setattr(Leader, "decide", counted)
    counting = tg.Job(tasks=5, epochs=EPOCHS, builder=lambda _: Counting(), settings=IN_STEP)
    result = tg.run(counting, nodes=0, timeout_s=30)
    assert result.values == dict.fromkeys(range(5), EPOCHS)
    commits = sum(isinstance(decision, Commit) for decision in decisions)
    assert commits == EPOCHS
    # Beside them: when nodes and members came, and twice a second. Two for each epoch would be one too many.
    assert len(decisions) - commits < EPOCHS / 2


def test_it_decides_once_for_a_commit_of_several_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ready when one is written is committed with more, later, and not looked at before that."""
    decided, written = list[Action](), list[Commit]()
    decide, commit = Leader.decide, LeaderRole._commit

    def counted(self: Leader, view: JobView, *, settled: bool = False) -> Action:
        decided.append(decide(self, view, settled=settled))
        return decided[-1]

    async def counted_commit(self: LeaderRole, action: Commit) -> None:
        written.append(action)
        await commit(self, action)

    monkeypatch.setattr(Leader, "decide", counted)
    monkeypatch.setattr(LeaderRole, "_commit", counted_commit)
    counting = tg.Job(tasks=5, epochs=1200, builder=lambda _: Counting())
    assert tg.run(counting, nodes=0, timeout_s=30).values == dict.fromkeys(range(5), 1200)
    assert len(written) > 10
    assert sum(isinstance(decision, Commit) for decision in decided) - len(written) < len(written) / 3


def test_a_cycle_of_waits_that_is_found_once_fails_nothing(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks answer at different moments: each may have waited for another, and never all of them at once."""
    found = [None, [Edge(0, "count", "item", "x", 0, "count")], None] * 2
    monkeypatch.setattr(leader, "find_cycle", lambda waits: found.pop() if found else None)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await gated.reached.wait()
        while found:  # noqa: ASYNC110
            await asyncio.sleep(1)
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=1).values == {0: 3}


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(["a"], "a"), (["a", "b", "c"], "a; b; c"), (["a", "b", "c", "d", "e"], "a; b; c; and 2 more")],
)
def test_of_many_lines_it_tells_the_first(lines: list[str], shown: str) -> None:
    assert "; ".join(first_of(lines, 3)) == shown


@pytest.mark.usefixtures("blindable")
def test_what_is_told_of_an_attempt_that_the_leader_has_not_read_of_counts_once_it_has(gated: type[Gated]) -> None:
    """Void, it would come back by a look at an epoch that stands still, and not before."""

    async def scenario(cluster: InProcessCluster) -> float:
        await gated.reached.wait()
        leads, other = holder(cluster, 0), holder(cluster, 1)
        assert other is not leads
        eyes(leads).blind(at=cluster.keys.epoch)
        other.roles.primaries[1].ask_restart(Stamp(1, 1), "a test asks for it")
        await until_attempt(other, 2)
        gated.gate.set()
        await asyncio.sleep(1.0)
        assert leads.keeper.view.stamp == Stamp(1, 1)
        began = asyncio.get_running_loop().time()
        eyes(leads).see()
        assert (await cluster.result()).values == {0: 3, 1: 3}
        return asyncio.get_running_loop().time() - began

    assert play(job(gated, backups=0), scenario, nodes=2) < tg.Settings().stall_check_s
