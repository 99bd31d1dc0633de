"""Boundaries of a task that works ahead: gathered, offered together, held before they are done; nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cluster_kit import Counting, holder, job, play, told

import taskgraph as tg
from taskgraph.errors import DecodeError, PeerLost, Refused
from taskgraph.graph.values import decode, encode, joined, parted, verify
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.reporter import Reporter
from taskgraph.node.router import Router
from taskgraph.node.serving import Serving, _boundaries
from taskgraph.protocol.messages import Call, Encoded, Offer, Offers, Reply, Report, Reports, Stamp

EPOCHS = 40


class Slow(Counting, state=["total"]):
    """An epoch takes 1 ms: some twenty are made while commits are gathered."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.001)
        await super().count(epoch, ins, outs)


class Still(Slow, state=["total", "mark"]):
    """Its state stays as it is."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)

    @tg.stateless
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.001)

    def setup(self) -> None:
        self.total, self.mark = EPOCHS, "x" * 1000


class Bulky(Slow, state=["total", "bulk"]):
    def setup(self) -> None:
        super().setup()
        self.bulk = np.zeros(20_000)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Offer | Offers]:
    """What members were offered at once."""
    offers: list[Offer | Offers] = []
    begin_at = Router.begin_at

    def begun(self: Router, node: str, message: Call) -> asyncio.Future[Reply] | None:
        assert isinstance(message, Offer | Offers)
        offers.append(message)
        return begin_at(self, node, message)

    monkeypatch.setattr(Router, "begin_at", begun)
    return offers


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


def run(
    kind: type[tg.Task],
    scenario: Callable[[InProcessCluster], Awaitable[Any]] = result,
    *,
    epochs: int = EPOCHS,
    tasks: int = 1,
    **settings: Any,
) -> Any:
    given = tg.Settings(**{"admit_wait_s": 30.0, **settings})
    return play(job(kind, tasks=tasks, epochs=epochs, settings=given), scenario, nodes=2)


async def primary_at(cluster: InProcessCluster, epoch: int) -> Node:
    """The node of task 0's primary, once that epoch is at work."""
    await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= epoch)
    return holder(cluster, 0)


def numbers(offer: Offer | Offers) -> list[int]:
    return [boundary.stamp.epoch for boundary in _boundaries(offer)]


def test_boundaries_travel_together_and_each_of_them_once(sent: list[Offer | Offers]) -> None:
    assert run(Slow).values == {0: EPOCHS}
    offered = [number for offer in sent for number in numbers(offer)]
    assert offered == sorted(set(offered)) and offered[-1] == EPOCHS
    assert len(offered) >= EPOCHS - 2, "but for those that a candidate was offered by its tender"
    assert len(sent) <= len(offered) / 4


def test_a_member_holds_each_as_it_was_made(sent: list[Offer | Offers]) -> None:
    run(Slow)
    for offer in sent:
        for boundary in _boundaries(offer):
            assert verify(boundary.value)
            assert decode(boundary.value)["state"]["total"] == boundary.stamp.epoch


def test_what_is_the_same_is_sent_once(sent: list[Offer | Offers]) -> None:
    run(Still)
    together = [offer for offer in sent if isinstance(offer, Offers)]
    assert max(len(offer.parts) for offer in together) >= 4
    for offer in together:
        assert [size > 0 for _, size, _ in offer.parts] == [True] + [False] * (len(offer.parts) - 1)
        assert offer.value.size_bytes < 2000
        values = {id(boundary.value) for boundary in _boundaries(offer)}
        assert len(values) == 1, "nor is it kept more than once"


