"""Nodes of one job in this process, on a clock that skips waits, and faults that a test can cause."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pytest

import taskgraph as tg
from taskgraph.coordination.api import Listing, WatchBatch
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.errors import OutcomeUnknown, Unavailable
from taskgraph.launch import inprocess
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node, Point
from taskgraph.node.reconciler import Reconciler
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.messages import RequestRestart, Stamp
from taskgraph.testing.clock import FastForwardLoop
from taskgraph.testing.threads import LockStepThreads

R = TypeVar("R")
Stage = Callable[[InProcessCluster, str], Awaitable[None]]


class Counting(tg.Task, state=["total"]):
    """Counts its epochs."""

    total: int

    def setup(self) -> Any:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1

    def result(self) -> int:
        return self.total


class Gated(Counting, state=["total"]):
    """Epoch `at` waits for `gate`."""

    at = 1
    reached: asyncio.Event
    gate: asyncio.Event

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == self.at:
            self.reached.set()
            await self.gate.wait()
        await super().count(epoch, ins, outs)


@pytest.fixture
def gated() -> type[Gated]:
    """A class with events of its own."""

    class Fresh(Gated, state=["total"]):
        reached = asyncio.Event()
        gate = asyncio.Event()

    return Fresh


class Joining(Gated, state=["total"]):
    """After `joins` is set, set-ups wait for `may_join`."""

    joins: bool
    joining: asyncio.Event
    may_join: asyncio.Event

    async def setup(self) -> None:  # type: ignore[override]
        self.total = 0
        if type(self).joins:
            self.joining.set()
            await self.may_join.wait()


@pytest.fixture
def joining() -> type[Joining]:
    class Fresh(Joining, state=["total"]):
        reached, gate = asyncio.Event(), asyncio.Event()
        joins, joining, may_join = False, asyncio.Event(), asyncio.Event()

    return Fresh


@pytest.fixture
def set_up_when_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backups are set up with their first offer, so the first set-up is the primary's."""
    monkeypatch.setattr(Reconciler, "_set_up_backups", lambda self: None)


#: Of the loop's clock, which leaps: only what hangs comes to it.
LIMIT_S = 600.0


def play(
    job: tg.Job,
    scenario: Callable[[InProcessCluster], Awaitable[R]],
    *,
    nodes: int,
    order: int = 0,
    stages: Mapping[tuple[str, int, int], Stage] | None = None,
) -> R:
    """Starts the job's nodes, and returns what `scenario` returns.

    Args:
        stages: (stage, task, epoch) -> what happens when a primary first reaches it.
    """
    left = dict(stages or {})

    def point(cluster: InProcessCluster, node: str) -> Point:
        async def at(stage: str, task: int, epoch: int) -> None:
            if (act := left.pop((stage, task, epoch), None)) is not None:
                await act(cluster, node)

        return at

    async def whole() -> R:
        rng = random.Random(order) if order else None
        cluster = InProcessCluster(job, rng=rng, threads=LockStepThreads, point=point)
        await cluster.start(nodes)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await scenario(cluster)
        except TimeoutError:
            raise AssertionError(f"it hangs; {cluster.waits()}") from None
        finally:
            await cluster.stop()

    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        return runner.run(whole())


