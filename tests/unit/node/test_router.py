"""Calls to peers: when they are tried again, and when they end although nobody answers."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest
from cluster_kit import job, play

import taskgraph as tg
from taskgraph.errors import PeerLost
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.backoff import Backoff
from taskgraph.protocol.messages import Release


class Idle(tg.Task):
    """Never comes to an end."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.wait)

    async def wait(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.Event().wait()


async def never(caller: str, message: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def test_pauses_are_short_at_first_and_bounded() -> None:
    backoff = Backoff()
    pauses = [backoff.step() for _ in range(12)]
    assert pauses[:3] == [0.001, 0.002, 0.004]
    assert pauses == sorted(pauses) and pauses[-1] == 0.05
    backoff.reset()
    assert backoff.step() == 0.001


def test_a_call_to_a_node_that_does_not_answer_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        caller, silent = cluster.nodes[:2]
        await caller.keeper.wait_until(lambda view: silent.id in view.nodes)
        monkeypatch.setattr(silent.transport, "_serve", never)
        message = Release(0, 1, 1, 0)
        call = asyncio.ensure_future(caller.router.to_node(silent.id, message, timeout_s=60))
        done, _ = await asyncio.wait([call], timeout=10)
        assert not done
        cluster.store.revoke(silent.keeper.view.nodes[silent.id].record.lease)
        done, _ = await asyncio.wait([call], timeout=1)
        assert done
        with pytest.raises(PeerLost, match="lease"):
            await call

    play(job(Idle), scenario, nodes=2)
