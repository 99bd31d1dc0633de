"""Jobs that lose every replica of a task, and jobs that are resumed: the same bits, the same reports."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import crashes

import taskgraph as tg
from taskgraph.checkpoint import Store
from taskgraph.checkpoint import store as store_module
from taskgraph.checkpoint.manifest import Manifest, Name
from taskgraph.checkpoint.places import Directory
from taskgraph.errors import CheckpointError
from taskgraph.launch import resuming
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import replica as replica_module
from taskgraph.node.node import Point
from taskgraph.node.primary import checkpointer as checkpointer_module
from taskgraph.node.primary.checkpoint_reader import CheckpointReader

pytestmark = pytest.mark.slow


class Walk(tg.Task, state=["place", "steps"]):
    """Every task's state depends on that of all others, and on its own random numbers."""

    def setup(self) -> None:
        self.place = np.zeros(700)
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"place": "peers"})
        epoch.processor(self.step, inbound={"place": "peers"})

    async def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("place", self.place)

    async def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.place = 0.5 * self.place + 0.1 * sum(ins.all("place").values()) + epoch.rng.normal(size=700)
        self.steps += 1
        if (epoch.number + self.task_id) % 3:
            epoch.report(**{f"steps{self.task_id}": self.steps, "first": self.place[0]})

    def result(self) -> Any:
        return self.place, self.steps


def walk(where: Path | None, *, epochs: int = 12, **changes: Any) -> tg.Job:
    given: dict[str, Any] = {"tasks": 3, "backups": 1, "checkpoint_every": 4, "builder": Walk, **changes}
    url = f"file://{where}" if where is not None else None
    in_step = {"epochs_ahead": 0}  # what is to happen in an epoch happens when those before it are committed
    settings = tg.Settings(admit_wait_s=5, takeover_stagger_s=0.01, **{**in_step, **given.pop("settings", {})})
    given |= {"topology": tg.full(), "epochs": epochs, "checkpoint": url, "settings": settings}
    return tg.Job(name="walk", **given)


def files(where: Path, pattern: str) -> list[Path]:
    return sorted((where / "walk").glob(pattern))


def found_below(places: Path, pattern: str) -> list[Path]:
    return list(places.glob(f"*/walk/*/{pattern}"))


def same(one: tg.JobResult, other: tg.JobResult) -> None:
    assert one.epochs == other.epochs
    assert one.reports == other.reports
    for task, (place, steps) in one.values.items():
        assert np.array_equal(place, other.values[task][0]), f"task {task}"
        assert steps == other.values[task][1]


@pytest.fixture(scope="module")
def unharmed() -> tg.JobResult:
    return tg.run(walk(None), nodes=0)


@asynccontextmanager
async def running(job: tg.Job, nodes: int, point: Any = None, **beginning: bool) -> AsyncIterator[InProcessCluster]:
    cluster = InProcessCluster(job, rng=random.Random(1), point=point)
    try:
        await cluster.start(nodes, **beginning)
        yield cluster
    finally:
        await cluster.stop()


def kinds(cluster: InProcessCluster) -> list[str]:
    return [event.kind for event in cluster.events]


async def checkpointed(cluster: InProcessCluster, epoch: int) -> None:
    """Until there is a checkpoint of this epoch, or of a later one."""
    async with asyncio.timeout(20):
        await cluster.nodes[0].keeper.wait_until(
            lambda v: v.checkpoint is not None and v.checkpoint.record.epoch >= epoch
        )


def patient(epoch: int, at: int) -> Any:
    """The epoch is not done before the checkpoint `at` is complete."""

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, now: int) -> None:
            if (stage, now) == ("done", epoch):
                await checkpointed(cluster, at)

        return point

    return make


def cleaned(where: Path, epoch: int, *patterns: str) -> Any:
    """The epoch is not done before what is of earlier runs was removed."""

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, now: int) -> None:
            if (stage, now) == ("done", epoch):
                async with asyncio.timeout(20):
                    while any(files(where, pattern) for pattern in patterns):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)

        return point

    return make


class Kill:
    """Crashes every node that holds a task, as soon as its primary comes to a stage of an epoch."""

    def __init__(self, task: int, epoch: int, stage: str = "compose", times: int = 1) -> None:
        self.task, self.epoch, self.stage, self.left = task, epoch, stage, times

    def __call__(self, cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, task, epoch) == (self.stage, self.task, self.epoch) and self.left:
                await self.wait(cluster)
                self.left -= 1
                for holder in cluster.node(node).keeper.view.in_sync(self.task):
                    cluster.crash(holder)
                    cluster.add()
                await asyncio.Event().wait()

        return point

    async def wait(self, cluster: InProcessCluster) -> None:
        """Before the kill: until there is a checkpoint to go back to."""


