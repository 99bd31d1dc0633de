"""Tables of a job's own checkpoints, read as data frames."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

pandas = pytest.importorskip("pandas")

IDS = np.arange(-30, 60)


def drawn(task: int, number: int) -> Any:
    return np.random.default_rng([task, number]).choice(IDS, 12)


class Noting(tg.Task, state=["pulls"]):
    """Task 0 notes all rows at the beginning of each epoch."""

    def setup(self) -> None:
        self.pulls: list[Any] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.keep)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        time.sleep(0.02)  # checkpoints become complete meanwhile
        table = epoch.table("users")
        epoch.scratch.rows = table.pull(IDS)
        ids = drawn(self.task_id, epoch.number)
        table.push(ids, table.pull(ids) + 1)

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 0:
            self.pulls = [*self.pulls, epoch.scratch.rows]

    def result(self) -> Any:
        return self.pulls


@tg.job
def noted(place: str, servers: int = 2, epochs: int = 16, optimizer: str = "sgd") -> tg.Job:
    options: Any = {"servers": servers, "optimizer": optimizer}
    return tg.Job(
        tasks=2,
        epochs=epochs,
        builder=Noting,
        tables={"users": tg.Table(4, **options), "items": tg.Table(2, dtype="float64")},
        checkpoint=place,
        checkpoint_every=1,
    )


@tg.message
class Note:
    text: str


@tg.elastic
def steps(run: tg.Run, passes: int = 4) -> Any:
    run.once(lambda: Note("no reader needs this class"))
    s = run.state(pulls=[])
    table = run.table("users", 4, optimizer="adam")
    run.table("items", 2)
    for step in run.steps(rows=60, batch=10, parts=4, passes=passes):
        for part in step:
            time.sleep(0.002)
            table.push(part.rows, table.pull(part.rows) + 1)
            part.add()
        s.pulls = [*s.pulls, table.pull(IDS)]
    return s.pulls


async def part_of_run(job: tg.Job, nodes: int, until: int, kills: bool = False, **how: bool) -> Any:
    """Runs a job until it has a checkpoint of that boundary; 0: to its end. With kills nodes die, and others start."""
    cluster = InProcessCluster(job, endless_leases=True)
    try:
        await cluster.start(nodes, **how)
        keeper = cluster.living[0].keeper
        if kills:
            await keeper.wait_until(lambda v: v.checkpoint is not None)
            cluster.add()
            cluster.crash(cluster.living[1].id)
        if not until:
            return (await cluster.result(20)).values[0]
        await keeper.wait_until(lambda v: v.checkpoint is not None and v.checkpoint.record.epoch >= until)
        return None
    finally:
        await cluster.stop()


def complete_ones(folder: Path) -> dict[int, Path]:
    """Returns the folders of complete checkpoints by the boundaries, oldest first."""
    found = sorted(each.parent for each in folder.glob("*/manifest.json"))
    return {int(each.name.split("-e")[1].split("-")[0]): each for each in found}


def test_equal_to_what_tasks_pull(tmp_path: Path) -> None:
    job = noted(tmp_path.as_uri())
    asyncio.run(part_of_run(job, 3, until=4, kills=True))
    before = complete_ones(tmp_path / "noted")
    pulls = asyncio.run(part_of_run(noted(tmp_path.as_uri(), servers=3), 3, until=0, kills=True, resume=True))
    kept = complete_ones(tmp_path / "noted")
    assert max(kept) > max(before)
    for epoch, folder in kept.items():
        frame = tg.read_table(str(folder), "users")
        pushed = np.unique([drawn(task, number) for task in range(2) for number in range(epoch)])
        assert frame.index.tolist() == pushed.tolist() and frame.index.name == "id"
        assert frame.to_numpy().tobytes() == pulls[epoch][pushed - IDS[0]].tobytes()
    newest = tg.read_table((tmp_path / "noted").as_uri() + "/", "users")
    pandas.testing.assert_frame_equal(newest, frame)
    assert list(newest.columns) == [0, 1, 2, 3] and newest.dtypes.unique().tolist() == [np.float32]
    nobody_pushed = tg.read_table(str(tmp_path / "noted"), "items")
    assert nobody_pushed.shape == (0, 2) and nobody_pushed.dtypes.unique().tolist() == [np.float64]


def often(place: str) -> tg.Job:
    made = steps()
    assert made.elastic is not None
    return dataclasses.replace(
        made, checkpoint=place, _elastic=dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
    )


def test_of_elastic_jobs(tmp_path: Path) -> None:
    job = often(tmp_path.as_uri())
    asyncio.run(part_of_run(job, 2, until=6, kills=True))
    pulls = asyncio.run(part_of_run(job, 3, until=0, resume=True))
    kept = complete_ones(tmp_path / "steps")
    for sums, folder in kept.items():
        frame = tg.read_table(str(folder), "users")
        expected = pandas.DataFrame(pulls[sums - 2], index=IDS)  # run.once counts as a sum
        assert frame.to_numpy().tobytes() == expected.loc[frame.index].to_numpy().tobytes()
    assert len(tg.read_table(str(tmp_path / "steps"), "items")) == 0
    with pytest.raises(tg.TableError, match="has no table 'none'; the tables in it are: 'users', 'items'"):
        tg.read_table(str(tmp_path / "steps"), "none")


@pytest.mark.slow
def test_a_reader_needs_none_of_the_jobs_classes(tmp_path: Path) -> None:
    tg.run(often(tmp_path.as_uri()), nodes=0)
    url = str(tmp_path / "steps")
    read = f"import taskgraph as tg; print(tg.read_table({url!r}, 'users').to_numpy().tobytes().hex())"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tg.read_table(url, "users").to_numpy().tobytes().hex()


@pytest.mark.slow
def test_of_a_place_that_fsspec_knows() -> None:
    pytest.importorskip("fsspec")
    tg.run(noted("memory://tables", optimizer="adam", epochs=6), nodes=0, fresh=True)
    assert len(tg.read_table("memory://tables/noted", "users"))
    with pytest.raises(tg.CheckpointError, match=r"has no complete checkpoint; there is: nothing\. Give the folder"):
        tg.read_table("memory://tables/other", "users")


def test_what_cannot_be_read_from_a_checkpoint_is_named(tmp_path: Path) -> None:
    tg.run(noted(tmp_path.as_uri()), nodes=0)
    *_, before, newest = complete_ones(tmp_path / "noted").values()
    url = str(tmp_path / "noted")
    with pytest.raises(tg.TableError, match="has no table 'x'; the tables in it are: 'users', 'items'"):
        tg.read_table(url, "x")
    with pytest.raises(tg.TableError, match=r"say which table of it: read_table\(.*noted', name\)"):
        tg.read_table(url)
    with pytest.raises(tg.CheckpointError, match=r"no complete checkpoint; there is: noted\. Give the folder of a job"):
        tg.read_table(str(tmp_path), "users")
    with pytest.raises(tg.CheckpointError, match=r"cannot be read: .*Not a directory"):
        tg.read_table(str(newest / "manifest.json"), "users")
    with pytest.raises(tg.TableError, match=r"must be the path or the URL of a job's folder"):
        tg.read_table("", "users")
    manifest = (newest / "manifest.json").read_text()
    (newest / "manifest.json").write_text(manifest.replace("taskgraph checkpoint", "taskgraph checkpoints"))
    with pytest.raises(tg.CheckpointError, match="was written by another taskgraph"):
        tg.read_table(url, "users")
    (newest / "manifest.json").write_text(manifest)
    file = newest / "task-000002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(tg.CheckpointError, match=r"task-000002.safetensors is torn"):
        tg.read_table(url, "users")
    file.unlink()
    with pytest.raises(tg.CheckpointError, match=r"task-000002.safetensors is missing"):
        tg.read_table(url, "users")
    assert len(tg.read_table(url, "items")) == 0, "the other table's files are whole"
    (newest / "manifest.json").unlink()
    with pytest.raises(tg.CheckpointError, match=r"is no complete checkpoint: it has no manifest\.json"):
        tg.read_table(str(newest), "users")
    pandas.testing.assert_frame_equal(tg.read_table(url, "users"), tg.read_table(str(before), "users"))
    shutil.copytree(newest, tmp_path / "begun" / newest.name)
    with pytest.raises(tg.CheckpointError, match=rf"no complete checkpoint yet: none of {newest.name} has a manifest"):
        tg.read_table(str(tmp_path / "begun"), "users")
    moved = shutil.copytree(before, tmp_path / "kept" / before.name)
    pandas.testing.assert_frame_equal(tg.read_table(str(moved), "users"), tg.read_table(str(before), "users"))
