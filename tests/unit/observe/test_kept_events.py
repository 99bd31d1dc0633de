"""Events that outlive the node that emitted them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.errors import DecodeError, Unavailable
from taskgraph.observe.events import Event, EventLog, keep_events, sort_by_revision, task_ids
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Delete, Put, Txn, TxnResult
from taskgraph.protocol.numbers import Numbers, compact
from taskgraph.testing.clock import FastForwardLoop

JOB = "job"


def submitted() -> MemoryStore:
    """An etcd that has the job."""
    store = MemoryStore()
    store.execute(Txn(success=(Put(Keys(JOB).spec, b"{}"),)))
    return store


def run_at(store: MemoryStore) -> int:
    """The revision of the run's spec."""
    (spec,) = store.select(Keys(JOB).spec, prefix=False)
    return spec.mod_revision


@contextlib.asynccontextmanager
async def kept(events: EventLog, store: MemoryStore, *, kept: int = 100) -> AsyncIterator[None]:
    keeping = asyncio.ensure_future(
        keep_events(events, MemoryCoordinator(store), JOB, spec_revision=run_at(store), node_id="n1-1", kept=kept)
    )
    try:
        yield
    finally:
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping


def at_its_own_pace(scenario: Coroutine[Any, Any, None]) -> None:
    """A clock that runs only while all asyncio tasks wait, however busy the machine is."""
    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        runner.run(scenario)


def in_etcd(store: MemoryStore) -> list[str]:
    return [Event.from_bytes(kv.value).text for kv in store.select(Keys(JOB).events, prefix=True)]


async def pruned(store: MemoryStore, kept: int, last: str) -> None:
    """Returns once the last event is there, and no more than so many are."""
    async with asyncio.timeout(30):
        while last not in (there := in_etcd(store)) or len(there) > kept:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_burst_of_events_is_one_write() -> None:
    """Around a failure or a drain every node tells several within some milliseconds; each write wakes all nodes."""

    async def scenario() -> None:
        events, store = EventLog("n1"), submitted()
        async with kept(events, store):
            before = store.revision
            for number in range(10):
                events.emit("evicted", f"{number}")
                events.emit("commit", "many", transient=True)
                await asyncio.sleep(0.002)
            async with asyncio.timeout(30):
                while len(in_etcd(store)) < 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert in_etcd(store) == [str(number) for number in range(10)]
            assert store.revision == before + 1

    at_its_own_pace(scenario())


async def test_first_and_last_events_are_kept() -> None:
    events, store = EventLog("n1"), submitted()
    events.emit("began", "before anybody kept it")
    async with kept(events, store):
        events.emit("drain", "just before the end")
        await asyncio.sleep(0)
    assert in_etcd(store) == ["before anybody kept it", "just before the end"]


def test_waiting_for_kept_events_writes_them() -> None:
    """A job may be over before a burst is gathered."""

    async def scenario() -> None:
        events, store = EventLog("n1"), submitted()
        await events.wait_until_kept()  # no keeper: nothing to wait for
        async with kept(events, store):
            await asyncio.sleep(0.01)
            for text in ("began", "finished"):
                events.emit(text, text)
                async with asyncio.timeout(0.08):  # they are gathered for 0.1 s
                    await events.wait_until_kept()
                assert in_etcd(store)[-1] == text
            await events.wait_until_kept()

    at_its_own_pace(scenario())


def test_waiting_for_kept_events_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def away(txn: Txn) -> None:
            raise Unavailable("etcd is away")

        events, store = EventLog("n1"), submitted()
        coordinator = MemoryCoordinator(store)
        monkeypatch.setattr(coordinator, "txn", away)
        keeping = asyncio.ensure_future(
            keep_events(events, coordinator, JOB, spec_revision=run_at(store), node_id="n1-1", kept=100)
        )
        await asyncio.sleep(0)
        events.emit("began", "began")
        async with asyncio.timeout(1.5):
            await events.wait_until_kept()
        assert "some events are not kept yet" in caplog.text
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert "1 events could not be kept" in caplog.text

    at_its_own_pace(scenario())


async def test_events_wait_for_a_dead_etcd(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    events, store = EventLog("n1"), submitted()
    coordinator, tries, away = MemoryCoordinator(store), 0, True
    write = coordinator.txn

    async def txn(txn: Txn) -> TxnResult:
        nonlocal tries
        if not away:
            return await write(txn)
        tries += 1
        raise Unavailable("etcd is away")

    monkeypatch.setattr(coordinator, "txn", txn)
    monkeypatch.setattr("taskgraph.observe.events._RETRY_S", 0.005)
    monkeypatch.setattr("taskgraph.observe.events._RING", 40)
    keeping = asyncio.ensure_future(
        keep_events(events, coordinator, JOB, spec_revision=run_at(store), node_id="n1-1", kept=100)
    )
    await asyncio.sleep(0)
    for number in range(50):
        events.emit("evicted", f"{number}")
    async with asyncio.timeout(30):
        while tries < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "events wait for etcd: etcd is away"
    ]
    away = False
    await events.wait_until_kept()
    assert in_etcd(store) == [str(number) for number in range(10, 50)]
    assert "10 events were left out: etcd was away for too long" in caplog.text
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_events_survive_the_end_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    events, store = EventLog("n1"), submitted()
    coordinator, written = MemoryCoordinator(store), asyncio.Event()
    write = coordinator.txn

    async def slow(txn: Txn) -> TxnResult:
        if not written.is_set():
            written.set()
            await asyncio.Event().wait()
        return await write(txn)

    monkeypatch.setattr(coordinator, "txn", slow)
    events.emit("began", "began")
    keeping = asyncio.ensure_future(
        keep_events(events, coordinator, JOB, spec_revision=run_at(store), node_id="n1-1", kept=100)
    )
    await written.wait()
    events.emit("finished", "finished")
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert in_etcd(store) == ["began", "finished"]


