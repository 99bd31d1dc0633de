"""Several epochs of a task at a time: their dones are told in order, and what is asked is answered of the right one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from cluster_kit import holder, play, set_up_when_offered
from flight_kit import Early, Script, at_work, boundaries, early, job, whole
from trace_kit import spans_of

import taskgraph as tg
from taskgraph.graph.values import encode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs.attempts import Attempts
from taskgraph.node.epochs.items import Items
from taskgraph.node.primary.reporter import Reporter
from taskgraph.node.usercode import lastwords
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Report, Stamp
from taskgraph.protocol.records import Ran
from taskgraph.transport.api import PendingReply

__all__ = ["early", "set_up_when_offered"]


# -- dones, in their order ----------------------------------------------------------------------------


@pytest.fixture
def dones(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """task -> the epochs that its primary reported done, as it did."""
    found: dict[int, list[int]] = {0: [], 1: []}
    tell = Reporter.set

    def report(reporter: Reporter, report: Report) -> None:
        if report.done:
            found[report.task].append(report.stamp.epoch)
        tell(reporter, report)

    monkeypatch.setattr(Reporter, "set", report)
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
        assert holder(cluster, 0).roles.primaries[0].waiting_for == "what the tasks report in epoch 2"
        gate.set()
        return await cluster.result()

    whole(play(job(early), scenario, nodes=2))
    assert dones == {0: list(range(12)), 1: list(range(12))}


@pytest.mark.usefixtures("set_up_when_offered")
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
        assert holder(cluster, 1).roles.primaries[1].waiting_for.startswith("the admission of")
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


@pytest.mark.usefixtures("set_up_when_offered")
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
    """Of it, only the term of task 1 is asked for."""

    primaries: ClassVar[dict[int, Any]] = {1: SimpleNamespace(record=SimpleNamespace(term=1))}


def attempt(epoch: int, *, attempt: int = 1, put: bool = False) -> Any:
    """One that can say what it offers: 'x' to task 1."""
    stamp = Stamp(attempt, epoch)
    out = Items(stamp, 1, [("x", 1)])
    if put:
        out.put("x", 1, encode(epoch))
    return SimpleNamespace(stamp=stamp, out=out, graph=(), drop=out.drop, put_bytes=0)


def pull(epoch: int, *, attempt: int = 1) -> Pull:
    return Pull(Stamp(attempt, epoch), 1, 1, 0, "x")


async def test_what_is_asked_of_an_epoch_in_flight_waits_until_that_one_is_composed() -> None:
    """Also where a later one is composed before: its compose may await something."""
    attempts = Attempts(SimpleNamespace(view=View()), 0, 1)  # type: ignore[arg-type]
    over, one, other, yet = (attempts.item(given) for given in (pull(9, attempt=0), pull(5), pull(6), pull(7)))
    earlier, later = attempt(5), attempt(6, put=True)
    earlier.graph = later.graph = None
    attempts.begin(earlier)
    attempts.begin(later)
    again = attempts.item(pull(5))
    later.graph = ()
    attempts.composed(later)
    assert all(isinstance(coming, PendingReply) for coming in (over, one, other, yet, again))
    assert isinstance(over.reply, Refusal) and over.reply.reason == Reason.STALE  # type: ignore[union-attr]
    assert isinstance(other.reply, Item)  # type: ignore[union-attr]
    assert not one.done and not again.done and not yet.done  # type: ignore[union-attr]
    earlier.graph = ()
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
        begun.graph = None
        attempts.begin(begun)
    old, new = attempts.item(pull(6)), attempts.item(pull(5, attempt=2))
    attempts.drop()
    again = attempt(5, attempt=2)
    attempts.begin(again)
    attempts.composed(again)
    assert isinstance(old, PendingReply) and isinstance(old.reply, Refusal)
    assert isinstance(new, PendingReply) and not new.done


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
        primary = holder(cluster, 0).roles.primaries[0]
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
        spans.extend(spans_of(holder(cluster, 0).tracing))
        return found

    given = job(early, tasks=1, backups=0)
    found = play(given, scenario, nodes=1, stages={("compose", 0, 0): begin})
    assert found.values == {0: list(range(12))}
    assert [span[6] for span in spans if span[:2] == ("code", "compose")] == [0], "it asks nothing of the epoch"
    for kind, name in (("code", "early"), ("code", "late"), ("code", "snapshot"), ("epoch", "")):
        epochs = [span[6] for span in spans if span[:2] == (kind, name)]
        assert sorted(epochs) == list(range(kind == "epoch", 12)), (kind, name)  # of 0 it began before the trace
