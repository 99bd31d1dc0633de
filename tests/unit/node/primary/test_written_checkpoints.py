"""Jobs that lose every replica of a task, and resumed jobs: the same bits, the same reports."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.checkpoint import CheckpointStore
from taskgraph.checkpoint.places import Directory
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Point
from taskgraph.node.primary import checkpoint_completer as checkpoint_completer_module
from taskgraph.node.primary.checkpoint_reader import CheckpointReader


class Walk(tg.Task, state=["place", "steps"]):
    """Every task's state depends on all others, and on its own random numbers."""

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
    """Waits for the checkpoint of this epoch, or a later one."""
    async with asyncio.timeout(20):
        await cluster.nodes[0].keeper.wait_until(
            lambda v: v.checkpoint is not None and v.checkpoint.record.epoch >= epoch
        )


def patient(epoch: int, at: int) -> Any:
    """The epoch does not finish before the checkpoint `at` is complete, with the manifest that a resumed job reads."""

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, now: int) -> None:
            if (stage, now) == ("done", epoch):
                await checkpointed(cluster, at)
                async with asyncio.timeout(20):
                    while not any(e.kind == "checkpoint" and e.epoch == at for e in cluster.events):  # noqa: ASYNC110
                        await asyncio.sleep(0.001)

        return point

    return make


def cleaned(where: Path, epoch: int, *patterns: str) -> Any:
    """The epoch does not finish before files of earlier runs are removed."""

    def make(cluster: InProcessCluster, node: str) -> Point:
        async def point(stage: str, task: int, now: int) -> None:
            if (stage, now) == ("done", epoch):
                async with asyncio.timeout(20):
                    while any(files(where, pattern) for pattern in patterns):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)

        return point

    return make


class Kill:
    """Kills every node of a task when its primary reaches a stage of an epoch."""

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
        """Delays the kill until there is a checkpoint."""


