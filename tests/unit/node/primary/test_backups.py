"""A primary's care for its task's replicas: whom it evicts, whom it counts, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cluster_kit import (
    Counting,
    Gated,
    Joining,
    blindable,
    die,
    eyes,
    gated,
    holder,
    job,
    joining,
    paused,
    play,
    set_up_when_offered,
    told,
)

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.backoff import Backoff
from taskgraph.node.node import Node
from taskgraph.node.primary.backups import Backups
from taskgraph.node.primary.primary import Primary
from taskgraph.node.serving import Serving
from taskgraph.protocol.insync import Place
from taskgraph.protocol.messages import Accepted, Call, Offer, Release, Reply, RequestRestart, Stamp
from taskgraph.protocol.placement import Wish
from taskgraph.protocol.records import MemberRecord
from taskgraph.protocol.transactions import TakenOver
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult

__all__ = ["blindable", "gated", "joining", "set_up_when_offered"]


def truth(cluster: InProcessCluster) -> JobView:
    """What etcd holds, whatever the nodes know of it."""
    view = JobView(cluster.keys.job)
    view.reset(cluster.store.revision, cluster.store.select(cluster.keys.root, prefix=True))
    return view


@pytest.mark.usefixtures("blindable")
def test_a_member_that_the_view_does_not_show_yet_is_evicted_and_not_forgotten(gated: type[Gated]) -> None:
    """Admitted just before a takeover, suspected just after: the takeover read its key, the view did not come to it.

    Forgotten instead, it would stay in sync in etcd without being asked for any boundary.
    """

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        heir = next(node for node in cluster.nodes if node is not first)
        eyes(heir).blind(at=cluster.keys.member(0, "n3-local"))
        third = cluster.node(cluster.add())
        await first.keeper.wait_until(lambda view: third.id in view.in_sync(0))
        assert heir.keeper.view.in_sync(0) == [first.id, heir.id]
        # A session with it, by which the heir learns that it died.
        await heir.router.to_node(third.id, Release(0, 1, 0, 0), timeout_s=None)
        cluster.crash(third.id)
        cluster.crash(first.id)
        await asyncio.sleep(30)
        assert told(cluster, "takeover")
        assert third.id in truth(cluster).in_sync(0)
        assert not eyes(heir).sees
        eyes(heir).see()
        gated.gate.set()
        result = await cluster.result()
        assert [text for text in told(cluster, "evicted") if "n3" in text]
        assert truth(cluster).in_sync(0) == [heir.id]
        return result

    assert play(job(gated, tasks=1, epochs=4, backups=2), scenario, nodes=2).values == {0: 4}


def test_who_was_evicted_before_the_boundary_taken_over_is_nobody(gated: type[Gated]) -> None:
    """To evict it once more would say "until" this boundary, which it does not hold."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 0)
        until = {node.id: None, "always": None, "before": 2, "just": 3, "long-ago": 0}
        members = {name: (9, MemberRecord(until=epoch)) for name, epoch in until.items()}
        taken = TakenOver(revision=10, term=4, epoch=3, attempt=1, members=members)
        successor = Primary(node, node.roles.replicas[0], taken)
        assert successor.backups.in_sync == 2, "itself and the member"
        insync = successor.backups._insync
        assert {name: insync.place(name) for name in insync.nodes} == {"always": Place.MEMBER, "just": Place.MARKED}

    play(job(gated, tasks=1, backups=0), scenario, nodes=1)


def test_a_member_that_was_unwanted_before_a_pause_and_is_not_after_it_stays(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was evicted for what the node had seen before it paused."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        backups = first.roles.primaries[0].backups
        asked: list[str] = []
        async with paused(first):
            with monkeypatch.context() as unwanted:
                unwanted.setattr(Backups, "_unwanted", lambda self, node: bool(asked.append(node)) or self is backups)
                first.keeper.notify_later()
                await asyncio.sleep(1.0)
            assert asked
        await asyncio.sleep(1.0)
        assert not told(cluster, "evicted")
        assert len(truth(cluster).staying(0)) == 2
        gated.gate.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=2).values == {0: 3}


