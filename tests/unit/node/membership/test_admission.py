"""Nodes that could not speak with those that are there: refused, and the job goes on without them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from cluster_kit import Gated, blindable, change_leader, die, eyes, gated, job, play

from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TransportError
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership import registration
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, NodeRecord
from taskgraph.settings import Settings

__all__ = ["blindable", "gated"]


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


def test_nor_does_one_whose_token_is_not_the_jobs_where_it_is_the_first(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decided which token the others needed: those with the job's own were refused."""
    local = JobSpec.local
    monkeypatch.setattr(JobSpec, "local", lambda job: dataclasses.replace(local(job), token_mark="ours"))

    async def scenario(cluster: InProcessCluster) -> None:
        strange = marked(cluster, "another")
        await asyncio.wait([run_of(cluster, strange)])
        error = cluster._node_failed.result()
        assert isinstance(error, JobError) and "was submitted with another token than this node has" in str(error)
        right = marked(cluster, "ours")
        await registered(right)
        assert not strange.node_revision and not right.keeper.view.gone

    play(job(gated), scenario, nodes=0)


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
        while not again.node_revision:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.1)
        assert not run_of(cluster, again).done()

    play(job(gated), scenario, nodes=1)


def unreached(cluster: InProcessCluster) -> Node:
    """A node that starts now, and cannot reach the first one."""
    first = cluster.nodes[0]
    node = cluster.node(cluster.add())
    cluster.network.cut(node.id, first.id)
    return node


async def registered(node: Node) -> None:
    while not node.node_revision:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.1)


def test_a_node_that_cannot_reach_one_that_is_there_never_registers(gated: type[Gated]) -> None:
    """A firewall, or an address that leads nowhere: it was given tasks, and the job stood until it was drained."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        began = first.now()
        other = unreached(cluster)
        await asyncio.wait([run_of(cluster, other)])
        settings = Settings()
        assert settings.lease_ttl_s + settings.lease_stall_s < first.now() - began < 3 * settings.lease_ttl_s
        error = cluster._node_failed.result()
        assert isinstance(error, JobError) and "cannot take part in job" in str(error) and seen <= {first.id}
        assert "n2 on n2 cannot reach n1 on n1 at memory: (the link between" in str(error)
        (told,) = [event for event in cluster.events if event.kind == "refused"]
        assert told.node == "n2" and "firewall of n1" in told.text and "--listen HOST" in told.text

    play(job(gated), scenario, nodes=1)


def test_a_node_that_waits_while_its_jobs_name_is_submitted_again_ends_and_says_so(gated: type[Gated]) -> None:
    """It shows its own run for as long as it lives: whom it cannot reach would be there for ever."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreached(cluster)
        await asyncio.sleep(Settings().lease_ttl_s / 2)
        began = first.now()
        again = dataclasses.replace(cluster.spec, run="again")
        cluster.store.execute(Txn(success=(Put(cluster.keys.spec, again.to_bytes()),)))
        await asyncio.wait([run_of(cluster, first), run_of(cluster, other)])
        assert first.now() - began < 2
        assert "was submitted anew while this node started" in str(cluster._node_failed.result())

    play(job(gated), scenario, nodes=1)


def test_a_node_that_is_declared_gone_while_it_waits_ends_and_says_so(gated: type[Gated]) -> None:
    """It registered once that was forgotten: seed 545863 of the simulation."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreached(cluster)
        await asyncio.sleep(Settings().lease_ttl_s / 2)
        began, record = first.now(), GoneRecord(reason="killed")
        cluster.store.execute(Txn(success=(Put(cluster.keys.gone(other.id), record.to_bytes()),)))
        await asyncio.wait([run_of(cluster, other)])
        assert first.now() - began < 1.0 + Settings().connect_s
        assert "n2 was declared gone: killed" in str(cluster._node_failed.result())

    play(job(gated), scenario, nodes=1)


def test_a_node_that_is_asked_to_leave_while_it_waits_leaves_at_once(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreached(cluster)
        await asyncio.sleep(Settings().lease_ttl_s / 2)
        began = first.now()
        other.drain("SIGTERM")
        await asyncio.wait([run_of(cluster, other)])
        assert first.now() - began < 1.0 + Settings().connect_s
        assert not other.node_revision and run_of(cluster, other).exception() is None

    play(job(gated), scenario, nodes=1)


def test_a_node_that_is_reached_in_the_end_takes_part(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreached(cluster)
        await asyncio.sleep(Settings().lease_ttl_s)
        assert not other.node_revision
        cluster.network.heal(other.id, first.id)
        await first.keeper.wait_until(lambda view: other.id in view.nodes)
        assert not run_of(cluster, other).done()

    play(job(gated), scenario, nodes=1)


def test_a_node_that_came_back_while_the_last_try_was_on_its_way_is_reached(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That try had begun before: the node that joined ended itself, and blamed a firewall."""
    settings, tried, real = Settings(), list[float](), Registration._try
    enough_s = settings.lease_ttl_s + registration._REGRANTED_S + settings.lease_stall_s

    async def scenario(cluster: InProcessCluster) -> None:
        async def slowly(self: Registration, name: str, record: NodeRecord) -> TransportError | None:
            error = await real(self, name, record)
            if error is not None:  # it is not heard of before the time for it is over
                tried.append(other.now())
                lives_since = tried[0] + settings.connect_s + registration._LOOK_S
                if other.now() + settings.connect_s > lives_since + enough_s:
                    cluster.network.heal(other.id, first.id)
                await asyncio.sleep(settings.connect_s)
            return error

        monkeypatch.setattr(Registration, "_try", slowly)
        first = await works(cluster, gated)
        other = unreached(cluster)
        await asyncio.wait([run_of(cluster, other)], timeout=enough_s + 3 * settings.connect_s)
        assert other.node_revision and not run_of(cluster, other).done()

    play(job(gated), scenario, nodes=1)