class KillWithCheckpoint(Kill):
    def __init__(self, *args: Any, at: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.at = at

    async def wait(self, cluster: InProcessCluster) -> None:
        await checkpointed(cluster, self.at)


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("stage", ["compose", "snapshot", "done"])
async def test_lost_task_rolls_job_back(unharmed: tg.JobResult, tmp_path: Path, task: int, stage: str) -> None:
    kill = KillWithCheckpoint(task, 6, stage, at=4)
    async with running(walk(tmp_path), 4, kill) as cluster:
        same(unharmed, await cluster.result(40))
        assert kinds(cluster).count("rolled back") == 1
        (told,) = [e for e in cluster.events if e.kind == "rolled back"]
        assert told.epoch == 4
        assert f"task {task} lost every replica" in told.text
        assert "goes back from epoch 6 to the checkpoint of epoch 4; epochs 4 to 5 are computed again" in told.text


class Unwilling(Walk):
    """Task 2, which keeps its primary, restores only the first boundary."""

    calls = 0

    def snapshot(self) -> Any:
        return super().snapshot()

    def restore(self, state: Any) -> None:
        Unwilling.calls += self.task_id == 2
        if self.task_id == 2 and state["steps"]:
            raise RuntimeError("not this one")
        super().restore(state)


async def test_failed_restore_after_roll_back_fails_job(tmp_path: Path) -> None:
    Unwilling.calls = 0
    async with running(walk(tmp_path, builder=Unwilling), 4, KillWithCheckpoint(0, 6, at=4)) as cluster:
        with pytest.raises(tg.JobFailed, match="task 2, epoch 4, 'restore': RuntimeError: not this one"):
            await cluster.result(40)
        assert Unwilling.calls == 2  # at its beginning, and once after the roll-back
        assert kinds(cluster).count("failed") == 1


async def test_job_survives_death_of_all_nodes(unharmed: tg.JobResult, tmp_path: Path) -> None:
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


async def test_corrupt_checkpoint_falls_back(unharmed: tg.JobResult, tmp_path: Path) -> None:
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


async def test_failure_names_unusable_files(tmp_path: Path) -> None:
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


# -- resuming -----------------------------------------------------------------------------------------------------


async def interrupted(tmp_path: Path, *, epochs: int = 10, **changes: Any) -> None:
    """A job that ended after some epochs, and left its checkpoints."""
    last = (epochs - 1) // 4 * 4
    async with running(walk(tmp_path, epochs=epochs, **changes), 2, patient(epochs - 1, last)) as cluster:
        await cluster.result(40)


@pytest.mark.parametrize("nodes", [1, 2, 5])
async def test_resumes_on_any_number_of_nodes(unharmed: tg.JobResult, tmp_path: Path, nodes: int) -> None:
    await interrupted(tmp_path)
    async with running(walk(tmp_path), nodes, resume=True) as cluster:
        same(unharmed, await cluster.result(40))
        (began,) = [e for e in cluster.events if e.kind == "began"]
        assert "the job goes on from the checkpoint of epoch 8" in began.text


async def test_existing_checkpoints_need_a_choice(tmp_path: Path) -> None:
    await interrupted(tmp_path)
    with pytest.raises(tg.JobError, match=r"has checkpoints in .*/walk, the newest of epoch 8: .*--resume.*--fresh"):
        async with running(walk(tmp_path), 2):
            pass


async def test_fresh_ignores_old_checkpoints(unharmed: tg.JobResult, tmp_path: Path) -> None:
    await interrupted(tmp_path)
    removed = cleaned(tmp_path, 5, "s0001-*", "*-begun")
    async with running(walk(tmp_path, epochs=6, seed=5), 2, removed, fresh=True) as cluster:
        await cluster.result(40)
    names = sorted(os.listdir(tmp_path / "walk"))
    assert [name[:5] for name in names] == ["s0002"]
    async with running(walk(tmp_path, seed=5), 2, resume=True) as cluster:
        result = await cluster.result(40)
    same(await tg.arun(walk(None, seed=5), nodes=0), result)


async def test_resume_without_checkpoint_starts(
    unharmed: tg.JobResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same(unharmed, await tg.arun(walk(tmp_path), nodes=0, resume=True))
    assert "holds no checkpoint yet" in caplog.text


@tg.elastic
def nothing(run: tg.Run) -> None:
    pass


async def test_resume_without_place_is_error() -> None:
    with pytest.raises(tg.JobError, match="'walk' keeps no checkpoints"):
        await tg.arun(walk(None), nodes=0, resume=True)
    with pytest.raises(tg.JobError, match=r"keeps no checkpoints: give it @tg\.elastic\(checkpoint="):
        await tg.arun(nothing(), nodes=0, resume=True)
    with pytest.raises(tg.JobError, match="either the one or the other"):
        await tg.arun(walk(None), nodes=0, resume=True, fresh=True)


async def test_checkpoint_of_other_tasks_is_refused(tmp_path: Path) -> None:
    await interrupted(tmp_path)
    with pytest.raises(tg.CheckpointError, match=r"none of the 2 checkpoints .*used: tasks is 3, here it is 4"):
        await tg.arun(walk(tmp_path, tasks=4), nodes=0, resume=True)


# -- writing ------------------------------------------------------------------------------------------------------


async def test_last_checkpoints_are_kept(tmp_path: Path) -> None:
    job = walk(tmp_path, checkpoint_every=1, settings={"checkpoints_kept": 2})
    async with running(job, 2, patient(11, 11)) as cluster:
        await cluster.result(40)
    complete = [name for name in os.listdir(tmp_path / "walk") if (tmp_path / "walk" / name / "manifest.json").exists()]
    assert len(complete) == 2, "one that a newer one overtook may be missing; two are kept all the same"
    assert max(complete).startswith("s0001-a000001-e000000011")


async def test_refusing_place_costs_only_checkpoint(unharmed: tg.JobResult, tmp_path: Path) -> None:
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


async def test_unshared_place_makes_no_checkpoint(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_completer_module, "_LOOK_AGAIN_S", 0.01)
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


async def test_last_manifest_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without the pointer needs it, and the disk is full."""
    real, left = CheckpointStore.finish, 2

    def full(self: CheckpointStore, name: str) -> None:
        nonlocal left
        if "-e000000006-" in name and left:
            left -= 1
            raise OSError(28, "No space left on device")
        real(self, name)

    monkeypatch.setattr(CheckpointStore, "finish", full)

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


async def test_slow_place_delays_epochs_by_name(
    unharmed: tg.JobResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, released = CheckpointStore.write, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: CheckpointStore, name: Any, task: int, value: Any) -> Any:
        if task == 1:
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)
        return real(self, name, task, value)

    monkeypatch.setattr(CheckpointStore, "write", slow)
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
