"""What a node does with the boundaries that it is offered."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, Gated, blindable, gated, holder, job, joining, play

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.graph.values import encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Accepted, Offer, Reason, Release, Stamp
from taskgraph.results import JobResult

__all__ = ["blindable", "gated", "joining"]


def wish_away_and_back(node: Node) -> None:
    """Placement changes its mind twice: the replica is dropped and wished for again."""
    node.roles.drop(0)
    assert 0 not in node.roles.replicas


def test_offer_to_dropped_replica_is_refused() -> None:
    """An acknowledgement would count, although the replica is gone."""
    setups: list[str] = []
    reached = asyncio.Event()
    cluster: InProcessCluster

    class Dropped(Counting, state=["total"]):
        async def setup(self) -> None:
            super().setup()
            setups.append("")
            if len(setups) == 2:
                backup = cluster.node("n2-local")
                # Called when the set-up is over, and before the offer that waits for it goes on.
                set_up = backup.roles.replicas[0]._set_up
                assert set_up is not None
                set_up.add_done_callback(lambda _: wish_away_and_back(backup))

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            if epoch.number == 1 and not reached.is_set():
                reached.set()
                await asyncio.Event().wait()

    async def scenario(running: InProcessCluster) -> JobResult:
        nonlocal cluster
        cluster = running
        await reached.wait()
        first, backup = holder(cluster, 0), cluster.add()
        await first.keeper.wait_until(lambda view: backup in view.in_sync(0))
        cluster.crash(first.id)
        return await cluster.result()

    result = play(job(Dropped, tasks=1), scenario, nodes=1)
    assert result.values == {0: 3}
    assert result.failovers == 1
    assert len(setups) == 3, "the replica that stays was set up anew"


def test_pending_boundary_replaces_mistaken_commit(gated: type[Gated]) -> None:
    """A replica was evicted while it held a boundary that did not commit, and a primary with a stale view invites it
    again.

    The replica has read the epoch as committed, and must keep what it acknowledges now.
    """

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        primary = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not primary)
        right = primary.roles.replicas[0].boundaries.committed
        boundaries = backup.roles.replicas[0].boundaries
        assert right is not None
        assert right.key == (1, 1, 1)
        boundaries.clear()
        boundaries.store(Boundary(right.stamp, 0, replaced), committed=False)
        boundaries.note_committed(1)
        assert boundaries.committed is not None
        assert boundaries.committed.key == (1, 1, 0), "of a term before, as far as it knows"
        offer = Offer(right.stamp, 1, 0, False, True, 99, right.value)
        assert await primary.router.to_node(backup.id, offer, timeout_s=None) == Accepted(1)
        assert boundaries.committed is right or boundaries.committed.key == right.key
        assert boundaries.committed.value == right.value
        cluster.crash(primary.id)
        gated.gate.set()
        return await cluster.result()

    replaced = encode({"state": {"total": 100}, "numbers": {}, "log": {}}, what="a boundary that did not commit")
    result = play(job(gated, tasks=1), scenario, nodes=2)
    assert result.values == {0: 3}
    assert result.failovers == 1


def test_stale_offers_are_refused(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        primary = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not primary)
        held = backup.roles.replicas[0].boundaries
        value = encode({"state": {"total": 100}, "numbers": {}, "log": {}}, what="a boundary")

        async def refused(by: Node, to: Node, stamp: Stamp, term: int) -> str:
            with pytest.raises(Refused) as caught:
                await by.router.to_node(to.id, Offer(stamp, term, 0, False, True, 99, value), timeout_s=None)
            assert caught.value.reason == Reason.STALE
            return str(caught.value)

        assert "attempt 0 is over" in await refused(primary, backup, Stamp(0, 2), 1)
        assert "task 0 is in term 1, not 0" in await refused(primary, backup, Stamp(1, 2), 0)
        assert "task 0 is in term 1, not 1" in await refused(backup, backup, Stamp(1, 2), 1)
        assert "still stepping down" in await refused(primary, primary, Stamp(1, 2), 1)
        assert held.pending == ()
        assert held.has_committed(1)

    play(job(gated, tasks=1), scenario, nodes=2)


def test_release_waits_for_earlier_writes(gated: type[Gated]) -> None:
    """A released node may drop boundaries, but not before it can see that it is a member."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        primary = holder(cluster, 0)
        backup = next(node for node in cluster.nodes if node is not primary)
        view = primary.keeper.view
        await backup.keeper.wait_until(lambda read: read.revision >= view.revision)
        released = Release(0, view.term(0), 99, view.revision + 1)
        releasing = asyncio.ensure_future(primary.router.to_node(backup.id, released, timeout_s=None))
        await asyncio.sleep(1.0)
        assert not releasing.done() and not backup.roles.replicas[0].is_unneeded(view.term(0))
        gated.gate.set()  # something is written: a commit
        assert await releasing == Accepted()

    play(job(gated, tasks=1), scenario, nodes=2)
