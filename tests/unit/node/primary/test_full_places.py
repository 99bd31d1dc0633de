"""A place of checkpoints that is full for a while: once there is room again, there are checkpoints again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from cluster_kit import Counting, job, play, told

import taskgraph as tg
from taskgraph.checkpoint.places import Bytes, Directory
from taskgraph.launch.inprocess import InProcessCluster

TASKS = 3


class Paced(Counting, state=["total"]):
    """Its epochs take some of the loop's time."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(0.05)
        await super().count(epoch, ins, outs)


class Room:
    """So many files of tasks find room."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = 1000

    def taken(self) -> int:
        return len(list(self.root.glob("*/*/task-*")))

    def folders(self) -> list[Path]:
        return [folder for folder in self.root.glob("*/s*") if folder.is_dir()]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    made, real = Room(tmp_path), Directory.write

    def write(self: Directory, path: str, parts: Iterable[Bytes]) -> None:
        if "/task-" in path and made.taken() >= made.files:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, path, parts)

    monkeypatch.setattr(Directory, "write", write)
    return made


def kept(room: Room) -> tg.Job:
    url = f"file://{room.root}"
    return job(Paced, tasks=TASKS, epochs=10_000, checkpoint=url, checkpoint_every=4)


async def reaches(cluster: InProcessCluster, epoch: int) -> int:
    """The epoch of a checkpoint that late or later, once it is complete."""
    keeper = cluster.nodes[0].keeper
    async with asyncio.timeout(100):
        await keeper.wait_until(lambda v: v.checkpoint is not None and v.checkpoint.record.epoch >= epoch)
    assert keeper.view.checkpoint is not None
    return keeper.view.checkpoint.record.epoch


@pytest.mark.parametrize("left", [0, 1, 2])
def test_files_of_checkpoints_that_failed_take_no_room_from_the_next(room: Room, left: int) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await reaches(cluster, 16)
        room.files = 3 * TASKS + left  # something else takes it
        await asyncio.sleep(1.0)
        before = await reaches(cluster, 16)
        await asyncio.sleep(5.0)
        assert await reaches(cluster, 16) == before
        folders = room.folders()
        room.files = 4 * TASKS
        now = cluster.nodes[0].keeper.view.epoch
        assert now is not None
        assert await reaches(cluster, before + 4) <= now.record.epoch + 12
        assert len(folders) <= 4, "the three that are kept, and the one that is being written"
        since = told(cluster, "no checkpoint")
        assert since[0].startswith(f"no checkpoint is complete since that of epoch {before}: 2 in a row failed, ")
        assert [text.split(": ")[1].split()[0] for text in since] == ["2", "4", "8", "16", "32"][: len(since)]

    play(kept(room), scenario, nodes=2)
