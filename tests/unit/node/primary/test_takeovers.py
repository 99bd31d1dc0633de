"""Takeovers: one for each loss, and what the new primary begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_kit import Counting, Gated, blindable, die, eyes, gated, holder, job, paused, play, told

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.graph.values import encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import HandOver, Stamp

__all__ = ["blindable", "gated"]


def test_of_two_backups_that_see_a_death_the_later_one_looks_again(gated: type[Gated]) -> None:
    """What it had decided before its turn came was to take over: it did so from the one that had just begun."""

    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        first = holder(cluster, 0)
        await first.keeper.wait_until(lambda view: len(view.in_sync(0)) == 3)
        gated.reached.clear()
        die(cluster, first.id)
        await gated.reached.wait()
        await asyncio.sleep(5)
        gated.gate.set()
        assert (await ended).failovers == 1
        assert len(told(cluster, "takeover")) == 1

    play(job(gated, tasks=1, backups=2), scenario, nodes=3)


def test_a_hand_over_that_is_not_of_now_or_to_a_node_that_cannot_is_refused(gated: type[Gated]) -> None:
    """Its sender asked long ago: by now the task has another term, or is amid an epoch."""

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not first)
        view = first.keeper.view
        at, term = view.stamp, view.term(0)
        assert at is not None and at.epoch > 0
        now = HandOver(at, 0, term)

        async def refused(message: HandOver) -> None:
            with pytest.raises(Refused, match="cannot take over task 0"):
                await backup.takeovers.hand_over(message)

        await refused(HandOver(Stamp(at.attempt, at.epoch - 1), 0, term))
        await refused(HandOver(at, 0, term - 1))
        async with paused(backup):
            await refused(now)
        backup.draining = True
        await refused(now)
        backup.draining = False
        assert not told(cluster, "takeover")
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=2).values == {0: 3}


class Stands(Counting, state=["total"]):
    """Task 1 waits in epoch `at` for `gate`."""

    at: int
    gate: asyncio.Event

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == self.at:
            await self.gate.wait()
        await super().count(epoch, ins, outs)


@pytest.fixture
def stands() -> type[Stands]:
    class Fresh(Stands, state=["total"]):
        gate = asyncio.Event()

    return Fresh


class Stateless(tg.Task):
    """Reports the number of each epoch."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.work)

    async def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.report(n=epoch.number)


def alone(builder: Callable[[int], tg.Task], where: Path) -> tg.Job:
    """No task has a backup; boundaries 2 and 4 are checkpoints."""
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=0.5)
    return job(builder, epochs=6, backups=0, checkpoint=f"file://{where}", checkpoint_every=2, settings=settings)


async def stands_at(cluster: InProcessCluster, epoch: int) -> tuple[Node, Node]:
    """Once there is a checkpoint, and that epoch is at work: the node of task 0, and the other one."""
    await cluster.nodes[0].keeper.wait_until(
        lambda view: view.checkpoint is not None and view.stamp is not None and view.stamp.epoch == epoch
    )
    first = holder(cluster, 0)
    return first, next(node for node in cluster.nodes if node is not first)


def test_who_is_replaced_as_the_leader_and_lives_leads_no_more(gated: type[Gated]) -> None:
    """It would take reports that nobody commits, and try to write what etcd refuses, for as long as its node lives."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        second = next(node for node in cluster.nodes if node is not first)
        await second.takeovers._become_primary(0, failure=False)
        await first.keeper.wait_until(lambda view: view.primary_node(0) == second.id)
        await asyncio.sleep(0.01)
        assert first.leader is None and second.leader is not None
        assert "leader" not in {task.get_name() for task in asyncio.all_tasks() if task is not second.roles._leading}
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3}

    play(job(gated, tasks=1), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
def test_a_restart_that_the_leader_was_asked_for_as_it_died_its_successor_is_asked_for(gated: type[Gated]) -> None:
    """It had taken the request, and written nothing: without the restart the epoch would stand still."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        leader = holder(cluster, 0)
        asks = next(node for node in cluster.nodes if node is not leader)
        await leader.keeper.wait_until(lambda view: len(view.in_sync(0)) == len(view.in_sync(1)) == 2)
        assert holder(cluster, 1) is asks
        at = asks.keeper.view.stamp
        assert at is not None
        eyes(leader).lose(cluster.keys.epoch)
        asks.roles.primaries[1].ask_restart(at, "a test asks for it")
        await asyncio.sleep(1.0)
        assert eyes(leader).losses and asks.keeper.view.stamp == at
        cluster.crash(leader.id)
        await asks.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.attempt > at.attempt)
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3, 1: 3}

    play(job(gated), scenario, nodes=2)


def test_what_a_replica_held_counts_for_nothing_where_its_task_begins_anew(
    stands: type[Stands], tmp_path: Path
) -> None:
    """It is a boundary of that very epoch, and passed for the one that was committed: the file has that."""
    stands.at = 2

    async def scenario(cluster: InProcessCluster) -> None:
        first, other = await stands_at(cluster, 2)
        replica = other.roles.replica(0)
        replica.promise(1, 1)
        wrong = encode({"state": {"total": 77}, "numbers": {}, "log": {}}, what="a boundary that did not commit")
        assert replica.boundaries.hold(Boundary(Stamp(1, 2), 1, wrong), committed=True)
        cluster.crash(first.id)
        await other.keeper.wait_until(lambda view: view.primary_node(0) == other.id)
        stands.gate.set()
        assert (await cluster.result()).values == {0: 6, 1: 6}
        assert told(cluster, "rolled back") == []

    play(alone(stands, tmp_path), scenario, nodes=2)


def test_a_task_without_state_takes_no_numbers_of_a_checkpoint_of_before(stands: type[Stands], tmp_path: Path) -> None:
    """The checkpoint has a file of task 0 in any case; what was reported before that one is not of this epoch."""
    stands.at = 3

    async def scenario(cluster: InProcessCluster) -> None:
        first, other = await stands_at(cluster, 3)
        cluster.crash(first.id)
        await other.keeper.wait_until(lambda view: view.primary_node(0) == other.id)
        stands.gate.set()
        result = await cluster.result()
        assert told(cluster, "rolled back") == [] and result.values == {1: 6}
        reported = {row.epoch: row.by_task[0] for row in result.reports}
        assert {3, 4, 5} <= reported.keys() and reported == {epoch: {"n": epoch} for epoch in reported}

    play(alone(lambda task: stands() if task else Stateless(), tmp_path), scenario, nodes=2)
