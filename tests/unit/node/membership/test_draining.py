"""A node that is told to leave at an odd moment: nothing is lost with it."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, Gated, blindable, eyes, gated, holder, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.node import Node
from taskgraph.observe.format import ids_text

__all__ = ["blindable", "gated"]

SETTINGS = tg.Settings(epochs_ahead=0, drain_s=2.0)


class Paced(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.02)
        await super().count(epoch, ins, outs)


def paced() -> tg.Job:
    """It lasts several times `drain_s`, and without backups: who leaves with a task's state fails it."""
    return job(Paced, tasks=4, epochs=300, backups=0, settings=SETTINGS)


async def works(node: Node) -> None:
    """Returns when the job is well under way."""
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)


async def pause(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns when the node has paused; it resumes after that."""
    with monkeypatch.context() as away:
        away.setattr(Registration, "_unproved", lambda self, lease: self is node.registration)
        await node.keeper.wait_until(lambda _: node.paused)


def test_a_node_that_is_told_to_leave_before_it_is_registered_never_is() -> None:
    """It joined, was given tasks, and left with their state."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        seen = set[str]()
        first.keeper.on_change(lambda: seen.update(first.keeper.view.nodes))
        told_to = cluster.node(cluster.add())
        told_to.drain("SIGTERM")
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)
        run = cluster._members[told_to.id].run
        assert run.done() and run.exception() is None
        assert seen == {first.id}

    play(paced(), scenario, nodes=1)


@pytest.mark.usefixtures("blindable")
def test_a_node_that_is_told_to_leave_while_it_registers_says_so_at_once() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        told_to = cluster.node(cluster.add())
        eyes(told_to).answer_late(cluster.keys.node(told_to.id))
        await eyes(told_to).written.wait()
        told_to.drain("SIGTERM")
        eyes(told_to).answer()
        await first.keeper.wait_until(lambda view: told_to.id in view.nodes and view.nodes[told_to.id].record.draining)
        began = asyncio.get_running_loop().time()
        await asyncio.wait([cluster._members[told_to.id].run])
        assert asyncio.get_running_loop().time() - began < SETTINGS.drain_s, "it handed everything over"
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(paced(), scenario, nodes=1)


@pytest.mark.usefixtures("blindable")
def test_a_node_that_is_told_to_leave_while_it_resumes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it resumed with was made before that, and was what it said of itself from then on."""

    async def scenario(cluster: InProcessCluster) -> None:
        first, told_to = cluster.nodes
        await works(first)
        eyes(told_to).answer_late(cluster.keys.node(told_to.id))
        await pause(told_to, monkeypatch)
        await eyes(told_to).written.wait()
        told_to.drain("SIGTERM")
        await asyncio.sleep(0.01)  # it begins to say so, and waits for the end of the pause
        eyes(told_to).answer()
        await asyncio.wait([cluster._members[told_to.id].run])
        assert not [text for text in told(cluster, "drain") if "without" in text]
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(paced(), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
def test_of_two_writes_of_its_key_a_node_compares_the_later_one_whichever_is_answered_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It pauses while it says that it leaves, and resumes before the answer comes: all it writes compares its key."""

    async def scenario(cluster: InProcessCluster) -> None:
        first, told_to = cluster.nodes
        await works(first)
        eyes(told_to).answer_late(cluster.keys.node(told_to.id))
        told_to.drain("SIGTERM")
        await eyes(told_to).written.wait()
        await pause(told_to, monkeypatch)
        await told_to.while_paused()
        resumed_at = told_to.node_revision
        eyes(told_to).answer()
        await asyncio.wait([cluster._members[told_to.id].run])
        assert told_to.node_revision == resumed_at
        assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(paced(), scenario, nodes=2)


