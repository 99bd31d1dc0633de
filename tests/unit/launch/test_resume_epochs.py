"""Epochs of a resumed job; looking at its checkpoints can be interrupted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph.checkpoint import CheckpointName, CheckpointStore
from taskgraph.launch import resuming


def left(place: Path) -> list[int]:
    """Returns the epochs of complete checkpoints."""
    return sorted(int(path.parent.name.split("-e")[1][:9]) for path in place.glob("count/*/manifest.json"))


class Count(tg.Task, state=["n"]):
    def __init__(self, place: Path) -> None:
        self.place = place

    def setup(self) -> None:
        self.n = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.step)

    async def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number % 10 == 3 and epoch.number > 10:  # that of the epoch before this one is complete by now
            while epoch.number - 3 not in left(self.place):  # noqa: ASYNC110 - nobody tells this task
                await asyncio.sleep(0.005)
        self.n += 1

    def result(self) -> int:
        return self.n


@tg.job
def count(epochs: int, place: str) -> tg.Job:
    return tg.Job(
        tasks=1,
        epochs=epochs,
        builder=lambda task: Count(Path(place)),
        checkpoint=f"file://{place}",
        settings=tg.Settings(epochs_ahead=0),
    )


def test_checkpoint_of_the_last_epoch_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = str(tmp_path)
    assert tg.run(count(25, place), nodes=0, timeout_s=60).values == {0: 25}
    assert left(tmp_path)[:2] == [10, 20]
    for epochs in (21, 20, 19):
        caplog.clear()
        done = tg.run(count(epochs, place), nodes=0, timeout_s=60, resume=True)
        assert (done.values, done.epochs) == ({0: epochs}, epochs)
        assert ("has nothing to do from there on" in caplog.text) == (epochs < 21)
    with pytest.raises(tg.CheckpointError, match=r"is of epoch 10, and a job of 10 epochs has nothing to do"):
        tg.run(count(10, place), nodes=0, timeout_s=60, resume=True)


def test_resumed_attempt_is_later_than_all_in_the_place(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert tg.run(count(25, place), nodes=0, timeout_s=60).restarts == 0
    assert tg.run(count(35, place), nodes=0, timeout_s=60, resume=True).restarts == 1
    done = tg.run(count(30, place), nodes=0, timeout_s=60, resume=True)
    assert done.restarts == 2, "from the checkpoint of epoch 20, which the first attempt wrote"


def test_hanging_checkpoint_directory_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, read = threading.Event(), threading.Event()

    def complete(store: CheckpointStore) -> list[CheckpointName]:
        released.wait(60)
        read.set()
        return []

    async def give_up() -> None:
        running = asyncio.ensure_future(tg.arun(count(10, str(tmp_path)), nodes=0, resume=True))
        while "is slow: what it holds is still being read after" not in caplog.text:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    monkeypatch.setattr(CheckpointStore, "complete_names", complete)
    monkeypatch.setattr(resuming, "_SLOW_S", 0.01, raising=False)
    try:
        asyncio.run(asyncio.wait_for(give_up(), 30))
        assert not read.is_set()
    finally:
        released.set()


def test_hanging_checkpoint_directory_obeys_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def complete(store: CheckpointStore) -> list[CheckpointName]:
        released.wait(60)
        return []

    monkeypatch.setattr(CheckpointStore, "complete_names", complete)
    try:
        with pytest.raises(tg.JobTimeout, match=r"did not begin within 0\.05 s: what .* holds is still being read"):
            tg.run(count(10, str(tmp_path)), nodes=0, resume=True, timeout_s=0.05)
        assert not released.is_set()
    finally:
        released.set()
