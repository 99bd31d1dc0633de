"""Following a job's events in etcd."""

from __future__ import annotations

import asyncio

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.launch.follow import Follower, follow_events, kept_events
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import EpochRecord, StatusRecord

JOB = "job"


async def test_stopped_follower_gets_each_event_once() -> None:
    store = MemoryStore()
    coordinator = MemoryCoordinator(store)

    async def tell(number: int) -> None:
        event = Event(float(number), "n1", "takeover", f"event {number}")
        await coordinator.txn(Txn(success=(Put(Keys(JOB).event(f"{number:03}"), event.to_bytes()),)))

    await tell(0)
    following = follow_events(coordinator, JOB)
    async with asyncio.timeout(30):
        seen = [(await anext(following)).text]
        for number in (1, 2):
            await tell(number)
        store.compact(store.revision)
        seen += [(await anext(following)).text for _ in range(2)]
        await tell(3)
        seen.append((await anext(following)).text)
    assert seen == [f"event {number}" for number in range(4)]
    await following.aclose()  # type: ignore[attr-defined]


async def test_events_come_in_order_despite_clocks() -> None:
    coordinator, at = MemoryCoordinator(MemoryStore()), (9.0, 1.0, 5.0)

    async def tell(number: int) -> None:
        event = Event(at[number], "n1", "takeover", f"event {number}")
        await coordinator.txn(Txn(success=(Put(Keys(JOB).event(f"{event.at:03}"), event.to_bytes()),)))

    for number in (0, 1):
        await tell(number)
    following = follow_events(coordinator, JOB)
    async with asyncio.timeout(30):
        seen = [(await anext(following)).text for _ in range(2)]
        await tell(2)
        seen.append((await anext(following)).text)
    said = await kept_events(coordinator, JOB)
    assert seen == [event.text for event in said] == [f"event {number}" for number in range(3)]
    await following.aclose()  # type: ignore[attr-defined]


async def begun() -> tuple[MemoryCoordinator, Keys, JobSpec]:
    """A job that runs, without nodes."""
    coordinator, keys = MemoryCoordinator(MemoryStore()), Keys(JOB)
    spec = JobSpec.local(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=JOB))
    records = {
        keys.spec: spec.to_bytes(),
        keys.status: StatusRecord(state="running").to_bytes(),
        keys.epoch: EpochRecord(epoch=0, attempt=1, writer="w").to_bytes(),
    }
    await coordinator.txn(Txn(success=tuple(Put(key, value) for key, value in records.items())))
    return coordinator, keys, spec


async def test_event_of_a_launcher_is_kept() -> None:
    coordinator, keys, spec = await begun()
    seen: list[str] = []
    follower = Follower(coordinator, spec, b"")
    await follower.start(lambda event: seen.append(event.text))
    try:
        for number in range(2):
            await follower.keep_event(Event(5.0, "launcher", "preempted", f"n{number} was preempted"))
        await coordinator.txn(
            Txn(success=(Put(keys.event("6"), Event(6.0, "n2", "waits", "last").to_bytes()),)),
        )
        async with asyncio.timeout(30):
            while "last" not in seen:  # noqa: ASYNC110 (another task fills it)
                await asyncio.sleep(0.01)
    finally:
        await follower.stop()
    assert seen == ["n0 was preempted", "n1 was preempted", "last"], "each once"
    assert [event.text for event in await kept_events(coordinator, JOB)] == seen


async def test_failure_reported_by_two_launchers_is_shown_once() -> None:
    coordinator, keys, spec = await begun()
    seen: list[str] = []
    follower = Follower(coordinator, spec, b"")
    await follower.start(lambda event: seen.append(event.text))
    try:
        for after in (0.07, 0.08):
            failover = Event(
                5.0, "launcher", "failover", f"n1 died; next commit after {after} s", fields={"node": "n1"}
            )
            await coordinator.txn(Txn(success=(Put(keys.event("5-failover-n1"), failover.to_bytes()),)))
            async with asyncio.timeout(30):
                while not seen:  # noqa: ASYNC110 (another task fills it)
                    await asyncio.sleep(0.01)
        other = Event(6.0, "n2", "waits", "last")
        await coordinator.txn(Txn(success=(Put(keys.event("6"), other.to_bytes()),)))
        async with asyncio.timeout(30):
            while seen[-1] != "last":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await follower.stop()
    assert seen == ["n1 died; next commit after 0.07 s", "last"]