def test_a_candidate_that_died_in_a_pause_is_not_admitted_after_it(joining: type[Joining]) -> None:
    """It held every boundary as the pause began, and was to be admitted when that ended. No launcher tells of it."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await joining.reached.wait()
        joining.joins = True
        first, joined = holder(cluster, 0), cluster.add()
        await joining.joining.wait()
        async with paused(first):
            joining.may_join.set()
            await asyncio.sleep(1.0)
            assert first.roles.primaries[0].backups._insync.may_admit(joined)
            die(cluster, joined)
            await first.keeper.wait_until(lambda view: joined not in view.nodes)
        await asyncio.sleep(5.0)
        assert joined not in truth(cluster).members_of(0)
        joining.gate.set()
        return await cluster.result()

    assert play(job(joining, tasks=1), scenario, nodes=1).values == {0: 3}


@pytest.mark.usefixtures("blindable")
def test_what_is_made_while_an_admission_is_not_answered_waits_for_who_may_be_a_member(gated: type[Gated]) -> None:
    """Committed without it, the boundary would be lost with the others: by its key in etcd it is an heir."""
    waits_for_nobody = tg.Settings(epochs_ahead=0, admit_wait_s=0.0)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        alone, joined = holder(cluster, 0), cluster.add()
        eyes(alone).answer_late(cluster.keys.member(0, joined))
        await eyes(alone).written.wait()
        cluster.network.cut(alone.id, joined)
        gated.gate.set()
        await asyncio.sleep(1.0)
        assert joined in truth(cluster).in_sync(0)
        assert truth(cluster).stamp == Stamp(1, 1), "it takes no boundary"
        cluster.network.heal(alone.id, joined)
        eyes(alone).answer()
        return await cluster.result()

    assert play(job(gated, tasks=1, settings=waits_for_nobody), scenario, nodes=1).values == {0: 3}


def test_whom_a_predecessor_evicted_is_admitted_anew(gated: type[Gated]) -> None:
    """Its key says "until 1": left so it would be asked for every boundary, and no heir once epoch 1 is over."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        heir, marked = (n for n in first.keeper.view.in_sync(0) if n != first.id)
        backups = first.roles.primaries[0].backups
        await backups._evict(backups._tenders[marked], Backoff())
        cluster.crash(first.id)
        assert truth(cluster).members_of(0)[marked].record.until == 1
        other = cluster.node(marked)
        await other.keeper.wait_until(lambda view: view.term(0) == 2)
        assert truth(cluster).primary_node(0) == heir
        gated.gate.set()
        result = await cluster.result()
        assert truth(cluster).in_sync(0) == [heir, marked]
        return result

    assert play(job(gated, tasks=1, epochs=6, backups=2), scenario, nodes=3).values == {0: 6}


