"""How a job begins."""

from __future__ import annotations

import asyncio
import logging

import pytest
from cluster_kit import Counting, job, play, told

from taskgraph.coordination.api import Lease, Listing
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.errors import Unavailable
from taskgraph.launch import inprocess
from taskgraph.launch.inprocess import InProcessCluster

SETUP_S = 5.0


class Loading(Counting, state=["total"]):
    """Its set-up takes long."""

    async def setup(self) -> None:
        await asyncio.sleep(SETUP_S)
        super().setup()


def test_backups_are_set_up_beside_the_primaries() -> None:
    async def scenario(cluster: InProcessCluster) -> float:
        began = asyncio.get_running_loop().time()
        assert (await cluster.result()).values == {0: 3, 1: 3}
        assert all(len(cluster.nodes[0].keeper.view.in_sync(task)) == 2 for task in range(2))
        return asyncio.get_running_loop().time() - began

    assert SETUP_S <= round(play(job(Loading), scenario, nodes=2), 3) < SETUP_S + 1


@pytest.mark.parametrize("kind", ["list", "lease"])
def test_starting_node_waits_for_etcd(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryCoordinator):
        """Does not answer the first calls of one kind."""

        left = 3

        def _answer(self, asked: str) -> None:
            if asked == kind and self.left:
                self.left -= 1
                raise Unavailable("no usable answer from etcd")

        async def list(self, prefix: str) -> Listing:
            self._answer("list")
            return await super().list(prefix)

        async def lease(self, ttl_s: float, *, stall_limit_s: float) -> Lease:
            self._answer("lease")
            return await super().lease(ttl_s, stall_limit_s=stall_limit_s)

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result()).values == {0: 3, 1: 3}

    monkeypatch.setattr(inprocess, "MemoryCoordinator", Away)
    with caplog.at_level(logging.WARNING):
        play(job(Counting), scenario, nodes=1)
    said = [record.message for record in caplog.records if "waiting for etcd" in record.message]
    assert said == ["waiting for etcd: no usable answer from etcd"], "once"


def test_status_shows_wait_for_nodes() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        def status() -> list[str]:
            return [wait for node in cluster.nodes for wait in node.status().waits]

        while len(cluster.nodes[0].keeper.view.nodes) < 2:  # noqa: ASYNC110 (before it runs, there is nobody to ask)
            await asyncio.sleep(0.01)
        await asyncio.sleep(5)
        text = "the job waits for nodes: 2 of at least 3 are here (min_nodes)"
        assert status() == [text] and told(cluster, "waits").count(text) == 1
        assert cluster.waits() == f"it waits: {text}"
        cluster.add()
        assert (await cluster.result()).values == {0: 3, 1: 3}
        assert status() == []

    play(job(Counting, min_nodes=3), scenario, nodes=2)
