"""Tasks that work ahead of the last commit: how far, who does not, and what of it counts."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import Counting, holder, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs import sharing
from taskgraph.node.epochs.attempts import Attempts
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.view import JobView


class Free(Counting, state=["total"]):
    """Two tasks that need nothing of each other. In the epochs named, task 0 waits for task 1 to come to one."""

    shared: SimpleNamespace

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        shared = self.shared
        if self.task_id == 1:
            shared.begun = max(shared.begun, epoch.number)
            shared.changed.set()
        while self.task_id == 0 and shared.begun < shared.waits.get(epoch.number, -1):
            shared.changed.clear()
            await shared.changed.wait()
        await super().count(epoch, ins, outs)
        self.then(epoch)

    def then(self, epoch: tg.Epoch) -> None:
        """What a test adds."""


@pytest.fixture
def free() -> type[Free]:
    class Fresh(Free, state=["total"]):
        # waits: epoch of task 0 -> epoch that task 1 must have begun
        shared = SimpleNamespace(waits={}, begun=-1, changed=asyncio.Event())

    return Fresh


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": 6, "builder": builder, "backups": 1, **options})


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


def test_a_task_goes_on_as_far_as_it_may(free: type[Free]) -> None:
    free.shared.waits = {0: 3, 1: 4, 5: 8}
    given = job(free, epochs=9, settings=tg.Settings(epochs_ahead=3))
    assert play(given, result, nodes=2).values == {0: 9, 1: 9}


def test_and_no_further(free: type[Free]) -> None:
    free.shared.waits = {0: 4}

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        return free.shared.begun

    assert play(job(free, settings=tg.Settings(epochs_ahead=3)), scenario, nodes=2) == 3


@pytest.mark.parametrize("further", [1, 3])
def test_the_result_is_the_last_committed_state_of_a_task_that_was_further(free: type[Free], further: int) -> None:
    class Finishing(free, state=["total"]):  # type: ignore[misc, valid-type]
        def then(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0 and epoch.number == 2:
                epoch.finish()

    free.shared.waits = {2: 2 + further}
    found = play(job(Finishing, epochs=None, settings=tg.Settings(epochs_ahead=further)), result, nodes=2)
    assert free.shared.begun == 2 + further
    assert found.values == {0: 3, 1: 3}
    assert found.epochs == 3
    assert found.restarts == 0


def test_a_mistake_in_an_epoch_that_never_comes_is_none(free: type[Free]) -> None:
    class Finishing(free, state=["total"]):  # type: ignore[misc, valid-type]
        def then(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0 and epoch.number == 2:
                epoch.finish()
            if self.task_id == 1 and epoch.number == 4:
                raise ValueError("there is no epoch 4")

    free.shared.waits = {2: 4}
    assert play(job(Finishing, epochs=None), result, nodes=2).values == {0: 3, 1: 3}
    assert free.shared.begun == 4


def test_a_mistake_in_an_epoch_ahead_fails_the_job_when_that_epoch_comes(free: type[Free]) -> None:
    class Wrong(free, state=["total"]):  # type: ignore[misc, valid-type]
        def then(self, epoch: tg.Epoch) -> None:
            if self.task_id == 1 and epoch.number == 4:
                raise ValueError("no epoch 4")

    free.shared.waits = {1: 4}

    async def scenario(cluster: InProcessCluster) -> int:
        with pytest.raises(tg.JobFailed, match="no epoch 4") as caught:
            await cluster.result()
        assert caught.value.epoch == 4
        epoch = holder(cluster, 0).keeper.view.epoch
        assert epoch is not None
        return epoch.record.epoch

    assert play(job(Wrong), scenario, nodes=2) == 4, "all epochs before it were committed"


def test_on_commit_is_called_before_anything_of_the_next_epoch(free: type[Free]) -> None:
    seen: list[tuple[str, int]] = []

    class Listening(free, state=["total"]):  # type: ignore[misc, valid-type]
        def on_commit(self, number: int, state: Any) -> None:
            seen.append(("commit", number))

        def then(self, epoch: tg.Epoch) -> None:
            seen.append(("epoch", epoch.number))

    found = play(job(lambda task: Listening() if task == 1 else free()), result, nodes=2)
    assert found.values == {0: 6, 1: 6}
    assert seen == [(kind, number) for number in range(6) for kind in ("epoch", "commit")]


def test_every_checkpoint_that_is_due_is_written_however_far_tasks_might_go(free: type[Free], tmp_path: Path) -> None:
    """It is written of the committed boundary: whoever is further by then has none of it."""

    async def scenario(cluster: InProcessCluster) -> list[str]:
        await cluster.result()
        return told(cluster, "checkpoint")

    given = job(free, epochs=9, checkpoint=f"file://{tmp_path}", checkpoint_every=2)
    written = play(given, scenario, nodes=2)
    assert [int(number) for text in written for number in re.findall(r"epoch (\d+)", text)] == [2, 4, 6, 8], written


def test_an_epoch_that_cannot_be_done_fails_the_job_though_a_commit_is_read_in_that_very_moment(
    free: type[Free],
) -> None:
    """Nobody waits for a move of the view then, to be told: whoever waits for the next one looks first."""

    async def met(cluster: InProcessCluster, node: str) -> None:
        primary = cluster.node(node).roles.primaries[0]
        primary._lanes.dones.error = UserCodeError("snapshot", ValueError("it is not there"))

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(tg.JobFailed, match="it is not there"):
            await cluster.result()

    play(job(free, epochs=40), scenario, nodes=2, stages={("compose", 0, 3): met})


def test_what_uncommitted_epochs_hold_is_bounded(free: type[Free], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 1)
    free.shared.waits = {1: 3}

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        return free.shared.begun

    assert play(job(free), scenario, nodes=2) == 1


class Giving(tg.Task):
    """Tasks 1 to 4 give to task 0, which takes nothing before it is let."""

    size = 0
    begun: dict[int, int]
    let: asyncio.Event

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.wait)
            epoch.processor(self.take, inbound={"x": range(1, 5)})
        else:
            epoch.processor(self.give, outbound={"x": 0})

    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.begun[self.task_id] = epoch.number
        outs.put("x", bytes(self.size))

    async def wait(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await self.let.wait()

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert len(ins.all("x")) == 4


@pytest.mark.parametrize(
    ("nodes", "size", "furthest"),
    [
        (5, 20_000, 43),
        (1, 20_000, 8),
        (1, 100_000, 2),  # what two epochs hold, at least
        (1, 400_000, 2),  # but no more than a node of one task
        (1, 2_000_000, 0),  # and one at least
    ],
)
def test_what_uncommitted_epochs_hold_is_shared_by_the_primaries_of_a_node(
    nodes: int, size: int, furthest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that wait for no other are as far ahead as they may, all of them at once."""
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 1_000_000)

    class Fresh(Giving):
        begun: dict[int, int] = {}  # noqa: RUF012
        let = asyncio.Event()

    Fresh.size = size

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        assert set(Fresh.begun.values()) == {furthest}, Fresh.begun
        Fresh.let.set()
        return (await cluster.result()).epochs

    assert play(job(Fresh, tasks=5, epochs=80, backups=0), scenario, nodes=nodes) == 80


