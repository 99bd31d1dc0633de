"""Tasks that work ahead of the last commit: how far, who does not, and what of it counts."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import Counting, holder, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs import sharing
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


def test_what_uncommitted_epochs_hold_is_bounded(free: type[Free], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 1)
    free.shared.waits = {1: 3}

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        return free.shared.begun

    assert play(job(free), scenario, nodes=2) == 1


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


def _committed(epoch: int, view: JobView) -> bool:
    return view.stamp is not None and view.stamp.epoch >= epoch
