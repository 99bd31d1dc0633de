"""What a launcher tells etcd of nodes whose processes ended, and what it says where etcd does not take it."""

from __future__ import annotations

import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver import JobSpec
from taskgraph.errors import CoordinationError
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Delete, Put, Txn, TxnResult
from taskgraph.protocol.records import GoneRecord, NodeRecord

KEYS = Keys("dead")
ENTRY = JobEntry(name="dead", etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})
RECORD = GoneRecord(reason="killed by SIGKILL", writer="launcher 1")


class Refusing(MemoryCoordinator):
    """Refuses what is to be written, for these reasons."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(MemoryStore())
        self.reasons = list(reasons)

    async def txn(self, txn: Txn) -> TxnResult:
        if self.reasons:
            raise CoordinationError(self.reasons.pop(0))
        return await super().txn(txn)


async def with_node(coordinator: Refusing) -> LocalNodes:
    """A job with a node that has a lease."""
    reasons, coordinator.reasons = coordinator.reasons, []
    spec = JobSpec.local(tg.Job(tasks=1, epochs=1, builder=lambda task: tg.Task(), name="dead"))
    await submit(coordinator, spec)
    lease = coordinator.store.grant(60.0)
    record = NodeRecord(name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=lease)
    await coordinator.txn(Txn(success=(Put(KEYS.node("n1-1"), record.to_bytes(), lease),)))
    coordinator.reasons = reasons
    return LocalNodes(ENTRY, coordinator, Runtime())


async def left(coordinator: Refusing) -> list[str]:
    return [kv.key for kv in (await coordinator.list(KEYS.root)).items]


async def test_an_etcd_that_refuses_is_told_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told four times a second, for half a minute."""
    monkeypatch.setattr("taskgraph.launch.local._RETRY_S", 0.0)
    coordinator = Refusing(*["permission denied", "no space"] * 5)
    nodes = await with_node(coordinator)
    await nodes._tell_gone("n1-1", RECORD)
    assert [record.message for record in caplog.records] == [
        "cannot tell that node n1-1 was killed by SIGKILL: permission denied",
        "cannot tell that node n1-1 was killed by SIGKILL: no space",
    ]
    there = await left(coordinator)
    assert KEYS.gone("n1-1") in there and KEYS.node("n1-1") not in there
    await coordinator.close()


async def test_a_job_that_etcd_has_lost_is_told_nothing() -> None:
    """`gone/{node}` was all that there was of it, for ever."""
    coordinator = Refusing()
    nodes = await with_node(coordinator)
    for key in await left(coordinator):
        if key != KEYS.node("n1-1"):
            await coordinator.txn(Txn(success=(Delete(key),)))
    await nodes._tell_gone("n1-1", RECORD)
    assert await left(coordinator) == [], "its lease ended all the same"
    await coordinator.close()
