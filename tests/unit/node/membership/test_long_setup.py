"""A lease that ends while `setup()` is long: the set-up goes on and is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from cluster_kit import Counting, holder, job, play, stand_still

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Delete, Txn

SETUP_S = 40.0


def freeze_all(cluster: InProcessCluster) -> None:
    stand_still(8.0)


def stop_one_lease(cluster: InProcessCluster) -> None:
    holder(cluster, 0).registration._lease.stop()  # type: ignore[union-attr]


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("hiccup", [freeze_all, stop_one_lease])
def test_setup_survives_an_ended_lease(hiccup: Callable[[InProcessCluster], None], nodes: int) -> None:
    calls: list[int] = []

    class Slow(Counting, state=["total"]):
        async def setup(self) -> None:
            calls.append(self.task_id)
            ends = asyncio.get_running_loop().time() + SETUP_S
            while (left_s := ends - asyncio.get_running_loop().time()) > 0:
                with contextlib.suppress(asyncio.CancelledError):  # as a plain function, which cannot be interrupted
                    await asyncio.sleep(left_s)
            super().setup()

    async def scenario(cluster: InProcessCluster) -> tuple[dict[int, object], int]:
        await asyncio.sleep(10.0)
        assert len(calls) == 4
        hiccup(cluster)
        values = (await cluster.result()).values
        return dict(values), len(cluster.nodes)

    settings = tg.Settings(cancel_s=5.0)
    assert play(job(Slow, settings=settings), scenario, nodes=nodes) == ({0: 3, 1: 3}, nodes)
    assert len(calls) <= 2 * nodes, "each node sets each task up once at most"


def test_finished_setup_survives_a_deleted_key() -> None:
    """A backup is set up, and its primary is not: the backup is no member yet, and loses its key in etcd."""
    calls: list[int] = []

    class Uneven(Counting, state=["total"]):
        async def setup(self) -> None:
            calls.append(self.task_id)
            if len(calls) == 1:
                await asyncio.sleep(SETUP_S)
            super().setup()

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(10.0)
        assert len(calls) == 2
        ready = next(n for n in cluster.nodes if any(r.ready for r in n.replicas.values()))
        await ready.coordinator.txn(Txn(success=(Delete(ready.keeper.view.keys.node(ready.id)),)))
        await cluster.result()
        return len(calls)

    assert play(job(Uneven, tasks=1), scenario, nodes=2) == 2