@pytest.mark.parametrize(("numbers", "furthest"), [(0, range(40, 41)), (100, range(30))])
def test_what_all_tasks_reported_counts_for_task_0(
    numbers: int, furthest: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its boundaries carry that, also where it comes after the snapshot."""
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 4_000_000)

    class Telling(Free, state=["total"]):
        shared = SimpleNamespace(waits={}, begun=-1, changed=asyncio.Event())

        def then(self, epoch: tg.Epoch) -> None:
            begun[self.task_id] = epoch.number
            epoch.report(**{f"number {place}": 0.5 for place in range(numbers)})

    async def blocked(cluster: InProcessCluster, node: str) -> None:
        await let.wait()

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        assert begun.pop(0) in furthest
        assert set(begun.values()) == {40}
        let.set()
        return (await cluster.result()).epochs

    begun, let = dict[int, int](), asyncio.Event()
    given = job(lambda _: Telling(), tasks=20, epochs=60, backups=0, settings=tg.Settings(epochs_ahead=40))
    assert play(given, scenario, nodes=2, stages={("commit", 0, 0): blocked}) == 60


def test_and_anew_when_the_node_has_more_primaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 1_000_000)

    def shares(cluster: InProcessCluster) -> list[int]:
        found = [holder(cluster, task).roles.primaries[task]._lanes for task in range(2)]
        return [one._share.bytes for one in found if one is not None]

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await cluster.nodes[0].keeper.wait_until(partial(_committed, 5))
        assert shares(cluster) == [1_000_000, 1_000_000]
        cluster.crash(holder(cluster, 1).id)
        left = holder(cluster, 0)
        await left.keeper.wait_until(partial(_committed, 50))
        assert shares(cluster) == [500_000, 500_000]
        return await cluster.result()

    assert play(job(Exchanging, epochs=200, settings=tg.Settings(epochs_ahead=4)), scenario, nodes=2).failovers == 1


def test_an_attempt_that_is_over_needs_no_room() -> None:
    """Else all of a node would be left with the least, for as long as it lives."""

    def held(cluster: InProcessCluster) -> dict[str, tuple[int, int]]:
        found = {}
        for node in cluster.nodes:
            lanes = [primary._lanes for primary in node.roles.primaries.values()]
            found[node.name] = (node.sharing._sum, sum(one._share.most for one in lanes if one is not None))
        return found

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        for number in (1, 2):
            await cluster.nodes[0].keeper.wait_until(partial(_committed, 60 * number))
            lost = holder(cluster, 1).id
            cluster.add()
            await cluster.nodes[0].keeper.wait_until(lambda view: len(view.nodes) == 3)
            cluster.crash(lost)
            left = holder(cluster, 0) if holder(cluster, 0).id != lost else cluster.nodes[-1]
            await left.keeper.wait_until(lambda view, number=number: view.term(1) > number)
        await left.keeper.wait_until(partial(_committed, 190))
        assert all(summed == of_lanes > 0 for summed, of_lanes in held(cluster).values() if of_lanes), held(cluster)
        assert any(of_lanes for _, of_lanes in held(cluster).values())
        return await cluster.result()

    assert play(job(Exchanging, epochs=250), scenario, nodes=2).epochs == 250


@pytest.mark.parametrize("task", [0, 1])
def test_one_large_epoch_does_not_count_for_all_that_come_after_it(
    task: int, free: type[Free], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it may be uncommitted less is gathered, and what the epochs hold is added up; soon after that no more."""
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 100_000)
    summed: list[int] = []
    held_bytes = Attempts.held_bytes

    def looked(self: Attempts, before: int) -> int:
        summed.append(before)
        return held_bytes(self, before)

    monkeypatch.setattr(Attempts, "held_bytes", looked)
    enough: dict[int, tuple[int, int, int]] = {}

    class Large(free, state=["total", "large"]):  # type: ignore[misc, valid-type]
        def setup(self) -> None:  # type: ignore[override]
            super().setup()
            self.large = b""

        def then(self, epoch: tg.Epoch) -> None:
            self.large = bytes(40_000) if self.task_id == task and epoch.number == 5 else b""

    async def looks(cluster: InProcessCluster, node: str) -> None:
        primary = cluster.node(node).roles.primaries[task]
        leader = holder(cluster, 0).roles.leader
        assert leader is not None
        number = primary.attempts.latest.epoch  # type: ignore[union-attr]
        enough[number] = (primary.reporter._enough, primary.backups.gathered._enough, leader._leader.enough)

    stages = {("compose", task, number): looks for number in (5, 6, 49)}
    given = job(Large, epochs=50, settings=tg.Settings(epochs_ahead=8))
    assert play(given, result, nodes=2, stages=stages).values == {0: 50, 1: 50}
    usual = (4 if task else 1, 4, 4)  # task 0 gathers no reports, only its leader commits
    assert enough == {5: usual, 6: (1, 1, 4 if task else 1), 49: usual}
    assert [before for before in summed if before < 10], "while it may be uncommitted"
    assert not [before for before in summed if before > 30]


