"""Reports reach the leader, even if one is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.router import Router
from taskgraph.protocol.messages import Reply, Report


class _Flagged(Counting, state=["total"]):
    """Its tasks are idle before they are finished."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.flag, outbound={"x": 1 - self.task_id})
        epoch.processor(self.count, inbound={"x": 1 - self.task_id})

    async def flag(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.flag([1 - self.task_id], 1)
        outs.put("x", 1)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: int) -> None:
        pass


@pytest.mark.parametrize("done", [False, True])
def test_lost_report_is_sent_again(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection breaks, so nothing announces the loss."""
    lost: list[Report] = []
    begin = Router.begin

    def losing(router: Router, task: int, message: Any, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        if quiet and not lost and isinstance(message, Report) and message.stamp.epoch == 1 and message.done is done:
            lost.append(message)
            return asyncio.get_running_loop().create_future()
        return begin(router, task, message, quiet=quiet)

    monkeypatch.setattr(Router, "begin", losing)

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result(timeout_s=500)).values[0] == 3

    play(job(_Flagged), scenario, nodes=2)
    assert lost