class KillWithCheckpoint(Kill):
    def __init__(self, *args: Any, at: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.at = at

    async def wait(self, cluster: InProcessCluster) -> None:
        await checkpointed(cluster, self.at)


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("stage", ["compose", "snapshot", "done"])
async def test_a_job_that_lost_a_task_goes_back_to_its_checkpoint(
    unharmed: tg.JobResult, tmp_path: Path, task: int, stage: str
) -> None:
    kill = KillWithCheckpoint(task, 6, stage, at=4)
    async with running(walk(tmp_path), 4, kill) as cluster:
        same(unharmed, await cluster.result(40))
        assert kinds(cluster).count("rolled back") == 1
        (told,) = [e for e in cluster.events if e.kind == "rolled back"]
        assert told.epoch == 4
        assert f"task {task} lost every replica" in told.text
        assert "goes back from epoch 6 to the checkpoint of epoch 4; epochs 4 to 5 are computed again" in told.text


class Unwilling(Walk):
    """Task 2, which keeps its primary, cannot be put into a state of later than the first boundary."""

    calls = 0

    def snapshot(self) -> Any:
        return super().snapshot()

    def restore(self, state: Any) -> None:
        Unwilling.calls += self.task_id == 2
        if self.task_id == 2 and state["steps"]:
            raise RuntimeError("not this one")
        super().restore(state)


async def test_what_cannot_be_restored_after_a_roll_back_fails_the_job_once(tmp_path: Path) -> None:
    Unwilling.calls = 0
    async with running(walk(tmp_path, builder=Unwilling), 4, KillWithCheckpoint(0, 6, at=4)) as cluster:
        with pytest.raises(tg.JobFailed, match="task 2, epoch 4, 'restore': RuntimeError: not this one"):
            await cluster.result(40)
        assert Unwilling.calls == 2  # at its beginning, and once after the roll-back
        assert kinds(cluster).count("failed") == 1


async def test_a_job_whose_every_node_dies_goes_on(unharmed: tg.JobResult, tmp_path: Path) -> None:
    async with running(walk(tmp_path), 3, KillAll(2, 7, at=4)) as cluster:
        same(unharmed, await cluster.result(40))
        assert kinds(cluster).count("rolled back") == 1


class KillAll(KillWithCheckpoint):
    def __call__(self, cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, task, epoch) == (self.stage, self.task, self.epoch) and self.left:
                await self.wait(cluster)
                self.left = 0
                for one in cluster.nodes:
                    cluster.crash(one.id)
                    cluster.add()
                await asyncio.Event().wait()

        return point


async def test_that_a_job_went_back_is_not_pushed_out_by_what_its_tasks_do_then(tmp_path: Path) -> None:
    """Of a job of 60 tasks `events` did not tell it any more two minutes later: with it all tasks get new primaries and
    backups, and events of single tasks go first."""

    class Corrupt(KillWithCheckpoint):
        async def wait(self, cluster: InProcessCluster) -> None:
            await super().wait(cluster)
            (file,) = files(tmp_path, "*-e000000008-*/task-000002.safetensors")
            file.write_bytes(b"")

    async with running(walk(tmp_path), 4, Corrupt(0, 10, at=8)) as cluster:
        await cluster.result(40)
        told = {(e.kind, e.task) for e in cluster.events if e.kind in ("rolled back", "checkpoint refused")}
    assert told == {("rolled back", None), ("checkpoint refused", None)}


async def test_at_the_checkpoints_own_epoch_nothing_is_undone(unharmed: tg.JobResult, tmp_path: Path) -> None:
    async with running(walk(tmp_path), 4, KillWithCheckpoint(1, 8, "done", at=8)) as cluster:
        same(unharmed, await cluster.result(40))
        assert "rolled back" not in kinds(cluster)
        assert "takeover" in kinds(cluster)


async def test_the_one_before_is_used_where_the_newest_is_corrupt(unharmed: tg.JobResult, tmp_path: Path) -> None:
    class Corrupt(KillWithCheckpoint):
        async def wait(self, cluster: InProcessCluster) -> None:
            await super().wait(cluster)
            (file,) = files(tmp_path, "*-e000000008-*/task-000002.safetensors")
            data = bytearray(file.read_bytes())
            data[3000] ^= 1
            file.write_bytes(data)

    async with running(walk(tmp_path), 4, Corrupt(0, 10, at=8)) as cluster:
        same(unharmed, await cluster.result(40))
        refused = [e.text for e in cluster.events if e.kind == "checkpoint refused"]  # of every node that looked
        assert refused and all("task-000002.safetensors is corrupt" in text for text in refused)
        (told,) = [e for e in cluster.events if e.kind == "rolled back"]
        assert told.epoch == 4


async def test_a_place_that_is_slow_when_the_job_goes_back_is_told_of(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a checkpoint are read first: that took its time, and nothing was said of the place."""
    real, read, released = Store.newest, threading.Event(), threading.Event()

    def slow(self: Store, names: Any) -> Any:
        read.set()
        released.wait(30)
        return real(self, names)

    async with running(walk(tmp_path), 4, KillWithCheckpoint(1, 6, at=4)) as cluster:
        monkeypatch.setattr(Store, "newest", slow)
        try:
            async with asyncio.timeout(20):
                while not read.is_set():  # noqa: ASYNC110 - it is set in a thread
                    await asyncio.sleep(0.01)
            why = "task 1 lost every replica, and the files of its checkpoint are read before the job goes back to it"
            assert f"{why}: {tmp_path}/walk" in cluster.waits()
        finally:
            released.set()
        same(unharmed, await cluster.result(40))
        assert why not in cluster.waits()


async def test_without_a_usable_checkpoint_the_job_fails_and_names_the_files(tmp_path: Path) -> None:
    class Remove(KillWithCheckpoint):
        async def wait(self, cluster: InProcessCluster) -> None:
            await super().wait(cluster)
            for file in files(tmp_path, "*/task-000001.safetensors"):
                file.unlink()

    async with running(walk(tmp_path), 4, Remove(1, 6, at=4)) as cluster:
        with pytest.raises(
            tg.JobFailed,
            match=r"no checkpoint can be used: .*task-000001.safetensors is missing: do all hosts see the same place\?",
        ):
            await cluster.result(40)


async def test_where_another_run_removed_the_checkpoint_it_is_told_of(tmp_path: Path) -> None:
    class Remove(KillWithCheckpoint):
        async def wait(self, cluster: InProcessCluster) -> None:
            await super().wait(cluster)
            while not files(tmp_path, "*/manifest.json"):  # noqa: ASYNC110 - it comes after the pointer
                await asyncio.sleep(0.01)
            for file in files(tmp_path, "*/manifest*.json"):
                file.unlink()
            (tmp_path / "walk" / str(Name(1, 2, 8, "0ther"))).mkdir()

    async with running(walk(tmp_path), 4, Remove(1, 6, at=4)) as cluster:
        with pytest.raises(tg.JobFailed, match=r"manifest.json is missing: another run \(0ther\) keeps checkpoints"):
            await cluster.result(40)


async def test_a_job_that_fails_for_its_checkpoint_is_not_told_to_go_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run had removed it, and the launcher called it complete."""
    await interrupted(tmp_path)
    real = Store.newest

    def looked(self: Store, names: Any) -> Any:
        found = real(self, names)
        for file in files(tmp_path, "*/manifest*.json"):
            file.unlink()
        return found

    monkeypatch.setattr(Store, "newest", looked)
    with pytest.raises(tg.JobFailed, match=r"manifest.json is missing: do all hosts see the same place\?") as failed:
        await tg.arun(walk(tmp_path), nodes=0, resume=True)
    assert not any("is complete" in note for note in getattr(failed.value, "__notes__", ()))


async def test_a_task_lost_before_the_first_checkpoint_fails_the_job(tmp_path: Path) -> None:
    async with running(walk(tmp_path), 4, Kill(1, 2)) as cluster:
        with pytest.raises(tg.JobFailed, match="its first checkpoint is not complete yet"):
            await cluster.result(40)


async def test_lost_again_and_again(unharmed: tg.JobResult, tmp_path: Path) -> None:
    async with running(walk(tmp_path), 4, KillWithCheckpoint(1, 6, at=4, times=3)) as cluster:
        result = await cluster.result(60)
        same(unharmed, result)
        assert kinds(cluster).count("rolled back") == 3
        assert result.restarts >= 3


# -- resuming -----------------------------------------------------------------------------------------------------


async def interrupted(tmp_path: Path, *, epochs: int = 10, **changes: Any) -> None:
    """A job that ended after some epochs, and left its checkpoints."""
    last = (epochs - 1) // 4 * 4
    async with running(walk(tmp_path, epochs=epochs, **changes), 2, patient(epochs - 1, last)) as cluster:
        await cluster.result(40)


@pytest.mark.parametrize("nodes", [1, 2, 5])
async def test_resumed_on_any_number_of_nodes(unharmed: tg.JobResult, tmp_path: Path, nodes: int) -> None:
    await interrupted(tmp_path)
    async with running(walk(tmp_path), nodes, resume=True) as cluster:
        same(unharmed, await cluster.result(40))
        (began,) = [e for e in cluster.events if e.kind == "began"]
        assert "the job goes on from the checkpoint of epoch 8" in began.text


async def test_resumed_and_then_lost(unharmed: tg.JobResult, tmp_path: Path) -> None:
    await interrupted(tmp_path)
    async with running(walk(tmp_path), 4, KillWithCheckpoint(0, 10, at=8), resume=True) as cluster:
        same(unharmed, await cluster.result(40))
        assert kinds(cluster).count("rolled back") == 1


async def test_attempts_never_come_again(tmp_path: Path) -> None:
    await interrupted(tmp_path, epochs=6)
    for _ in range(2):
        async with running(walk(tmp_path, epochs=6), 2, resume=True) as cluster:
            result = await cluster.result(40)
    assert result.restarts == 1  # both began in attempt 2: no checkpoint was written in between
    async with running(walk(tmp_path, epochs=10), 2, patient(9, 8), resume=True) as cluster:
        await cluster.result(40)
    async with running(walk(tmp_path), 2, resume=True) as cluster:
        assert (await cluster.result(40)).restarts == 2


async def test_what_is_there_is_not_begun_anew_by_mistake(tmp_path: Path) -> None:
    await interrupted(tmp_path)
    with pytest.raises(tg.JobError, match=r"has checkpoints in .*/walk, the newest of epoch 8: .*--resume.*--fresh"):
        async with running(walk(tmp_path), 2):
            pass


async def test_fresh_starts_from_the_beginning_and_outlives_the_old_ones(
    unharmed: tg.JobResult, tmp_path: Path
) -> None:
    await interrupted(tmp_path)
    removed = cleaned(tmp_path, 5, "s0001-*", "*-begun")
    async with running(walk(tmp_path, epochs=6, seed=5), 2, removed, fresh=True) as cluster:
        await cluster.result(40)
    names = sorted(os.listdir(tmp_path / "walk"))
    assert [name[:5] for name in names] == ["s0002"]
    async with running(walk(tmp_path, seed=5), 2, resume=True) as cluster:
        result = await cluster.result(40)
    same(await tg.arun(walk(None, seed=5), nodes=0), result)


async def begun_anew(tmp_path: Path) -> None:
    """A job that left checkpoints was begun anew, and killed before its first one."""
    await interrupted(tmp_path)
    async with running(walk(tmp_path, seed=5), 2, fresh=True):
        pass


async def test_what_is_resumed_is_the_run_begun_last_also_where_it_left_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on, silently, from what --fresh was to be rid of."""
    await begun_anew(tmp_path)
    with pytest.raises(tg.JobError, match=r"newest of epoch 8: they are of an earlier run than the last; start from"):
        await tg.arun(walk(tmp_path, seed=5), nodes=0)
    for _ in range(2):  # and so it is when that one is killed early, too
        async with running(walk(tmp_path, seed=5), 2, resume=True):
            pass
        assert f"begun last left no complete checkpoint in {tmp_path}/walk: the job starts from its be" in caplog.text
        assert "The checkpoint of epoch 8 there is of an earlier run" in caplog.text
        caplog.clear()
    assert len(files(tmp_path, "s0001-*/manifest.json")) == 2, "they stay until there is a newer one"
    async with running(walk(tmp_path, seed=5), 2, cleaned(tmp_path, 11, "s0001-*", "*-begun"), resume=True) as cluster:
        result = await cluster.result(40)
    same(await tg.arun(walk(None, seed=5), nodes=0), result)
    assert result.restarts == 0
    assert {path.name[:5] for path in files(tmp_path, "*")} == {"s0005"}, "one more for each start"
    caplog.clear()
    same(result, await tg.arun(walk(tmp_path, seed=5), nodes=0, resume=True))
    assert caplog.text == ""


async def test_the_way_back_to_an_earlier_run_is_to_remove_what_is_of_later_ones(
    unharmed: tg.JobResult, tmp_path: Path
) -> None:
    await begun_anew(tmp_path)
    for path in files(tmp_path, "s0002-*"):
        path.unlink()
    result = await tg.arun(walk(tmp_path), nodes=0, resume=True)
    same(unharmed, result)
    assert result.restarts == 1


async def test_a_run_that_was_refused_did_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise tg.JobRunning("another one was quicker")

    await interrupted(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(resuming, "submit", refuse)
        with pytest.raises(tg.JobRunning):
            await tg.arun(walk(tmp_path), nodes=0, fresh=True)
    assert (await tg.arun(walk(tmp_path), nodes=0, resume=True)).restarts == 1


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_place_that_does_not_take_that_a_run_began_keeps_no_job_from_running(
    unharmed: tg.JobResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hangs: bool,
) -> None:
    released = threading.Event()

    def begin(*_: Any) -> None:
        if not hangs:
            raise OSError(30, "Read-only file system")
        released.wait(30)

    await interrupted(tmp_path)
    monkeypatch.setattr(resuming, "_SLOW_S", 0.2)
    monkeypatch.setattr(Store, "begin", begin)
    try:
        same(unharmed, await tg.arun(walk(tmp_path), nodes=0, fresh=True))
    finally:
        released.set()
    why = "it takes longer than 0.2 s" if hangs else "[Errno 30] Read-only file system"
    assert f"({why}): if it ends before its first checkpoint, --resume goes on from that of epoch 8" in caplog.text


class Forgetful(tg.Task):
    """What task 1 was before it had state."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"place": "peers"})
        epoch.processor(self.hear, inbound={"place": "peers"})

    async def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("place", np.ones(700))

    async def hear(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass


async def test_a_task_that_has_state_since_is_named(tmp_path: Path) -> None:
    """Its nodes ended, all of them, by an assertion of ours."""
    await interrupted(tmp_path, builder=lambda task: Forgetful() if task == 1 else Walk())
    with pytest.raises(
        tg.JobFailed, match=r"the checkpoint of epoch 8 in .*/walk has no state of task 1: .*\(--fresh, fresh=True\)"
    ):
        await tg.arun(walk(tmp_path), nodes=0, resume=True)


async def test_without_the_file_of_a_task_0_that_has_no_state_its_job_goes_on_and_says_what_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what tasks reported before, and nothing that anybody computes with."""

    def builder(task: int) -> tg.Task:
        return Walk() if task else Forgetful()

    whole = await tg.arun(walk(None, builder=builder), nodes=0)
    await interrupted(tmp_path, builder=builder)
    boundary_of = CheckpointReader.boundary_of

    async def torn(reader: CheckpointReader, task: int, term: int) -> Any:  # since the job was resumed
        if task == 0:
            raise CheckpointError("task-000000.safetensors is torn")
        return await boundary_of(reader, task, term)

    monkeypatch.setattr(CheckpointReader, "boundary_of", torn)
    async with running(walk(tmp_path, builder=builder), 1, resume=True) as cluster:
        found = await cluster.result(40)
        refused = [event.text for event in cluster.events if event.kind == "checkpoint refused"]
    for task, (place, steps) in whole.values.items():
        assert np.array_equal(place, found.values[task][0]) and steps == found.values[task][1]
    assert refused == ["task-000000.safetensors is torn; what was reported before epoch 8 may be missing in the result"]
    assert [report.epoch for report in found.reports if report.epoch >= 8] == [8, 9, 10, 11]


async def test_resuming_where_there_is_nothing_yet_starts_from_the_beginning(
    unharmed: tg.JobResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same(unharmed, await tg.arun(walk(tmp_path), nodes=0, resume=True))
    assert "holds no checkpoint yet" in caplog.text


async def test_resuming_a_job_that_keeps_none_is_an_error() -> None:
    with pytest.raises(tg.JobError, match="'walk' keeps no checkpoints"):
        await tg.arun(walk(None), nodes=0, resume=True)
    with pytest.raises(tg.JobError, match="either the one or the other"):
        await tg.arun(walk(None), nodes=0, resume=True, fresh=True)


async def test_resumed_from_the_one_before_where_the_newest_is_torn(unharmed: tg.JobResult, tmp_path: Path) -> None:
    await interrupted(tmp_path)
    (file,) = files(tmp_path, "*-e000000008-*/task-000000.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    same(unharmed, await tg.arun(walk(tmp_path), nodes=0, resume=True))


async def test_a_job_with_other_tasks_refuses_the_checkpoints_by_name(tmp_path: Path) -> None:
    await interrupted(tmp_path)
    with pytest.raises(tg.CheckpointError, match=r"none of the 2 checkpoints .*foreign: tasks is 3, here it is 4"):
        await tg.arun(walk(tmp_path, tasks=4), nodes=0, resume=True)


async def test_where_none_can_be_used_the_reason_is_told_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await interrupted(tmp_path)
    for file in (tmp_path / "walk").glob("*/manifest*.json"):
        manifest = Manifest.from_bytes(file.read_bytes(), path=str(file))
        file.write_bytes(dataclasses.replace(manifest, fingerprint="e36b3cc1f058c194").to_bytes())
    with pytest.raises(tg.CheckpointError) as refused:
        await tg.arun(walk(tmp_path), nodes=0, resume=True)
    assert str(refused.value).count("is foreign: the driver's fingerprint is e36b3cc1f058c194, here it is local") == 2
    back = "go back to the driver and the number of tasks they were written with, or start from the beginning (--fresh"
    assert back in str(refused.value)
    assert "foreign" not in caplog.text, "the error has it"
    for file in files(tmp_path, "*/manifest*.json"):
        file.write_text(file.read_text().replace("taskgraph checkpoint 4", "taskgraph checkpoint 3"))
    back = (
        r"go on with the taskgraph that wrote them, on all hosts, or start from the beginning .*they are removed once"
    )
    with pytest.raises(tg.CheckpointError, match=f"by another taskgraph, .*To run the job, {back}"):
        await tg.arun(walk(tmp_path), nodes=0, resume=True)
    for file in files(tmp_path, "*/manifest*.json"):
        file.write_bytes(b"{")
    with pytest.raises(
        tg.CheckpointError, match=r"torn or corrupt.*To run the job, start from the beginning \(--fresh"
    ):
        await tg.arun(walk(tmp_path), nodes=0, resume=True)


# -- writing ------------------------------------------------------------------------------------------------------


async def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    job = walk(tmp_path, checkpoint_every=1, settings={"checkpoints_kept": 2})
    async with running(job, 2, patient(11, 11)) as cluster:
        await cluster.result(40)
    complete = [name for name in os.listdir(tmp_path / "walk") if (tmp_path / "walk" / name / "manifest.json").exists()]
    assert len(complete) == 2, "one that a newer one overtook may be missing; two are kept all the same"
    assert max(complete).startswith("s0001-a000001-e000000011")


async def test_a_place_that_refuses_costs_the_checkpoint_and_nothing_else(
    unharmed: tg.JobResult, tmp_path: Path
) -> None:
    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, epoch) == ("compose", 1):
                (tmp_path / "walk").write_text("a file where a directory should be")

        return point

    async with running(walk(tmp_path), 2, make) as cluster:
        same(unharmed, await cluster.result(40))
        failed = [e for e in cluster.events if e.kind == "checkpoint failed"]
        assert failed
        assert all("cannot be written" in e.text for e in failed)
        assert len(failed) <= 3 * 2
        kept = [e for e in failed if not e.transient]
        assert sorted(e.task for e in kept) == [0, 1, 2], "what is kept of a place that refuses all is the first"


@pytest.mark.parametrize("error", [CheckpointError("too many bytes"), MemoryError("too many bytes")])
async def test_a_state_that_makes_no_file_costs_the_checkpoint_and_nothing_else(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where memory was lacking for it, it cost the nodes, one after the other."""

    def pack(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(store_module, "pack", pack)
    async with running(walk(tmp_path), 2) as cluster:
        same(unharmed, await cluster.result(40))
        failed = [e for e in cluster.events if e.kind == "checkpoint failed"]
        assert failed and all("cannot be written: too many bytes" in e.text for e in failed)


async def test_a_place_that_hosts_do_not_share_is_told_of_and_makes_no_checkpoint(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken for complete, until the day that one was needed."""
    monkeypatch.setattr(checkpointer_module, "_LOOK_AGAIN_S", 0.01)
    async with running(walk(tmp_path), 2) as cluster:
        for node in cluster.nodes:
            node.checkpoints = CheckpointReader(node, node.threads, Directory(tmp_path / node.name))
        same(unharmed, await cluster.result(40))
        failed = [e for e in cluster.events if e.kind == "checkpoint failed"]
        assert failed
        leader, other = "n1", "n2"
        if "n2 does not see" in failed[0].text:
            leader, other = other, leader
        for event in failed:
            assert f"checkpoint of epoch {event.epoch}: {leader} does not see all of its files" in event.text
            assert f" on {other}, {tmp_path / leader / 'walk'}/s0001-" in event.text
            assert "safetensors is not there" in event.text
            assert "do all hosts see the same place?" in event.text
        assert [e.transient for e in failed] == [False, *[True] * (len(failed) - 1)]
        assert cluster.checkpoint() is None
    assert found_below(tmp_path, "task-*") and not found_below(tmp_path, "manifest*")


async def test_files_that_are_listed_a_moment_later_make_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_LOOK_AGAIN_S", 0.01)
    real, looked = Directory.sizes, set[str]()

    def late(self: Directory, path: str) -> dict[str, int | None]:
        first = path not in looked
        looked.add(path)
        return {} if first else real(self, path)

    monkeypatch.setattr(Directory, "sizes", late)
    async with running(walk(tmp_path), 2, patient(11, 8)) as cluster:
        await cluster.result(40)
        assert [e for e in cluster.events if e.kind == "checkpoint failed"] == []
    assert looked


async def test_a_run_that_began_later_in_the_same_place_is_told_of(tmp_path: Path) -> None:
    """It removes this one's checkpoints, whose node would only say that some file is not there."""
    later = str(Name(2, 1, 4, "0ther"))

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, epoch) == ("compose", 1):
                (tmp_path / "walk" / later).mkdir(parents=True, exist_ok=True)
            if (stage, epoch) == ("done", 11):
                await checkpointed(cluster, 8)

        return point

    async with running(walk(tmp_path), 2, make) as cluster:
        await cluster.result(40)
        (told,) = [e for e in cluster.events if e.kind == "checkpoint shared"]
    assert "another run (0ther), which began later, keeps checkpoints of this job" in told.text
    assert f"in {tmp_path}/walk, too, and it removes this run's: end one of the two" in told.text
    assert (tmp_path / "walk" / later).exists(), "what a later run writes is not this run's to remove"


async def test_a_run_that_began_earlier_and_still_writes_is_told_of(tmp_path: Path) -> None:
    """What earlier runs left is removed, and nothing is said of it; what comes after that a run wrote that lives."""
    before, after = (str(Name(1, 1, epoch, "0ther")) for epoch in (4, 8))
    (tmp_path / "walk" / before).mkdir(parents=True)
    (tmp_path / "walk" / before / "manifest.json").write_bytes(b"{}")

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, epoch) == ("done", 6):
                async with asyncio.timeout(20):
                    while (tmp_path / "walk" / before).exists():  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)
                assert [e for e in cluster.events if e.kind in ("checkpoint failed", "checkpoint shared")] == []
                (tmp_path / "walk" / after).mkdir(exist_ok=True)
            if (stage, epoch) == ("done", 11):
                await checkpointed(cluster, 8)

        return point

    async with running(walk(tmp_path), 2, make, fresh=True) as cluster:
        await cluster.result(40)
        (told,) = [e for e in cluster.events if e.kind == "checkpoint shared"]
    assert "another run (0ther), which began earlier, keeps checkpoints of this job" in told.text
    assert "and this run removes them: end one of the two" in told.text


async def test_what_the_run_that_is_gone_on_from_left_half_written_is_no_other_run(tmp_path: Path) -> None:
    """Nearly every run that was resumed after a kill told of another one, which was its dead predecessor."""
    async with running(walk(tmp_path, epochs=6), 2) as cluster:
        await cluster.result(40)
        left = tmp_path / "walk" / str(Name(1, 1, 8, cluster.spec.run[:8]))
    left.mkdir()
    async with running(walk(tmp_path), 2, cleaned(tmp_path, 11, left.name), resume=True) as cluster:
        await cluster.result(40)
        assert "checkpoint shared" not in kinds(cluster)


async def test_of_two_runs_that_began_at_the_same_time_neither_is_said_to_be_the_later(tmp_path: Path) -> None:
    """Each said of the other that it had begun earlier."""

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, epoch) == ("compose", 1):
                (tmp_path / "walk" / str(Name(1, 1, 2, "0ther"))).mkdir(parents=True, exist_ok=True)
            if (stage, epoch) == ("done", 11):
                await checkpointed(cluster, 8)

        return point

    async with running(walk(tmp_path), 2, make) as cluster:
        await cluster.result(40)
        (told,) = [e for e in cluster.events if e.kind == "checkpoint shared"]
    assert "another run (0ther) keeps checkpoints of this job" in told.text
    assert "and each of the two removes what the other wrote: end one of the two" in told.text


async def test_the_last_manifest_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer names it, and the disk is full: who is resumed without the pointer shall find it all the same."""
    real, left = Store.finish, 2

    def full(self: Store, name: str) -> None:
        nonlocal left
        if "-e000000006-" in name and left:
            left -= 1
            raise OSError(28, "No space left on device")
        real(self, name)

    monkeypatch.setattr(Store, "finish", full)

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if (stage, epoch) == ("done", 7):
                await checkpointed(cluster, 6)  # else a newer one may overtake it
            if (stage, epoch) == ("done", 9):
                async with asyncio.timeout(20):
                    while not files(tmp_path, "*-e000000006-*/manifest.json"):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)

        return point

    async with running(walk(tmp_path, checkpoint_every=2), 2, make) as cluster:
        await cluster.result(40)
        (told,) = [e for e in cluster.events if e.kind == "checkpoint failed"]
        assert told.epoch == 6
        assert "No space left on device" in told.text


async def test_old_ones_that_cannot_be_removed_are_told_of_as_what_they_are(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called the failure of a checkpoint that is complete, and every one of them was kept in etcd."""

    def denied(self: Store, names: Any, current: str) -> Any:
        raise PermissionError(13, "Permission denied", "old")

    monkeypatch.setattr(Store, "keep_only", denied)

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, epoch: int) -> None:
            if stage == "done" and epoch in (5, 11):
                await checkpointed(cluster, epoch - 1)

        return point

    async with running(walk(tmp_path, checkpoint_every=2), 2, make) as cluster:
        same(unharmed, await cluster.result(40))
        failed = [e for e in cluster.events if e.kind == "checkpoint failed"]
    assert len(failed) >= 2, "of every checkpoint"
    assert all("it is complete, but some before it cannot be removed: [Errno 13]" in e.text for e in failed)
    assert [e.transient for e in failed] == [False, *[True] * (len(failed) - 1)]


