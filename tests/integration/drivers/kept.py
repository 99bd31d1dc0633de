"""Every task has state that depends on all epochs before and on its neighbors; checkpoints now and then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

import taskgraph as tg


class Disk(LocalFileSystem):
    """Any store that fsspec has a file system for, as far as the job can tell: `disk:///path`."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path):  # type: ignore[no-untyped-def]
        return super()._strip_protocol(str(path).removeprefix("disk://"))  # older fsspec takes off its own name only


fsspec.register_implementation("disk", Disk, clobber=True)


class Kept(tg.Task, state=["place", "steps"]):
    def __init__(self, size: int, stops: list[str], gate: str, lacks: Callable[[int], bool]) -> None:
        self.size, self.stops, self.gate, self.lacks = size, stops, gate, lacks

    def setup(self) -> None:
        self.place = np.full(self.size, float(self.task_id))
        self.steps = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"place": "right"})
        epoch.processor(self.step, inbound={"place": "left"})

    async def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        while str(epoch.number) in self.stops and not os.path.exists(f"{self.gate}{epoch.number}"):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
        while self.lacks(epoch.number):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        outs.put("place", self.place[:1000])

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.place = 0.7 * self.place
        self.place[:1000] += 0.2 * ins["place"] + epoch.rng.normal(size=1000)
        self.steps += 1
        epoch.report(**{f"at{self.task_id}": float(self.place[0]), "steps": self.steps})

    def result(self) -> np.ndarray:
        return self.place[:1000]


@tg.job
def kept(
    tasks: int = 5,
    epochs: int = 140,
    backups: int = 1,
    every: int = 20,
    where: str = "",
    size: int = 1000,
    stops: str = "",
    gate: str = "",
    waits: int = 0,
) -> tg.Job:
    """It stands still in the epochs `stops`, e.g. "5,7", until the file `gate` exists, with the epoch at its end.

    Half way to the next checkpoint it waits for the last one, as long as it has made fewer than `waits`: a slow leader
    leaves some out.
    """
    folder = Path(where.partition("://")[2])

    def lacks(epoch: int) -> bool:
        last = epoch - every // 2
        due = last % every == 0 and 0 < last <= waits * every
        return due and not any(folder.glob(f"kept/*-e{last:09d}-*/manifest.json"))

    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Kept(size, stops.split(","), gate, lacks),
        topology=tg.ring(),
        checkpoint=where or None,
        checkpoint_every=every,
    )