def test_an_epoch_is_done_only_when_its_boundary_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()
    done: list[int] = []
    hold = Serving._hold

    def holds(self: Serving, replica: Any, offer: Offer | Offers, *log: Any) -> None:
        hold(self, replica, offer, *log)
        held.update(numbers(offer))

    monkeypatch.setattr(Serving, "_hold", holds)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        primary = (await primary_at(cluster, 1)).roles.primaries[0]
        tell = primary.reporter.set

        def tells(report: Report) -> None:
            assert report.stamp.epoch + 1 in held
            done.append(report.stamp.epoch)
            tell(report)

        monkeypatch.setattr(primary.reporter, "set", tells)
        return await cluster.result()

    assert run(Slow, scenario).values == {0: EPOCHS}
    assert done == list(range(done[0], EPOCHS)) and done[0] < 4


async def seconds_from(cluster: InProcessCluster, epoch: int) -> float:
    """From when that epoch is at work to the end of the job."""
    clock = (await primary_at(cluster, epoch)).now
    began = clock()
    await cluster.result()
    return clock() - began


def test_a_task_that_does_not_go_on_waits_for_no_more_to_gather(sent: list[Offer | Offers]) -> None:
    """The job has no more epochs: what is gathered by then is all there will be."""
    assert run(Slow, partial(seconds_from, epoch=1), gather_s=5.0, epochs_ahead=1000) < 0.3
    assert numbers(sent[-1])[-1] == EPOCHS and len(numbers(sent[-1])) > 20


def test_nor_does_one_that_has_several_epochs_in_flight() -> None:
    class Marked(Slow, state=["total"]):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

    assert run(Marked, partial(seconds_from, epoch=1), gather_s=5.0, epochs_ahead=1000, epochs_in_flight=4) < 0.3


def test_time_alone_makes_boundaries_go(sent: list[Offer | Offers]) -> None:
    """There are never enough of them, and the task does not wait for any commit."""

    class Slower(Slow, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.003)
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 1)
        for _ in range(10):
            await asyncio.sleep(0.1)
            at, latest = node.keeper.view.stamp, node.roles.primaries[0].attempts.latest
            assert at is not None and latest is not None and latest.epoch - at.epoch <= 15
        return await cluster.result()

    assert run(Slower, scenario, epochs=400, epochs_ahead=1000).values == {0: 400}
    assert 400 / 6 <= len(sent) <= 400 / 3


def test_an_epoch_that_takes_longer_than_that_waits_for_nothing() -> None:
    class Long(Slow, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.1)
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> None:
        node = await primary_at(cluster, 3)
        for _ in range(5):
            before, at = node.now(), node.keeper.view.stamp
            assert at is not None
            await node.keeper.wait_until(lambda view, at=at: view.stamp is not None and view.stamp > at)
            assert node.now() - before < 0.102

    run(Long, scenario)


