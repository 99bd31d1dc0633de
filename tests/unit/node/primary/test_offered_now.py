"""Boundaries that members are offered where they are made: acknowledged where the answer arrives, or offered again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cluster_kit import IN_STEP, Counting, holder, job, play, restart, told

import taskgraph as tg
from taskgraph.errors import PeerLost, Refused
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.backups import Backups
from taskgraph.node.router import Router
from taskgraph.node.serving import Serving
from taskgraph.protocol.insync import Place
from taskgraph.protocol.messages import Accepted, Call, Offer, Reason, Reply, RequestRestart, Stamp
from taskgraph.protocol.records import name_of
from taskgraph.results import JobResult
from taskgraph.transport.api import Peer

Answer = Callable[["asyncio.Future[Reply]"], "asyncio.Future[Reply]"]


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
    """An answer that does not come; it is noted that it was asked for."""
    begun.append(asyncio.ensure_future(asyncio.Event().wait()))
    return begun[-1]


async def raising(error: Exception) -> Reply:
    raise error


@pytest.mark.parametrize("backups", [1, 2])
def test_members_are_offered_every_boundary_at_once(slow: list[tuple[str, int]], backups: int) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        began = node.now()
        result = await cluster.result()
        assert node.now() - began < 0.5
        return result

    settings = tg.Settings(epochs_ahead=0, admit_wait_s=30.0)
    waiting = job(Counting, tasks=1, epochs=20, backups=backups, settings=settings)
    assert play(waiting, scenario, nodes=1 + backups).values == {0: 20}
    offered = sorted(epoch for _, epoch in slow)
    assert offered == [0] * backups + [1] * backups, "a candidate's, by its tender; then it is a member"


@pytest.mark.parametrize(
    "error", [PeerLost("cut"), Refused(Reason.STALE, "behind"), Refused(Reason.USER_ERROR, "its setup")]
)
def test_what_is_not_accepted_the_tender_offers_again(
    slow: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        began = node.now()
        result = await cluster.result()
        assert node.now() - began < 0.5, "at once, and not when something else is looked at"
        return result

    answering(monkeypatch, lambda _, offer: raising(error) if offer.stamp.epoch % 4 == 0 else None)
    waiting = job(Counting, tasks=1, epochs=12, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0))
    assert play(waiting, scenario, nodes=2).values == {0: 12}
    assert [epoch for _, epoch in slow] == [0, 1, 4, 8, 12]


def test_what_a_member_has_no_memory_for_is_offered_once_a_second_and_the_wait_says_why(
    slow: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent whole some twenty times a second, and nothing but the backup's log said why it was not taken."""
    monkeypatch.setattr(Serving, "_offer_now", refusing_at(epoch=4, for_s=20.0))

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


def test_a_refusal_is_not_told_of_once_the_member_took_what_came_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(3)
            await super().count(epoch, ins, outs)

    taken = Serving._offer_now

    def served(serving: Serving, peer: str, offer: Offer) -> Reply | None:
        if offer.stamp == Stamp(1, 4):
            raise Refused(Reason.NO_MEMORY, "no memory for a call of 8000019 bytes")
        if offer.stamp.epoch == 8 and asyncio.get_running_loop().time() < 60:
            raise Refused(Reason.STALE, "behind")
        return taken(serving, peer, offer)

    monkeypatch.setattr(Serving, "_offer_now", served)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        backup = next(name_of(other.id) for other in cluster.nodes if other is not node)
        await node.keeper.wait_until(lambda view: view.stamp == Stamp(1, 3))
        await asyncio.sleep(5)
        assert "no memory" in node.roles.primaries[0].waiting_for
        await restart(cluster, Stamp(1, 3))
        await node.keeper.wait_until(lambda view: view.stamp == Stamp(2, 7))
        await asyncio.sleep(5)
        assert node.roles.primaries[0].waiting_for == f"the acknowledgement of {backup}"
        return await cluster.result()

    waiting = job(Slow, tasks=1, epochs=12, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0))
    assert play(waiting, scenario, nodes=2).values == {0: 12}


def refusing_at(*, epoch: int, for_s: float) -> Callable[[Serving, str, Offer], Reply | None]:
    """How a node serves offers that has no memory for that boundary, for so long from when it was first offered."""
    taken = Serving._offer_now
    first: list[float] = []

    def served(serving: Serving, peer: str, offer: Offer) -> Reply | None:
        now = asyncio.get_running_loop().time()
        if offer.stamp.epoch == epoch:
            first.append(now)
            if now - first[0] < for_s:
                raise Refused(Reason.NO_MEMORY, "no memory for a call of 8000019 bytes")
        return taken(serving, peer, offer)

    return served


