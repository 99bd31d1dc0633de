"""Dynamic sharding as in docs/guide.md: a free task takes the next piece, and each piece counts once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jobs_kit import Kills, run

import taskgraph as tg

PIECES, AT_A_TIME = 20, 6


class Queue(tg.Task, state=["left", "made"]):
    """Task 0: the pieces that are left, and the results of the others."""

    def setup(self) -> None:
        self.left = list(range(PIECES))
        self.made: dict[int, int] = {}

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.dealt = 0
        epoch.scratch.made = {}
        epoch.processor(self.settle)

    @tg.handles("next")
    def next(self, epoch: tg.Epoch, sender: int, payload: None) -> int | None:
        dealt: int = epoch.scratch.dealt
        if dealt >= min(AT_A_TIME, len(self.left)):
            return None
        epoch.scratch.dealt += 1
        return self.left[dealt]

    @tg.handles("made")
    def take(self, epoch: tg.Epoch, sender: int, payload: list[int]) -> None:
        piece, value = payload
        epoch.scratch.made[piece] = value

    def settle(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        dealt = epoch.scratch.dealt
        for piece in self.left[:dealt]:  # in their order, not in that in which they came back
            assert piece not in self.made
            self.made[piece] = epoch.scratch.made[piece]
        self.left = self.left[dealt:]
        if not self.left:
            epoch.finish()

    def result(self) -> dict[int, int]:
        return self.made


class Worker(tg.Task, state=["mine"]):
    def setup(self) -> None:
        self.mine: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.keep)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        epoch.scratch.mine = []
        while (piece := await epoch.request(0, "next")) is not None:
            await asyncio.sleep(0.001 * (1 + (7 * piece + 3 * self.task_id) % 5))
            await epoch.request(0, "made", [piece, piece**2])
            epoch.scratch.mine.append(piece)

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.mine += epoch.scratch.mine

    def result(self) -> list[int]:
        return self.mine


KILLS: list[Kills] = [
    {},
    {(1, 1): "done"},
    {(2, 0): "sync", (0, 2): "sync"},
    {(0, 1): "committed", (3, 2): "snapshot"},
    {(3, 3): "compose", (1, 2): "done", (0, 3): "commit"},
]


@pytest.mark.parametrize("kills", KILLS, ids=str)
@pytest.mark.parametrize(("order", "strict"), [(0, True), (1, False), (2, True)])
def test_each_piece_counts_once_whoever_dies(kills: Kills, order: int, strict: bool) -> None:
    job = tg.Job(tasks=4, builder=lambda task_id: Worker() if task_id else Queue())
    values: dict[int, Any] = run(job, kills=kills, order=order, strict=strict).values
    assert values[0] == {piece: piece**2 for piece in range(PIECES)}
    assert sorted(values[1] + values[2] + values[3]) == list(range(PIECES))
