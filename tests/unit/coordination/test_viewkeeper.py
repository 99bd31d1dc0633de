"""The view's keeper: which changes wake which waiters and listeners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from taskgraph.coordination.api import Coordinator, DataLost, Listing, WatchBatch
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.protocol.kv import Op, Put, Txn
from taskgraph.protocol.records import EpochRecord, JobStatus, NodeRecord, PrimaryRecord, Record, StatusRecord
from taskgraph.protocol.view import JobView


class Job:
    """A job's keys and a keeper that watches them; counts its notifications of all changes and of the structure."""

    def __init__(self, node: Coordinator, name: str) -> None:
        self.node = node
        self.keeper = ViewKeeper(node, name, refresh_s=1000.0)  # a re-read would be counted, too
        self.changes = self.structures = 0
        self.keeper.on_change(self._changed)
        self.keeper.on_change(self._structured, structure=True)

    def _changed(self) -> None:
        self.changes += 1

    def _structured(self) -> None:
        self.structures += 1

    async def put(self, *records: tuple[str, Record]) -> None:
        """Writes records; returns when the view has them."""
        ops: tuple[Op, ...] = tuple(Put(key, record.to_bytes()) for key, record in records)
        await self.keeper.wait_for_revision((await self.node.txn(Txn(success=ops))).revision)

    async def put_epoch(self, epoch: int) -> None:
        await self.put((self.keeper.view.keys.epoch, EpochRecord(epoch=epoch, attempt=0)))


@pytest.fixture
async def job(cluster, node: Coordinator) -> AsyncIterator[Job]:
    job = Job(node, cluster.prefix.strip("/").replace("/", "-"))
    await job.keeper.load()
    watching = asyncio.create_task(job.keeper.run())
    await job.put_epoch(0)
    yield job
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_commit_wakes_waiters_for_the_epoch(job: Job) -> None:
    asked: list[int] = []

    def of_the_structure(view: JobView) -> bool:
        asked.append(view.revision)
        return 3 in view.primaries

    waiting = job.keeper.begin_wait(of_the_structure, structure=True)
    next_epoch = job.keeper.begin_wait(lambda view: view.stamp is not None and view.stamp.epoch == 2)
    changes, structures, asked_before = job.changes, job.structures, len(asked)
    await job.put_epoch(1)
    assert not next_epoch.done()
    await job.put_epoch(2)
    await next_epoch
    assert (job.changes - changes, job.structures - structures, len(asked) - asked_before) == (2, 0, 0)
    assert not waiting.done()
    await job.put((job.keeper.view.keys.primary(3), PrimaryRecord(node="n1", term=1, stateful=True)))
    await waiting
    assert (job.changes - changes, job.structures - structures) == (3, 1)


async def test_change_beside_a_commit_wakes_all(job: Job) -> None:
    waiting = job.keeper.begin_wait(lambda view: 0 in view.primaries, structure=True)
    structures = job.structures
    keys = job.keeper.view.keys
    await job.put(
        (keys.epoch, EpochRecord(epoch=1, attempt=0)),
        (keys.primary(0), PrimaryRecord(node="n1", term=1, stateful=True)),
    )
    await waiting
    assert job.structures == structures + 1


async def test_listing_and_nudge_wake_all(job: Job) -> None:
    beside = False
    waiting = job.keeper.begin_wait(lambda _: beside, structure=True)
    await job.keeper.load()
    assert (job.changes, job.structures) == (3, 2)  # two listings; the first epoch by the watch
    assert not waiting.done()
    beside = True
    job.keeper.notify_later()
    job.keeper.notify_later()
    await waiting
    assert (job.changes, job.structures) == (4, 3)
    again = job.keeper.begin_wait(lambda _: not beside, structure=True)
    beside = False
    job.keeper.notify_later()
    async with asyncio.timeout(30):
        await again
    assert (job.changes, job.structures) == (5, 4), "each nudge notifies"


