"""Several epochs of a task at a time: what may be early and how far, what waits for its turn, and what of it counts."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import holder, play, told

import taskgraph as tg
from taskgraph.graph.values import decode, encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import lanes, lastwords
from taskgraph.node.attempts import Attempts
from taskgraph.node.items import Items
from taskgraph.node.primary import Primary
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Report, RequestRestart, Stamp
from taskgraph.protocol.records import Ran
from taskgraph.protocol.view import JobView
from taskgraph.transport.api import Coming


class Script:
    """What the computes of a test's tasks came to, and where the test holds them."""

    def __init__(self) -> None:
        self.came: list[tuple[str, int, int]] = []
        self._gates: dict[tuple[str, int, int], asyncio.Event] = {}
        self._changed = asyncio.Event()

    def hold(self, where: str, task: int, epoch: int) -> asyncio.Event:
        """Who comes there waits for this event."""
        return self._gates.setdefault((where, task, epoch), asyncio.Event())

    async def at(self, where: str, task: int, epoch: int) -> None:
        """A compute came to it."""
        self.came.append((where, task, epoch))
        self._changed.set()
        if (gate := self._gates.get((where, task, epoch))) is not None:
            await gate.wait()

    async def until(self, where: str, task: int, epoch: int) -> None:
        while (where, task, epoch) not in self.came:
            self._changed.clear()
            await self._changed.wait()

    def epochs(self, where: str, task: int) -> list[int]:
        """In which epochs that was come to, in that order."""
        return [epoch for place, of, epoch in self.came if (place, of) == (where, task)]


class Early(tg.Task, state=["seen"]):
    """What it works out in `early` may be; what it adds to the state in `late` may not."""

    script: Script
    seen: list[int]

    def setup(self) -> None:
        self.seen = []

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.early, outbound={"x": self.task_id})
        epoch.processor(self.late, inbound={"x": self.task_id})

    @tg.stateless
    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("early", self.task_id, epoch.number)
        await self.first(epoch)
        outs.put("x", epoch.number)

    async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("late", self.task_id, epoch.number)
        self.seen = [*self.seen, ins["x"]]
        epoch.report(**{f"seen {self.task_id}": len(self.seen)})

    async def first(self, epoch: tg.Epoch) -> None:
        """What a test adds, where it may be early."""

    def result(self) -> list[int]:
        return self.seen


@pytest.fixture
def early() -> type[Early]:
    class Fresh(Early, state=["seen"]):
        script = Script()

    return Fresh


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": 12, "builder": builder, "backups": 1, **options})


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


def at_work(cluster: InProcessCluster) -> Stamp:
    stamp = holder(cluster, 0).keeper.view.stamp
    assert stamp is not None
    return stamp


def whole(found: tg.JobResult, epochs: int = 12) -> None:
    """Each task's state has each epoch once, in order; so have the reports."""
    assert found.values == {task: list(range(epochs)) for task in found.values}
    assert found.epochs == epochs
    assert [(row.epoch, dict(row.numbers)) for row in found.reports] == [
        (epoch, {f"seen {task}": epoch + 1 for task in found.values}) for epoch in range(epochs)
    ]


