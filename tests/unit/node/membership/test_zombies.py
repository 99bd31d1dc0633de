"""A primary that was replaced while it saw nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest
from cluster_kit import Counting, blindable, eyes, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.results import JobResult

__all__ = ["blindable"]


class Slow(Counting, state=["total"]):
    """Task 1's first compute of epoch 1 never ends."""

    reached: asyncio.Event

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 1 and not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()
        await super().count(epoch, ins, outs)


@pytest.fixture
def slow() -> type[Slow]:
    class Fresh(Slow, state=["total"]):
        reached = asyncio.Event()

    return Fresh


def lose_lease(cluster: InProcessCluster, node: Node) -> None:
    """Removes a node's key, as after a freeze that outlasts its lease."""
    cluster.store.revoke(node.keeper.view.nodes[node.id].record.lease)


async def epoch_begins(node: Node, number: int) -> None:
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= number)


async def never(caller: str, message: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.usefixtures("blindable")
def test_replaced_primary_ends_without_error(slow: type[Slow], caplog: pytest.LogCaptureFixture) -> None:
    """It reads the successor's commit without having that boundary."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await slow.reached.wait()
        zombie = holder(cluster, 1)
        other = holder(cluster, 0)
        assert zombie is not other
        eyes(zombie).blind()
        lose_lease(cluster, zombie)
        await epoch_begins(other, 2)
        assert zombie.keeper.view.term(1) == 1
        eyes(zombie).see()
        result = await cluster.result()
        assert zombie in cluster.nodes
        return result

    assert play(job(slow, epochs=6), scenario, nodes=3).values == {0: 6, 1: 6}
    assert errors(caplog) == []


@pytest.mark.usefixtures("blindable")
def test_frozen_primary_delays_only_its_lease(slow: type[Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader asks it in vain what it waits for."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        loop = asyncio.get_running_loop()
        await slow.reached.wait()
        frozen, leads = holder(cluster, 1), holder(cluster, 0)
        assert frozen is not leads and leads.roles.leader is not None
        monkeypatch.setattr(frozen.transport, "_serve", never)
        eyes(frozen).blind()
        await asyncio.sleep(leads.settings.stall_check_s + 2.0)
        assert any("does not answer" in line for line in leads.roles.leader.waits)
        await asyncio.sleep(0.2)  # it asks again by now
        lose_lease(cluster, frozen)
        ended = loop.time()
        await epoch_begins(leads, 2)
        assert loop.time() - ended < 0.2
        eyes(frozen).see()
        return await cluster.result()

    assert play(job(slow, epochs=6), scenario, nodes=3).values == {0: 6, 1: 6}


class Lingers(Counting, state=["total"]):
    """The first compute of epoch 1 goes on after its cancellation, until `let_go`. Epoch 4 waits for `gate`."""

    seen: list[tuple[str, bool]]
    reached: asyncio.Event
    lingers: asyncio.Event
    let_go: asyncio.Event
    gate: asyncio.Event

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 1 and not self.reached.is_set():
            self.reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.lingers.set()
                await self.let_go.wait()
                self.seen.append(("ended", self.primary))
        if epoch.number == 4:
            await self.gate.wait()
        await super().count(epoch, ins, outs)

    def on_event(self, event: tg.Event) -> None:
        if isinstance(event, tg.BecameBackup):
            self.seen.append(("became a backup", self.primary))

    def teardown(self) -> None:
        self.seen.append(("torn down", self.primary))


@pytest.fixture
def lingering() -> type[Lingers]:
    class Fresh(Lingers, state=["total"]):
        reached, lingers, let_go, gate = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()
        seen: list[tuple[str, bool]] = []  # noqa: RUF012

    return Fresh


async def ends_its_term(cluster: InProcessCluster, lingering: type[Lingers]) -> tuple[Node, Node]:
    """A node that is back, no member, and still ends its term; and the leader by then."""
    await lingering.reached.wait()
    zombie = holder(cluster, 0)
    other = next(node for node in cluster.nodes if node is not zombie)
    eyes(zombie).refuse(cluster.keys.node(zombie.id))
    lose_lease(cluster, zombie)
    await epoch_begins(other, 4)
    assert zombie.id not in other.keeper.view.in_sync(0)
    eyes(zombie).refuse("")
    await zombie.wait_while_paused()
    await lingering.lingers.wait()
    assert 0 in zombie.roles.stepping_down
    return zombie, holder(cluster, 0)


@pytest.mark.usefixtures("blindable")
def test_replica_outlives_its_term(lingering: type[Lingers]) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        zombie, _ = await ends_its_term(cluster, lingering)
        await asyncio.sleep(2.0)
        assert 0 in zombie.roles.replicas and not lingering.seen
        lingering.let_go.set()
        await asyncio.sleep(2.0)
        assert 0 not in zombie.roles.replicas
        assert lingering.seen == [("ended", True), ("became a backup", False), ("torn down", False)]
        lingering.gate.set()
        return await cluster.result()

    assert play(job(lingering, tasks=1, epochs=6), scenario, nodes=3).values == {0: 6}


@pytest.mark.usefixtures("blindable")
def test_node_waits_for_ending_term(lingering: type[Lingers]) -> None:
    """Its code may have work to save."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        zombie, leads = await ends_its_term(cluster, lingering)
        zombie.drain("a test")
        await leads.keeper.wait_until(lambda view: zombie.id in view.nodes and view.nodes[zombie.id].record.draining)
        await asyncio.sleep(2.0)
        assert zombie.running
        lingering.let_go.set()
        await asyncio.wait([cluster._members[zombie.id].run])
        assert lingering.seen == [("ended", True), ("became a backup", False), ("torn down", False)]
        lingering.gate.set()
        return await cluster.result()

    assert play(job(lingering, tasks=1, epochs=6), scenario, nodes=3).values == {0: 6}
