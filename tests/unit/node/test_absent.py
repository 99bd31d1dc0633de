"""Who is declared gone because its key stayed absent."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["blindable", "gated"]


@pytest.mark.usefixtures("blindable")
def test_time_before_an_observer_was_paused_counts_for_nothing(gated: type[Gated]) -> None:
    """A pause of etcd pauses everybody, and may let every key vanish: it loses nobody."""
    settings = tg.Settings(epochs_ahead=0)
    limit_s = settings.lost_after_s

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        observer = holder(cluster, 0)
        absent = next(node for node in cluster.nodes if node is not observer)
        keys = observer.keeper.view.keys
        eyes(absent).refuse(keys.node(absent.id))  # it cannot come back
        eyes(observer).refuse(keys.member(0, absent.id))  # nor be evicted
        cluster.store.revoke(absent.keeper.view.nodes[absent.id].record.lease)
        await asyncio.sleep(0.8 * limit_s)
        for _ in range(int(0.4 * limit_s / 0.05)):
            observer.paused = True  # it would resume
            await asyncio.sleep(0.05)
        await asyncio.sleep(3.0)
        assert absent.id not in observer.keeper.view.gone
        await asyncio.sleep(1.5 * limit_s)
        assert absent.id in observer.keeper.view.gone

    play(job(gated, tasks=1, settings=settings), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
def test_who_came_back_while_it_was_being_declared_gone_is_not(gated: type[Gated]) -> None:
    """The answers of etcd were lost for so long."""
    settings = tg.Settings(epochs_ahead=0)

    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        observer = holder(cluster, 0)
        absent = next(node for node in cluster.nodes if node is not observer)
        keys = observer.keeper.view.keys
        eyes(absent).refuse(keys.node(absent.id))  # it cannot come back
        eyes(observer).lose(keys.gone(absent.id))
        cluster.store.revoke(absent.keeper.view.nodes[absent.id].record.lease)
        await asyncio.sleep(1.5 * settings.lost_after_s)
        assert eyes(observer).losses and absent.paused
        eyes(absent).refuse("")
        await absent.while_paused()
        eyes(observer).lose("")
        await asyncio.sleep(1.5 * settings.lost_after_s)
        assert absent.id not in observer.keeper.view.gone and absent in cluster.nodes
        gated.gate.set()
        assert (await ended).values == {0: 3}

    play(job(gated, tasks=1, settings=settings), scenario, nodes=2)