# -- how far ------------------------------------------------------------------------------------------


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
def test_what_is_stateless_of_later_epochs_runs_first_as_far_as_it_may(
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
    """Between what may be early and the sync point, something is not marked."""

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
    """Of this only compose is marked."""

    async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.script.at("middle", self.task_id, epoch.number)
        assert self.seen == list(range(epoch.number))
        outs.put("x", epoch.number)


class Plain(Early, state=["seen"]):
    """The sync point is a plain function, and so is `snapshot`: both in threads."""

    def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:  # type: ignore[override]
        self.script.came.append(("late", self.task_id, epoch.number))
        self.seen = [*self.seen, ins["x"]]
        epoch.report(**{f"seen {self.task_id}": len(self.seen)})

    def snapshot(self) -> Any:
        return super().snapshot()

    def restore(self, state: Any) -> None:
        super().restore(state)


def boundaries(cluster: InProcessCluster, task: int) -> dict[int, Any]:
    """epoch -> the state in the boundaries that the task's primary keeps."""
    kept = holder(cluster, task).primaries[task].backups._boundaries.values()
    return {boundary.stamp.epoch: decode(boundary.value)["state"] for boundary in kept}


@pytest.mark.parametrize("kind", [Early, Middle, Parallel, Unmarked, Plain])
def test_what_is_not_stateless_waits_until_the_epochs_before_it_are_snapshotted(kind: type[Early]) -> None:
    """Its inputs are there, and nothing of the task runs: but the state is not that of its epoch."""

    class Fresh(kind, state=["seen"]):  # type: ignore[misc, valid-type]
        script = Script()

    script, gate = Fresh.script, asyncio.Event()
    first = "middle" if "middle" in vars(kind) or kind in (Parallel, Unmarked) else "late"

    async def before_snapshot(cluster: InProcessCluster, node: str) -> None:
        await asyncio.sleep(3)
        assert boundaries(cluster, 0) == {2: {"seen": [0, 1]}}
        assert script.epochs(first, 0) == [0, 1, 2], "the state of epoch 2 is complete, and not taken yet"
        assert script.epochs("early", 0) == ([] if kind is Unmarked else list(range(6)))
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
    """What goes down may be early; what goes up, and what the state becomes, depends on the state."""

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
def test_the_results_are_the_same_bits_however_many_epochs_are_in_flight(way: str, order: int) -> None:
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


# -- mistakes of the job ------------------------------------------------------------------------------


class Wrong(Early, state=["seen"]):
    """Raises in `early` of the epochs named: (task, epoch)."""

    wrong: frozenset[tuple[int, int]]

    async def first(self, epoch: tg.Epoch) -> None:
        if (self.task_id, epoch.number) in self.wrong:
            raise ValueError(f"wrong in {epoch.number}")


def wrong(*where: tuple[int, int]) -> type[Wrong]:
    class Fresh(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset(where)

    return Fresh


def test_a_mistake_fails_the_job_when_all_epochs_before_it_are_committed() -> None:
    made = wrong((0, 4))
    gate = made.script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> None:
        await made.script.until("early", 0, 4)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 2)
        assert not told(cluster, "failed")
        gate.set()
        with pytest.raises(tg.JobFailed, match=r"task 0, epoch 4, 'early': ValueError: wrong in 4") as caught:
            await cluster.result()
        assert caught.value.epoch == 4
        assert at_work(cluster) == Stamp(1, 4)
        assert made.script.epochs("late", 0) == [0, 1, 2, 3]

    play(job(made), scenario, nodes=2)


def test_of_two_mistakes_that_of_the_earlier_epoch_is_told() -> None:
    """Though the other one came first."""
    made = wrong((0, 3), (0, 4))
    gate = made.script.hold("early", 0, 3)

    async def scenario(cluster: InProcessCluster) -> None:
        await made.script.until("early", 0, 4)
        await asyncio.sleep(3)
        assert not told(cluster, "failed")
        gate.set()
        with pytest.raises(tg.JobFailed, match="wrong in 3") as caught:
            await cluster.result()
        assert caught.value.epoch == 3

    play(job(made), scenario, nodes=2)


def test_a_mistake_in_an_epoch_that_never_comes_is_none() -> None:
    class Finishing(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset({(0, 4)})

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().late(epoch, ins, outs)
            if (self.task_id, epoch.number) == (1, 3):
                epoch.finish()

    gate = Finishing.script.hold("early", 1, 3)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await Finishing.script.until("early", 0, 4)
        await asyncio.sleep(3)
        gate.set()
        return await cluster.result()

    whole(play(job(Finishing, epochs=None), scenario, nodes=2), epochs=4)


def test_what_later_epochs_raise_when_they_are_given_up_does_not_hide_the_mistake() -> None:
    """They are cancelled, since one before them failed, and their clean-up fails, too."""

    class Unwilling(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset({(0, 3)})

        async def first(self, epoch: tg.Epoch) -> None:
            await super().first(epoch)
            if (self.task_id, epoch.number) == (0, 4):
                try:
                    await asyncio.Event().wait()
                finally:
                    raise RuntimeError("while it was given up")

    gate = Unwilling.script.hold("early", 0, 3)
    held = Unwilling.script.hold("early", 1, 2)  # epoch 3 is not the one at work when it fails

    async def scenario(cluster: InProcessCluster) -> None:
        await Unwilling.script.until("early", 0, 4)
        gate.set()
        await asyncio.sleep(3)
        held.set()
        with pytest.raises(tg.JobFailed, match="wrong in 3") as caught:
            await cluster.result()
        assert caught.value.epoch == 3

    play(job(Unwilling), scenario, nodes=2)


def test_a_mistake_of_ours_is_told_at_once(early: type[Early]) -> None:
    """It says nothing of the job: others take over."""
    early.script.hold("early", 0, 2)

    async def ours(cluster: InProcessCluster, node: str) -> None:
        await asyncio.sleep(3)
        raise AssertionError("ours")

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(tg.JobFailed, match=r"task 0 on n\d cannot go on: ours"):
            await cluster.result()
        assert at_work(cluster) == Stamp(1, 2)

    play(job(early), scenario, nodes=2, stages={("processor", 0, 4): ours})


def test_an_item_that_nobody_offers_in_an_epoch_in_flight_fails_the_job_when_that_one_comes() -> None:
    class Asking(Early, state=["seen"]):
        """In epoch 4 task 1 has nothing for task 0."""

        script = Script()

        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            super().compose(epoch)
            if self.task_id == 0:
                epoch.processor(self.ask, inbound={"z": 1})
            elif epoch.number != 4:
                epoch.processor(self.give, outbound={"z": 0})

        async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            """A sync point that changes nothing."""

        @tg.stateless
        async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("z", 1)

    gate = Asking.script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> None:
        await Asking.script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert not told(cluster, "failed")
        gate.set()
        says = r"task 0, epoch 4: 'ask' pulls 'z' from task 1, which does not offer it in this epoch"
        with pytest.raises(tg.JobFailed, match=says):
            await cluster.result()
        assert at_work(cluster) == Stamp(1, 4)

    play(job(Asking), scenario, nodes=2)


async def test_a_thread_of_an_epoch_that_was_given_up_and_does_not_return_ends_the_node() -> None:
    """Also where another epoch failed before it: nothing of the task may run beside that thread."""
    end, began = threading.Event(), threading.Event()
    failing, gate = asyncio.Event(), asyncio.Event()

    class Stuck(tg.Task):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.hang, outbound={"x": self.task_id}, parallel=True)
            epoch.processor(self.late, inbound={"x": self.task_id})

        @tg.stateless
        def hang(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if (self.task_id, epoch.number) == (0, 2):
                began.set()
                end.wait(20)
            outs.put("x", 1)

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 1:
                await gate.wait()
            elif epoch.number == 1:
                await asyncio.to_thread(began.wait, 20)
                failing.set()
                raise ValueError("nothing yet: the epoch at work is another")

    cluster = InProcessCluster(job(Stuck, settings=tg.Settings(cancel_s=0.05)))
    try:
        await cluster.start(2)
        await failing.wait()
        await restart(cluster, Stamp(1, 0))
        gate.set()
        with pytest.raises(tg.JobFailed, match=r"task 0 on n\d cannot go on: hang did not return within 0.05 s"):
            await cluster.result(20)
    finally:
        end.set()
        await cluster.stop()


# -- the end of an attempt ----------------------------------------------------------------------------


def _in_attempt(attempt: int, view: JobView) -> bool:
    return view.stamp is not None and view.stamp.attempt >= attempt


async def restart(cluster: InProcessCluster, stamp: Stamp) -> None:
    """Somebody asks for it, and the leader has written it."""
    leader = holder(cluster, 0)
    await leader.router.to_primary(0, lambda: RequestRestart(stamp, 1, "a test asks for it"), timeout_s=1.0)
    await leader.keeper.wait_until(partial(_in_attempt, stamp.attempt + 1))


def stamps(cluster: InProcessCluster, task: int) -> list[Stamp]:
    """Of the attempts that the task's primary keeps."""
    return [attempt.stamp for attempt in holder(cluster, task).primaries[task].attempts]


def test_a_restart_ends_all_epochs_in_flight(early: type[Early]) -> None:
    script = early.script
    script.hold("early", 0, 3)
    held = script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert stamps(cluster, 0) == [Stamp(1, epoch) for epoch in (2, 3, 4, 5)]
        actor = holder(cluster, 0).primaries[0].replica.actor
        assert [running.where for running in actor.running] == ["early", "early"]
        script.came.clear()
        await restart(cluster, Stamp(1, 2))
        await script.until("early", 0, 2)
        await asyncio.sleep(3)
        assert stamps(cluster, 0) == [Stamp(2, 2)], "of which nothing is known: how large it is, say"
        assert len(actor.running) == 1
        for epoch in (2, 3):
            script.hold("early", 0, epoch).set()
        held.set()
        found = await cluster.result()
        assert script.epochs("early", 0) == script.epochs("late", 0) == list(range(2, 12))
        return found

    found = play(job(early), scenario, nodes=2)
    whole(found)
    assert found.restarts == 1


@pytest.mark.parametrize("dies", [0, 1])
def test_a_takeover_begins_at_the_committed_epoch_and_works_on_several_again(early: type[Early], dies: int) -> None:
    script = early.script
    gate = script.hold("early", dies, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", dies, 5)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 2)
        script.came.clear()
        cluster.crash(holder(cluster, dies).id)
        gate.set()
        ahead = script.hold("early", dies, 4)
        await script.until("early", dies, 7)
        ahead.set()
        return await cluster.result()

    found = play(job(early), scenario, nodes=3)
    whole(found)
    assert found.failovers >= 1
    assert script.epochs("late", dies) == list(range(2, 12))


def test_a_mistake_of_an_attempt_that_is_over_is_none() -> None:
    class Once(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset({(0, 4)})

        async def first(self, epoch: tg.Epoch) -> None:
            if epoch.attempt == 1:
                await super().first(epoch)

    gate = Once.script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await Once.script.until("early", 0, 4)
        await asyncio.sleep(3)
        await restart(cluster, Stamp(1, 2))
        gate.set()
        return await cluster.result()

    found = play(job(Once), scenario, nodes=2)
    whole(found)
    assert found.restarts == 1


def test_a_roll_back_ends_all_epochs_in_flight(early: type[Early], tmp_path: Path) -> None:
    """Every replica of task 1 is lost while task 0 works on epochs behind the checkpoint."""
    script = early.script
    gate = script.hold("early", 0, 5)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 7)
        await cluster.nodes[0].keeper.wait_until(lambda view: view.checkpoint is not None)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 5)
        lost, kept = holder(cluster, 1), holder(cluster, 0)
        assert lost is not kept
        script.came.clear()
        cluster.crash(lost.id)
        cluster.add()
        await kept.keeper.wait_until(partial(_in_attempt, 2))
        await script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert {stamp.attempt for stamp in stamps(cluster, 0)} == {2}
        gate.set()
        found = await cluster.result()
        assert script.epochs("early", 0) == script.epochs("late", 0) == list(range(4, 12))
        assert len(told(cluster, "rolled back")) == 1
        return found

    given = job(early, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=4)
    whole(play(given, scenario, nodes=2))


# -- the end of the job -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["early", "late"])
def test_the_job_ends_with_the_epoch_that_says_so_though_others_are_under_way(where: str) -> None:
    class Finishing(Early, state=["seen"]):
        script = Script()

        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().early(epoch, ins, outs)
            self.end(epoch, "early")

        tg.stateless(early)

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().late(epoch, ins, outs)
            self.end(epoch, "late")

        def end(self, epoch: tg.Epoch, place: str) -> None:
            if (self.task_id, epoch.number, place) == (0, 4, where):
                epoch.finish()

    script = Finishing.script
    gate = script.hold("early", 0, 3)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 6)
        await asyncio.sleep(3)
        gate.set()
        return await cluster.result()

    whole(play(job(Finishing, epochs=None), scenario, nodes=2), epochs=5)
    assert script.epochs("early", 0) == list(range(7)), "none begins when one is known to be the last"


def test_no_epoch_begins_behind_the_jobs_last_one(early: type[Early]) -> None:
    script = early.script
    gate = script.hold("early", 0, 3)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == [0, 1, 2, 3, 4]
        gate.set()
        return await cluster.result()

    whole(play(job(early, epochs=5), scenario, nodes=2), epochs=5)


# -- who does not -------------------------------------------------------------------------------------


class Handling(Early, state=["seen"]):
    @tg.handles("push")
    def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
        """Nobody asks for it."""


class Flagged(Early, state=["seen"]):
    def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        """Nobody sends one."""


class Committed(Early, state=["seen"]):
    def on_commit(self, number: int, state: Any) -> None:
        assert state["seen"] == list(range(number + 1)) == self.seen


class Composing(Early, state=["seen"]):
    """Its graph may depend on the state."""

    def compose(self, epoch: tg.Epoch) -> None:
        assert self.seen == list(range(epoch.number))
        super().compose(epoch)


@pytest.mark.parametrize(
    ("kind", "strict"), [(Handling, False), (Flagged, False), (Committed, False), (Composing, False), (Early, True)]
)
def test_where_epochs_have_an_order_there_is_one_at_a_time(kind: type[Early], strict: bool) -> None:
    class Fresh(kind, state=["seen"]):  # type: ignore[misc, valid-type]
        script = Script()

    script = Fresh.script
    gate = script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 2)
        await asyncio.sleep(3)
        assert stamps(cluster, 0)[-1] == Stamp(1, 2)
        assert set(script.epochs("early", 0)) == {0, 1, 2}
        assert holder(cluster, 0).primaries[0]._lanes._count == 1  # type: ignore[union-attr]
        gate.set()
        return await cluster.result()

    whole(play(job(Fresh, settings=tg.Settings(strict=strict)), scenario, nodes=2))


def test_every_checkpoint_that_is_due_is_written_of_the_committed_boundary(early: type[Early], tmp_path: Path) -> None:
    """No epoch begins early that begins with one."""
    script = early.script
    gates = [script.hold("early", 0, epoch) for epoch in (2, 5)]

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == [0, 1, 2, 3]
        gates[0].set()
        await script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == list(range(8))
        gates[1].set()
        found = await cluster.result()
        written = [int(n) for text in told(cluster, "checkpoint") for n in re.findall(r"epoch (\d+)", text)]
        assert written == [4, 8]
        return found

    given = job(early, checkpoint=f"file://{tmp_path}", checkpoint_every=4)
    whole(play(given, scenario, nodes=2))


@pytest.mark.parametrize("task", [0, 1])
def test_a_node_that_leaves_hands_over_when_what_is_in_flight_is_committed(early: type[Early], task: int) -> None:
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
    assert script.epochs("early", task) == list(range(60)), "nothing was computed twice"


# -- memory -------------------------------------------------------------------------------------------


def test_large_epochs_begin_when_the_one_before_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when it is committed. Two have room, with the one that is to be pulled again, say."""
    monkeypatch.setattr(lanes, "_AHEAD_BYTES", 100_000)

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
        assert script.epochs("early", 0) == [0, 1, 2], "40 kB of each of two uncommitted epochs"
        assert at_work(cluster) == Stamp(1, 0)
        last = script.hold("early", 0, 11)
        commit.set()
        await script.until("early", 0, 11)
        await asyncio.sleep(3)
        assert script.epochs("late", 0) == []
        last.set()
        return await cluster.result()

    whole(play(job(Large), scenario, nodes=2))


# -- dones, in their order ----------------------------------------------------------------------------


@pytest.fixture
def dones(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """task -> the epochs that its primary reported done, as it did."""
    found: dict[int, list[int]] = {0: [], 1: []}
    tell = Primary.report

    def report(primary: Primary, report: Report) -> None:
        if report.done:
            found[report.task].append(report.stamp.epoch)
        tell(primary, report)

    monkeypatch.setattr(Primary, "report", report)
    return found


def test_task_0_goes_on_while_its_boundaries_lack_what_others_report(
    early: type[Early], dones: dict[int, list[int]]
) -> None:
    """Boundary 4 carries what task 1 reports in its epoch 2, which takes long."""
    gate = early.script.hold("early", 1, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert early.script.epochs("late", 0) == list(range(12))
        assert dones == {0: [0, 1, 2], 1: [0, 1]}
        assert holder(cluster, 0).primaries[0].waiting_for == "what the tasks report in epoch 2"
        gate.set()
        return await cluster.result()

    whole(play(job(early), scenario, nodes=2))
    assert dones == {0: list(range(12)), 1: list(range(12))}


def test_dones_are_told_in_their_order_though_the_boundaries_of_later_ones_are_held_before(
    early: type[Early], dones: dict[int, list[int]]
) -> None:
    """Epoch 0 waits for a backup to be admitted; for those after it all members hold them at once."""
    gate, setups = asyncio.Event(), [0, 0]

    class Fresh(early, state=["seen"]):  # type: ignore[misc, valid-type]
        async def setup(self) -> None:  # type: ignore[override]
            setups[self.task_id] += 1
            if setups[self.task_id] > 1:
                await gate.wait()
            super().setup()

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert early.script.epochs("late", 1) == [0, 1, 2, 3]
        assert dones == {0: [], 1: []}
        assert holder(cluster, 1).primaries[1].waiting_for.startswith("the admission of")
        gate.set()
        return await cluster.result()

    whole(play(job(Fresh), scenario, nodes=2))
    assert dones == {0: list(range(12)), 1: list(range(12))}


def test_epochs_that_are_through_before_those_before_them_are_snapshotted_and_told_in_their_order(
    dones: dict[int, list[int]],
) -> None:
    """Of a task that has nothing which waits for its turn."""

    class Relay(tg.Task):
        script = Script()

        @tg.stateless
        async def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.early)

        @tg.stateless
        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await self.script.at("early", self.task_id, epoch.number)
            epoch.report(**{f"task {self.task_id}": epoch.number})
            self.script.came.append(("through", self.task_id, epoch.number))

    script = Relay.script
    gates = [script.hold("early", task, epoch) for task in (0, 1) for epoch in (3, 1)]

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("through", 0) == script.epochs("through", 1) == [0, 2, 4]
        assert dones == {0: [0], 1: [0]}
        assert list(boundaries(cluster, 1)) == [1]
        for gate in gates:
            gate.set()
        return await cluster.result()

    found = play(job(Relay), scenario, nodes=2)
    assert dones == {0: list(range(12)), 1: list(range(12))}
    assert [dict(row.numbers) for row in found.reports] == [{"task 0": e, "task 1": e} for e in range(12)]


@pytest.mark.parametrize("task", [0, 1])
def test_a_done_that_takes_long_holds_up_those_behind_it_and_no_work(
    early: type[Early], dones: dict[int, list[int]], task: int
) -> None:
    gate = asyncio.Event()

    async def held(cluster: InProcessCluster, node: str) -> None:
        await gate.wait()

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert dones[task] == [0, 1, 2]
        assert early.script.epochs("late", task) == list(range(12 if task == 0 else 7))
        gate.set()
        return await cluster.result()

    whole(play(job(early), scenario, nodes=2, stages={("done", task, 3): held}))
    assert dones == {0: list(range(12)), 1: list(range(12))}


# -- what others ask of it ----------------------------------------------------------------------------


class View:
    """Of it, only terms are asked for."""

    def term(self, task: int) -> int:
        return 1


def attempt(epoch: int, *, attempt: int = 1, put: bool = False) -> Any:
    """One that can say what it offers: 'x' to task 1."""
    stamp = Stamp(attempt, epoch)
    out = Items(stamp, 1)
    out.open([("x", 1)])
    if put:
        out.put("x", 1, encode(epoch))
    return SimpleNamespace(stamp=stamp, out=out, composed=True, drop=out.drop, put_bytes=0)


def pull(epoch: int, *, attempt: int = 1) -> Pull:
    return Pull(Stamp(attempt, epoch), 1, 1, 0, "x")


async def test_what_is_asked_of_an_epoch_in_flight_waits_until_that_one_is_composed() -> None:
    """Also where a later one is composed before: its compose may await something."""
    attempts = Attempts(SimpleNamespace(view=View()), 0, 1)  # type: ignore[arg-type]
    over, one, other, yet = (attempts.item(given) for given in (pull(9, attempt=0), pull(5), pull(6), pull(7)))
    earlier, later = attempt(5), attempt(6, put=True)
    earlier.composed = later.composed = False
    attempts.begin(earlier)
    attempts.begin(later)
    again = attempts.item(pull(5))
    later.composed = True
    attempts.composed(later)
    assert all(isinstance(coming, Coming) for coming in (over, one, other, yet, again))
    assert isinstance(over.reply, Refusal) and over.reply.reason == Reason.STALE  # type: ignore[union-attr]
    assert isinstance(other.reply, Item)  # type: ignore[union-attr]
    assert not one.done and not again.done and not yet.done  # type: ignore[union-attr]
    earlier.composed = True
    attempts.composed(earlier)
    assert not one.done and not again.done, "it is offered, and not there yet"  # type: ignore[union-attr]
    earlier.out.put("x", 1, encode(5))
    assert isinstance(one.reply, Item) and one.reply == again.reply  # type: ignore[union-attr]
    assert one.reply.stamp == Stamp(1, 5)  # type: ignore[union-attr]
    assert not yet.done  # type: ignore[union-attr]


async def test_what_was_asked_of_an_epoch_in_flight_that_a_restart_ended_is_refused() -> None:
    attempts = Attempts(SimpleNamespace(view=View()), 0, 1)  # type: ignore[arg-type]
    for epoch in (5, 6):
        begun = attempt(epoch)
        begun.composed = False
        attempts.begin(begun)
    old, new = attempts.item(pull(6)), attempts.item(pull(5, attempt=2))
    attempts.drop()
    again = attempt(5, attempt=2)
    attempts.begin(again)
    attempts.composed(again)
    assert isinstance(old, Coming) and isinstance(old.reply, Refusal)
    assert isinstance(new, Coming) and not new.done


def test_a_graph_that_is_composed_late_is_waited_for(early: type[Early]) -> None:
    """Though that of the next epoch is there: the items of each go to that one."""

    class Late(early, state=["seen"]):  # type: ignore[misc, valid-type]
        @tg.stateless
        async def compose(self, epoch: tg.Epoch) -> None:  # type: ignore[override]
            await self.script.at("compose", self.task_id, epoch.number)
            super().compose(epoch)
            if self.task_id == 0:
                epoch.processor(self.give, outbound={"z": 1})
            else:
                epoch.processor(self.take, inbound={"z": 0})

        @tg.stateless
        async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("z", epoch.number)

        async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await self.script.at("take", self.task_id, epoch.number)
            assert ins["z"] == epoch.number

    script = early.script
    gate = script.hold("compose", 0, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert script.epochs("early", 0) == [0, 1, 3, 4, 5]
        assert script.epochs("take", 1) == [0, 1]
        gate.set()
        return await cluster.result()

    whole(play(job(Late), scenario, nodes=2))


def test_last_words_and_waits_name_the_epoch_of_each_call(
    early: type[Early], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lastwords, "here", lastwords.LastWords(tmp_path))
    script = early.script
    gates = [script.hold("early", 0, epoch) for epoch in (2, 4)]

    def ran() -> list[Ran]:
        left = lastwords.read(tmp_path)
        assert left is not None
        return list(left.ran)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        assert ran() == [Ran("early", 0, 2), Ran("early", 0, 4)]
        primary = holder(cluster, 0).primaries[0]
        waits = {epoch: [(w.processor, w.kind, w.name) for w in primary.waits(Stamp(1, epoch))] for epoch in range(7)}
        unfinished = [("early", "running", "early"), ("late", "item", "x"), ("late", "order", "early")]
        assert waits == {0: [], 1: [], 2: unfinished, 3: [], 4: unfinished, 5: [], 6: []}
        gates[0].set()
        await asyncio.sleep(3)
        assert ran() == [Ran("early", 0, 4)]
        assert at_work(cluster) == Stamp(1, 4)
        gates[1].set()
        return await cluster.result()

    whole(play(job(early), scenario, nodes=2))
    assert ran() == []


def test_a_trace_names_the_epoch_of_each_call(early: type[Early]) -> None:
    """Of each epoch all of it is there once, also of those that ran before an earlier one was through."""
    gate = early.script.hold("early", 0, 3)
    spans: list[tuple[Any, ...]] = []

    async def begin(cluster: InProcessCluster, node: str) -> None:
        cluster.node(node).tracing.start()

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await asyncio.sleep(3)
        gate.set()
        found = await cluster.result()
        spans.extend(holder(cluster, 0).tracing._spans)
        return found

    given = job(early, tasks=1, backups=0)
    found = play(given, scenario, nodes=1, stages={("compose", 0, 0): begin})
    assert found.values == {0: list(range(12))}
    for kind, name in (("code", "compose"), ("code", "early"), ("code", "late"), ("code", "snapshot"), ("epoch", "")):
        epochs = [span[6] for span in spans if span[:2] == (kind, name)]
        assert sorted(epochs) == list(range(kind == "epoch", 12)), (kind, name)  # of 0 it began before the trace
