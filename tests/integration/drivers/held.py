"""A ring of tasks that add up what their neighbors hold. It stands still at an epoch for as long as a file says so."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import taskgraph as tg


class Held(tg.Task, state=["row"]):
    def __init__(self, folder: str, stuck: str) -> None:
        self.folder, self.stuck = folder, stuck

    def setup(self) -> None:
        self.row = np.arange(100) + self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        around = [*epoch.neighbors("left"), *epoch.neighbors("right")]
        send = {"": self.send, "loop": self.stand_still, "thread": self.never_return}[self.stuck]
        epoch.processor(send if self.task_id == 0 else self.send, outbound={"row": around})
        epoch.processor(self.add, inbound={"row": around})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        while self.folder and (Path(self.folder) / f"hold-{epoch.number}").exists() and not epoch.cancelled:
            time.sleep(0.002)
        outs.put("row", self.row)

    async def stand_still(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        (Path(self.folder) / "stuck").touch()
        time.sleep(600)  # noqa: ASYNC251 - what nobody should do: the node's event loop stands still

    def never_return(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        (Path(self.folder) / "stuck").touch()
        while True:  # it does not even look at epoch.cancelled
            time.sleep(0.1)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        left, right = ins.all("row").values()
        self.row = (self.row + left + 2 * right) % 1_000_003
        epoch.report(total=float(self.row.sum()))

    def result(self) -> np.ndarray:
        return self.row


@tg.job
def held(
    name: str = "held",
    tasks: int = 4,
    epochs: int = 8,
    folder: str = "",
    stuck: str = "",
    lease_ttl_s: float = 5.0,
    connect_s: float = 5.0,
) -> tg.Job:
    return tg.Job(
        name=name,
        tasks=tasks,
        epochs=epochs,
        builder=lambda task_id: Held(folder, stuck),
        topology=tg.ring(),
        settings=tg.Settings(lease_ttl_s=lease_ttl_s, connect_s=connect_s),
    )


if __name__ == "__main__":
    tg.main(held)
