"""A task whose own asyncio code ends the process, and not what the framework called."""

from __future__ import annotations

import asyncio
import sys

import taskgraph as tg


class Leaving(tg.Task, state=["total"]):
    def __init__(self, how: str) -> None:
        self.how = how

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1
        if epoch.number == 20 and self.task_id == 1:
            await self.leave()
        await asyncio.sleep(0.01)

    async def leave(self) -> None:
        if self.how == "exit":
            self.helper = asyncio.create_task(self.exits())
            await asyncio.sleep(0.1)
        else:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def exits(self) -> None:
        sys.exit(1)


@tg.job
def leaving(how: str = "exit", backups: int = 2) -> tg.Job:
    return tg.Job(tasks=2, epochs=60, builder=lambda _: Leaving(how), backups=backups)
