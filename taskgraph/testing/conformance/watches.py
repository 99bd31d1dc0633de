"""Tests of watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from taskgraph.coordination.api import Coordinator, WatchBatch, WatchCompacted
from taskgraph.errors import Unavailable
from taskgraph.protocol.kv import Delete, KeyEvent, KeyValue, Put, Txn
from taskgraph.testing.conformance.cluster import Cluster, Clusters

__all__ = ["WatchesSuite"]


async def collect(
    node: Coordinator, prefix: str, start: int, enough: Callable[[list[WatchBatch]], bool]
) -> list[WatchBatch]:
    """Returns the batches of a watch with events, once `enough(batches)` is true. Fails the test after a minute."""
    batches: list[WatchBatch] = []
    async with asyncio.timeout(60.0), aclosing(node.watch(prefix, start)) as watch:
        async for batch in watch:
            if batch.events:
                batches.append(batch)
            if enough(batches):
                return batches
    raise AssertionError("the watch ended by itself")


def reaches(revision: int) -> Callable[[list[WatchBatch]], bool]:
    return lambda batches: bool(batches) and batches[-1].revision >= revision


def events_of(batches: list[WatchBatch]) -> list[KeyEvent]:
    return [event for batch in batches for event in batch.events]


class WatchesSuite(Clusters):
    """Watches: each event once, in order, from any revision that the store still has."""

    async def test_watch_from_the_past(self, cluster: Cluster, node: Coordinator) -> None:
        revisions = [(await cluster.put(node, "a", bytes([number]))).revision for number in range(10)]
        found = events_of(await collect(node, cluster.prefix, revisions[3], reaches(revisions[-1])))
        assert found == [
            KeyEvent("put", KeyValue(cluster.key("a"), bytes([number]), revisions[0], revisions[number]))
            for number in range(3, 10)
        ]

    async def test_watch_delivers_in_order_once(self, cluster: Cluster, node: Coordinator) -> None:
        other = await cluster.node()
        start = (await node.list(cluster.prefix)).revision + 1
        watching = asyncio.create_task(collect(node, cluster.prefix, start, lambda b: len(events_of(b)) == 30))
        revisions = [(await cluster.put(other, str(number % 3))).revision for number in range(30)]
        found = events_of(await watching)
        assert [event.kv.mod_revision for event in found] == revisions
        assert [event.kv.key for event in found] == [cluster.key(str(number % 3)) for number in range(30)]

    async def test_a_watch_may_start_in_the_future(self, cluster: Cluster, node: Coordinator) -> None:
        now = (await cluster.put(node, "a")).revision
        watching = asyncio.create_task(collect(node, cluster.prefix, now + 3, reaches(now + 3)))
        for _ in range(3):
            await cluster.put(node, "a")
        assert [event.kv.mod_revision for event in events_of(await watching)] == [now + 3]

    async def test_one_revision_is_one_batch(self, cluster: Cluster, node: Coordinator) -> None:
        await cluster.put(node, "old/2")
        start = (await cluster.put(node, "old/1")).revision + 1
        result = await node.txn(
            Txn(
                success=(
                    Put(cluster.key("z"), b"1"),
                    Delete(cluster.key("old/"), prefix=True),
                    Put(cluster.key("a"), b"2"),
                )
            )
        )
        (batch,) = await collect(node, cluster.prefix, start, reaches(result.revision))
        assert batch.revision == result.revision == start
        assert [(event.kind, event.kv.key) for event in batch.events] == [
            ("put", cluster.key("z")),
            ("delete", cluster.key("old/1")),
            ("delete", cluster.key("old/2")),
            ("put", cluster.key("a")),
        ]

    async def test_delete_event_has_no_value(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await cluster.put(node, "a", b"value")).revision + 1
        revision = (await node.txn(Txn(success=(Delete(cluster.key("a")),)))).revision
        found = events_of(await collect(node, cluster.prefix, start, reaches(revision)))
        assert found == [KeyEvent("delete", KeyValue(cluster.key("a"), b"", 0, revision))]

    async def test_watch_ignores_other_prefixes(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await cluster.put(node, "b/1")).revision
        for name in ("a", "b", "bb", "c", "b/2"):
            last = (await cluster.put(node, name)).revision
        found = events_of(await collect(node, cluster.key("b/"), start, reaches(last)))
        assert [event.kv.key for event in found] == [cluster.key("b/1"), cluster.key("b/2")]

    async def test_two_watches_of_a_node_get_the_same_events(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await node.list(cluster.prefix)).revision + 1
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(collect(node, cluster.prefix, start, lambda b: len(events_of(b)) == 5))
                for _ in range(2)
            ]
            for number in range(5):
                await cluster.put(node, str(number))
        first, second = (events_of(watch.result()) for watch in watches)
        assert first == second and len(first) == 5

    async def test_watch_of_compacted_history_is_refused(self, cluster: Cluster, node: Coordinator) -> None:
        first = (await cluster.put(node, "a", b"1")).revision
        last = first
        for _ in range(5):
            last = (await cluster.put(node, "a", b"2")).revision
        await cluster.compact(node, last)
        with pytest.raises(WatchCompacted):
            await collect(node, cluster.prefix, first, reaches(last))
        found = events_of(await collect(node, cluster.prefix, last, reaches(last)))
        assert [event.kv.mod_revision for event in found] == [last]
        kv = await node.get(cluster.key("a"))
        assert kv is not None and kv.create_revision == first

    async def test_compaction_does_not_end_a_running_watch(self, cluster: Cluster, node: Coordinator) -> None:
        other = await cluster.node()
        start = (await cluster.put(node, "a")).revision
        async with asyncio.timeout(30), aclosing(node.watch(cluster.prefix, start)) as watch:
            assert [event.kv.mod_revision for event in (await anext(watch)).events] == [start]
            waiting = asyncio.ensure_future(anext(watch))
            # Revisions of other prefixes, then compaction beyond the last one that this watch delivered.
            for _ in range(3):
                last = (await other.txn(Txn(success=(Put(f"{cluster.prefix[:-1]}-beside", b""),)))).revision
            await cluster.compact(other, last)
            revision = (await cluster.put(other, "a")).revision
            assert [event.kv.mod_revision for event in (await waiting).events] == [revision]

    async def test_a_watch_cannot_start_before_the_first_revision(self, cluster: Cluster, node: Coordinator) -> None:
        with pytest.raises(ValueError, match="from 1 on"):
            node.watch(cluster.prefix, 0)

    async def test_cancelling_a_watch_leaves_the_handle_usable(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await node.list(cluster.prefix)).revision + 1
        watching = asyncio.create_task(collect(node, cluster.prefix, start, lambda _: False))
        revision = (await cluster.put(node, "a")).revision
        await collect(node, cluster.prefix, start, reaches(revision))
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert await node.get(cluster.key("a")) is not None

    async def test_closed_handle_ends_its_watches(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await cluster.put(node, "a")).revision
        delivered = asyncio.Event()

        async def follow() -> None:
            async with aclosing(node.watch(cluster.prefix, start)) as watch:
                async for _ in watch:
                    delivered.set()

        following = asyncio.create_task(follow())
        async with asyncio.timeout(30):
            await delivered.wait()
            await node.close()
            with pytest.raises(Unavailable):
                await following

    async def test_slow_reader_gets_all_events(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await node.list(cluster.prefix)).revision + 1
        async with aclosing(node.watch(cluster.prefix, start)) as watch:
            await cluster.put(node, "a")
            first = await anext(watch)
            last = 0
            for number in range(1500):  # more than etcd tells in one message to a watch that lags (1000)
                last = (await cluster.put(node, "a", b"%d" % number)).revision
            batches = [first]
            while batches[-1].revision < last:
                batches.append(await anext(watch))
        assert [event.kv.mod_revision for event in events_of(batches)] == list(range(start, last + 1))

    async def test_long_history_arrives_whole(self, cluster: Cluster, node: Coordinator) -> None:
        start = (await node.list(cluster.prefix)).revision + 1

        async def put(name: str) -> None:  # of 2500 calls at once some might not be answered in time
            for _ in range(50):
                await cluster.put(node, name)

        await asyncio.gather(*(put(str(number)) for number in range(50)))
        last = (await cluster.put(node, "last")).revision
        batches = await collect(node, cluster.prefix, start, reaches(last))
        assert [event.kv.mod_revision for event in events_of(batches)] == list(range(start, last + 1))
        assert [batch.revision for batch in batches] == [batch.events[-1].kv.mod_revision for batch in batches]
