"""A map, one of whose pieces takes its first task much longer than the epochs; another node may kill that task's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np

import taskgraph as tg

PIECES, SLOW, EPOCHS = 60, 17, 8


class Straggling(tg.Task, state=["sums"]):
    def __init__(self, folder: str, kills: bool) -> None:
        self.slow, self.end = Path(folder) / "slow", Path(folder) / "end"
        self.kills = kills

    def setup(self) -> None:
        self.sums: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", range(PIECES), self.work, self.keep)
        epoch.processor(self.pull, outbound={"pushed": self.task_id})
        epoch.processor(self.report, inbound={"pushed": self.task_id})

    def work(self, epoch: tg.Epoch, piece: int) -> int:
        epoch.table("pushed").push([0], -np.ones((1, 1), np.float32))
        time.sleep(0.002)
        if piece == SLOW and epoch.number == 1:
            mine = self.slow.with_name(f"slow-{os.getpid()}")
            mine.write_text(str(os.getpid()))
            with contextlib.suppress(FileExistsError):
                os.link(mine, self.slow)
                while not epoch.cancelled or not self.end.exists():
                    time.sleep(0.01)
        return piece

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.sums.append(sum(ins["work"]))
        if epoch.number == 3 and self.task_id == 0:
            slow = int(self.slow.read_text())
            if not self.kills:
                self.end.touch()
            elif self.end.exists():
                return
            else:
                self.end.touch()
                os.kill(slow, signal.SIGKILL)

    def pull(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("pushed", float(epoch.table("pushed").pull([0])[0, 0]))

    def report(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.report(pushed=ins["pushed"])

    def result(self) -> list[int]:
        return self.sums


@tg.job
def straggling(folder: str, kills: bool = False) -> tg.Job:
    return tg.Job(
        tasks=3,
        epochs=EPOCHS,
        builder=lambda task_id: Straggling(folder, kills),
        tables={"pushed": tg.Table(1, init="zeros", lr=1.0, servers=1)},
    )