def test_that_a_member_is_out_is_told_once_however_many_primaries_there_are_in_the_epoch(gated: type[Gated]) -> None:
    """It holds the committed boundary, so each of them evicts it anew; and each told that, and so pushed out others."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        nodes = [node.id for node in cluster.nodes]
        keeper = cluster.nodes[-1].keeper
        await keeper.wait_until(lambda view: len(view.in_sync(0)) == 4)
        for count in (1, 2):
            first = holder(cluster, 0)
            died = next(n for n in keeper.view.in_sync(0) if n not in (first.id, nodes[-1])) if count == 1 else first.id
            cluster.crash(died)
            await keeper.wait_until(lambda view, died=died: view.members_of(0)[died].record.until is not None)
        cluster.crash(holder(cluster, 0).id)
        await keeper.wait_until(lambda view: view.term(0) == 3 and len(view.staying(0)) == 1)
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3}
        out = [text.split(" (")[0] for text in told(cluster, "evicted")]
        kept = [
            event.text.split(" (")[0] for event in cluster.events if event.kind == "evicted" and not event.transient
        ]
        assert len(kept) == len(set(kept)) == 3, kept
        assert len(out) > 3, "they were evicted anew"

    play(job(gated, tasks=1, backups=3), scenario, nodes=4)


def test_a_task_below_min_in_sync_waits_and_says_for_how_many(gated: type[Gated]) -> None:
    gated.gate.set()
    safe = job(gated, tasks=1, backups=2, settings=tg.Settings(min_in_sync=3, admit_wait_s=0.0))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(30)
        assert not ended.done()
        assert holder(cluster, 0).roles.primaries[0].waiting_for == "1 more in-sync replicas (min_in_sync=3)"
        assert "task 0 waits for 1 more in-sync replicas (min_in_sync=3)" in cluster.waits()
        (waits,) = told(cluster, "waits")
        assert "epoch 0 waits: task 0 waits for 1 more in-sync replicas (min_in_sync=3), " in waits
        assert truth(cluster).stamp == Stamp(1, 0)
        cluster.add()
        return await ended

    assert play(safe, scenario, nodes=2).values == {0: 3}


def test_what_a_done_waited_for_is_not_told_after_a_restart() -> None:
    """Nothing was done in that attempt, and nothing is in the next one: what it waits for is at work."""
    gate = asyncio.Event()

    class Again(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.attempt > 1:
                await gate.wait()
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await asyncio.sleep(5)
        node = holder(cluster, 0)
        assert node.roles.primaries[0].waiting_for == "1 more in-sync replicas (min_in_sync=2)"
        await node.router.to_primary(0, lambda: RequestRestart(Stamp(1, 0), 0, "a test asks for it"), timeout_s=1.0)
        await asyncio.sleep(5)
        assert truth(cluster).stamp == Stamp(2, 0)
        assert node.roles.primaries[0].waiting_for == ""
        gate.set()
        cluster.add()
        return await cluster.result()

    safe = job(Again, tasks=1, backups=1, settings=tg.Settings(min_in_sync=2, admit_wait_s=0.0))
    assert play(safe, scenario, nodes=1).values == {0: 3}


@pytest.mark.usefixtures("set_up_when_offered")
def test_epoch_0_waits_for_the_backups_wished_for_and_says_for_whom() -> None:
    """For `admit_wait_s`: a backup whose set-up takes for ever holds up epoch 0, and nothing after it."""

    class SlowSetup(Gated, state=["total"]):
        reached, gate = asyncio.Event(), asyncio.Event()

        async def setup(self) -> None:  # type: ignore[override]
            self.total = 0
            if setups:
                await asyncio.sleep(10_000)
            setups.append(1)

    setups: list[int] = []
    SlowSetup.gate.set()
    waiting = job(SlowSetup, tasks=1, settings=tg.Settings(admit_wait_s=20.0))

    async def scenario(cluster: InProcessCluster) -> JobResult:
        ended = asyncio.ensure_future(cluster.result())
        await asyncio.sleep(15)
        assert holder(cluster, 0).roles.primaries[0].waiting_for == "the admission of n2"
        assert "task 0 waits for the admission of n2" in cluster.waits()
        assert truth(cluster).stamp == Stamp(1, 0)
        await asyncio.sleep(10)
        assert ended.done()
        return ended.result()

    assert play(waiting, scenario, nodes=2).values == {0: 3}


def test_a_backup_far_away_gets_in_sync_however_fast_epochs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Serving._offer

    async def from_far(self: Serving, peer: str, message: Offer) -> Accepted:
        await asyncio.sleep(0.05)
        return await offer(self, peer, message)

    class Fast(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.01)
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> int:
        first = cluster.nodes[0]
        await first.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 5)
        primary_node = holder(cluster, 0)
        cluster.crash(next(node for node in cluster.nodes if node is not primary_node).id)
        monkeypatch.setattr(Serving, "_offer", from_far)
        monkeypatch.setattr(Serving, "_offer_now", lambda *_: None)
        joined = cluster.add()
        await primary_node.keeper.wait_until(lambda view: joined in view.in_sync(0) or not view.running)
        assert primary_node.keeper.view.stamp is not None
        return primary_node.keeper.view.stamp.epoch

    assert play(job(Fast, tasks=1, epochs=3000), scenario, nodes=2) < 1000


@pytest.mark.parametrize("end", [InProcessCluster.crash, die], ids=["its launcher tells", "its port refuses"])
def test_nobody_is_evicted_for_a_node_that_dies_before_it_is_a_member(
    joining: type[Joining], end: Callable[[InProcessCluster, str], None]
) -> None:
    """Placement wants it instead of the only member, and the primary, killed meanwhile, took all there was with it."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await joining.reached.wait()
        joining.joins = True
        joined = cluster.add()
        await joining.joining.wait()
        wishes = [holder(cluster, task).wish(task) for task in range(2)]
        assert any(wish is not None and joined in wish.backups for wish in wishes)
        end(cluster, joined)
        await asyncio.sleep(20)
        assert not told(cluster, "evicted")
        assert [len(truth(cluster).in_sync(task)) for task in range(2)] == [2, 2]
        cluster.crash(holder(cluster, 1).id)
        joining.gate.set()
        return await cluster.result()

    assert play(job(joining), scenario, nodes=2).values == {0: 3, 1: 3}