@pytest.mark.parametrize("host", [False, True], ids=["its-port-refuses", "its-host-is-off"])
def test_a_dead_node_keeps_others_out_no_longer_than_its_lease(gated: type[Gated], host: bool) -> None:
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


async def joins_when_that_lease_ended(cluster: InProcessCluster, joining: Node, dead: Node) -> None:
    await asyncio.wait([run_of(cluster, joining)], timeout=Settings().lease_ttl_s + 1)
    assert not cluster._node_failed.done(), cluster._node_failed.result()
    assert joining.node_revision and dead.id not in joining.keeper.view.nodes


@pytest.mark.parametrize("how", ["silent", "port-refuses", "other-token"])
def test_leader_losses_that_lengthen_a_dead_nodes_lease_refuse_nobody(gated: type[Gated], how: str) -> None:
    """Another leader of etcd gives each lease its whole TTL again: who joined ended itself, and blamed a firewall."""

    async def scenario(cluster: InProcessCluster) -> None:
        dead = await works(cluster, gated)
        die(cluster, dead.id, host=how == "silent")
        joining = marked(cluster, "another" if how == "other-token" else "ours")
        if how == "silent":
            cluster.network.cut(joining.id, dead.id)
        for _ in range(5):
            await asyncio.sleep(0.9 * Settings().lease_ttl_s)
            assert dead.id in joining.keeper.view.nodes and not joining.node_revision
            change_leader(cluster)
        await joins_when_that_lease_ended(cluster, joining, dead)

    play(job(gated), scenario, nodes=1)


@pytest.mark.usefixtures("blindable")
def test_the_time_in_which_etcd_is_away_proves_no_lease(gated: type[Gated]) -> None:
    """It was counted as time in which the dead node's lease could have ended."""

    async def scenario(cluster: InProcessCluster) -> None:
        dead = await works(cluster, gated)
        die(cluster, dead.id, host=True)
        joining = marked(cluster, "ours")
        cluster.network.cut(joining.id, dead.id)
        await asyncio.sleep(1.0)
        eyes(joining).blind()
        for _ in range(10):
            await asyncio.sleep(Settings().lease_ttl_s / 2)
            change_leader(cluster)
        eyes(joining).see()
        await joins_when_that_lease_ended(cluster, joining, dead)

    play(job(gated), scenario, nodes=1)


@pytest.mark.parametrize("heals", [False, True])
def test_of_two_that_register_at_once_the_later_one_takes_its_key_back_where_it_cannot_reach_the_other(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    looks, real = 0, Registration._until_it_may

    async def blindly_at_first(self: Registration) -> None:
        nonlocal looks
        if self._node.name == "n2":
            looks += 1
            if looks == 1:
                return
        await real(self)

    monkeypatch.setattr(Registration, "_until_it_may", blindly_at_first)

    async def scenario(cluster: InProcessCluster) -> None:
        first = await works(cluster, gated)
        other = unreached(cluster)
        await first.keeper.wait_until(lambda view: other.id in view.nodes)
        await first.keeper.wait_until(lambda view: other.id not in view.nodes)
        if heals:
            cluster.network.heal(other.id, first.id)
            await first.keeper.wait_until(lambda view: other.id in view.nodes)
            assert not run_of(cluster, other).done()
        else:
            await asyncio.wait([run_of(cluster, other)])
            assert "n2 on n2 cannot reach n1 on n1" in str(cluster._node_failed.result())
        assert looks == 2 and not run_of(cluster, first).done()

    play(job(gated), scenario, nodes=1)