class Exchanging(tg.Task, state=["total"]):
    """Each adds what the other one put, of every epoch, and reports it."""

    def setup(self) -> None:  # type: ignore[override]
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.put, outbound={"x": 1 - self.task_id})
        epoch.processor(self.take, inbound={"x": 1 - self.task_id})

    async def put(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", self.total + self.task_id)

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"] + epoch.number
        epoch.report(**{f"total {self.task_id}": float(self.total % 1000)})

    def result(self) -> int:
        return self.total


@pytest.mark.parametrize("dies", [0, 1])
def test_a_takeover_works_through_what_others_are_ahead_with(dies: int) -> None:
    """And of every epoch the result has what both reported, also of those that were gathered, or told to a dead."""

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        any_node = cluster.nodes[0]
        await any_node.keeper.wait_until(partial(_committed, 5))
        cluster.crash(holder(cluster, dies).id)
        return await cluster.result()

    given = job(Exchanging, epochs=60, settings=tg.Settings(gather_s=0.5))
    expected, found = play(given, result, nodes=3), play(given, scenario, nodes=3)
    assert found.values == expected.values
    assert found.failovers >= 1
    assert [report.epoch for report in found.reports] == list(range(60))
    assert found.reports == expected.reports
    assert all(len(report.numbers) == 2 for report in found.reports)


def test_task_0_goes_on_while_others_gather_what_its_boundaries_are_to_carry() -> None:
    """Else each epoch would last until the others' timers."""

    async def scenario(cluster: InProcessCluster) -> float:
        loop = asyncio.get_running_loop()
        await cluster.nodes[0].keeper.wait_until(partial(_committed, 8))
        began = loop.time()
        found = await cluster.result()
        assert len(found.reports) == 400
        return loop.time() - began

    given = job(Exchanging, epochs=400, settings=tg.Settings(gather_s=40.0, epochs_ahead=16))
    assert play(given, scenario, nodes=2) < 10.0, "less than one timer of a gatherer"


def _committed(epoch: int, view: JobView) -> bool:
    return view.stamp is not None and view.stamp.epoch >= epoch


@pytest.mark.parametrize("slow", [0, 1])
def test_epochs_that_take_long_are_committed_as_they_come(slow: int) -> None:
    """Nothing is gathered then: neither reports nor commits."""

    class Slow(Exchanging, state=["total"]):
        async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().take(epoch, ins, outs)
            if self.task_id == slow:
                await asyncio.sleep(1.0)

    async def scenario(cluster: InProcessCluster) -> list[float]:
        loop, at = asyncio.get_running_loop(), []
        for number in range(2, 9):
            await cluster.nodes[0].keeper.wait_until(partial(_committed, number))
            at.append(loop.time())
        return [later - earlier for earlier, later in pairwise(at)]

    given = job(Slow, epochs=20, settings=tg.Settings(gather_s=0.2, epochs_ahead=16))
    assert all(0.8 < pause < 1.2 for pause in play(given, scenario, nodes=2))


def test_the_first_commit_after_a_takeover_gathers_nothing() -> None:
    """Whoever watches the job sees at once that it goes on."""

    class Slow(Exchanging, state=["total"]):
        async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().take(epoch, ins, outs)
            await asyncio.sleep(1.0)

    async def scenario(cluster: InProcessCluster) -> float:
        loop = asyncio.get_running_loop()
        await cluster.nodes[0].keeper.wait_until(partial(_committed, 9))
        keeper = holder(cluster, 0).keeper
        at = keeper.view.stamp
        assert at is not None
        term = keeper.view.term(1)
        cluster.crash(holder(cluster, 1).id)
        await keeper.wait_until(lambda view: view.term(1) > term)
        began = loop.time()
        await keeper.wait_until(partial(_committed, at.epoch + 1))
        return loop.time() - began

    given = job(Slow, epochs=60, settings=tg.Settings(gather_s=30.0, epochs_ahead=16))
    assert play(given, scenario, nodes=2) < 2.5, "an epoch takes a second, and eight would be enough for a commit"