def test_a_member_that_drains_stays_until_it_is_replaced_by_one_that_lives(joining: type[Joining]) -> None:
    """The first replacement dies while it is set up; the next one lets it go."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await joining.reached.wait()
        first = holder(cluster, 0)
        leaving = next(node for node in cluster.nodes if node is not first)
        joining.joins = True
        replacement, other = cluster.add(), cluster.add()
        await first.keeper.wait_until(lambda view: len(view.nodes) == 4)
        await asyncio.sleep(1)  # until each of the two has reached the other
        leaving.drain("asked to")
        await joining.joining.wait()
        die(cluster, replacement)
        await asyncio.sleep(20)
        assert truth(cluster).in_sync(0) == [first.id, leaving.id]
        joining.may_join.set()
        await first.keeper.wait_until(lambda view: view.members_of(0)[leaving.id].record.until == 1)
        assert truth(cluster).in_sync(0) == [first.id, leaving.id, other], "until the next commit"
        joining.gate.set()
        await asyncio.wait([cluster._members[leaving.id].run])
        assert truth(cluster).in_sync(0) == [first.id, other]
        return await cluster.result()

    assert play(job(joining, tasks=1), scenario, nodes=2).values == {0: 3}


class Arriving(Gated, state=["total"]):
    """Once `arrive` is set, whoever sets it up tells that it began, and waits for an event of its own."""

    arrive: bool
    setups: list[asyncio.Event]
    began: asyncio.Event

    async def setup(self) -> None:  # type: ignore[override]
        self.total = 0
        if type(self).arrive:
            self.setups.append(may := asyncio.Event())
            self.began.set()
            await may.wait()


@pytest.fixture
def arriving() -> type[Arriving]:
    class Fresh(Arriving, state=["total"]):
        reached, gate, began = asyncio.Event(), asyncio.Event(), asyncio.Event()
        arrive, setups = False, []

    return Fresh


async def wished(
    cluster: InProcessCluster, node: Node, arriving: type[Arriving], monkeypatch: pytest.MonkeyPatch
) -> str:
    """One node more, which placement wishes for as the only backup as soon as it is there, and whose set-up began."""
    arriving.arrive = True
    arriving.began.clear()
    joined = cluster.add()
    await node.keeper.wait_until(lambda view: joined in view.nodes)
    monkeypatch.setattr(node, "wish", lambda task: Wish(primary=node.id, backups=(joined,)))
    node.keeper.notify_later()
    await arriving.began.wait()
    return joined


def test_a_candidate_that_is_not_wished_for_any_more_is_not_admitted_where_there_are_members_enough(
    arriving: type[Arriving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set up to its end and admitted, only to be evicted, as it was not whom placement wished for next."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await arriving.reached.wait()
        node = holder(cluster, 0)
        insync = node.roles.primaries[0].backups._insync
        (member,) = insync.members()
        third = await wished(cluster, node, arriving, monkeypatch)
        assert insync.place(third) is Place.CANDIDATE
        fourth = await wished(cluster, node, arriving, monkeypatch)
        await asyncio.sleep(0.01)
        assert insync.place(third) is None, "it is let go before its set-up is over"
        assert insync.place(member) is Place.MEMBER, "until whom it goes for is one"
        for may in arriving.setups:
            may.set()
        await node.keeper.wait_until(lambda view: fourth in view.in_sync(0) and member not in view.staying(0))
        arriving.gate.set()
        result = await cluster.result()
        assert not [text for text in told(cluster, "admitted") if "n3" in text]
        return result

    assert play(job(arriving, tasks=1), scenario, nodes=2).values == {0: 3}


def test_where_members_are_lacking_whoever_is_ready_first_is_admitted(
    arriving: type[Arriving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that join faster than a replica is set up would leave the task without a backup for as long."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await arriving.reached.wait()
        node = holder(cluster, 0)
        third = await wished(cluster, node, arriving, monkeypatch)
        fourth = await wished(cluster, node, arriving, monkeypatch)
        arriving.setups[0].set()
        await node.keeper.wait_until(lambda view: third in view.in_sync(0))
        arriving.setups[1].set()
        await node.keeper.wait_until(lambda view: fourth in view.in_sync(0) and third not in view.staying(0))
        arriving.gate.set()
        return await cluster.result()

    assert play(job(arriving, tasks=1), scenario, nodes=1).values == {0: 3}


def test_a_replica_that_nobody_counts_on_any_more_goes(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node goes on, and would hold it until the job ends."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        (other,) = (node for node in cluster.nodes if node is not first)
        for node in cluster.nodes:
            monkeypatch.setattr(node, "wish", lambda task: Wish(primary=first.id, backups=()))
        first.keeper.notify_later()
        await first.keeper.wait_until(lambda view: not view.staying(0)[1:])
        assert 0 in other.replicas, "until the next commit it may take over"
        gated.gate.set()
        result = await cluster.result()
        assert 0 not in other.replicas
        return result

    assert play(job(gated, tasks=1, epochs=20), scenario, nodes=2).values == {0: 20}


def test_who_is_wished_for_again_while_it_is_released_is_tended_as_soon_as_it_was(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 0)
        backups, to_node = node.roles.primaries[0].backups, node.router.to_node
        (other,) = backups._insync.members()
        releasing, may = asyncio.Event(), asyncio.Event()

        async def slow(to: str, message: Call, *, timeout_s: float | None) -> Reply:
            if isinstance(message, Release):
                releasing.set()
                await may.wait()
            return await to_node(to, message, timeout_s=timeout_s)

        monkeypatch.setattr(node.router, "to_node", slow)
        with monkeypatch.context() as patch:
            patch.setattr(node, "wish", lambda task: Wish(primary=node.id, backups=()))
            node.keeper.notify_later()
            await releasing.wait()
        await asyncio.sleep(5.5)
        assert backups._insync.place(other) is Place.CANDIDATE and backups._tenders[other].invitation == 1
        may.set()
        await asyncio.sleep(0.01)
        assert backups._tenders[other].invitation == 2
        await node.keeper.wait_until(lambda view: view.members_of(0)[other].record.until is None)

    play(job(gated, tasks=1), scenario, nodes=2)
