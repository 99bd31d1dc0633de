"""Tests of leases, in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from taskgraph.coordination.api import Coordinator, Lease, WatchBatch
from taskgraph.testing.conformance.cluster import Cluster, Clusters

__all__ = ["LeasesSuite"]


async def watch_for_delete(node: Coordinator, prefix: str, start: int, limit_s: float) -> tuple[WatchBatch, float]:
    """Returns the first batch with a delete, and the loop's time when it came. Fails the test after `limit_s`."""
    async with asyncio.timeout(limit_s), aclosing(node.watch(prefix, start)) as watch:
        async for batch in watch:
            if any(event.kind == "delete" for event in batch.events):
                return batch, asyncio.get_running_loop().time()
    raise AssertionError("the watch ended by itself")


async def wait_until_lost(lease: Lease) -> None:
    async with asyncio.timeout(30.0):
        while not lease.lost():
            lease.tick()
            await asyncio.sleep(0.02)


async def renewal_keeps_a_lease(cluster: Cluster, node: Coordinator) -> None:
    lease = await cluster.lease(node, 4.0, stall_limit_s=60.0)
    await cluster.put(node, "a", b"", lease.id)
    last = lease.valid_until()
    end = last + 0.5
    while node.now() < end:
        await asyncio.sleep(0.1)
        assert lease.valid_until() >= last
        last = lease.valid_until()
        assert 0.0 < last - node.now() <= 4.0
    assert await node.get(cluster.key("a")) is not None and not lease.lost()


async def closed_lease_expires_with_its_keys(cluster: Cluster, node: Coordinator) -> None:
    observer = await cluster.node()
    lease = await cluster.lease(node, 2.0)
    start = (await cluster.put(node, "a", b"", lease.id)).revision + 1
    await lease.close(revoke=False)
    closed_at, valid_until = asyncio.get_running_loop().time(), lease.valid_until()
    batch, at = await watch_for_delete(observer, cluster.prefix, start, 30.0)
    assert [(event.kind, event.kv.key) for event in batch.events] == [("delete", cluster.key("a"))]
    assert observer.now() > valid_until, "the key went while the lease was said to be valid"
    assert at - closed_at < 2.0 + 20.0


async def stuck_loop_loses_the_lease(cluster: Cluster, node: Coordinator) -> None:
    observer = await cluster.node()
    lease = await cluster.lease(node, 2.0, stall_limit_s=0.5)
    start = (await cluster.put(node, "a", b"", lease.id)).revision + 1
    _, _ = await watch_for_delete(observer, cluster.prefix, start, 30.0)
    assert lease.valid_until() < node.now()
    await wait_until_lost(lease)


async def tick_resumes_the_renewal(cluster: Cluster, node: Coordinator) -> None:
    lease = await cluster.lease(node, 4.0, stall_limit_s=0.3)
    await cluster.put(node, "a", b"", lease.id)
    await asyncio.sleep(1.0)  # a renewal was due after 0.8 s
    stalled_until = lease.valid_until()
    assert stalled_until - node.now() < 3.1
    async with asyncio.timeout(30):
        while lease.valid_until() <= stalled_until:
            lease.tick()
            await asyncio.sleep(0.05)
    assert not lease.lost() and await node.get(cluster.key("a")) is not None


async def any_node_reads_the_seconds_left_of_a_lease(cluster: Cluster, node: Coordinator) -> None:
    observer = await cluster.node()
    renewed, lease = await cluster.lease(node, 4.0), await cluster.lease(node, 4.0)
    await cluster.put(node, "a", b"", lease.id)
    await lease.close(revoke=False)
    latest = node.now() + lease.ttl_s  # when it ends if it was renewed just now
    answers: list[int | None] = []
    async with asyncio.timeout(30):
        while not answers or answers[-1] is not None:
            sent_at = observer.now()
            answers.append(await observer.lease_left(lease.id))
            if answers[-1]:
                assert answers[-1] <= latest - sent_at
            assert await observer.lease_left(renewed.id) in (1, 2, 3, 4)
            await asyncio.sleep(0.05)
    seconds = [left for left in dict.fromkeys(answers) if left is not None]  # a busy test may miss one
    assert len(seconds) > 1 and seconds == sorted(seconds, reverse=True) and seconds[-1] >= 0
    assert await observer.get(cluster.key("a")) is None
    assert await observer.lease_left(0x7FFFFFFF) is None


