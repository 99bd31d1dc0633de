"""Calls to peers: when they are tried again, and when they end although nobody answers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
from cluster_kit import holder, job, play

import taskgraph as tg
from taskgraph.errors import PeerLost
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.backoff import Backoff
from taskgraph.node.router import Router, peer_of
from taskgraph.protocol.messages import Call, Encoded, Item, Pull, Refusal, Release, Reply, Stamp
from taskgraph.protocol.records import NodeRecord, PrimaryRecord
from taskgraph.protocol.view import Versioned
from taskgraph.transport.api import Peer


class Idle(tg.Task):
    """Never comes to an end."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.wait)

    async def wait(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.Event().wait()


async def never(caller: str, message: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def test_pauses_are_short_at_first_and_bounded() -> None:
    backoff = Backoff()
    pauses = [backoff.step() for _ in range(12)]
    assert pauses[:3] == [0.001, 0.002, 0.004]
    assert pauses == sorted(pauses) and pauses[-1] == 0.05
    backoff.reset()
    assert backoff.step() == 0.001


def test_a_call_to_a_node_that_does_not_answer_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        caller, silent = cluster.nodes[:2]
        await caller.keeper.wait_until(lambda view: silent.id in view.nodes)
        monkeypatch.setattr(silent.transport, "_serve", never)
        message = Release(0, 1, 1, 0)
        call = asyncio.ensure_future(caller.router.to_node(silent.id, message, timeout_s=60))
        done, _ = await asyncio.wait([call], timeout=10)
        assert not done
        cluster.store.revoke(silent.keeper.view.nodes[silent.id].record.lease)
        done, _ = await asyncio.wait([call], timeout=1)
        assert done
        with pytest.raises(PeerLost, match="lease"):
            await call

    play(job(Idle), scenario, nodes=2)


def test_a_call_begun_to_a_node_ends_with_its_lease_and_none_begins_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        caller, silent = cluster.nodes[:2]
        await caller.keeper.wait_until(lambda view: silent.id in view.nodes)
        monkeypatch.setattr(silent.transport, "_serve", never)
        message = Release(0, 1, 1, 0)
        reply = caller.router.begin_at(silent.id, message)
        assert reply is not None
        await asyncio.sleep(10)
        assert not reply.done()
        cluster.store.revoke(silent.keeper.view.nodes[silent.id].record.lease)
        await asyncio.wait([reply], timeout=1)
        assert reply.cancelled()
        assert caller.router.peer(silent.id) is not None
        assert caller.router.begin_at(silent.id, message) is None
        assert caller.router.begin_at("nobody", message) is None

    play(job(Idle), scenario, nodes=3)


def test_a_call_to_a_primary_that_does_not_answer_ends_when_another_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease ended, and its key is still there: whoever waits for that waits for longer than needed."""

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.nodes[0].keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        silent = holder(cluster, 0)
        caller = next(node for node in cluster.nodes if node is not silent)
        await caller.keeper.wait_until(lambda view: caller.id in view.in_sync(0))
        monkeypatch.setattr(silent.transport, "_serve", never)
        message = Release(1, 1, 1, 0)
        calls = [
            asyncio.ensure_future(caller.router.to_node(silent.id, message, timeout_s=60, task=task))
            for task in (0, None)
        ]
        done, _ = await asyncio.wait(calls, timeout=10)
        assert not done
        caller.suspicion.refused(silent.id)
        await caller.keeper.wait_until(lambda view: view.primary_node(0) == caller.id)
        done, others = await asyncio.wait(calls, timeout=1)
        assert done == {calls[0]} and silent.id in caller.keeper.view.nodes
        with pytest.raises(PeerLost, match="task 0"):
            await calls[0]
        for call in others:
            call.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    play(job(Idle), scenario, nodes=2)


class Wire:
    """A transport to one node, whose replies are this test's."""

    def __init__(self) -> None:
        self.replies: list[asyncio.Future[Reply]] = []

    def allocate(self, nbytes: int) -> None:
        return None

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply]:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.replies.append(reply)
        return reply

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]]:
        return [self.call_now(peer, message.each(number)) for number in range(message.count)]


class View:
    """A view in which n1 is primary of task 0, until another is."""

    structure_revision = 1

    def __init__(self) -> None:
        primary = PrimaryRecord(node="n1-1", term=1, stateful=False)
        self.primaries = {0: Versioned(primary, 3, 3)}
        self.nodes: dict[str, object] = {}


class Keeper:
    def __init__(self) -> None:
        self.view = View()
        self.changed: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None], *, structure: bool) -> None:
        self.changed.append(listener)


def routed() -> tuple[Router, Wire, Keeper]:
    wire, keeper = Wire(), Keeper()
    router = Router(wire, keeper)  # type: ignore[arg-type]
    record = NodeRecord(name="n1", run="", host="h", pid=1, endpoints=(), control="", fingerprint="", lease=1)
    router._addresses["n1-1"] = record, peer_of("n1-1", record)
    return router, wire, keeper


PULL = Pull(Stamp(1, 4), 1, 1, 0, "x", 3)


async def test_what_a_reply_brought_is_not_kept_by_who_made_the_call() -> None:
    """Its memory is lent, or takes the next item: an epoch of large items would fill fresh memory every time."""
    router, wire, _ = routed()
    taken = [router.begin(0, PULL.each(0)), *(router.begin_all(0, PULL) or ())]
    assert len(taken) == 4
    arrays = [np.full(10_000, float(number)) for number in range(4)]
    gone = [weakref.ref(array) for array in arrays]
    for reply, array in zip(wire.replies, arrays, strict=True):
        reply.set_result(Item(Stamp(1, 4), 1, "x", Encoded(b"", (memoryview(array),), bytes(16))))
    del arrays, array, reply
    taken.clear()
    wire.replies.clear()
    assert [ref() for ref in gone] == [None] * 4


async def test_calls_that_ended_by_themselves_are_forgotten_in_passing() -> None:
    router, wire, _ = routed()
    for _ in range(1000):
        router.begin(0, PULL.each(0))
        wire.replies.pop().set_result(Refusal("no"))
    assert len(router._begun) <= 64


async def test_calls_that_are_in_vain_are_ended_and_no_others() -> None:
    router, wire, keeper = routed()
    router.begin_all(0, PULL)
    wire.replies[0].set_result(Refusal("no"))
    keeper.view.structure_revision = 2
    (changed,) = keeper.changed
    changed()
    assert not any(reply.cancelled() for reply in wire.replies)
    keeper.view.primaries[0] = Versioned(PrimaryRecord(node="n2-1", term=2, stateful=False), 3, 9)
    keeper.view.structure_revision = 3
    changed()
    assert [reply.cancelled() for reply in wire.replies] == [False, True, True]
