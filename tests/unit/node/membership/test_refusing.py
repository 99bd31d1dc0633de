"""The port of a living node refuses for a while: a firewall is reloaded, an address moves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from cluster_kit import Gated, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.errors import PeerGone
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Txn, TxnResult
from taskgraph.transport.memory import MemoryNetwork, MemoryTransport

__all__ = ["gated"]

SETTINGS = tg.Settings(epochs_ahead=0)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """(from, to) pairs that refuse at the moment."""
    links: set[tuple[str, str]] = set()
    find = MemoryNetwork._find

    def refuse(network: MemoryNetwork, caller: str, node: str) -> MemoryTransport:
        if (caller, node) in links:
            raise PeerGone(f"node {node}: nobody listens")
        return find(network, caller, node)

    monkeypatch.setattr(MemoryNetwork, "_find", refuse)
    return links


@pytest.mark.parametrize(
    ("for_s", "why"),
    [(1.5, "it answers"), (2 * SETTINGS.lease_ttl_s, "it renews its lease")],
    ids=["answers", "renews"],
)
def test_living_node_is_cleared(gated: type[Gated], refused: set[tuple[str, str]], for_s: float, why: str) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        primary = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not primary)
        link = (primary.id, backup.id)
        refused.add(link)
        cluster.network.cut(*link)
        cluster.network.heal(*link)
        await asyncio.sleep(for_s / 2)
        assert backup.id in primary.suspects and told(cluster, "evicted")
        await asyncio.sleep(for_s / 2)
        refused.remove(link)
        await asyncio.sleep(3.0)
        (found,) = told(cluster, "found")
        assert not primary.suspects and found.endswith(why)
        gated.gate.set()
        assert (await ended).values == {0: 3}
        assert set(primary.keeper.view.in_sync(0)) == {primary.id, backup.id}

    play(job(gated, tasks=1, settings=SETTINGS), scenario, nodes=2)


@pytest.mark.parametrize("nodes", [2, 3])
def test_mutual_refusals_end(
    gated: type[Gated], refused: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Otherwise takeovers alternate as fast as etcd answers."""
    txn = MemoryCoordinator.txn

    async def slow(coordinator: MemoryCoordinator, what: Txn) -> TxnResult:
        await asyncio.sleep(0.01)  # else it takes no time at all
        return await txn(coordinator, what)

    monkeypatch.setattr(MemoryCoordinator, "txn", slow)

    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        links = list(itertools.permutations([node.id for node in cluster.nodes], 2))
        refused.update(links)
        for one, other in links:
            cluster.network.cut(one, other)
            cluster.network.heal(one, other)
        await asyncio.sleep(1.0)
        taken = len(told(cluster, "takeover"))
        assert 0 < taken <= nodes * len(links), "each took each task from each other node once, at most"
        assert any(found.endswith("back") for found in told(cluster, "found"))
        await asyncio.sleep(2 * SETTINGS.lease_ttl_s)
        assert len(told(cluster, "takeover")) == taken
        refused.clear()
        gated.gate.set()
        assert set((await ended).values.values()) == {3}

    play(job(gated, tasks=nodes, backups=nodes - 1, settings=SETTINGS), scenario, nodes=nodes)


def test_dead_node_stays_suspected(gated: type[Gated]) -> None:
    """Only its port shows that it is dead."""

    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        primary = holder(cluster, 0)
        survivor = next(node for node in cluster.nodes if node is not primary)
        cluster.network.crash(primary.id)  # its process renews the lease for a while, as a zombie's parent might
        lasts_s = SETTINGS.lease_ttl_s
        for _ in range(int(lasts_s)):
            await asyncio.sleep(1.0)
            assert primary.id in survivor.suspects
        cluster.crash(primary.id)
        gated.gate.set()
        assert (await ended).values == {0: 3}
        assert not told(cluster, "found")

    play(job(gated, tasks=1, settings=SETTINGS), scenario, nodes=2)
