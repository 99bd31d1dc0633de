"""Nodes that could not speak with those that are there: refused, and the job goes on without them."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, die, gated, job, play

from taskgraph.errors import JobError
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node

__all__ = ["gated"]


def marked(cluster: InProcessCluster, token_mark: str) -> Node:
    """A node that starts now, with the token of that mark."""
    node = cluster.node(cluster.add())
    node._token_mark = token_mark
    return node


def run_of(cluster: InProcessCluster, node: Node) -> asyncio.Task[None]:
    return cluster._members[node.id].run


async def works(cluster: InProcessCluster, gated: type[Gated]) -> Node:
    """The first node, with a token, once the job is under way."""
    first = cluster.nodes[0]
    first._token_mark = "ours"
    await gated.reached.wait()
    return first


def test_a_node_with_another_token_never_registers(gated: type[Gated]) -> None:
    """It did, was given tasks, and those who waited for it waited for ever."""

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


def test_of_two_that_register_at_once_the_later_one_leaves(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    async def blindly(self: Registration) -> None:
        """As one that looked before the other was there."""

    monkeypatch.setattr(Registration, "_until_it_may", blindly)

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = marked(cluster, "another")
        await asyncio.wait([run_of(cluster, other)])
        assert "n2 on n2 has another token" in str(cluster._node_failed.result())
        await first.keeper.wait_until(lambda view: other.id in view.gone or other.id not in view.nodes)
        assert not run_of(cluster, first).done()

    play(job(gated), scenario, nodes=1)


def test_a_node_that_is_gone_but_for_its_lease_is_waited_out(gated: type[Gated]) -> None:
    """As one that was started again after it was told how."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        die(cluster, first.id)
        again = marked(cluster, "another")
        while again.registration is None or not again.registration.node_revision:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.1)
        assert not run_of(cluster, again).done()

    play(job(gated), scenario, nodes=1)