def test_of_a_batch_one_message_is_reported_where_the_task_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at its end when all of it is acknowledged."""
    reported: list[int] = []
    begin = Router.begin

    def begun(self: Router, task: int, message: Call, **options: Any) -> asyncio.Future[Reply] | None:
        if isinstance(message, Report | Reports):
            reported.append(1 if isinstance(message, Report) else len(message.reports))
        return begin(self, task, message, **options)

    monkeypatch.setattr(Router, "begin", begun)
    run(Slow, tasks=2, gather_s=5.0, epochs_ahead=1000)
    assert sum(reported) == EPOCHS and max(reported) > 30
    assert len(reported) < 8


class Listening(Slow, state=["total"]):
    """It does not go on before its epoch is committed."""

    def on_commit(self, epoch: int, state: Any) -> None: ...


class Last(Slow, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.001)
        await super().count(epoch, ins, outs)


class LastListening(Last, Listening, state=["total"]): ...


@pytest.mark.parametrize(
    "kinds", [(Slow, Listening), (Slow, LastListening), (Last, Listening), (Last, Listening, Slow)]
)
def test_who_waits_for_task_0_alone_does_not_wait_for_what_it_gathers(kinds: tuple[type[tg.Task], ...]) -> None:
    """Task 0 may go on, and is as far as they are, or before or behind them: what they wait for is its boundary."""
    given = job(lambda task: kinds[task](), tasks=len(kinds), epochs=EPOCHS, settings=tg.Settings(admit_wait_s=30.0))
    took = play(given, partial(seconds_from, epoch=3), nodes=2)
    assert took < 2.5 * EPOCHS * 0.001


def test_the_first_commit_after_a_takeover_waits_for_nothing() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        node = await primary_at(cluster, 20)
        other = next(n for n in cluster.nodes if n is not node)
        cluster.crash(node.id)
        await other.keeper.wait_until(lambda view: view.term(0) > 1)
        began, at = other.now(), other.keeper.view.stamp
        assert at is not None
        await other.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch > at.epoch)
        assert other.now() - began < 0.01

    given = job(Slow, tasks=1, epochs=400, backups=2, settings=tg.Settings(admit_wait_s=30.0, gather_s=0.5))
    play(given, scenario, nodes=3)


def test_what_is_gathered_goes_when_a_node_is_missed(sent: list[Offer | Offers]) -> None:
    """The one node that is left to hold it has it at once, and so the commit needs no more than its eviction."""

    async def scenario(cluster: InProcessCluster) -> None:
        node = await primary_at(cluster, 5)
        backups = node.roles.primaries[0].backups
        await asyncio.sleep(0.1)
        assert len(backups.gathered.boundaries) >= 3
        cluster.crash(next(n.id for n in cluster.nodes if n is not node))
        await node.keeper.wait_until(lambda view: bool(view.gone))
        await asyncio.sleep(0)
        assert len(backups.gathered.boundaries) <= 1

    given = tg.Settings(admit_wait_s=30.0, gather_s=1.0, epochs_ahead=1000)
    play(job(Slow, tasks=1, epochs=4000, backups=2, settings=given), scenario, nodes=3)


def test_a_mistake_ahead_is_told_when_what_is_before_it_is_held() -> None:
    class Wrong(Slow, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            if epoch.number == 30:
                raise ValueError("wrong")

    async def scenario(cluster: InProcessCluster) -> None:
        clock = (await primary_at(cluster, 1)).now
        began = clock()
        with pytest.raises(tg.JobFailed, match="wrong") as caught:
            await cluster.result()
        assert caught.value.epoch == 30
        assert clock() - began < 0.25, "they are committed when they would be anyway"

    run(Wrong, scenario, gather_s=0.2, epochs_ahead=1000)


def test_too_few_replicas_are_waited_for_where_the_epoch_is_made() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        node = cluster.nodes[0]
        await node.keeper.wait_until(lambda view: view.stamp is not None and view.primary_node(0) is not None)
        await asyncio.sleep(1.0)
        primary = node.roles.primaries[0]
        assert primary.attempts.latest == Stamp(1, 0)
        assert primary.waiting_for == "1 more in-sync replicas (min_in_sync=2)"

    given = tg.Settings(min_in_sync=2, admit_wait_s=0.0)
    play(job(Slow, tasks=1, epochs=5, settings=given), scenario, nodes=1)


def test_a_large_boundary_lets_small_ones_go_first(sent: list[Offer | Offers]) -> None:
    class Growing(Slow, state=["total", "bulk"]):
        def setup(self) -> None:
            super().setup()
            self.bulk = np.zeros(1)

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            self.bulk = np.zeros(20_000 if epoch.number % 7 == 6 else 1)

    assert run(Growing, gather_s=1.0).values == {0: EPOCHS}
    offered = [number for offer in sent for number in numbers(offer)]
    assert offered == sorted(offered)
    assert [numbers(offer) for offer in sent if numbers(offer)[0] in (22, 28)] == [[22, 23, 24, 25, 26, 27], [28]]


def test_a_message_is_not_larger_than_it_may_be(sent: list[Offer | Offers]) -> None:
    class Middling(Slow, state=["total", "bulk"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            self.bulk = np.full(1800, epoch.number)

        def setup(self) -> None:
            super().setup()
            self.bulk = np.zeros(1800)

    assert run(Middling, gather_s=1.0).values == {0: EPOCHS}
    assert max(len(numbers(offer)) for offer in sent) == 5, "the fifth of 14.5 KB is more than 64 KiB"


def test_what_is_gathered_is_nothing_that_a_task_waits_for() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        node = await primary_at(cluster, 5)
        primary = node.roles.primaries[0]
        await asyncio.sleep(0.1)
        assert primary.backups.gathered.boundaries and primary.backups._blocked
        assert primary.waiting_for == ""

    run(Slow, scenario, epochs=4000, gather_s=1.0, epochs_ahead=1000)


def test_what_is_said_after_the_snapshot_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither in the boundary, nor in what is reported: both are of one moment."""

    class Late(Slow, state=["total"]):
        beside: set[asyncio.Task[None]] = set()  # noqa: RUF012

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            epoch.report(early=1)
            if epoch.number == 20:
                self.beside.add(asyncio.get_running_loop().create_task(self.later(epoch)))

        async def later(self, epoch: tg.Epoch) -> None:
            await asyncio.sleep(0.003)
            epoch.report(late=1)
            epoch.finish()

    reported: list[Any] = []
    tell = Reporter.set

    def tells(self: Reporter, report: Report) -> None:
        reported.append(report.numbers)
        tell(self, report)

    monkeypatch.setattr(Reporter, "set", tells)
    found = run(Late, gather_s=0.05)
    assert found.epochs == EPOCHS
    assert reported == [{"early": 1}] * EPOCHS
    assert [row.numbers for row in found.reports] == [{"early": 1}] * EPOCHS


