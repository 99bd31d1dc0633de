"""Epochs in flight begin in their order, also where one of them has something to wait for first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.checkpoint_writer import CheckpointWriter


class Adds(tg.Task, state=["total"]):
    begun: list[tuple[int, int]]

    def setup(self) -> None:
        self.total = 0

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        self.begun.append((self.task_id, epoch.number))
        epoch.processor(self.add)

    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += epoch.number

    def result(self) -> int:
        return self.total


async def test_an_epoch_that_waits_for_room_for_a_checkpoint_is_not_overtaken_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its boundary is not due: nothing else keeps it from beginning."""
    room = CheckpointWriter.room
    waited: list[str] = []

    async def none_for_a_while(self: CheckpointWriter) -> None:
        waited.append(self.stage)
        await asyncio.sleep(0.02)
        await room(self)

    monkeypatch.setattr(CheckpointWriter, "room", none_for_a_while)
    begun = Adds.begun = []
    cluster = InProcessCluster(
        tg.Job(tasks=2, epochs=30, builder=lambda _: Adds(), checkpoint=tmp_path.as_uri(), checkpoint_every=5)
    )
    await cluster.start(1)
    try:
        result = await cluster.result(timeout_s=20)
    finally:
        await cluster.stop()
    assert result.values == dict.fromkeys(range(2), sum(range(30)))
    assert len(waited) >= 4, "checkpoints that were begun"
    for task in range(2):
        assert [number for of, number in begun if of == task] == list(range(30))