async def test_neither_the_loop_nor_user_code_makes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding all that was ever reported, digests and writing: in a few threads that do nothing else."""
    seen: list[tuple[str, str]] = []

    def spied(what: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((what, threading.current_thread().name))
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(Store, "write", spied("write", Store.write))
    monkeypatch.setattr(Store, "stage", spied("stage", Store.stage))
    monkeypatch.setattr(store_module, "pack", spied("pack", store_module.pack))
    monkeypatch.setattr(replica_module, "with_log", spied("with_log", replica_module.with_log))
    async with running(walk(tmp_path, backups=0), 1, patient(11, 8)) as cluster:
        await cluster.result(40)
    assert {what for what, _ in seen} == {"write", "stage", "pack", "with_log"}
    assert {thread.rpartition("_")[0] for _, thread in seen} == {"n1-files"}


async def test_a_place_that_hangs_takes_no_thread_from_user_code(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as no file is needed, the job does not notice: it is within the epochs of two checkpoints."""
    released = threading.Event()
    monkeypatch.setattr(Store, "write", lambda *_: released.wait(30) and None)
    try:
        async with running(walk(tmp_path, tasks=12, epochs=11), 1) as cluster:
            await cluster.result(20)
            assert [e for e in cluster.events if e.kind == "checkpoint failed"] == []
    finally:
        released.set()


