"""A transaction is repeated until its outcome is known."""

from __future__ import annotations

import asyncio

import pytest

from taskgraph.coordination.api import AccessRefused
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.node.writes import EtcdWrites
from taskgraph.protocol.kv import Compare, KeyValue, Put, Txn, TxnResult
from taskgraph.protocol.records import EpochRecord


class Lossy(MemoryCoordinator):
    """Loses answers: `losses` says for each transaction whether to execute it first, and what to raise."""

    def __init__(self, *losses: tuple[bool, type[CoordinationError]]) -> None:
        super().__init__(MemoryStore())
        self.losses = list(losses)
        self.lost = asyncio.Event()
        self.reads = 0
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    async def txn(self, txn: Txn) -> TxnResult:
        self.clock += 1.0
        if not self.losses:
            return await super().txn(txn)
        executed, error = self.losses.pop(0)
        if executed:
            await super().txn(txn)
        self.lost.set()
        raise error("lost by the test")

    async def get(self, key: str) -> KeyValue | None:
        self.reads += 1
        return await super().get(key)


def put(writer: str) -> Txn:
    return Txn((Compare("k", 0),), (Put("k", EpochRecord(epoch=1, attempt=1, writer=writer).to_bytes()),))


@pytest.mark.parametrize("executed", [True, False])
async def test_write_with_lost_answer_happens_once(executed: bool) -> None:
    coordinator = Lossy((executed, OutcomeUnknown), (False, Unavailable))
    revision = await EtcdWrites(coordinator).transact(put("a"), key="k", writer="a")
    found = await coordinator.get("k")
    assert found is not None and found.mod_revision == found.create_revision == revision


async def test_outrun_write_with_lost_answer_fails() -> None:
    coordinator = Lossy((False, OutcomeUnknown))
    writing = asyncio.ensure_future(EtcdWrites(coordinator).transact(put("a"), key="k", writer="a"))
    await coordinator.lost.wait()
    assert (await coordinator.txn(put("b"))).succeeded
    assert await writing is None


async def test_unexecuted_write_needs_no_read() -> None:
    coordinator = Lossy((False, Unavailable))
    writing = asyncio.ensure_future(EtcdWrites(coordinator).transact(put("a"), key="k", writer="a"))
    await coordinator.lost.wait()
    assert (await coordinator.txn(put("a"))).succeeded, "of the same name, which no other has"
    assert await writing is None
    assert not coordinator.reads


async def test_refused_write_waits() -> None:
    coordinator = Lossy((True, OutcomeUnknown), (False, AccessRefused), (False, AccessRefused))
    writes = EtcdWrites(coordinator)
    revision = await writes.transact(put("a"), key="k", writer="a")
    found = await coordinator.get("k")
    assert found is not None and found.mod_revision == revision, "that of the write whose answer was lost"
    coordinator.losses += [(False, AccessRefused)]
    assert await writes.transact(Txn(success=(Put("l", b""),)), key="l", writer="") is not None


async def test_refused_first_write_fails() -> None:
    """Its user may be the wrong one."""
    with pytest.raises(AccessRefused):
        await EtcdWrites(Lossy((False, AccessRefused))).transact(put("a"), key="k", writer="a")


async def test_waiting_time_counts_from_first_try() -> None:
    coordinator = Lossy(*[(False, Unavailable)] * 10)
    writes = EtcdWrites(coordinator)
    writing = asyncio.ensure_future(writes.transact(put("a"), key="k", writer="a"))
    assert not writes.waits
    await coordinator.lost.wait()
    assert coordinator.now() == 1.0
    assert writes.waits == ("a write has waited for etcd for 1.0 s: lost by the test",)
    assert await writing
    assert not writes.waits