def test_an_offer_is_not_given_up_for_want_of_an_answer(
    slow: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer than `call_s` on the network was given up and begun anew, for ever; so at its tender's."""
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


def test_an_answer_that_comes_after_the_eviction_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is invited anew, and has to acknowledge everything under that invitation."""
    accepted = asyncio.Event()
    offered: list[asyncio.Future[Reply]] = []

    async def late(offer: Offer) -> Reply:
        await accepted.wait()
        return Accepted(offer.term)

    async def scenario(cluster: InProcessCluster) -> None:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(0.1)
        backups = node.roles.primaries[0].backups
        (other,) = backups._insync.nodes
        offered.extend(backups._tenders[other].offered.values())
        insync = backups._insync
        insync.evicting(other)
        backups._evicted(backups._tenders[other], True)
        insync.invite(other)
        accepted.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert insync.place(other) is Place.CANDIDATE
        assert insync.missing(other) == insync.current
        assert all(reply.cancelled() for reply in offered)

    answering(monkeypatch, lambda _, offer: late(offer) if offer.stamp.epoch == 3 else None)
    play(job(Counting, tasks=1, epochs=6, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0)), scenario, nodes=2)
    assert offered


def test_an_answer_on_its_way_to_who_was_evicted_meanwhile_counts_for_nobody() -> None:
    """It is there already, and was not looked at yet."""

    async def scenario(cluster: InProcessCluster) -> None:
        node = await at_epoch_2(cluster)
        backups = node.roles.primaries[0].backups
        (other,) = backups._insync.nodes
        boundary = backups._boundaries[backups._insync.current[-1]]
        backups._insync._acked[other].clear()
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        tender = backups._tenders[other]
        tender.offered = {boundary.key: reply}
        reply.set_result(Accepted(1))
        tender.withdraw()
        backups._answered(tender, [boundary], 0, reply)
        assert boundary.key in backups._insync.missing(other)

    class Slow(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(1)

    play(job(Slow, tasks=1, epochs=6, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0)), scenario, nodes=2)


def test_offers_of_an_attempt_that_is_over_are_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.Future[Any]] = []
    gate = asyncio.Event()

    class Again(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.attempt > 1:
                await gate.wait()
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(0.1)
        assert [offer.done() for offer in begun] == [False]
        await node.router.to_primary(0, lambda: RequestRestart(Stamp(1, 2), 0, "a test asks for it"), timeout_s=1.0)
        await asyncio.sleep(0.1)
        assert node.keeper.view.stamp == Stamp(2, 2)
        assert [offer.cancelled() for offer in begun] == [True]
        gate.set()
        return await cluster.result()

    answering(monkeypatch, lambda _, offer: never(begun) if offer.stamp == Stamp(1, 3) else None)
    result = play(job(Again, tasks=1, epochs=6, settings=IN_STEP), scenario, nodes=2)
    assert result.values == {0: 6}


def test_a_member_that_dies_while_it_is_offered_something_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(0.1)
        (other,) = node.roles.primaries[0].backups._insync.nodes
        cluster.crash(other)
        result = await cluster.result()
        assert [text for text in told(cluster, "evicted") if "n2" in text]
        return result

    answering(monkeypatch, lambda _, offer: never([]) if offer.stamp.epoch == 3 else None)
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=30.0, call_s=1000.0)
    assert play(job(Counting, tasks=1, epochs=6, settings=settings), scenario, nodes=2).values == {0: 6}


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


def test_an_offer_names_the_invitation_under_which_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Release` of it must free what was offered at once, too, and one of an earlier invitation must not."""
    named: list[tuple[int | str, int]] = []

    def noted(router: Any, offer: Offer) -> None:
        named.append((offer.stamp.epoch, offer.invitation))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        node = await at_epoch_2(cluster)
        (other,) = node.roles.primaries[0].backups._insync.nodes
        cluster.crash(other)
        joined = cluster.add()
        await node.keeper.wait_until(lambda view: joined in view.in_sync(0))
        named.append(("joined", node.roles.primaries[0].backups._tenders[joined].invitation))
        return await cluster.result()

    class Slow(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(1)
            await super().count(epoch, ins, outs)

    answering(monkeypatch, noted)
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=30.0)
    assert play(job(Slow, tasks=1, epochs=30, settings=settings), scenario, nodes=2).values == {0: 30}
    at = named.index(("joined", 2))
    assert {invitation for _, invitation in named[:at]} == {1}
    assert {invitation for _, invitation in named[at + 1 :]} == {2}


def test_an_offer_is_answered_at_once_or_left_to_the_call() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        node = await at_epoch_2(cluster)
        await asyncio.sleep(0.1)
        (other,) = (n for n in cluster.nodes if n is not node)
        await other.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)
        right = node.roles.replicas[0].boundaries.committed
        assert right is not None
        serving = Serving(other, other.roles, other.takeovers)

        def now(attempt: int = 1, *, term: int = 1, task: int = 0, committed: bool = False) -> object:
            return serving.now(node.id, Offer(Stamp(attempt, 3), term, task, committed, False, 1, right.value))

        assert now() == Accepted(1)
        assert [b.stamp for b in other.roles.replicas[0].boundaries.pending] == [Stamp(1, 3)]
        assert now(committed=True) is None
        assert now(term=2) is None, "the takeover was not read here yet"
        assert now(2) is None, "nor was that attempt"
        assert now(task=1) is None, "no replica of it is here"
        other.roles.replicas[0].ready = False
        assert now() is None
        other.roles.replicas[0].ready = True
        with pytest.raises(Refused, match="attempt 0 is over"):
            now(0)
        other.injects_held = True
        assert now() is None
        other.injects_held = False
        other.paused = True
        assert now() is None
        other.paused = False

    class Slow(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(1)

    play(job(Slow, tasks=1, epochs=6, settings=tg.Settings(epochs_ahead=0, admit_wait_s=30.0)), scenario, nodes=2)