async def test_a_slow_place_makes_the_epochs_wait_by_name(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, released = Store.write, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: Store, name: Any, task: int, value: Any) -> Any:
        if task == 1:
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)
        return real(self, name, task, value)

    monkeypatch.setattr(Store, "write", slow)
    async with running(walk(tmp_path, checkpoint_every=1), 2) as cluster:
        async with asyncio.timeout(20):
            while "its file of the checkpoint of epoch 1: " not in cluster.waits():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
        view = cluster.nodes[0].keeper.view
        assert view.stamp is not None
        assert view.stamp.epoch == 3, "one is being written, one waits, the third makes its epoch wait"
        assert "is slow" in cluster.waits()
        released.set()
        same(unharmed, await cluster.result(40))


async def test_tasks_without_state_have_no_files(tmp_path: Path) -> None:
    class Server(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.ask, inbound={}, outbound={"x": "peers"})
            epoch.processor(self.end, inbound={"x": "peers"})

        async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1)

        async def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.report(n=epoch.number)

    job = tg.Job(
        tasks=2,
        builder=Server,
        topology=tg.full(),
        epochs=6,
        checkpoint=f"file://{tmp_path}",
        checkpoint_every=2,
        name="walk",
    )
    async with running(job, 1, patient(5, 4)) as cluster:
        await cluster.result(40)
    (newest,) = files(tmp_path, "*-e000000004-*")
    assert sorted(os.listdir(newest)) == ["manifest.json", "manifest.staged.json", "task-000000.safetensors"]
    result = await tg.arun(job, nodes=0, resume=True)
    assert [r.by_task[1]["n"] for r in result.reports] == [0, 1, 2, 3, 4, 5]


async def test_a_lost_task_without_state_is_made_anew_and_nothing_is_undone(tmp_path: Path) -> None:
    """Task 1 has no state; its only replica dies between two checkpoints."""

    class Counter(tg.Task, state=["count"]):
        def setup(self) -> None:
            self.count = 0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.step, inbound={"x": 1})

        async def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.count += ins["x"]

        def result(self) -> int:
            return self.count

    class Server(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.tell, outbound={"x": 0})

        async def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", epoch.number)

    job = tg.Job(
        tasks=2,
        builder=lambda task: Server() if task else Counter(),
        epochs=12,
        backups=0,
        checkpoint=f"file://{tmp_path}",
        checkpoint_every=4,
        name="walk",
    )
    async with running(job, 2, KillWithCheckpoint(1, 6, at=4)) as cluster:
        result = await cluster.result(40)
    assert result.values[0] == sum(range(12))
    assert crashes(cluster) == 1
    assert "rolled back" not in kinds(cluster)
    assert {path.name for path in files(tmp_path, "*/task-*")} == {"task-000000.safetensors"}
