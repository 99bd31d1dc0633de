"""Several epochs of a task at a time, where something goes wrong, or is told of them."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


class GivesUp(Counting, state=["total"]):
    """Its epoch 2 awaits what it cancelled."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 2:
            given_up = asyncio.get_running_loop().create_future()
            given_up.cancel()
            await given_up
        await super().count(epoch, ins, outs)


class GivesUpInFlight(GivesUp, state=["total"]):
    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)


@pytest.mark.parametrize("kind", [GivesUp, GivesUpInFlight])
def test_who_awaits_what_it_cancelled_fails_the_job(kind: type[GivesUp]) -> None:
    with pytest.raises(tg.JobFailed, match="CancelledError") as caught:
        play(tg.Job(tasks=2, epochs=5, builder=lambda _: kind()), result, nodes=1)
    assert caught.value.epoch == 2
