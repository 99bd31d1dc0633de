"""All coordinators behind one interface: a conformance test runs on each of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator

import pytest

from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.testing.conformance import Cluster, Connect
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.loop import Process


def _in_memory() -> Connect:
    store = MemoryStore()

    async def connect() -> Coordinator:
        return MemoryCoordinator(store)

    return connect


def _simulated() -> Connect:
    etcd = SimEtcd(SimStore(lambda *_: etcd.wake()), random.Random(1), delay_s=0.0005, lag_s=0.002)
    numbers = itertools.count()

    async def connect() -> Coordinator:
        name = f"node {next(numbers)}"
        return SimCoordinator(etcd, Process(name), Process(name), on_txn=lambda *_: None, timeout_s=3.0)

    return connect


@pytest.fixture(params=["memory", "simulated", "etcd"])
def connect(request: pytest.FixtureRequest) -> Connect:
    if request.param != "etcd":
        return _in_memory() if request.param == "memory" else _simulated()
    etcd = request.getfixturevalue("embedded_etcd")
    return lambda: EtcdCoordinator.connect(etcd.endpoint)


@pytest.fixture
async def cluster(connect: Connect) -> AsyncIterator[Cluster]:
    cluster = Cluster(connect)
    yield cluster
    await cluster.close()


@pytest.fixture
async def node(cluster: Cluster) -> Coordinator:
    return await cluster.node()
