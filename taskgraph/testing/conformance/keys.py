"""Tests of reads and transactions."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import CoordinationError, LeaseGone, OutcomeUnknown, Unavailable
from taskgraph.protocol.kv import Compare, Delete, Get, KeyValue, Op, Put, Txn
from taskgraph.testing.conformance.cluster import Cluster, Clusters

__all__ = ["KeysSuite"]

Target = Literal["mod", "create"]


class KeysSuite(Clusters):
    """Keys, comparisons, transactions and refusals."""

    async def test_unknown_key_is_absent(self, cluster: Cluster, node: Coordinator) -> None:
        assert await node.get(cluster.key("nothing")) is None
        assert (await node.list(cluster.prefix)).items == ()

    async def test_put_makes_one_revision(self, cluster: Cluster, node: Coordinator) -> None:
        other = await cluster.node()
        before = (await node.list(cluster.prefix)).revision
        result = await cluster.put(node, "a", b"1")
        assert result.succeeded and result.revision == before + 1 and result.reads == ()
        assert await other.get(cluster.key("a")) == KeyValue(cluster.key("a"), b"1", before + 1, before + 1)

    async def test_a_second_put_keeps_the_create_revision(self, cluster: Cluster, node: Coordinator) -> None:
        first = (await cluster.put(node, "a", b"1")).revision
        second = (await cluster.put(node, "a", b"2")).revision
        kv = await node.get(cluster.key("a"))
        assert kv == KeyValue(cluster.key("a"), b"2", first, second) and second == first + 1

    async def test_deleted_key_is_created_anew(self, cluster: Cluster, node: Coordinator) -> None:
        await cluster.put(node, "a")
        await node.txn(Txn(success=(Delete(cluster.key("a")),)))
        again = (await cluster.put(node, "a")).revision
        kv = await node.get(cluster.key("a"))
        assert kv is not None and kv.create_revision == kv.mod_revision == again

    async def test_values_are_bytes_of_any_kind(self, cluster: Cluster, node: Coordinator) -> None:
        value = bytes(range(256)) * 100
        await cluster.put(node, "ключ/é", value)
        assert [(kv.key, kv.value) for kv in (await node.list(cluster.prefix)).items] == [
            (cluster.key("ключ/é"), value)
        ]

    async def test_listing_is_in_key_order(self, cluster: Cluster, node: Coordinator) -> None:
        for name in ("b/2", "b/10", "c", "a", "b/1", "b", "bb"):
            await cluster.put(node, name)
        listing = await node.list(cluster.key("b/"))
        assert [kv.key for kv in listing.items] == [cluster.key(name) for name in ("b/1", "b/10", "b/2")]

    async def test_puts_of_a_transaction_share_a_revision(self, cluster: Cluster, node: Coordinator) -> None:
        puts = tuple(Put(cluster.key(name), b"x") for name in ("a", "b", "c"))
        revision = (await node.txn(Txn(success=puts))).revision
        items = (await node.list(cluster.prefix)).items
        assert [kv.mod_revision for kv in items] == [kv.create_revision for kv in items] == [revision] * 3

    async def test_transaction_reads_its_writes(self, cluster: Cluster, node: Coordinator) -> None:
        await cluster.put(node, "a", b"old")
        result = await node.txn(
            Txn(
                success=(
                    Get(cluster.key("a")),
                    Put(cluster.key("a"), b"new"),
                    Get(cluster.key("a")),
                    Put(cluster.key("b"), b"1"),
                    Get(cluster.prefix, prefix=True),
                    Get(cluster.key("nothing")),
                )
            )
        )
        assert [[kv.value for kv in read] for read in result.reads] == [[b"old"], [b"new"], [b"new", b"1"], []]
        assert result.reads[1][0].mod_revision == result.revision

    @pytest.mark.parametrize("target", ["mod", "create"])
    async def test_a_comparison_holds_at_exactly_its_revision(
        self, cluster: Cluster, node: Coordinator, target: Target
    ) -> None:
        first = (await cluster.put(node, "a", b"1")).revision
        second = (await cluster.put(node, "a", b"2")).revision
        held = {}
        for revision in (0, first, second, second + 1):
            result = await node.txn(Txn((Compare(cluster.key("a"), revision, target),)))
            held[revision] = result.succeeded
        right = second if target == "mod" else first
        assert held == {revision: revision == right for revision in held}

    @pytest.mark.parametrize("target", ["mod", "create"])
    async def test_revision_zero_means_absent(self, cluster: Cluster, node: Coordinator, target: Target) -> None:
        create = Txn((Compare(cluster.key("a"), 0, target),), (Put(cluster.key("a"), b"mine"),))
        assert (await node.txn(create)).succeeded
        assert not (await node.txn(create)).succeeded
        await node.txn(Txn(success=(Delete(cluster.key("a")),)))
        assert (await node.txn(create)).succeeded

    async def test_failure_branch_reads_the_key(self, cluster: Cluster, node: Coordinator) -> None:
        revision = (await cluster.put(node, "a", b"theirs")).revision
        result = await node.txn(
            Txn(
                (Compare(cluster.key("a"), 0), Compare(cluster.key("b"), 0)),
                (Put(cluster.key("a"), b"mine"), Put(cluster.key("b"), b"mine")),
                (Get(cluster.key("a")), Get(cluster.key("b"))),
            )
        )
        assert not result.succeeded and result.revision == revision
        assert result.reads == ((KeyValue(cluster.key("a"), b"theirs", revision, revision),), ())

    async def test_the_failure_branch_may_write(self, cluster: Cluster, node: Coordinator) -> None:
        result = await node.txn(Txn((Compare(cluster.key("a"), 1),), (), (Put(cluster.key("a"), b"1"),)))
        assert not result.succeeded
        kv = await node.get(cluster.key("a"))
        assert kv is not None and kv.mod_revision == result.revision

    async def test_prefix_delete_deletes_all_keys_below(self, cluster: Cluster, node: Coordinator) -> None:
        for name in ("b/1", "b/2", "b", "c"):
            await cluster.put(node, name)
        before = (await node.list(cluster.prefix)).revision
        result = await node.txn(Txn(success=(Delete(cluster.key("b/"), prefix=True),)))
        assert result.revision == before + 1
        assert [kv.key for kv in (await node.list(cluster.prefix)).items] == [cluster.key("b"), cluster.key("c")]

    async def test_deleting_an_absent_key_makes_no_revision(self, cluster: Cluster, node: Coordinator) -> None:
        before = (await cluster.put(node, "a")).revision
        result = await node.txn(Txn(success=(Delete(cluster.key("no")), Delete(cluster.key("no/"), prefix=True))))
        assert result.succeeded and result.revision == before

    async def test_read_only_transaction_has_a_revision(self, cluster: Cluster, node: Coordinator) -> None:
        revision = (await cluster.put(node, "a", b"1")).revision
        result = await node.txn(Txn(success=(Get(cluster.key("a")),)))
        assert result.revision == revision and result.reads[0][0].value == b"1"

    async def test_one_of_several_nodes_creates_a_key(self, cluster: Cluster, node: Coordinator) -> None:
        nodes = [await cluster.node() for _ in range(5)]
        results = await asyncio.gather(
            *(
                each.txn(Txn((Compare(cluster.key("a"), 0),), (Put(cluster.key("a"), bytes([number])),)))
                for number, each in enumerate(nodes)
            )
        )
        winner = [number for number, result in enumerate(results) if result.succeeded]
        kv = await node.get(cluster.key("a"))
        assert kv is not None and [kv.value] == [bytes([number]) for number in winner]

    @pytest.mark.parametrize("succeeds", [True, False])
    async def test_key_written_twice_is_refused(self, cluster: Cluster, node: Coordinator, succeeds: bool) -> None:
        a = cluster.key("a")
        twice: tuple[tuple[Op, ...], ...] = (
            (Put(a, b"1"), Put(a, b"2")),
            (Put(a, b"1"), Delete(a)),
            (Delete(cluster.prefix, prefix=True), Put(a, b"1")),
        )
        for ops in twice:
            with pytest.raises(CoordinationError, match="duplicate key"):
                await node.txn(Txn(success=ops) if succeeds else Txn(failure=ops))
        assert await node.get(a) is None

    async def test_the_same_key_may_be_written_in_either_branch(self, cluster: Cluster, node: Coordinator) -> None:
        a = cluster.key("a")
        result = await node.txn(Txn((Compare(a, 0),), (Put(a, b"1"),), (Put(a, b"2"),)))
        assert result.succeeded

    async def test_deletes_may_overlap(self, cluster: Cluster, node: Coordinator) -> None:
        await cluster.put(node, "a/1")
        result = await node.txn(Txn(success=(Delete(cluster.key("a/"), prefix=True), Delete(cluster.key("a/1")))))
        assert result.succeeded and (await node.list(cluster.prefix)).items == ()

    async def test_refusal_is_a_coordination_error(self, cluster: Cluster, node: Coordinator) -> None:
        many = tuple(Put(cluster.key(str(number)), b"") for number in range(129))
        large = (Put(cluster.key("large"), bytes(2 * 1024 * 1024)),)
        for txn in (Txn(success=many), Txn(success=large), Txn(success=(Put("", b""),))):
            with pytest.raises(CoordinationError) as raised:
                await node.txn(txn)
            assert not isinstance(raised.value, Unavailable | OutcomeUnknown)
        assert (await node.list(cluster.prefix)).items == ()

    async def test_transaction_may_have_128_operations(self, cluster: Cluster, node: Coordinator) -> None:
        names = [cluster.key(f"{number:03}") for number in range(128)]
        result = await node.txn(Txn(tuple(Compare(name, 0) for name in names), tuple(Put(name, b"") for name in names)))
        assert result.succeeded and len((await node.list(cluster.prefix)).items) == 128

    async def test_put_on_a_gone_lease_is_refused(self, cluster: Cluster, node: Coordinator) -> None:
        lease = await cluster.lease(node)
        await node.revoke(lease.id)
        with pytest.raises(LeaseGone):
            await node.txn(Txn(success=(Put(cluster.key("a"), b""), Put(cluster.key("b"), b"", lease.id))))
        assert (await node.list(cluster.prefix)).items == ()

    async def test_closed_handle_is_unavailable(self, cluster: Cluster, node: Coordinator) -> None:
        other = await cluster.node()
        await node.close()
        for call in (node.get("/x"), node.list("/x"), cluster.put(node, "a"), node.revoke(1)):
            with pytest.raises(Unavailable):
                await call
        await cluster.put(other, "a")
