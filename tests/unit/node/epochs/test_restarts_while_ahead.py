"""Restarts while tasks run ahead of the commit: nothing of the old attempt remains."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, blindable, eyes, holder, play, restart, until_attempt

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Stamp

__all__ = ["blindable"]

AHEAD = tg.Settings(epochs_ahead=4)
EPOCHS = 6


class Reporting(Counting, state=["total"]):
    """Tasks without channels that report their epoch."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.before(epoch.number)
        await super().count(epoch, ins, outs)
        epoch.report(number=epoch.number)

    async def before(self, epoch: int) -> None:
        """What a test adds."""


def job(builder: type[Reporting]) -> tg.Job:
    return tg.Job(tasks=2, epochs=EPOCHS, builder=lambda _: builder(), backups=1, settings=AHEAD)


def test_restart_drops_unreported_epochs() -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    class Fresh(Reporting, state=["total"]):
        async def before(self, epoch: int) -> None:
            if self.task_id == 1:
                await gate.wait()
            elif epoch == 2:
                begun.set()

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await begun.wait()
        await restart(cluster, Stamp(1, 0))
        gate.set()
        return await cluster.result()

    found = play(job(Fresh), scenario, nodes=2)
    assert found.restarts == 1
    assert found.values == {0: EPOCHS, 1: EPOCHS}
    assert [each.numbers["number"] for each in found.reports] == list(range(EPOCHS))


@pytest.mark.usefixtures("blindable")
def test_commit_and_restart_read_at_once() -> None:
    """Task 1 has begun epoch 2 when it reads that epoch 0 is committed, and epoch 1 starts again."""
    ahead, asked = asyncio.Event(), asyncio.Event()

    class Fresh(Reporting, state=["total"]):
        async def before(self, epoch: int) -> None:
            if self.task_id == 0 and epoch == 0:
                await ahead.wait()
            if self.task_id == 0 and epoch == 1:
                await asked.wait()

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            if self.task_id == 1 and epoch.number == 2:
                ahead.set()

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await ahead.wait()
        late = holder(cluster, 1)
        assert late is not holder(cluster, 0)
        eyes(late).blind()
        leader = holder(cluster, 0).keeper
        await leader.wait_until(lambda view: view.stamp is not None and view.stamp >= Stamp(1, 1))
        await restart(cluster, Stamp(1, 1))
        assert late.keeper.view.stamp == Stamp(1, 0)
        boundaries = late.roles.replicas[1].boundaries
        assert {boundary.stamp.attempt for boundary in boundaries.pending} == {1}
        eyes(late).see()
        await until_attempt(late, 2)
        await asyncio.sleep(1.0)
        assert not [boundary for boundary in boundaries.pending if boundary.stamp.attempt == 1], "nobody needs them"
        asked.set()
        return await cluster.result()

    found = play(job(Fresh), scenario, nodes=2)
    assert found.restarts == 1
    assert found.values == {0: EPOCHS, 1: EPOCHS}


def test_mistake_after_takeover_restarts_the_attempt() -> None:
    met: list[int] = []

    class Fresh(Reporting, state=["total"]):
        async def before(self, epoch: int) -> None:
            if self.task_id == 0 and epoch == 3 and not met:
                met.append(epoch)
                raise ValueError("as it is while somebody is replaced")

    async def die(cluster: InProcessCluster, node: str) -> None:
        cluster.crash(node)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        return await cluster.result()

    found = play(job(Fresh), scenario, nodes=2, stages={("compose", 1, 2): die})
    assert met
    assert (found.failovers, found.restarts) == (1, 1)
    assert found.values == {0: EPOCHS, 1: EPOCHS}
