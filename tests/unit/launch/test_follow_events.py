"""Following a job's events in etcd."""

from __future__ import annotations

import asyncio

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.launch.follow import follow_events, kept_events
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn

JOB = "job"


async def test_who_stands_still_for_longer_than_history_is_kept_misses_no_event_and_gets_none_twice() -> None:
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


async def test_events_come_in_the_order_of_what_happened_also_where_a_clock_is_off() -> None:
    """Their keys begin with the time of whoever told them."""
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
    told = await kept_events(coordinator, JOB)
    assert seen == [event.text for event in told] == [f"event {number}" for number in range(3)]
    await following.aclose()  # type: ignore[attr-defined]
