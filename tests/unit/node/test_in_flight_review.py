"""Several epochs of a task at a time, where something goes wrong, or is told of them."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, holder, play

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


class InFlight(Counting, state=["total"]):
    """Of its epochs only what is added to the state has an order."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.early, outbound={"x": self.task_id})
        epoch.processor(self.count, inbound={"x": self.task_id})

    @tg.stateless
    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.number)


def test_what_the_earliest_done_waits_for_is_told_however_many_others_are_held() -> None:
    """Later epochs need no more than the acknowledgement of the one member; epoch 0 waits for the other backup."""

    class SlowSetup(InFlight, state=["total"]):
        async def setup(self) -> None:  # type: ignore[override]
            self.total = 0
            setups.append(self.task_id)
            if setups.count(self.task_id) == 3:
                await asyncio.sleep(10_000)

    setups: list[int] = []
    waiting = tg.Job(tasks=2, epochs=9, builder=lambda _: SlowSetup(), backups=2, settings=tg.Settings(admit_wait_s=20))

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(15)
        for task in range(2):
            primary = holder(cluster, task).primaries[task]
            assert [attempt.number for attempt in primary.attempts] == [0, 1, 2, 3]
            assert primary.waiting_for.startswith("the admission of n")
        assert not ended.done()
        await asyncio.sleep(10)
        assert ended.done()
        return ended.result()

    assert play(waiting, scenario, nodes=3).values == {0: 9, 1: 9}
