"""User code fails because a replaced primary had taken messages that the new one does not know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult


class Account(tg.Task, state=["total"]):
    """In every epoch task 1 opens an account at task 2, then task 0 books on it. A test gets in between."""

    total: int

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.pay, inbound={"opened": 1}, outbound={"paid": 2})
        elif self.task_id == 1:
            epoch.processor(self.open, outbound={"opened": 0})
        else:
            epoch.processor(self.close, inbound={"paid": 0})

    async def open(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("opened", await epoch.request(2, "open_account"))

    async def pay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert ins["opened"]
        await self.meanwhile(epoch.number)
        outs.put("paid", await epoch.request(2, "book", 10))

    async def meanwhile(self, epoch: int) -> None: ...

    @tg.handles("open_account")
    async def open_account(self, epoch: tg.Epoch, sender: int, payload: Any) -> bool:
        epoch.scratch.account = []
        return True

    @tg.handles("book")
    async def book(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
        epoch.scratch.account.append(payload)
        return len(epoch.scratch.account)

    def close(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert ins["paid"] == 1
        self.total += sum(epoch.scratch.account)

    def result(self) -> int:
        return self.total


@pytest.mark.parametrize("order", range(4))
def test_handler_missing_predecessors_state_restarts_epoch(order: int) -> None:
    """The holder of the predecessor's answer asks for a restart, too, which the test delays until the handler
    failed.
    """
    cluster: InProcessCluster
    crashed = asyncio.Event()

    class Meanwhile(Account):
        async def meanwhile(self, epoch: int) -> None:
            if epoch == 1 and not crashed.is_set():
                lead, opener, victim = (holder(cluster, task).id for task in range(3))
                assert len({lead, opener, victim}) == 3
                cluster.network.cut(opener, lead)
                cluster.crash(victim)
                cluster.add()
                crashed.set()

    async def scenario(running: InProcessCluster) -> JobResult:
        nonlocal cluster
        cluster = running
        ended = asyncio.ensure_future(running.result())
        await crashed.wait()
        leader = holder(running, 0).keeper
        await leader.wait_until(lambda view: not view.running or (view.stamp is not None and view.stamp.attempt > 1))
        for one in running.nodes:
            for other in running.nodes:
                running.network.heal(one.id, other.id)
        return await ended

    result = play(job(Meanwhile, tasks=3), scenario, nodes=4, order=order)
    assert result.values == {0: 0, 1: 0, 2: 30}
    assert (result.failovers, result.restarts) == (1, 1)


@pytest.mark.parametrize("order", range(4))
def test_users_error_after_takeover_fails_job(order: int) -> None:
    """The error comes again in the next attempt, which had no takeover."""

    class Wrong(Account):
        async def book(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
            if epoch.number == 1:
                raise ValueError("no such account")
            return await super().book(epoch, sender, payload)

    with pytest.raises(tg.JobFailed, match=r"task 2, epoch 1.*no such account"):
        tg.testing.run(job(Wrong, tasks=3), kills={(2, 1): "compose"}, order=order, strict=False)
