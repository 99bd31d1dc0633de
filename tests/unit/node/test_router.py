"""Calls to peers: retries, and ends without an answer."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest
from cluster_kit import holder, job, play

import taskgraph as tg
from taskgraph.errors import PeerLost
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Release


class Idle(tg.Task):
    """Never returns."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.wait)

    async def wait(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.Event().wait()


async def never(caller: str, message: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def test_call_ends_with_nodes_lease(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_call_ends_at_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old primary's key may still be there."""

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        silent = holder(cluster, 0)
        caller = next(node for node in cluster.nodes if node is not silent)
        await caller.keeper.wait_until(lambda view: caller.id in view.in_sync(0))
        monkeypatch.setattr(silent.transport, "_serve", never)
        message = Release(1, 1, 1, 0)
        calls = [
            asyncio.ensure_future(caller.router.to_node(silent.id, message, timeout_s=60, task=task))
            for task in (0, None)
        ]
        done, _ = await asyncio.wait(calls, timeout=10)
        assert not done
        caller.suspicion.note_port_refused(silent.id)
        await caller.keeper.wait_until(lambda view: view.primary_node(0) == caller.id)
        done, others = await asyncio.wait(calls, timeout=1)
        assert done == {calls[0]} and silent.id in caller.keeper.view.nodes
        with pytest.raises(PeerLost, match="task 0"):
            await calls[0]
        for call in others:
            call.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    play(job(Idle), scenario, nodes=2)