def test_who_was_evicted_stays_until_the_next_commit(gated: type[Gated]) -> None:
    """It holds the committed boundary until then, and is the last to do so if the others die."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        leaves = cluster.node(next(node for node in first.keeper.view.in_sync(0) if node != first.id))
        leaves.drain("a test")
        await first.keeper.wait_until(lambda view: leaves.id not in view.staying(0))
        assert leaves.id in first.keeper.view.in_sync(0)
        for node in cluster.nodes:
            if node is not leaves:
                cluster.crash(node.id)
        await asyncio.sleep(5)
        assert leaves.running and leaves.id == leaves.keeper.view.primary_node(0)
        gated.gate.set()
        cluster.add()
        assert (await cluster.result()).values == {0: 3}
        assert not [text for text in told(cluster, "drain") if "without" in text]

    play(job(gated, tasks=1), scenario, nodes=3)


def few() -> tg.Job:
    return job(Counting, tasks=3, epochs=5, backups=1, settings=SETTINGS)


async def leave(cluster: InProcessCluster, node: Node) -> float:
    """Returns when it left, and after how long."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    node.drain("SIGTERM")
    await asyncio.wait([cluster._members[node.id].run])
    return loop.time() - began


def test_a_job_that_has_finished_is_handed_over_too() -> None:
    """Its node waited out `drain_s` with nothing to wait for, and said nothing; the same where it had no backup yet."""

    async def scenario(cluster: InProcessCluster) -> None:
        first, second = cluster.nodes
        await first.keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(1)
        assert await leave(cluster, first) < 0.5
        assert second.keeper.view.finished
        third = cluster.node(cluster.add())
        assert await leave(cluster, second) < 0.5
        assert set(third.roles.primaries) == {0, 1, 2}
        assert len(told(cluster, "drain")) == 2 and not [text for text in told(cluster, "drain") if "without" in text]
        assert (await cluster.result()).values == dict.fromkeys(range(3), 5)

    play(few(), scenario, nodes=2)


def test_who_leaves_with_what_nobody_else_has_of_a_finished_job_says_so() -> None:
    """It left without a word, and the job that had finished was failed by the next node."""

    async def scenario(cluster: InProcessCluster) -> None:
        (node,) = cluster.nodes
        await node.keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(1)
        assert await leave(cluster, node) >= SETTINGS.drain_s
        begun, late = told(cluster, "drain")
        assert begun.endswith("start one within 2 s (drain_s), or that is lost")
        assert late.endswith("task 0-2 within 2 s (drain_s): there was no other node to take over")

    play(few(), scenario, nodes=1)


@pytest.mark.parametrize("backups", [0, 1])
def test_who_leaves_while_etcd_is_away_says_what_it_gives_up_and_what_that_means(
    monkeypatch: pytest.MonkeyPatch, backups: int
) -> None:
    """Where another node had all that it has, it said nothing: it could hand nothing over, and was gone."""

    async def scenario(cluster: InProcessCluster) -> None:
        first = cluster.nodes[0]
        await works(first)
        await first.keeper.wait_until(lambda v: all(len(v.in_sync(task)) == 1 + backups for task in range(4)))
        monkeypatch.setattr(Registration, "_unproved", lambda self, lease: self is first.registration)
        await first.keeper.wait_until(lambda _: first.paused)
        has = sorted(first.roles.primaries)
        await leave(cluster, first)
        late = [text for text in told(cluster, "drain") if text.startswith(first.name)][-1]
        tasks = ids_text(has)
        assert late.startswith(
            f"{first.name} leaves without having handed over task {tasks} within 2 s (drain_s): {first.name} is "
            f"paused: the lease could not be renewed in time, and cannot write to etcd that another node takes over; "
        )
        means = (
            f"of task {tasks} another node in sync takes over once etcd answers it, and computes the epoch at work "
            f"again"
            if backups
            else f"task {tasks} no other node has"
        )
        assert late.endswith(f"; {means}")
        if backups:
            assert (await cluster.result()).values == dict.fromkeys(range(4), 300)

    play(job(Paced, tasks=4, epochs=300, backups=backups, settings=SETTINGS), scenario, nodes=2)


def test_who_leaves_in_an_epoch_that_lasts_longer_says_what_is_computed_again(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        await first.keeper.wait_until(lambda view: len(view.in_sync(0)) == 2)
        await leave(cluster, first)
        assert told(cluster, "drain")[-1] == (
            f"{first.name} leaves without having handed over task 0 within 2 s (drain_s): no other node has taken "
            f"over; of task 0 another node in sync takes over, and computes the epoch at work again"
        )
        gated.gate.set()
        assert (await cluster.result()).values == {0: 3}

    play(job(gated, tasks=1, settings=SETTINGS), scenario, nodes=2)
