"""All coordinators behind one interface: a conformance test runs on each of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from taskgraph.coordination.api import Coordinator, Lease
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.loop import Process


class Compacting(Coordinator, Protocol):
    async def compact(self, revision: int) -> None: ...


class Cluster:
    """A store and handles on it, with a prefix for the keys of one test."""

    def __init__(self, etcd: EmbeddedEtcd | SimEtcd | None) -> None:
        self._etcd = etcd
        self._store = MemoryStore()
        self._handles: list[Compacting] = []
        self._leases: list[Lease] = []
        self._beside: list[Cluster] = []
        self.prefix = f"/test/{uuid.uuid4().hex}/"

    @property
    def kind(self) -> str:
        if isinstance(self._etcd, SimEtcd):
            return "simulated"
        return "memory" if self._etcd is None else "etcd"

    async def node(self) -> Compacting:
        """A handle of another node."""
        handle: Compacting
        if self._etcd is None:
            handle = MemoryCoordinator(self._store)
        elif isinstance(self._etcd, SimEtcd):
            name = f"node {len(self._handles)}"
            handle = SimCoordinator(self._etcd, Process(name), Process(name), on_txn=lambda *_: None, timeout_s=3.0)
        else:
            handle = await EtcdCoordinator.connect(self._etcd.endpoint)
        self._handles.append(handle)
        return handle

    async def lease(self, node: Coordinator, ttl_s: float = 2.0, stall_limit_s: float = 60.0) -> Lease:
        lease = await node.lease(ttl_s, stall_limit_s=stall_limit_s)
        self._leases.append(lease)
        return lease

    def beside(self) -> Cluster:
        """Another cluster on the same etcd: handles and keys of its own."""
        self._beside.append(Cluster(self._etcd))
        return self._beside[-1]

    def key(self, name: str) -> str:
        return self.prefix + name

    async def put(self, node: Coordinator, name: str, value: bytes = b"", lease: int = 0) -> TxnResult:
        return await node.txn(Txn(success=(Put(self.key(name), value, lease),)))

    async def close(self) -> None:
        for beside in self._beside:
            await beside.close()
        for lease in self._leases:
            await lease.close(revoke=True)
        for handle in self._handles:
            await handle.close()


@pytest.fixture(params=["memory", "simulated", "etcd"])
def etcd_or_none(request: pytest.FixtureRequest) -> EmbeddedEtcd | SimEtcd | None:
    if request.param == "simulated":
        etcd = SimEtcd(SimStore(lambda *_: etcd.wake()), random.Random(1), delay_s=0.0005, lag_s=0.002)
        return etcd
    return request.getfixturevalue("embedded_etcd") if request.param == "etcd" else None


@pytest.fixture
async def cluster(etcd_or_none: EmbeddedEtcd | SimEtcd | None) -> AsyncIterator[Cluster]:
    cluster = Cluster(etcd_or_none)
    yield cluster
    await cluster.close()


@pytest.fixture
async def node(cluster: Cluster) -> Compacting:
    return await cluster.node()
