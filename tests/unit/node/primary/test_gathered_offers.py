"""Boundaries of a task that works ahead: gathered, offered together, acknowledged before they are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from cluster_kit import Counting, holder, job, play, told

import taskgraph as tg
from taskgraph.graph.values import decode, encode, join_values, split_values, verify
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.router import Router
from taskgraph.node.serving import Serving, _boundaries
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.messages import Call, Encoded, Offer, Offers, Reply, Report, Stamp

EPOCHS = 40


class Slow(Counting, state=["total"]):
    """An epoch takes 1 ms, so some twenty are made per commit."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.001)
        await super().count(epoch, ins, outs)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Offer | Offers]:
    """Messages with offers to members."""
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
    return [boundary.stamp.epoch for boundary in _boundaries(offer, Boundaries())]


def test_boundaries_travel_together_once(sent: list[Offer | Offers]) -> None:
    assert run(Slow).values == {0: EPOCHS}
    offered = [number for offer in sent for number in numbers(offer)]
    assert offered == sorted(set(offered)) and offered[-1] == EPOCHS
    assert len(offered) >= EPOCHS - 2, "but for those that a candidate was offered by its tender"
    assert len(sent) <= len(offered) / 4


def test_member_holds_each_boundary(sent: list[Offer | Offers]) -> None:
    run(Slow)
    for offer in sent:
        for boundary in _boundaries(offer, Boundaries()):
            assert verify(boundary.value)
            assert decode(boundary.value)["state"]["total"] == boundary.stamp.epoch


def test_report_waits_for_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()
    done: list[int] = []
    hold = Serving._store

    def holds(self: Serving, replica: Any, offer: Offer | Offers, *log: Any) -> None:
        hold(self, replica, offer, *log)
        held.update(numbers(offer))

    monkeypatch.setattr(Serving, "_store", holds)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        primary = (await primary_at(cluster, 1)).roles.primaries[0]
        tell = primary.reporter.send_or_gather

        def tells(report: Report) -> None:
            assert report.stamp.epoch + 1 in held
            done.append(report.stamp.epoch)
            tell(report)

        monkeypatch.setattr(primary.reporter, "send_or_gather", tells)
        return await cluster.result()

    assert run(Slow, scenario).values == {0: EPOCHS}
    assert done == list(range(done[0], EPOCHS)) and done[0] < 4


def test_restart_drops_gathered_boundaries(sent: list[Offer | Offers]) -> None:
    class Once(Slow, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().count(epoch, ins, outs)
            if epoch.number == 20 and epoch.attempt == 1:
                node = nodes[0]
                primary = node.roles.primaries[0]
                assert primary.backups.unsent.boundaries
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


def test_unoffered_epochs_are_recomputed_after_kill() -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        node = await primary_at(cluster, 5)
        await asyncio.sleep(0.05)
        assert len(node.roles.primaries[0].backups.unsent.boundaries) >= 3
        cluster.crash(node.id)
        return await cluster.result()

    assert run(Slow, scenario, epochs=400, gather_s=0.2).values == {0: 400}


# -- the message ------------------------------------------------------------------------------------


def of(*values: Encoded) -> list[tuple[int, bytes]]:
    return [(len(value.meta), value.digest) for value in values]


def test_joined_values_are_parted() -> None:
    a, b = encode({"a": 1.5, "b": np.arange(3)}), encode(None)
    whole = join_values([a, b])
    assert verify(whole)
    assert split_values(whole, of(a, b)) == [a, b]
    again = split_values(whole, [*of(a), (0, a.digest), *of(b), (0, b.digest)])
    assert again == [a, a, b, b] and again[0] is again[1]
