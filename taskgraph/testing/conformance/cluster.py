"""The fixtures of the suite: a store, handles of nodes on it, and a prefix for the keys of one test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from taskgraph.coordination.api import Coordinator, Lease
from taskgraph.protocol.kv import Put, Txn, TxnResult

__all__ = ["Cluster", "Clusters", "Connect"]

Connect = Callable[[], Awaitable[Coordinator]]
"""Makes another node's handle on the store of a test."""


class Cluster:
    """Handles of several nodes on one store, with leases and a key prefix of one test. `close` ends them all."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._handles: list[Coordinator] = []
        self._leases: list[Lease] = []
        self._others: list[Cluster] = []
        self.prefix = f"/test/{uuid.uuid4().hex}/"

    async def node(self) -> Coordinator:
        """Connects one more handle to the store, as another node does."""
        self._handles.append(await self._connect())
        return self._handles[-1]

    async def lease(self, node: Coordinator, ttl_s: float = 20.0, stall_limit_s: float = 60.0) -> Lease:
        """Takes a lease that is revoked at the end of the test."""
        self._leases.append(await node.lease(ttl_s, stall_limit_s=stall_limit_s))
        return self._leases[-1]

    def another(self) -> Cluster:
        """Makes another cluster on the same store, with handles and keys of its own. Closed with this one."""
        self._others.append(Cluster(self._connect))
        return self._others[-1]

    def key(self, name: str) -> str:
        """Returns the key of this name below the test's prefix."""
        return self.prefix + name

    async def put(self, node: Coordinator, name: str, value: bytes = b"", lease: int = 0) -> TxnResult:
        """Writes a key of this test."""
        return await node.txn(Txn(success=(Put(self.key(name), value, lease),)))

    async def compact(self, node: Coordinator, revision: int) -> None:
        """Drops the history before a revision. Skips the test if the coordinator has no method for that."""
        compact: Callable[[int], Awaitable[None]] | None = getattr(node, "compact", None)
        if compact is None:
            pytest.skip("this coordinator has no method `compact(revision)`")
        await compact(revision)

    async def close(self) -> None:
        for other in self._others:
            await other.close()
        for lease in self._leases:
            await lease.close(revoke=True)
        for handle in self._handles:
            await handle.close()


@pytest.mark.asyncio
class Clusters:
    """The fixtures of tests of a coordinator. A subclass has the fixture `connect`."""

    @pytest_asyncio.fixture
    async def cluster(self, connect: Connect) -> AsyncIterator[Cluster]:
        cluster = Cluster(connect)
        yield cluster
        await cluster.close()

    @pytest_asyncio.fixture
    async def node(self, cluster: Cluster) -> Coordinator:
        return await cluster.node()