class Blindable(MemoryCoordinator):
    """A node's handle on etcd: a test can hold back its reads, or one answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sees = asyncio.Event()
        self._sees.set()
        self._blind_at = ""
        self._late_keys: set[str] = set()
        self._refused = ""
        self._lost = ""
        self.losses = 0
        self.written = asyncio.Event()
        self._answer = asyncio.Event()

    def answer_late(self, key: str) -> None:
        """Executes the next transaction that puts `key`, sets `written`, and answers at `answer`."""
        self._late_keys.add(key)

    def answer(self) -> None:
        self._answer.set()

    def refuse(self, key: str) -> None:
        """Refuses all transactions that put `key`; "": none."""
        self._refused = key

    def lose(self, key: str) -> None:
        """Loses all transactions that put `key`; "": none."""
        self._lost = key

    async def txn(self, txn: Txn) -> TxnResult:
        if any(isinstance(op, Put) and op.key == self._lost for op in txn.success):
            self.losses += 1
            if self.losses > 100_000:
                raise AssertionError("it does nothing but try")
            raise OutcomeUnknown("held back by the test")
        if any(isinstance(op, Put) and op.key == self._refused for op in txn.success):
            return TxnResult(False, (await super().txn(Txn())).revision, ())
        result = await super().txn(txn)
        late = {op.key for op in txn.success if isinstance(op, Put)} & self._late_keys
        if result.succeeded and late:
            self._late_keys -= late
            self.written.set()
            await self._answer.wait()
        return result

    def blind(self, at: str = "") -> None:
        """Reads nothing from now on, or from the first event of the key `at` on."""
        self._blind_at = at
        if not at:
            self._sees.clear()

    def see(self) -> None:
        """Reads again; missed events come as one batch."""
        self._blind_at = ""
        self._sees.set()

    @property
    def sees(self) -> bool:
        return self._sees.is_set()

    async def list(self, prefix: str) -> Listing:
        if not self.sees:
            raise Unavailable("held back by the test")
        return await super().list(prefix)

    async def lease_left(self, lease_id: int) -> int | None:
        if not self.sees:
            raise Unavailable("held back by the test")
        return await super().lease_left(lease_id)

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        return self._watch_if_it_sees(prefix, start_revision)

    async def _watch_if_it_sees(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        position = start_revision
        while True:
            async with contextlib.aclosing(self._watch(prefix, position)) as batches:
                async for batch in batches:
                    if any(event.kv.key == self._blind_at for event in batch.events):
                        self._sees.clear()
                    if not self.sees:
                        break
                    position = batch.revision + 1
                    yield batch
            await self._sees.wait()


@pytest.fixture
def blindable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose reads a test can hold back."""
    monkeypatch.setattr(inprocess, "MemoryCoordinator", Blindable)


def eyes(node: Node) -> Blindable:
    assert isinstance(node.coordinator, Blindable)
    return node.coordinator


#: Each epoch is committed before the next one begins: for what is to happen in a certain one.
IN_STEP = tg.Settings(epochs_ahead=0)


def job(builder: Any, **options: Any) -> tg.Job:
    given = {"tasks": 2, "epochs": 3, "builder": builder, "topology": tg.full(), "backups": 1, "settings": IN_STEP}
    return tg.Job(**{**given, **options})


def holder(cluster: InProcessCluster, task: int) -> Node:
    """The node of a task's primary, by the newest view."""
    found = max((node.keeper.view for node in cluster.nodes), key=lambda view: view.revision).primary_node(task)
    assert found is not None
    return cluster.node(found)


def die(cluster: InProcessCluster, node_id: str, *, host: bool = False) -> None:
    """Kills a node without a launcher's report: its key stays until its lease ends.

    Args:
        host: also cuts its connections, so that its port does not refuse.
    """
    member = cluster._members[node_id]
    member.crashed = True
    member.coordinator.crash()
    if host:
        for node in cluster.nodes:
            cluster.network.cut(node.id, node_id)
    else:
        cluster.network.crash(node_id)
    member.run.cancel()


def crashes(cluster: InProcessCluster) -> int:
    """The number of killed nodes."""
    return sum(member.crashed for member in cluster._members.values())


@contextlib.asynccontextmanager
async def paused(node: Node) -> AsyncIterator[None]:
    """Keeps a node paused, with its key in etcd, within a block."""
    is_unrenewed = Registration._is_unrenewed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Registration, "_is_unrenewed", lambda self, lease: self is node.registration or is_unrenewed(self, lease)
        )
        await node.keeper.wait_until(lambda _: node.paused)
        yield
    await node.wait_while_paused()


def told(cluster: InProcessCluster, kind: str) -> list[str]:
    """The texts of the events of one kind, in order."""
    return [event.text for event in cluster.events if event.kind == kind]


async def restart(cluster: InProcessCluster, stamp: Stamp) -> None:
    """Asks for a restart, and waits until the leader has written it."""
    leader = holder(cluster, 0)
    await leader.router.to_primary(0, lambda: RequestRestart(stamp, 1, "a test asks for it"), timeout_s=1.0)
    await until_attempt(leader, stamp.attempt + 1)


async def until_attempt(node: Node, attempt: int) -> None:
    """Waits until the node sees that attempt, or a later one."""
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.attempt >= attempt)


def stand_still(for_s: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FastForwardLoop)
    loop.stand_still(for_s)