SLOW_SCENARIOS = (
    renewal_keeps_a_lease,
    closed_lease_expires_with_its_keys,
    stuck_loop_loses_the_lease,
    tick_resumes_the_renewal,
    any_node_reads_the_seconds_left_of_a_lease,
)


class LeasesSuite(Clusters):
    """Leases: renewed, revoked, lost and ended."""

    async def test_lease_has_two_seconds_at_least(self, cluster: Cluster, node: Coordinator) -> None:
        before = node.now()
        short, long = await cluster.lease(node, 0.5), await cluster.lease(node, 4.2)
        assert short.ttl_s == 2.0 and long.ttl_s == 5.0
        assert short.id != long.id and short.id > 0
        for lease in (short, long):
            assert before <= lease.valid_until() - lease.ttl_s <= node.now()
            assert not lease.lost()

    async def test_revoke_deletes_keys_at_one_revision(self, cluster: Cluster, node: Coordinator) -> None:
        observer = await cluster.node()
        lease = await cluster.lease(node)
        for name in ("b", "a", "c"):
            put = await cluster.put(node, name, b"", lease.id)
        kept = await cluster.put(node, "kept")
        waiting = asyncio.create_task(watch_for_delete(observer, cluster.prefix, kept.revision + 1, 30.0))
        await observer.revoke(lease.id)
        batch, _ = await waiting
        assert [(event.kind, event.kv.key) for event in batch.events] == [
            ("delete", cluster.key(name)) for name in ("a", "b", "c")
        ]
        assert {event.kv.mod_revision for event in batch.events} == {batch.revision} == {put.revision + 2}
        assert [kv.key for kv in (await node.list(cluster.prefix)).items] == [cluster.key("kept")]

    async def test_key_names_its_lease(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node)
        await cluster.put(node, "a", b"", lease.id)
        kv = await node.get(cluster.key("a"))
        assert kv is not None and kv.lease == lease.id

    async def test_key_put_without_a_lease_stays(self, cluster: Cluster, node: Coordinator) -> None:
        first, second = await cluster.lease(node), await cluster.lease(node)
        await cluster.put(node, "freed", b"", first.id)
        await cluster.put(node, "moved", b"", first.id)
        await cluster.put(node, "freed")
        await cluster.put(node, "moved", b"", second.id)
        await node.revoke(first.id)
        keys = {kv.key: kv.lease for kv in (await node.list(cluster.prefix)).items}
        assert keys == {cluster.key("freed"): 0, cluster.key("moved"): second.id}

    async def test_revoking_a_lease_without_keys_makes_no_revision(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node)
        before = (await cluster.put(node, "a")).revision
        await node.revoke(lease.id)
        assert (await node.list(cluster.prefix)).revision == before

    async def test_revoking_an_unknown_lease_is_no_error(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node)
        await node.revoke(lease.id)
        await node.revoke(lease.id)
        await node.revoke(0x7FFFFFFF)

    async def test_lease_revoked_by_another_node_is_lost(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node, 2.0)
        other = await cluster.node()
        await other.revoke(lease.id)
        await wait_until_lost(lease)
        assert lease.valid_until() <= node.now() + lease.ttl_s

    async def test_closing_with_revoke_deletes_keys(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node)
        await cluster.put(node, "a", b"", lease.id)
        await lease.close(revoke=True)
        assert await node.get(cluster.key("a")) is None
        await lease.close(revoke=True)  # again: no error

    async def test_leases_over_seconds(self, cluster: Cluster) -> None:
        """Plays the scenarios of `SLOW_SCENARIOS` at once, each on a cluster of its own: each waits for seconds."""

        async def play(scenario: Callable[..., Awaitable[None]]) -> None:
            another = cluster.another()
            await scenario(another, await another.node())

        async with asyncio.TaskGroup() as group:
            for scenario in SLOW_SCENARIOS:
                group.create_task(play(scenario), name=scenario.__name__)