def test_large_boundaries_are_offered_where_they_are_made_and_the_task_goes_on(
    sent: list[Offer | Offers], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    begin_at = Router.begin_at

    async def late(begun: asyncio.Future[Reply] | None) -> Reply:
        await gate.wait()
        assert begun is not None
        return await begun

    def begun(self: Router, node: str, message: Call) -> asyncio.Future[Reply] | None:
        return asyncio.ensure_future(late(begin_at(self, node, message)))

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 4)
        monkeypatch.setattr(Router, "begin_at", begun)
        before = len(sent)
        primary = node.roles.primaries[0]
        await asyncio.sleep(0.2)
        at = node.keeper.view.stamp
        assert at is not None and at.epoch < 10, "nothing is committed that is not acknowledged"
        assert primary.waiting_for == "the acknowledgement of n2"
        assert primary.attempts.latest == Stamp(1, at.epoch + 5), "as far ahead as it may be"
        assert [numbers(offer) for offer in sent[before:]] == [[n] for n in range(at.epoch + 1, at.epoch + 7)][
            -len(sent[before:]) :
        ]
        gate.set()
        return await cluster.result()

    assert run(Bulky, scenario, epochs_ahead=5).values == {0: EPOCHS}
    assert all(type(offer) is Offer for offer in sent)


@pytest.mark.parametrize("error", [PeerLost("cut"), Refused("stale", "behind")])
def test_what_is_not_accepted_the_tender_offers_again_one_by_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    begin_at, failed = Router.begin_at, []

    async def raising() -> Reply:
        raise error

    def begun(self: Router, node: str, message: Call) -> asyncio.Future[Reply] | None:
        if isinstance(message, Offers) and len(failed) < 2:
            failed.extend([len(message.parts)])
            return asyncio.ensure_future(raising())
        return begin_at(self, node, message)

    monkeypatch.setattr(Router, "begin_at", begun)
    assert run(Slow).values == {0: EPOCHS}
    assert len(failed) == 2 and min(failed) > 1