async def test_oldest_events_are_pruned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys begin with the time, and so those of a clock that is late were pruned as soon as they were there."""
    events, store = EventLog("n1"), submitted()
    now = 2_000_000_000.0
    monkeypatch.setattr("taskgraph.observe.events.time.time", lambda: now)
    async with kept(events, store, kept=4):
        await asyncio.sleep(0.01)
        for number in range(40):
            now = 2_000_000_000.0 - number  # as later events of hosts whose clocks are ever later
            events.emit("evicted", f"{number}")
            await events.wait_until_kept()
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while len(in_etcd(store)) > 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    listing = await MemoryCoordinator(store).list(Keys(JOB).events)
    texts = [Event.from_bytes(kv.value).text for kv in sort_by_revision(listing)]
    assert texts == [str(number) for number in range(28, 40)]


async def test_takeovers_of_one_failure_are_one_event() -> None:
    """One kill made 770 of the 1,000 events that etcd keeps."""
    events, store = EventLog("n9"), submitted()
    async with kept(events, store, kept=10):
        await asyncio.sleep(0.01)
        events.emit("began", "the job began")
        for node in ("n1", "n2"):
            events.emit("lost", f"{node} died")
            for task in range(100):
                text = f"task {task}: n9 is primary after {node} (term {2 + task % 2})"
                events.emit("takeover", text, task=task, epoch=3, fields={"from": node})
        events.emit("takeover", "task 3: n9 is primary after n4 (term 4)", task=3, fields={"from": "n4"})
        await events.wait_until_kept()
    assert in_etcd(store) == [
        "the job began",
        "n1 died",
        "tasks 0-99: n9 is primary after n1",
        "n2 died",
        "tasks 0-99: n9 is primary after n2",
        "task 3: n9 is primary after n4 (term 4)",
    ]
    first = Event.from_bytes(store.select(Keys(JOB).events, prefix=True)[2].value)
    assert (task_ids(first), first.fields["from"], first.epoch, first.task) == ([*range(100)], "n1", 3, None)


async def test_late_events_of_an_earlier_run_are_dropped() -> None:
    """As those of nodes that leave while the job is submitted again: `events` of the new run began with them."""
    events, store = EventLog("n1"), submitted()
    async with kept(events, store):
        await asyncio.sleep(0.01)
        events.emit("began", "began")
        await events.wait_until_kept()
        # As a submit does it.
        store.execute(Txn(success=(Delete(Keys(JOB).events, prefix=True), Put(Keys(JOB).spec, b"{}"))))
        events.emit("cancelled", "the job was ended")
        await events.wait_until_kept()
    assert in_etcd(store) == []


async def test_events_of_a_lost_job_are_dropped() -> None:
    """They were all that there was of it, for ever."""
    events, store = EventLog("n1"), submitted()
    async with kept(events, store):
        await asyncio.sleep(0.01)
        store.execute(Txn(success=(Delete(Keys(JOB).spec),)))
        events.emit("paused", "the lease could not be renewed")
        await events.wait_until_kept()
    assert in_etcd(store) == []


@pytest.mark.parametrize("data", [b"\xff{}", b"{", b"[]", b'{"at": 1}', b"{}{}", b'{"unknown": 1}'])
def test_bad_event_is_named(data: bytes) -> None:
    with pytest.raises(DecodeError, match="not an event"):
        Event.from_bytes(data)


def test_log_names_the_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "taskgraph.events")
    events = EventLog("n1")
    events.emit("failed", "task 0: ValueError: boom")
    events.emit("commit", "epoch 3", transient=True)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "failed: task 0: ValueError: boom"),
        ("DEBUG", "commit: epoch 3"),
    ]


@pytest.mark.parametrize(("fields", "remembered"), [(0, 40), (1, 40), (10, 10), (60, 1), (200, 1)])
def test_memory_for_events_is_bounded(fields: int, remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With commits these are all that the tasks reported, of thousands of epochs."""
    monkeypatch.setattr("taskgraph.observe.events._RING", 40)
    monkeypatch.setattr("taskgraph.observe.events._RING_FIELDS", 100)
    events = EventLog("n1")
    for number in range(100):
        events.emit("commit", f"{number}", transient=True, fields={f"f{place}": 0.5 for place in range(fields)})
    assert [event.text for event in events.recent()] == [f"{number}" for number in range(100 - remembered, 100)]


def test_packed_fields_travel() -> None:
    fields, events = {f"loss of part {part}": part / 8 for part in range(50)}, EventLog("n1")
    for beside in (fields, compact(fields)):
        events.emit("commit", "an epoch", epoch=1, transient=True, fields=beside)
    found = events.recent()
    assert [type(event.fields) for event in found] == [dict, Numbers]
    assert [Event.from_bytes(event.to_bytes()).fields for event in found] == [fields, fields]


def test_events_of_a_burst_that_lasts_are_gathered() -> None:
    """While one burst was written, the next ones came, and each of their events was kept for itself."""

    async def scenario() -> None:
        events, store = EventLog("n9"), submitted()
        async with kept(events, store):
            for task in range(300):
                text = f"task {task}: n2 has a backup now (in sync: 2)"
                events.emit("admitted", text, task=task, fields={"of": "n2"})
                await asyncio.sleep(0.004)
            await events.wait_until_kept()
        assert 1 < len(in_etcd(store)) <= 8

    at_its_own_pace(scenario())
