"""A queue of pieces, some of which kill the process that computes them first; one waits for a gate."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import taskgraph as tg

PIECES = 120


class Rows(tg.Task, state=["seen"]):
    def __init__(self, folder: str, kills: list[int], waits: int) -> None:
        self.folder = Path(folder)
        self.kills = kills
        self.waits = waits

    def setup(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", "rows", self.work, self.keep, upto=40)

    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        mark = self.folder / f"killed by {piece}"
        if piece in self.kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while piece == self.waits and not (self.folder / "gate").exists() and not epoch.cancelled:
            time.sleep(0.01)
        time.sleep(0.002)
        return piece, epoch.rng.random()

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.seen += ins["work"]
        if epoch.queue("rows").done:
            epoch.finish()

    def result(self) -> list[tuple[int, float]]:
        return self.seen


@tg.job
def queued(folder: str, kills: list[int] = [], waits: int = -1, passes: int = 1) -> tg.Job:  # noqa: B006 (read only)
    queue = tg.WorkQueue(range(PIECES), passes=passes, shuffle=True)
    return tg.Job(tasks=3, builder=lambda task_id: Rows(folder, kills, waits), queues={"rows": queue}, backups=3)