def test_nothing_gathered_survives_its_attempt(sent: list[Offer | Offers]) -> None:
    """The epochs that were undone are offered by nobody any more."""

    class Once(Slow, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            if epoch.number == 20 and epoch.attempt == 1:
                node = nodes[0]
                primary = node.roles.primaries[0]
                assert primary.backups.gathered.boundaries
                at = primary.attempts.latest
                assert at is not None
                primary.ask_restart(at, "a test asks for it")
                await asyncio.Event().wait()

    nodes: list[Node] = []
    undone: list[Stamp | None] = []

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        nodes.append(await primary_at(cluster, 1))
        await nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.attempt == 2)
        undone.append(nodes[0].keeper.view.stamp)
        found = await cluster.result()
        assert told(cluster, "restart")
        return found

    assert run(Once, scenario, gather_s=0.5).values == {0: EPOCHS}
    attempts = [offer.stamp.attempt for offer in sent]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    offered = [number for offer in sent if offer.stamp.attempt == 2 for number in numbers(offer)]
    (at,) = undone
    assert at is not None
    assert offered == list(range(at.epoch + 1, EPOCHS + 1)), "one after the other, and each of them once"


def test_what_was_gathered_in_an_attempt_that_is_over_is_offered_to_nobody(sent: list[Offer | Offers]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        backups = (await primary_at(cluster, 5)).roles.primaries[0].backups
        await asyncio.sleep(0.05)
        gathered, before = list(backups.gathered.boundaries), len(sent)
        assert len(gathered) >= 3
        backups.drop_pending()
        backups.gathered.flush()
        assert len(sent) == before
        assert backups.gathered._timer is None and not backups._insync.current[1:]

    run(Slow, scenario, epochs=400, gather_s=0.2)


def test_a_killed_primarys_epochs_that_nobody_was_offered_are_worked_on_again() -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 5)
        await asyncio.sleep(0.05)
        assert len(node.roles.primaries[0].backups.gathered.boundaries) >= 3
        cluster.crash(node.id)
        return await cluster.result()

    assert run(Slow, scenario, epochs=400, gather_s=0.2).values == {0: 400}


def test_who_joins_meanwhile_becomes_a_member() -> None:
    """A candidate needs all boundaries there are, those that are gathered, too."""

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 3)
        cluster.add()
        await node.keeper.wait_until(lambda view: len(view.in_sync(0)) == 3)
        at = node.keeper.view.stamp
        assert at is not None and at.epoch < 350
        return await cluster.result()

    class Shared(Slow, state=["total"]): ...

    given = tg.Settings(admit_wait_s=30.0)
    many = job(Shared, tasks=1, epochs=400, backups=2, settings=given)
    assert play(many, scenario, nodes=2).values == {0: 400}


# -- the message ------------------------------------------------------------------------------------


def of(*values: Encoded) -> list[tuple[int, bytes]]:
    return [(len(value.meta), value.digest) for value in values]


def test_values_that_were_joined_are_parted() -> None:
    a, b = encode({"a": 1.5, "b": np.arange(3)}), encode(None)
    whole = joined([a, b])
    assert verify(whole)
    assert parted(whole, of(a, b)) == [a, b]
    again = parted(whole, [*of(a), (0, a.digest), *of(b), (0, b.digest)])
    assert again == [a, a, b, b] and again[0] is again[1]


@pytest.mark.parametrize(
    "sizes", [[], [10_000], [-3], [0], [1, -1], [3]], ids=["none", "more", "negative", "before", "back", "less"]
)
def test_parts_that_are_not_those_are_refused(sizes: list[int]) -> None:
    whole = joined([encode("text")])
    with pytest.raises(DecodeError):
        parted(whole, [(size, bytes(16)) for size in sizes])


def test_offers_that_are_cut_are_refused_and_the_replica_keeps_what_it_has() -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 3)
        (other,) = node.roles.primaries[0].backups._insync.members()
        value = joined([encode("nothing of the kind")])
        wrong = Offers(Stamp(1, 9), 1, 0, 1, ((9, 5, bytes(16)),), value)
        with pytest.raises(Refused, match="offers of task 0: 37 bytes of joined values; their parts have 9") as caught:
            await node.router.to_node(other, wrong, timeout_s=1.0)
        assert caught.value.reason == "bad message"
        return await cluster.result()

    assert run(Slow, scenario).values == {0: EPOCHS}