async def test_run_by_prefixes_ignores_commits(cluster, node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = 0
    listing = node.list

    async def counted(prefix: str) -> Listing:
        nonlocal listed
        listed += 1
        return await listing(prefix)

    monkeypatch.setattr(node, "list", counted)
    keeper = ViewKeeper(node, cluster.prefix.strip("/").replace("/", "-"), refresh_s=1.0)
    keys = keeper.view.keys

    async def put(key: str, record: Record) -> None:
        await node.txn(Txn(success=(Put(key, record.to_bytes()),)))

    await put(keys.epoch, EpochRecord(epoch=0, attempt=0))
    await put(keys.status, StatusRecord(state=JobStatus.RUNNING))
    await keeper.load()
    watching = asyncio.create_task(keeper.run_with_listings(keys.nodes, keys.status))
    for epoch in range(5):
        await put(keys.epoch, EpochRecord(epoch=epoch, attempt=0))
    await put(keys.primary(3), PrimaryRecord(node="n1", term=1, stateful=True))
    await put(
        keys.node("n1"),
        NodeRecord(
            **dict.fromkeys(("name", "run", "host", "control", "fingerprint"), ""), pid=1, endpoints=(), lease=0
        ),
    )
    await keeper.wait_until(lambda view: "n1" in view.nodes)
    assert keeper.view.stamp is not None and keeper.view.stamp.epoch == 4
    assert keeper.view.primary_node(3) == "n1", "all of it is as it was then"
    assert listed == 2
    await put(keys.epoch, EpochRecord(epoch=5, attempt=0))
    await put(keys.status, StatusRecord(state=JobStatus.FINISHED))
    await keeper.wait_until(lambda view: not view.running)
    assert listed == 3
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


class Slow(MemoryCoordinator):
    """Listings wait for `go_on`."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.at_s, self.go_on = 0.0, asyncio.Event()

    def now(self) -> float:
        return self.at_s

    async def list(self, prefix: str) -> Listing:
        await self.go_on.wait()
        return await super().list(prefix)


async def test_slow_listing_is_named() -> None:
    etcd = Slow()
    keeper = ViewKeeper(etcd, "fit", refresh_s=1.0)
    loading = asyncio.ensure_future(keeper.load())
    await asyncio.sleep(0)
    for at_s, said in (
        (1.0, ()),
        (30.0, ("etcd: listing the job takes 30 s so far: it is busy, or the link to it is slow",)),
    ):
        etcd.at_s = at_s
        assert keeper.waits == said
    etcd.go_on.set()
    await loading
    assert keeper.waits == ()


class Anew(MemoryCoordinator):
    """An etcd that is set up anew while its watches are broken, and has more revisions by then."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.again = asyncio.Event()

    def set_up_anew(self) -> None:
        self.store = MemoryStore()
        self.store.revision = 500
        self.again.set()

    async def _watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        await self.again.wait()
        yield WatchBatch(start_revision - 1, (), reopened=True)
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("by", [False, True], ids=["all", "by prefixes"])
async def test_reopened_watch_lists_again(by: bool) -> None:
    """The watch alone would wait for ever: the new etcd has no events from its revision on."""
    etcd = Anew()
    keeper = ViewKeeper(etcd, "fit", refresh_s=1.0)
    keys = keeper.view.keys
    await etcd.txn(
        Txn(success=(Put(keys.spec, b"{}"), Put(keys.status, StatusRecord(state=JobStatus.FAILED).to_bytes())))
    )
    await keeper.load()
    watching = asyncio.create_task(keeper.run_with_listings(keys.nodes, keys.status) if by else keeper.run())
    etcd.set_up_anew()
    async with asyncio.timeout(30):
        await keeper.wait_until(lambda view: view.status is None, structure=True)
    assert keeper.view.spec is None and keeper.view.revision == 500
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_older_backup_is_noticed() -> None:
    etcd = Anew()
    keeper = ViewKeeper(etcd, "fit", refresh_s=1.0)
    keys = keeper.view.keys

    async def put(epoch: int) -> None:
        record = Put(keys.epoch, EpochRecord(epoch=epoch, attempt=1).to_bytes())
        status = Put(keys.status, StatusRecord(state=JobStatus.RUNNING).to_bytes())
        await etcd.txn(Txn(success=(record, status, Put(keys.spec, b"{}"))))

    await put(60)
    await keeper.load()
    watching = asyncio.create_task(keeper.run())
    etcd.set_up_anew()
    await put(24)
    with pytest.raises(DataLost, match=r"was in epoch 60, attempt 1, and is in epoch 24.*from a backup\?.*--resume"):
        async with asyncio.timeout(30):
            await watching
    with pytest.raises(DataLost, match="etcd has lost what it had acknowledged"):
        await keeper.refresh()


async def test_cancelled_waiter_is_not_called(job: Job) -> None:
    asked = 0

    def never(_: JobView) -> bool:
        nonlocal asked
        asked += 1
        return False

    for structure in (False, True):
        waiting = job.keeper.begin_wait(never, structure=structure)
        stop = job.keeper.on_change(lambda: never(job.keeper.view), structure=structure)
        waiting.cancel()
        stop()
        stop()
    await asyncio.sleep(0)
    asked = 0
    await job.keeper.load()
    assert asked == 0


async def test_re_read_is_linearizable(cluster, node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an earlier re-read is under way: later callers share the next one."""
    keeper = ViewKeeper(node, cluster.prefix.strip("/").replace("/", "-"), refresh_s=1.0)
    keys, gate, listing = keeper.view.keys, asyncio.Event(), node.list
    listed = 0

    async def late(prefix: str) -> Listing:
        nonlocal listed
        listed += 1
        found = await listing(prefix)
        await gate.wait()
        return found

    monkeypatch.setattr(node, "list", late)
    await node.txn(Txn(success=(Put(keys.epoch, EpochRecord(epoch=1, attempt=0).to_bytes()),)))
    first = asyncio.create_task(keeper.refresh())
    while not listed:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await node.txn(Txn(success=(Put(keys.epoch, EpochRecord(epoch=2, attempt=0).to_bytes()),)))
    others = [asyncio.create_task(keeper.refresh()) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *others)
    assert keeper.view.stamp is not None and keeper.view.stamp.epoch == 2
    assert listed == 2


async def test_cancelled_re_read_is_not_shared(cluster, node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second caller would return with an old view."""
    keeper = ViewKeeper(node, cluster.prefix.strip("/").replace("/", "-"), refresh_s=1.0)
    listing, begun, gates = node.list, [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    listed = 0

    async def late(prefix: str) -> Listing:
        nonlocal listed
        listed += 1
        if listed <= 2:
            begun[listed - 1].set()
            await gates[listed - 1].wait()
        return await listing(prefix)

    monkeypatch.setattr(node, "list", late)
    first = asyncio.create_task(keeper.refresh())
    await begun[0].wait()
    second, third = asyncio.create_task(keeper.refresh()), asyncio.create_task(keeper.refresh())
    await asyncio.sleep(0)
    gates[0].set()
    await first
    await begun[1].wait()
    await node.txn(Txn(success=(Put(keeper.view.keys.epoch, EpochRecord(epoch=2, attempt=0).to_bytes()),)))
    second.cancel()
    await asyncio.wait([second])
    await third
    assert keeper.view.stamp is not None and keeper.view.stamp.epoch == 2


async def test_changes_during_a_notification_are_gathered(
    job: Job, node: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s, now = 3600.0, node.now()

    def look() -> None:
        nonlocal now
        now += took_s  # with a thousand tasks each of them looks; and the process may have been stopped meanwhile

    monkeypatch.setattr(node, "now", lambda: now)
    monkeypatch.setattr("taskgraph.coordination.viewkeeper._MAX_PAUSE_S", 1.0)
    job.keeper.on_change(look, structure=True)
    keys, structures, changes = job.keeper.view.keys, job.structures, job.changes
    record = PrimaryRecord(node="n1", term=1, stateful=True).to_bytes()
    for task in range(20):
        await node.txn(Txn(success=(Put(keys.primary(task), record),)))
    async with asyncio.timeout(30):
        await job.keeper.wait_until(lambda view: len(view.primaries) == 20, structure=True)
    assert job.structures - structures <= 10
    assert job.changes - changes <= 10


async def test_commit_notifies_at_once(job: Job, node: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    now = node.now()

    def look() -> None:
        nonlocal now
        now += 3600.0

    monkeypatch.setattr(node, "now", lambda: now)
    monkeypatch.setattr("taskgraph.coordination.viewkeeper._MAX_PAUSE_S", 60.0)
    job.keeper.on_change(look, structure=True)
    keys = job.keeper.view.keys
    first = job.keeper.begin_wait(lambda view: 0 in view.primaries, structure=True)
    second = job.keeper.begin_wait(lambda view: 1 in view.primaries, structure=True)
    for task in range(2):
        record = PrimaryRecord(node="n1", term=1, stateful=True)
        await node.txn(Txn(success=(Put(keys.primary(task), record.to_bytes()),)))
        if task == 0:
            await first
    assert not second.done()
    structures = job.structures
    await job.put_epoch(1)
    await second
    assert job.structures == structures + 1


async def test_events_do_not_wake_structure_waiters(
    job: Job, node: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover of hundreds of tasks writes hundreds of events, when nodes are busy with it."""
    now = node.now()

    def look() -> None:
        nonlocal now
        now += 3600.0

    async def put(key: str, value: bytes) -> None:
        await node.txn(Txn(success=(Put(key, value),)))

    structures, keys = job.structures, job.keeper.view.keys
    result = await node.txn(Txn(success=(Put(keys.event("1"), b"{}"),)))
    await job.keeper.wait_for_revision(result.revision)
    assert job.structures == structures
    monkeypatch.setattr(node, "now", lambda: now)
    monkeypatch.setattr("taskgraph.coordination.viewkeeper._MAX_PAUSE_S", 1.0)
    job.keeper.on_change(look, structure=True)
    for task in range(2):
        await put(keys.primary(task), PrimaryRecord(node="n1", term=1, stateful=True).to_bytes())
    for number in range(20):
        await put(keys.event(str(number)), b"{}")
    async with asyncio.timeout(30):
        await job.keeper.wait_until(lambda view: len(view.primaries) == 2, structure=True)
    assert job.structures - structures <= 2


@pytest.mark.parametrize("how", ["nudged", "in time", "at once"])
async def test_error_of_a_listener_ends_the_watch(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The event loop would only log an error from a timer, and later waiters would wait for ever."""
    keeper = ViewKeeper(node := MemoryCoordinator(MemoryStore()), "fit", refresh_s=1.0)
    await keeper.load()
    watching = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)

    def breaks(view: JobView) -> bool:
        if view.status is not None or how == "nudged":
            raise AssertionError("a mistake")
        return False

    waiting = keeper.begin_wait(breaks if how != "nudged" else lambda view: False)
    if how == "nudged":
        keeper.on_change(lambda: breaks(keeper.view))
        keeper.notify_later()
        keeper.notify_later()
    else:
        if how == "in time":
            monkeypatch.setattr(keeper, "_pause_ends_at", node.now() + 0.01)
        status = StatusRecord(state=JobStatus.RUNNING).to_bytes()
        await node.txn(Txn(success=(Put(keeper.view.keys.status, status),)))
    async with asyncio.timeout(10):
        with pytest.raises(AssertionError, match="a mistake"):
            await watching
    waiting.cancel()
    await node.close()


async def test_waits_cost_nothing_per_event_key(job: Job, node: Coordinator) -> None:
    """A node with a thousand tasks has as many waits, and a job that begins writes as many events."""
    asked = 0

    def never(view: JobView) -> bool:
        nonlocal asked
        asked += 1
        return False

    waiting = job.keeper.begin_wait(never)
    changes = job.changes
    revisions = [
        (await node.txn(Txn(success=(Put(job.keeper.view.keys.event(str(number)), b"{}"),)))).revision
        for number in range(20)
    ]
    await asyncio.gather(*(job.keeper.wait_for_revision(revision) for revision in reversed(revisions)))
    assert asked == 1 and job.changes == changes
    waiting.cancel()


@pytest.mark.parametrize(("keys", "later_s", "re_reads"), [(10, 0.0, True), (2000, 0.0, False), (2000, 60.0, True)])
async def test_re_read_after_a_slow_listing(keys: int, later_s: float, re_reads: bool) -> None:
    """The pause after a listing is for large jobs, not for a busy host, and ends."""
    etcd = Slow()
    keeper = ViewKeeper(etcd, "fit", refresh_s=0.01)
    events = tuple(Put(keeper.view.keys.event(str(number)), b"{}") for number in range(keys))
    for first in range(0, keys, 100):
        await etcd.txn(Txn(success=events[first : first + 100]))
    loading = asyncio.ensure_future(keeper.load())
    await asyncio.sleep(0)
    etcd.at_s = 100.0
    etcd.go_on.set()
    await loading
    etcd.at_s += later_s
    revision = (await etcd.txn(Txn(success=events[:1]))).revision
    reading = asyncio.ensure_future(keeper.wait_for_revision(revision))  # no watch runs
    done, _ = await asyncio.wait([reading], timeout=60.0 if re_reads else 0.2)
    assert bool(done) is re_reads
    reading.cancel()
