"""Followers of a run whose name is another run's by now, or whose etcd does not answer any more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver import JobSpec
from taskgraph.errors import OutcomeUnknown, Unavailable
from taskgraph.jobs import JobResult
from taskgraph.launch.follow import Follower
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.records import State, StatusRecord

NAME = "again"
KEYS = Keys(NAME)
RESULT = JobResult(name=NAME, values={0: 1}, reports=(), epochs=1, failovers=0, restarts=0, wall_s=1.0)


def spec() -> JobSpec:
    """One run more of the same job."""
    return JobSpec.local(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME))


class Deaf(MemoryCoordinator):
    """Takes no write once `error` is set."""

    error: Exception | None = None

    async def txn(self, txn: Txn) -> TxnResult:
        if self.error is not None and txn.success:
            raise self.error
        return await super().txn(txn)


async def end(coordinator: MemoryCoordinator) -> None:
    ended = StatusRecord(state=State.CANCELLED, reason="by hand")
    await coordinator.txn(Txn(success=(Put(KEYS.status, ended.to_bytes()),)))


async def state(coordinator: MemoryCoordinator) -> str:
    kv = await coordinator.get(KEYS.status)
    assert kv is not None
    return StatusRecord.from_bytes(kv.value).state


@contextlib.asynccontextmanager
async def followed(coordinator: MemoryCoordinator, run: JobSpec) -> AsyncIterator[Follower]:
    follower = Follower(coordinator, run, b"")
    await follower.start()
    try:
        yield follower
    finally:
        await follower.stop()


async def test_who_wakes_up_late_neither_ends_nor_collects_the_run_that_has_the_name_now() -> None:
    coordinator = MemoryCoordinator(MemoryStore())
    first, second = spec(), spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        await end(coordinator)
        await submit(coordinator, second)
        assert not await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == State.RUNNING
        await follower.collected([], RESULT)
        assert await coordinator.get(KEYS.collected) is None and await coordinator.get(KEYS.result) is None
    async with followed(coordinator, second) as follower:
        await follower.collected([], RESULT)
        assert await coordinator.get(KEYS.collected) is not None
        assert await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == State.CANCELLED


async def test_who_read_nothing_of_its_runs_end_does_not_follow_the_next_one() -> None:
    store = MemoryStore()
    coordinator = MemoryCoordinator(store)
    first = spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        ended = asyncio.ensure_future(follower.ended())
        await asyncio.sleep(0)
        for service in follower._services:  # it stands still
            service.cancel()
        await end(coordinator)
        await submit(coordinator, spec())
        await follower.keeper.load()
        async with asyncio.timeout(5):
            status = await ended
        assert status.state == State.CANCELLED and "another one was submitted under its name" in status.reason


@pytest.mark.parametrize("error", [Unavailable("away"), OutcomeUnknown("full")])
async def test_a_result_that_is_here_does_not_get_lost_with_etcd(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskgraph.launch.follow._COLLECTED_S", 0.5)
    coordinator = Deaf(MemoryStore())
    run = spec()
    await submit(coordinator, run)
    async with followed(coordinator, run) as follower:
        coordinator.error = error
        async with asyncio.timeout(5):
            await follower.collected([], RESULT)
        assert follower.kept_json is not None
    (record,) = caplog.records
    assert "collected is not known" in record.message


async def test_a_submit_whose_writes_are_never_answered_says_why() -> None:
    coordinator = Deaf(MemoryStore())
    coordinator.error = OutcomeUnknown("space exceeded")
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="space exceeded"):
        await submit(coordinator, dataclasses.replace(spec(), expected_nodes=1))
    assert 1.0 < time.monotonic() - began < 5.0
