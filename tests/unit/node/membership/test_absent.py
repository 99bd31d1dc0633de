"""Nodes that are declared gone because their key stayed absent."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, Joining, blindable, die, eyes, gated, holder, job, joining, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node
from taskgraph.protocol.messages import Call, Reply

__all__ = ["blindable", "gated", "joining"]


def lets_go(cluster: InProcessCluster, observer: Node, absent: Node) -> None:
    """Removes a node's key; the node can neither come back nor be evicted."""
    keys = observer.keeper.view.keys
    eyes(absent).refuse(keys.node(absent.id))
    eyes(observer).refuse(keys.member(0, absent.id))
    cluster.store.revoke(absent.keeper.view.nodes[absent.id].record.lease)


@pytest.mark.usefixtures("blindable")
def test_absence_before_observers_pause_counts_nothing(gated: type[Gated]) -> None:
    """A pause of etcd pauses all nodes, and may remove every key."""
    settings = tg.Settings(epochs_ahead=0)
    limit_s = settings.lost_after_s

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        observer = holder(cluster, 0)
        absent = next(node for node in cluster.nodes if node is not observer)
        lets_go(cluster, observer, absent)
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
def test_returning_node_is_not_gone(gated: type[Gated]) -> None:
    """The answers of etcd were lost until it was back."""
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
        await absent.wait_while_paused()
        eyes(observer).lose("")
        await asyncio.sleep(1.5 * settings.lost_after_s)
        assert absent.id not in observer.keeper.view.gone and absent in cluster.nodes
        gated.gate.set()
        assert (await ended).values == {0: 3}

    play(job(gated, tasks=1, settings=settings), scenario, nodes=2)


async def without_etcd(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once both tasks have a backup all nodes pause and all keys vanish; then etcd is back, and no node may put its key
    yet.
    """
    keeper = cluster.nodes[0].keeper
    await keeper.wait_until(lambda view: all(len(view.in_sync(task)) == 2 for task in (0, 1)))
    view = keeper.view
    with monkeypatch.context() as away:
        away.setattr(Registration, "_is_unrenewed", lambda self, lease: True)
        for node in cluster.nodes:
            eyes(node).refuse(view.keys.node(node.id))
            await node.keeper.wait_until(lambda _, node=node: node.paused)
        for record in [known.record for known in view.nodes.values()]:
            cluster.store.revoke(record.lease)


@pytest.mark.usefixtures("blindable")
@pytest.mark.parametrize("first", [0, 1])
def test_common_loss_gives_time_to_return(gated: type[Gated], monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Otherwise the first node to return would take over from the others."""

    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        nodes = sorted(cluster.nodes, key=lambda node: node is not holder(cluster, first))
        await without_etcd(cluster, monkeypatch)
        gated.gate.set()
        for node in nodes:
            eyes(node).refuse("")
            await node.wait_while_paused()
            await asyncio.sleep(0.5)
        assert (await ended).values == {0: 3, 1: 3}
        assert not told(cluster, "takeover") and not told(cluster, "evicted")

    play(job(gated), scenario, nodes=2)


async def joins(cluster: InProcessCluster, joining: type[Joining]) -> tuple[Node, Node]:
    """A task's primary, and a third node that sets up a replica of it."""
    await joining.reached.wait()
    joining.joins = True
    joined = cluster.node(cluster.add())
    await joining.joining.wait()
    (task,) = joined.roles.replicas
    return holder(cluster, task), joined


def test_lost_candidate_is_declared_gone(joining: type[Joining], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own key names it in etcd, and no port refuses."""
    settings = tg.Settings(epochs_ahead=0)

    async def scenario(cluster: InProcessCluster) -> None:
        primary, lost = await joins(cluster, joining)
        calls: list[object] = []
        to_node = primary.router.to_node

        async def counted(node: str, message: Call, *, timeout_s: float | None) -> Reply:
            if node == lost.id:
                calls.append(message)
            return await to_node(node, message, timeout_s=timeout_s)

        die(cluster, lost.id, host=True)
        await primary.keeper.wait_until(lambda view: lost.id not in view.nodes)
        await asyncio.sleep(1.0)
        assert lost.id in primary.suspects
        monkeypatch.setattr(primary.router, "to_node", counted)
        await asyncio.sleep(1.5 * settings.lost_after_s)
        assert not calls
        assert lost.id in primary.keeper.view.gone and lost.id not in primary.suspects
        (gone,) = told(cluster, "gone")
        assert "n3" in gone
        joining.gate.set()
        assert (await cluster.result()).values == {0: 3, 1: 3}

    play(job(joining, settings=settings), scenario, nodes=2)
