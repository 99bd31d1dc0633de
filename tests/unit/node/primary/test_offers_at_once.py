"""Boundaries that members are offered where they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cluster_kit import Counting, holder, job, play, told

import taskgraph as tg
from taskgraph.errors import PeerLost, Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.backups import Backups
from taskgraph.node.router import Router
from taskgraph.node.serving import Serving
from taskgraph.protocol.messages import Accepted, Call, Offer, Reason, Reply
from taskgraph.protocol.records import name_of
from taskgraph.results import JobResult
from taskgraph.transport.api import Peer


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What tenders offered: (to whom, which boundary)."""
    offers: list[tuple[str, int]] = []
    offer = Backups._offer

    async def counted(self: Backups, tender: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        offers.append((name_of(tender.node), key[0]))
        await offer(self, tender, key, *args, **kwargs)

    monkeypatch.setattr(Backups, "_offer", counted)
    return offers


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Node, Offer], Awaitable[Reply] | None]) -> None:
    """What becomes of an offer that was made at once: `answer(...)`, or what would come anyway where that is None."""
    begin_at = Router.begin_at

    def begun(self: Router, node: str, message: Call) -> asyncio.Future[Reply] | None:
        assert isinstance(message, Offer)
        coming = answer(self, message)  # type: ignore[arg-type]
        return begin_at(self, node, message) if coming is None else asyncio.ensure_future(coming)

    monkeypatch.setattr(Router, "begin_at", begun)


async def at_epoch_2(cluster: InProcessCluster) -> Node:
    """The primary's node, as soon as it read that epoch 1 is committed."""
    await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)
    node = holder(cluster, 0)
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)
    return node


def never(begun: list[asyncio.Future[Any]]) -> Awaitable[Reply]:
    """An answer that never comes; notes that it was asked for."""
    begun.append(asyncio.ensure_future(asyncio.Event().wait()))
    return begun[-1]


def test_member_without_memory_gets_offer_each_second(
    slow: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Serving, "_take_offer_now", refusing_at(epoch=4, for_s=20.0))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(10)
        backup = next(name_of(other.id) for other in cluster.nodes if other is not node)
        why = f"the acknowledgement of {backup} (it refuses: no memory for a call of 8000019 bytes)"
        assert node.roles.primaries[0].waiting_for == why
        (told_of,) = told(cluster, "waits")
        assert f"task 0 waits for {why}" in told_of
        assert len(slow) < 20, "of 10 s"
        began = node.now()
        result = await cluster.result()
        assert node.now() - began < 20
        return result

    waiting = job(Counting, tasks=1, epochs=12, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0))
    assert play(waiting, scenario, nodes=2).values == {0: 12}


def refusing_at(*, epoch: int, for_s: float) -> Callable[[Serving, str, Offer], Reply | None]:
    """A `Serving.now` without memory for that boundary, for a while after its first offer."""
    taken = Serving._take_offer_now
    first: list[float] = []

    def served(serving: Serving, peer: str, offer: Offer) -> Reply | None:
        now = asyncio.get_running_loop().time()
        if offer.stamp.epoch == epoch:
            first.append(now)
            if now - first[0] < for_s:
                raise Refused(Reason.NO_MEMORY, "no memory for a call of 8000019 bytes")
        return taken(serving, peer, offer)

    return served


def test_offer_has_no_timeout(slow: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than `call_s` on the network."""
    call = Router._call
    begun: list[int] = []

    async def late(offer: Offer, error: Exception | None = None) -> Reply:
        begun.append(offer.stamp.epoch)
        await asyncio.sleep(5.0)
        if error is not None:
            raise error
        return Accepted(offer.term)

    def offered_at_once(_: object, offer: Offer) -> Awaitable[Reply] | None:
        if offer.stamp.epoch not in (3, 4):
            return None
        return late(offer, PeerLost("cut") if offer.stamp.epoch == 4 else None)

    async def by_its_tender(self: Router, peer: Peer, message: Call, timeout_s: float | None, in_vain: Any) -> Reply:
        if not isinstance(message, Offer) or message.stamp.epoch != 4:
            return await call(self, peer, message, timeout_s, in_vain)
        async with asyncio.timeout(timeout_s):
            return await late(message)

    async def scenario(cluster: InProcessCluster) -> float:
        node = await at_epoch_2(cluster)
        began = node.now()
        await asyncio.sleep(0.5)
        assert node.roles.primaries[0].waiting_for == "the acknowledgement of n2"
        await cluster.result()
        return node.now() - began

    answering(monkeypatch, offered_at_once)
    monkeypatch.setattr(Router, "_call", by_its_tender)
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=30.0, call_s=2.0)
    took = play(job(Counting, tasks=1, epochs=6, settings=settings), scenario, nodes=2)
    assert [epoch for _, epoch in slow] == [0, 1, 4]
    assert begun == [3, 4, 4]
    assert 14.9 < took < 15.5


def test_offers_end_with_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.Future[Any]] = []

    async def scenario(cluster: InProcessCluster) -> None:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(0.1)
        assert [offer.done() for offer in begun] == [False]
        node.roles.runs[0].cancel()
        await asyncio.sleep(0.1)
        assert [offer.cancelled() for offer in begun] == [True]

    answering(monkeypatch, lambda _, offer: never(begun) if offer.stamp.epoch == 3 else None)
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=30.0, call_s=1000.0)
    play(job(Counting, tasks=1, epochs=6, settings=settings), scenario, nodes=2)
    assert begun
