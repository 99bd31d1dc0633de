"""A primary that was replaced while it saw nothing: what it does with the view it gets at last."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest
from cluster_kit import blindable, eyes, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.messages import HandOver, Stamp
from taskgraph.results import JobResult

__all__ = ["blindable"]


class Slow(tg.Task, state=["total"]):
    """Task 1's first compute of epoch 1 never ends."""

    total: int
    reached: asyncio.Event

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 1 and not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()
        self.total += 1

    def result(self) -> int:
        return self.total


@pytest.fixture
def slow() -> type[Slow]:
    class Fresh(Slow, state=["total"]):
        reached = asyncio.Event()

    return Fresh


def lose_lease(cluster: InProcessCluster, node: Node) -> None:
    """Its key vanishes, as when it was frozen for longer than its lease."""
    cluster.store.revoke(node.keeper.view.nodes[node.id].record.lease)


async def epoch_begins(node: Node, number: int) -> None:
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= number)


async def never(caller: str, message: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.usefixtures("blindable")
def test_a_commit_and_the_own_replacement_seen_at_once_end_a_term_quietly(
    slow: type[Slow], caplog: pytest.LogCaptureFixture
) -> None:
    """The commit was its successor's work: the boundary is not here, and that is no mistake."""

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
def test_a_take_over_whose_answer_comes_after_the_next_one_was_read_ends_quietly(
    slow: type[Slow], caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen between its write and the answer, it finds that another took over from it, and committed."""

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await slow.reached.wait()
        first = holder(cluster, 1)
        heirs = [cluster.node(n) for n in first.keeper.view.in_sync(1) if n != first.id]
        late = heirs[0]
        assert len(heirs) == 2
        eyes(late).answer_late(cluster.keys.primary(1))
        cluster.crash(first.id)
        await eyes(late).written.wait()
        eyes(late).blind()
        lose_lease(cluster, late)
        watcher = next(node for node in cluster.nodes if node is not late)
        await epoch_begins(watcher, 2)
        eyes(late).see()
        held = late.roles.replicas[1].boundaries
        await late.keeper.wait_until(lambda _: held.committed is not None and held.committed.stamp.epoch > 1)
        assert late.keeper.view.term(1) == 3
        eyes(late).answer()
        result = await cluster.result()
        assert late in cluster.nodes
        return result

    assert play(job(slow, epochs=30, backups=2), scenario, nodes=4).values == {0: 30, 1: 30}
    assert errors(caplog) == []


def test_a_primary_without_the_committed_boundary_says_so_and_a_replaced_one_waits_for_its_end(
    slow: type[Slow],
) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await slow.reached.wait()
        node = holder(cluster, 1)
        primary, view = node.roles.primaries[1], node.keeper.view
        assert view.stamp is not None
        before = Stamp(view.stamp.attempt, view.stamp.epoch - 1)
        primary.replica.boundaries.clear()
        with pytest.raises(AssertionError, match="task 1: epoch 1 committed without its boundary"):
            await primary._moved(before)
        primary.term -= 1  # as after a takeover by somebody else
        waiting = asyncio.ensure_future(primary._moved(before))
        done, _ = await asyncio.wait([waiting], timeout=5)
        assert not done
        assert "primary" in primary.waiting_for
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    play(job(slow), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
@pytest.mark.parametrize("written", [False, True], ids=["before its write", "before the answer"])
def test_a_hand_over_to_a_node_that_dies_meanwhile_is_one_failure_and_no_error(
    slow: type[Slow], caplog: pytest.LogCaptureFixture, written: bool
) -> None:
    """All tasks begin on one node; the second one, which is to take over half of them, dies in the middle of it."""
    slow.reached.set()

    async def scenario(cluster: InProcessCluster) -> JobResult:
        first = cluster.nodes[0]
        await epoch_begins(first, 1)
        heir = cluster.node(cluster.add())
        asked = asyncio.Event()
        hand_over = heir.takeovers.hand_over

        async def asked_to(message: HandOver) -> None:
            asked.set()
            await hand_over(message)

        heir.takeovers.hand_over = asked_to  # type: ignore[method-assign]
        for task in range(4):
            eyes(heir).answer_late(cluster.keys.primary(task))
        await (eyes(heir).written if written else asked).wait()
        cluster.crash(heir.id)
        cluster.add()
        result = await cluster.result()
        assert any("n2" in text for text in told(cluster, "evicted"))
        return result

    result = play(job(slow, tasks=4, epochs=40), scenario, nodes=1)
    assert result.values == dict.fromkeys(range(4), 40)
    assert errors(caplog) == []


@pytest.mark.usefixtures("blindable")
def test_a_frozen_primary_delays_nobody_once_its_lease_has_ended(
    slow: type[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader asks it what it waits for, in vain: that must not keep it from committing with the successor."""

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
