"""Takeovers: one for each loss."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, die, gated, holder, job, paused, play, told

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import HandOver, Stamp

__all__ = ["blindable", "gated"]


def test_slower_backup_looks_again(gated: type[Gated]) -> None:
    """Otherwise it would take over from the one that has just begun."""

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


def test_stale_handover_is_refused(gated: type[Gated]) -> None:
    """The task has another term by now, or is amid an epoch."""

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
                await backup.takeovers.accept_handover(message)

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


def test_replaced_leader_steps_down(gated: type[Gated]) -> None:
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
