"""Several epochs of a task in flight: how many, what waits for its turn, and the same results."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from cluster_kit import holder, play, set_up_when_offered
from flight_kit import Early, Script, at_work, boundaries, early, job, result, whole

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs import epoch_memory
from taskgraph.protocol.messages import Stamp

__all__ = ["early", "set_up_when_offered"]


# -- how far ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("set_up_when_offered")
@pytest.mark.parametrize(
    ("in_flight", "ahead", "held", "furthest"),
    [
        (4, 16, ("early", 0, 1), 4),
        (2, 16, ("early", 0, 1), 2),
        (1, 16, ("early", 0, 1), 1),
        (8, 4, ("early", 0, 1), 5),
        (4, 1, ("early", 0, 1), 2),
        (4, 0, ("early", 0, 1), 1),
        (4, 16, ("early", 0, 0), 0),  # how large its epochs are is found out with one
        (4, 16, ("late", 0, 3), 6),
        (4, 4, ("early", 1, 0), 4),  # nothing is committed before task 1 is through with its epoch 0
    ],
)
def test_stateless_code_of_later_epochs_runs_first(
    early: type[Early], in_flight: int, ahead: int, held: tuple[str, int, int], furthest: int
) -> None:
    script = early.script
    gate = script.hold(*held)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == list(range(furthest + 1))
        assert max(script.epochs("late", 0), default=-1) <= (3 if held[0] == "late" else furthest)
        gate.set()
        return await cluster.result()

    settings = tg.Settings(epochs_in_flight=in_flight, epochs_ahead=ahead)
    whole(play(job(early, settings=settings), scenario, nodes=2))


# -- what waits for its turn --------------------------------------------------------------------------


class Middle(Early, state=["seen"]):
    """Between stateless code and the sync point there is a compute without the mark."""

    parallel = False

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        me = self.task_id
        epoch.processor(self.early, outbound={"x": me})
        epoch.processor(self.middle, inbound={"x": me}, outbound={"y": me}, parallel=self.parallel)
        epoch.processor(self.late, inbound={"x": me, "y": me})

    async def middle(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("middle", self.task_id, epoch.number)
        assert self.seen == list(range(epoch.number)), "it works from the state after the epoch before"
        outs.put("y", None)


class Parallel(Middle, state=["seen"]):
    parallel = True


class Unmarked(Early, state=["seen"]):
    """Only `compose` is marked."""

    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("middle", self.task_id, epoch.number)
        assert self.seen == list(range(epoch.number))
        outs.put("x", epoch.number)


class Plain(Early, state=["seen"]):
    """Sync point and `snapshot` are plain functions, which run in threads."""

    def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        self.script.came.append(("late", self.task_id, epoch.number))
        self.seen = [*self.seen, ins["x"]]
        epoch.report(**{f"seen {self.task_id}": len(self.seen)})

    def snapshot(self) -> Any:
        return super().snapshot()

    def restore(self, state: Any) -> None:
        super().restore(state)


@pytest.mark.parametrize("kind", [Early, Middle, Parallel, Unmarked, Plain])
def test_stateful_code_waits_for_earlier_snapshots(kind: type[Early]) -> None:

    class Fresh(kind, state=["seen"]):  # type: ignore[misc, valid-type]
        script = Script()

    script, gate = Fresh.script, asyncio.Event()
    first = "middle" if "middle" in vars(kind) or kind in (Parallel, Unmarked) else "late"

    async def before_snapshot(cluster: InProcessCluster, node: str) -> None:
        await asyncio.sleep(3)
        assert boundaries(cluster, 0) == {2: {"seen": [0, 1]}}
        assert script.epochs(first, 0) == [0, 1, 2], "the state of epoch 2 is complete, and not taken yet"
        # What is stateless may run in any order: epoch 5's before 4's, where a thread has the task when 4 begins.
        assert sorted(script.epochs("early", 0)) == ([] if kind is Unmarked else list(range(6)))
        gate.set()

    async def before_done(cluster: InProcessCluster, node: str) -> None:
        await asyncio.sleep(3)
        kept = boundaries(cluster, 0)
        assert 5 in kept
        assert kept == {epoch: {"seen": list(range(epoch))} for epoch in kept}

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await gate.wait()
        return await cluster.result()

    stages = {("snapshot", 0, 2): before_snapshot, ("done", 0, 4): before_done}
    whole(play(job(Fresh), scenario, nodes=2, stages=stages))


class Tree(tg.Task, state=["place"]):
    """Items down the tree are stateless; items up, and the new state, depend on the state."""

    most: int

    def setup(self) -> None:
        self.place = 0.1 * (1 + self.task_id)
        self._open: set[int] = set()

    def _compose(self, epoch: tg.Epoch) -> None:
        kind = type(self)
        self._open.add(epoch.number)  # of this test: how many epochs there are at a time
        kind.most = max(kind.most, len(self._open))
        down, up = ({"down": "parents"}, {"up": "parents"}) if self.task_id else ({}, {})
        epoch.processor(self.first, inbound=down, outbound={"down": "children"})
        epoch.processor(self.second, inbound={"up": "children"}, outbound={**up, "own": self.task_id})
        epoch.processor(self.third, inbound={**down, "own": self.task_id})

    def _first(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.scratch.drawn = epoch.rng.normal()
        outs.put("down", (ins["down"] if self.task_id else 1.0) * 1.1 + epoch.scratch.drawn)

    def _second(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        value = sum(ins.all("up").values()) * 0.3 + self.place * epoch.scratch.drawn
        outs.put("own", value)
        if self.task_id:
            outs.put("up", value)

    def _third(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.place = 0.9 * self.place + 0.1 * ins["own"] + (0.01 * ins["down"] if self.task_id else 0.0)
        epoch.report(**{f"place {self.task_id}": self.place})
        self._open.discard(epoch.number)

    def result(self) -> float:
        return self.place


def tree(way: str) -> Any:
    def written(function: Any) -> Any:
        @functools.wraps(function)
        async def as_coroutine(self: Tree, epoch: tg.Epoch, *given: Any) -> None:
            if way == "awaits":
                await asyncio.sleep(epoch.number % 3 * 0.01)  # some of the later ones would be first
            function(self, epoch, *given)

        @functools.wraps(function)
        def as_function(self: Tree, epoch: tg.Epoch, *given: Any) -> None:
            function(self, epoch, *given)

        return as_function if way == "def" else as_coroutine

    members = {name: written(getattr(Tree, f"_{name}")) for name in ("compose", "first", "second", "third")}
    for name in ("compose", "first"):
        tg.stateless(members[name])
    return type("Written", (Tree,), {**members, "most": 0})


@pytest.mark.parametrize("way", ["def", "async def", "awaits"])
@pytest.mark.parametrize("order", [0, 1])
def test_same_bits_with_epochs_in_flight(way: str, order: int) -> None:
    found, most = {}, {}
    for in_flight in (1, 4):
        made = tree(way)
        settings = tg.Settings(epochs_in_flight=in_flight)
        given = job(made, tasks=5, epochs=15, topology=tg.tree(), settings=settings)
        found[in_flight] = play(given, result, nodes=2, order=order)
        most[in_flight] = made.most
    assert found[1].values == found[4].values
    assert found[1].reports == found[4].reports
    assert len(found[1].reports) == 15
    assert most == {1: 1, 4: 4}


# -- who does not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [0, 1])
def test_leaving_node_hands_over_after_epochs_in_flight(early: type[Early], task: int) -> None:
    script = early.script
    gate = script.hold("early", task, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", task, 5)
        leaving = holder(cluster, task)
        leaving.drain("a test asks for it")
        await asyncio.sleep(3)
        gate.set()
        found = await cluster.result()
        assert holder(cluster, task) is not leaving
        assert leaving not in cluster.nodes, "it has left"
        return found

    found = play(job(early, epochs=60), scenario, nodes=3)
    whole(found, epochs=60)
    assert (found.restarts, found.failovers) == (0, 0)
    assert sorted(script.epochs("early", task)) == list(range(60)), "nothing was computed twice"


# -- memory -------------------------------------------------------------------------------------------


def test_large_epochs_begin_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_memory, "AHEAD_BYTES", 70_000)

    class Large(Early, state=["seen"]):
        script = Script()

        @tg.stateless
        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await self.script.at("early", self.task_id, epoch.number)
            outs.put("x", bytes(40_000) if self.task_id == 0 else b"")

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.seen = [*self.seen, epoch.number]
            epoch.report(**{f"seen {self.task_id}": len(self.seen)})

    script = Large.script
    commit, through = script.hold("early", 1, 0), script.hold("early", 0, 1)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == [0, 1]
        through.set()
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == [0, 1], "40 kB of each of two uncommitted epochs"
        assert at_work(cluster) == Stamp(1, 0)
        last = script.hold("early", 0, 11)
        commit.set()
        await script.until("early", 0, 11)
        await asyncio.sleep(3)
        assert script.epochs("late", 0) == []
        last.set()
        return await cluster.result()

    whole(play(job(Large), scenario, nodes=2))
