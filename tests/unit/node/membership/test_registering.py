"""Boundaries offered to a node that still registers: its key is there, and it has not begun to work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster_kit import Gated, gated, holder, job, play

from taskgraph.errors import JobError, Refused
from taskgraph.graph.values import encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership.registration import Registration
from taskgraph.node.replica import Replica
from taskgraph.node.serving import Serving
from taskgraph.protocol.boundaries import Boundaries
from taskgraph.protocol.messages import Offer, Stamp
from taskgraph.protocol.records import EpochRecord
from taskgraph.results import JobResult

__all__ = ["gated"]

VALUE = encode({"state": None, "numbers": {}, "log": {}}, what="a boundary")


def test_a_node_that_still_registers_frees_what_it_reads_as_history(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acknowledged boundaries, and what a roll-back had undone stayed there."""
    go_on = asyncio.Event()
    unreached = Registration._why_unreached

    async def asks_long(self: Registration) -> dict[str, str]:
        if self._node.node_revision and self._before():
            await go_on.wait()
        return await unreached(self)

    monkeypatch.setattr(Registration, "_why_unreached", asks_long)

    async def scenario(cluster: InProcessCluster) -> JobResult:
        await gated.reached.wait()
        first = holder(cluster, 0)
        late = cluster.node(cluster.add())
        await first.keeper.wait_until(lambda view: late.id in view.in_sync(0))
        gated.gate.set()
        await first.keeper.wait_until(lambda view: view.finished)
        boundaries = late.roles.replicas[0].boundaries
        assert [b.stamp.epoch for b in boundaries.pending] == [2, 3], "its view is as it was when it registered"
        await late.keeper.refresh()
        assert boundaries.holds(3) and not boundaries.pending
        go_on.set()
        return await cluster.result()

    assert play(job(gated, tasks=1), scenario, nodes=1).values == {0: 3}


@pytest.mark.parametrize("refused", [False, True])
def test_a_node_that_comes_to_take_no_part_tears_down_what_it_was_offered(
    gated: type[Gated], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Its `setup` had run, and no `teardown` did: seed 530849 of the simulation."""
    go_on, torn_down = asyncio.Event(), list[int]()

    async def fails(self: Registration) -> dict[str, str]:
        if not (self._node.node_revision and (before := self._before())):
            return {}
        await go_on.wait()
        return {} if refused else dict.fromkeys(before, "it does not answer")

    def refuses(self: Registration) -> None:
        if refused and self._before():
            raise JobError("they could not speak")

    class Torn(gated, state=["total"]):  # type: ignore[valid-type,misc]
        def teardown(self) -> None:
            torn_down.append(self.task_id)

    monkeypatch.setattr(Registration, "_why_unreached", fails)
    monkeypatch.setattr(Registration, "check_reach", refuses)

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        late = cluster.node(cluster.add())
        await holder(cluster, 0).keeper.wait_until(lambda view: late.id in view.in_sync(0))
        late.drain("told to")
        go_on.set()
        await asyncio.wait([cluster._members[late.id].run])
        assert torn_down == [0]

    play(job(Torn, tasks=1), scenario, nodes=1)


class Member:
    """A replica of task 1 that is offered boundaries, and what etcd says."""

    def __init__(self) -> None:
        self.view = SimpleNamespace(epoch=None)
        self.serving = Serving.__new__(Serving)
        self.serving._node = cast(Any, SimpleNamespace(keeper=SimpleNamespace(view=self.view)))
        self.replica = Replica.__new__(Replica)
        self.replica.task, self.replica.boundaries = 1, Boundaries()
        self.replica.log = cast(Any, SimpleNamespace(cut=lambda epoch: None))
        self.replica._lineage, self.replica._promise = 0, (0, 0)

    def reads(self, epoch: int, attempt: int, lineage: int = 0) -> None:
        record = EpochRecord(epoch=epoch, attempt=attempt, lineage=lineage, base=epoch if lineage else 0)
        self.view.epoch = SimpleNamespace(record=record)

    def takes(self, epoch: int, attempt: int, *, term: int = 2, committed: bool = False) -> None:
        self.serving._hold(self.replica, Offer(Stamp(attempt, epoch), term, 1, committed, False, 1, VALUE))

    @property
    def held(self) -> tuple[tuple[int, int, int] | None, list[tuple[int, int, int]]]:
        boundaries = self.replica.boundaries
        return boundaries.committed.key if boundaries.committed else None, [b.key for b in boundaries.pending]


def test_what_a_roll_back_undid_makes_nothing_history_that_comes_after_it() -> None:
    """It was acknowledged and dropped: the member was to take over with a boundary that it did not hold."""
    member = Member()
    member.reads(4, 2)
    member.takes(4, 2, committed=True)
    member.takes(5, 2)
    member.reads(2, 3, lineage=3)
    member.takes(3, 3)
    assert member.held == (None, [(3, 3, 2)])


def test_a_boundary_that_is_not_held_is_not_acknowledged() -> None:
    member = Member()
    member.reads(4, 2)
    member.takes(4, 2, term=3, committed=True)
    member.takes(3, 2)
    with pytest.raises(Refused, match="not one that counts"):
        member.takes(4, 2)
    member.reads(2, 3, lineage=3)
    with pytest.raises(Refused, match="not one that counts"):
        member.takes(5, 2)
    assert member.held == (None, [])
