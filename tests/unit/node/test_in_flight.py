"""Several epochs of a task at a time: what may be early and how far, what waits for its turn, and what of it counts."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from cluster_kit import holder, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import RequestRestart, Stamp
from taskgraph.protocol.view import JobView


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
