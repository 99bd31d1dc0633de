"""Tasks that start processes and never end them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
from pathlib import Path

import taskgraph as tg


def magnitude(number: int) -> int:
    return abs(number)


class Pools(tg.Task, state=["total"]):
    """Each has a pool and memory that it forgets; task 0 starts a program that is to go on by itself.

    `dies`: in epoch 2 the process of task 1 is killed. `method`: how the processes of pools are started.
    """

    def __init__(self, folder: str, dies: bool, method: str) -> None:
        self.folder = Path(folder)
        self.dies = dies
        self.method = method

    def setup(self) -> None:
        self.total = 0
        self.pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(self.method))
        self.memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
        (self.folder / f"memory-{self.memory.name}").touch()

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"x": self.task_id})
        epoch.processor(self.add, inbound={"x": self.task_id})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 0 and self.task_id == 0:
            program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            (self.folder / f"goes-on-{program.pid}").touch()
        outs.put("x", self.pool.submit(magnitude, -epoch.number).result())
        died = self.folder / "died"
        if self.dies and epoch.number == 2 and self.task_id == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]

    def result(self) -> int:
        return self.total


@tg.job
def pools(folder: str, dies: bool = False, method: str = "fork", epochs: int = 5) -> tg.Job:
    return tg.Job(tasks=2, epochs=epochs, builder=lambda task: Pools(folder, dies, method))
