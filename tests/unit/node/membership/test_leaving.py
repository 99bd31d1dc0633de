"""A node that leaves while others still talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator

import pytest
from cluster_kit import Counting, Gated, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.coordination.api import WatchBatch
from taskgraph.errors import CoordinationError, Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.kv import Delete, Put, Txn
from taskgraph.protocol.messages import Offer, Reason
from taskgraph.protocol.records import RunningCode

__all__ = ["gated"]

tearing_down: list[int] = []


class Slow(Counting, state=["total"]):
    async def teardown(self) -> None:
        tearing_down.append(self.task_id)
        await asyncio.sleep(1)


def test_leaving_node_sets_nothing_up() -> None:
    """Otherwise `setup` would run without a `teardown`."""
    tearing_down.clear()

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        runs = [member.run for member in cluster._members.values()]
        tearing_down.clear()
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        while len(tearing_down) < len(runs):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)
        by = next(node for node in cluster.nodes if 0 in node.roles.replicas)
        to = next(node for node in cluster.nodes if 0 not in node.roles.replicas)
        view, held = to.keeper.view, by.roles.replicas[0].boundaries.committed
        assert held is not None
        offer = Offer(held.stamp, view.term(0), 0, True, True, 99, held.value)
        with pytest.raises(Refused, match="is leaving") as refused:
            await to.serving(view.primary_node(0) or "", offer)
        assert refused.value.reason == Reason.CLOSING
        await asyncio.wait(runs)
        assert not any(replica.ready for node in cluster.nodes for replica in node.roles.replicas.values())

    play(job(Slow, tasks=2, epochs=2, backups=1), scenario, nodes=4)


class Endless(Counting, state=["total"]):
    """The teardown of task 1 never returns."""

    gate: asyncio.Event

    async def teardown(self) -> None:
        while self.task_id == 1 and not self.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.gate.wait()


def test_endless_teardown_is_named_and_left() -> None:
    class Fresh(Endless, state=["total"]):
        gate = asyncio.Event()

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        loop = asyncio.get_running_loop()
        nodes, runs = cluster.nodes, [member.run for member in cluster._members.values()]
        began = loop.time()
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        try:
            while not all(node.status().waits for node in nodes):  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)
            waits = [f"task 1: its end on {node.name} waits for 'teardown', for 7 s at most" for node in nodes]
            assert [node.status().waits for node in nodes] == [(text,) for text in waits]
            await asyncio.wait(runs)
        finally:
            Fresh.gate.set()
        assert loop.time() - began == pytest.approx(7, abs=1)
        assert [run.exception() for run in runs] == [None] * 2
        left = "task 1: teardown did not return within 7 s: it is left behind"
        assert sorted(told(cluster, "slow")) == [*sorted(waits), left, left]

    settings = tg.Settings(epochs_ahead=0, cancel_s=7, slow_compute_s=2)
    play(job(Fresh, epochs=2, settings=settings), scenario, nodes=2)


class Raising(Counting, state=["total"]):
    def teardown(self) -> None:
        raise ValueError("the file cannot be closed")


def test_error_in_last_teardown_is_event() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        runs = [member.run for member in cluster._members.values()]
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        await asyncio.wait(runs)
        assert [run.exception() for run in runs] == [None] * 2
        line = inspect.getsourcelines(Raising.teardown)[1] + 1
        said = f"teardown raised ValueError: the file cannot be closed (at {__file__}, line {line}); the log "
        texts = sorted(told(cluster, "teardown failed"))
        assert len(texts) == 4, "each replica, of two tasks"
        assert texts[0].startswith(f"task 0: {said}") and texts[3].startswith(f"task 1: {said}")

    play(job(Raising, tasks=2, epochs=2), scenario, nodes=2)


def test_drain_of_leaving_node_is_harmless() -> None:
    """A SIGTERM of its launcher must not start `drain_s` again."""
    tearing_down.clear()

    async def scenario(cluster: InProcessCluster) -> float:
        await cluster.result()
        runs = [member.run for member in cluster._members.values()]
        tearing_down.clear()
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        while len(tearing_down) < len(runs):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        for node in cluster.nodes:
            node.drain("SIGTERM")
        await asyncio.wait(runs)
        assert [run.exception() for run in runs] == [None] * 2
        return asyncio.get_running_loop().time() - began

    assert play(job(Slow, tasks=2, epochs=2), scenario, nodes=2) < 5


def test_deleted_job_stays_deleted(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        runs = [member.run for member in cluster._members.values()]
        cluster.store.execute(Txn(success=(Delete(cluster.keys.root, prefix=True),)))
        await asyncio.wait(runs)
        assert not cluster.store.select(cluster.keys.root, prefix=True)

    play(job(gated), scenario, nodes=2)


async def fails() -> None:
    raise ValueError("not a number")


@pytest.mark.parametrize("what", ["view", "work"])
def test_own_error_blames_no_user_code(gated: type[Gated], what: str) -> None:
    break_it = asyncio.Event()

    async def watch(prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        await break_it.wait()
        raise CoordinationError("etcd: permission denied")
        yield

    async def scenario(cluster: InProcessCluster) -> None:
        (node,) = cluster.nodes
        node.own_process = True
        if what == "view":
            node.coordinator.watch = watch  # type: ignore[method-assign]
        await gated.reached.wait()
        if what == "view":
            break_it.set()
        else:
            node.own(fails(), "work of its own")
        await asyncio.wait([cluster._members[node.id].run])
        error = "etcd: permission denied" if what == "view" else "not a number"
        assert error in str(cluster._node_failed.result())
        assert (node.gone_record().reason, node.gone_record().running_code) == (f"ended itself: {error}", ())

    play(job(gated), scenario, nodes=1)


def test_cancelled_node_names_running_code(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 0)
        node.own_process = True
        cluster._members[node.id].run.cancel()
        await asyncio.wait([cluster._members[node.id].run])
        gone = node.gone_record()
        assert "was ended by user code" in gone.reason
        assert RunningCode("asyncio tasks of its own", 0, 1) in gone.running_code

    play(job(gated), scenario, nodes=2)
