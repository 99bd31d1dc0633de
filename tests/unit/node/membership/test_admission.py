"""Nodes that cannot speak with the members are refused, and the job goes on without them."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, die, gated, job, play

from taskgraph.errors import JobError
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord
from taskgraph.settings import Settings

__all__ = ["blindable", "gated"]


def marked(cluster: InProcessCluster, token_mark: str) -> Node:
    """Starts a node with the token of that mark."""
    node = cluster.node(cluster.add())
    node._token_mark = token_mark
    return node


def run_of(cluster: InProcessCluster, node: Node) -> asyncio.Task[None]:
    return cluster._members[node.id].run


async def works(cluster: InProcessCluster, gated: type[Gated]) -> Node:
    """Returns the first node, with a token, once the job is under way."""
    first = cluster.nodes[0]
    first._token_mark = "ours"
    await gated.reached.wait()
    return first


def test_wrong_token_never_registers(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        other = marked(cluster, "another")
        await asyncio.wait([run_of(cluster, other)])
        error = cluster._node_failed.result()
        assert isinstance(error, JobError) and "n2 on n2 has another token than n1 on n1" in str(error)
        assert "cannot take part in job" in str(error) and seen <= {first.id}
        assert [event.node for event in cluster.events if event.kind == "refused"] == ["n2"]
        same = marked(cluster, "ours")
        await first.keeper.wait_until(lambda view: same.id in view.nodes)

    play(job(gated), scenario, nodes=1)


def test_later_of_two_conflicting_nodes_leaves(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    async def blindly(self: Registration) -> None:
        """Registers as if the other node were not there."""

    monkeypatch.setattr(Registration, "_wait_until_reachable", blindly)

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = marked(cluster, "another")
        await asyncio.wait([run_of(cluster, other)])
        assert "n2 on n2 has another token" in str(cluster._node_failed.result())
        await first.keeper.wait_until(lambda view: other.id in view.gone or other.id not in view.nodes)
        assert not run_of(cluster, first).done()

    play(job(gated), scenario, nodes=1)


def unreachable_nodes(cluster: InProcessCluster) -> Node:
    """Starts a node that cannot reach the first one."""
    first = cluster.nodes[0]
    node = cluster.node(cluster.add())
    cluster.network.cut(node.id, first.id)
    return node


async def registered(node: Node) -> None:
    while not node.node_revision:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.1)


def test_unreachable_member_prevents_registration(gated: type[Gated]) -> None:
    """As behind a firewall, or with an address that leads nowhere."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        began = first.now()
        other = unreachable_nodes(cluster)
        await asyncio.wait([run_of(cluster, other)])
        settings = Settings()
        assert settings.lease_ttl_s + settings.lease_stall_s < first.now() - began < 3 * settings.lease_ttl_s
        error = cluster._node_failed.result()
        assert isinstance(error, JobError) and "cannot take part in job" in str(error) and seen <= {first.id}
        assert "n2 on n2 cannot reach n1 on n1 at memory: (the link between" in str(error)
        (told,) = [event for event in cluster.events if event.kind == "refused"]
        assert told.node == "n2" and "firewall of n1" in told.text and "--listen HOST" in told.text

    play(job(gated), scenario, nodes=1)


def test_waiting_node_declared_gone_ends(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreachable_nodes(cluster)
        await asyncio.sleep(Settings().lease_ttl_s / 2)
        began, record = first.now(), GoneRecord(reason="killed")
        cluster.store.execute(Txn(success=(Put(cluster.keys.gone(other.id), record.to_bytes()),)))
        await asyncio.wait([run_of(cluster, other)])
        assert first.now() - began < 1.0 + Settings().connect_s
        assert "n2 was declared gone: killed" in str(cluster._node_failed.result())

    play(job(gated), scenario, nodes=1)


def test_waiting_node_leaves_at_once(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreachable_nodes(cluster)
        await asyncio.sleep(Settings().lease_ttl_s / 2)
        began = first.now()
        other.drain("SIGTERM")
        await asyncio.wait([run_of(cluster, other)])
        assert first.now() - began < 1.0 + Settings().connect_s
        assert not other.node_revision and run_of(cluster, other).exception() is None

    play(job(gated), scenario, nodes=1)


@pytest.mark.parametrize("host", [False, True], ids=["its-port-refuses", "its-host-is-off"])
def test_dead_node_blocks_only_for_its_lease(gated: type[Gated], host: bool) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        dead = cluster.nodes[1]
        await gated.reached.wait()
        die(cluster, dead.id, host=host)
        joining = cluster.node(cluster.add())
        if host:
            cluster.network.cut(joining.id, dead.id)
        await asyncio.wait_for(registered(joining), Settings().lease_ttl_s + 1)
        assert dead.id not in joining.keeper.view.nodes and not run_of(cluster, joining).done()

    play(job(gated), scenario, nodes=2)
