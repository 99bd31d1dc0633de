"""Tasks that run ahead of the last commit: how far, and what counts."""

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
from taskgraph.node.epochs import epoch_memory
from taskgraph.protocol.view import JobView


class Free(Counting, state=["total"]):
    """Two tasks without channels between them. In some epochs task 0 waits for task 1."""

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


def test_task_runs_ahead(free: type[Free]) -> None:
    free.shared.waits = {0: 3, 1: 4, 5: 8}
    given = job(free, epochs=9, settings=tg.Settings(epochs_ahead=3))
    assert play(given, result, nodes=2).values == {0: 9, 1: 9}


def test_ahead_is_bounded(free: type[Free]) -> None:
    free.shared.waits = {0: 4}

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        return free.shared.begun

    assert play(job(free, settings=tg.Settings(epochs_ahead=3)), scenario, nodes=2) == 3


@pytest.mark.parametrize("further", [1, 3])
def test_result_is_the_last_committed_state(free: type[Free], further: int) -> None:
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


def test_mistake_in_an_uncommitted_epoch_is_ignored(free: type[Free]) -> None:
    class Finishing(free, state=["total"]):  # type: ignore[misc, valid-type]
        def then(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0 and epoch.number == 2:
                epoch.finish()
            if self.task_id == 1 and epoch.number == 4:
                raise ValueError("there is no epoch 4")

    free.shared.waits = {2: 4}
    assert play(job(Finishing, epochs=None), result, nodes=2).values == {0: 3, 1: 3}
    assert free.shared.begun == 4


def test_mistake_ahead_fails_the_job_in_its_epoch(free: type[Free]) -> None:
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


def test_on_commit_before_the_next_epoch(free: type[Free]) -> None:
    seen: list[tuple[str, int]] = []

    class Listening(free, state=["total"]):  # type: ignore[misc, valid-type]
        def on_commit(self, number: int, state: Any) -> None:
            seen.append(("commit", number))

        def then(self, epoch: tg.Epoch) -> None:
            seen.append(("epoch", epoch.number))

    found = play(job(lambda task: Listening() if task == 1 else free()), result, nodes=2)
    assert found.values == {0: 6, 1: 6}
    assert seen == [(kind, number) for number in range(6) for kind in ("epoch", "commit")]


def test_all_due_checkpoints_are_written(free: type[Free], tmp_path: Path) -> None:

    async def scenario(cluster: InProcessCluster) -> list[str]:
        await cluster.result()
        return told(cluster, "checkpoint")

    given = job(free, epochs=9, checkpoint=f"file://{tmp_path}", checkpoint_every=2)
    written = play(given, scenario, nodes=2)
    assert [int(number) for text in written for number in re.findall(r"epoch (\d+)", text)] == [2, 4, 6, 8], written


def test_uncommitted_memory_is_bounded(free: type[Free], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_memory, "AHEAD_BYTES", 1)
    free.shared.waits = {1: 3}

    async def scenario(cluster: InProcessCluster) -> int:
        await asyncio.sleep(30)
        return free.shared.begun

    assert play(job(free), scenario, nodes=2) == 1


class Exchanging(tg.Task, state=["total"]):
    """Each task adds and reports the other's item of every epoch."""

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
def test_takeover_catches_up(dies: int) -> None:

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
