"""The tree on asyncio over unix sockets, and nothing else: no names, no retries, no checks, no faults.

What Python's fastest event loop allows for this work: a connection an edge, a message of a size known beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Array, Meter, arguments, check, children, parent, tasks_of, tell


class Edge(asyncio.Protocol):
    """One end of an edge. Messages are n float64 values, and come in turns."""

    def __init__(self, task: Task, *, upwards: bool = False) -> None:
        self.task = task
        self.upwards = upwards
        self.got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.task.connected(self)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if len(self.got) >= self.task.size:
            message, self.got = self.got, bytearray()
            self.task.received(self, np.frombuffer(message))

    def connection_lost(self, error: Exception | None) -> None:
        self.task.over.set()


class Task:
    """A task: x comes from above, is passed on, and the sums come from below."""

    def __init__(self, task: int, tasks: int, n: int) -> None:
        self.id, self.tasks, self.size = task, tasks, 8 * n
        self.below: list[Edge] = []
        self.above: Edge | None = None
        self.total: Array = np.zeros(n)
        self.missing = 0
        self.whole, self.over = asyncio.Event(), asyncio.Event()

    def connected(self, edge: Edge) -> None:
        if edge.upwards:
            self.above = edge
            return
        self.below.append(edge)
        if len(self.below) == len(children(self.id, self.tasks)):
            self.whole.set()

    def received(self, edge: Edge, values: Array) -> None:
        if edge.upwards:
            self.pass_on(values)
        else:
            np.add(self.total, values, out=self.total)
            self.missing -= 1
        if not self.missing:
            self.complete()

    def pass_on(self, x: Array) -> None:
        self.missing = len(self.below)
        for edge in self.below:
            edge.transport.write(x.data)
        self.total = x * float(self.id)

    def complete(self) -> None:
        assert self.above is not None
        self.above.transport.write(self.total.data)


class Root(Task):
    def __init__(self, tasks: int, n: int, seconds: float) -> None:
        super().__init__(0, tasks, n)
        self.n, self.meter, self.number = n, Meter(seconds), -1

    def begin(self) -> None:
        self.number += 1
        self.pass_on(np.full(self.n, float(self.number)))

    def complete(self) -> None:
        check(self.total, self.tasks, self.number)
        if self.meter.again():
            self.begin()
        else:
            self.over.set()


async def listen(task: Task, folder: str) -> None:
    if children(task.id, task.tasks):
        await asyncio.get_running_loop().create_unix_server(lambda: Edge(task), f"{folder}/{task.id}")
        await task.whole.wait()


async def run_task(task: int, tasks: int, n: int, folder: str) -> None:
    mine = Task(task, tasks, n)
    await listen(mine, folder)
    await connect(mine, f"{folder}/{parent(task)}")
    await mine.over.wait()


async def connect(task: Task, path: str) -> None:
    """To the parent, once it listens; by then it sends nothing before all of its children are there."""
    async with asyncio.timeout(30.0):
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                loop = asyncio.get_running_loop()
                await loop.create_unix_connection(lambda: Edge(task, upwards=True), path)
                return
            await asyncio.sleep(0.02)


def start(task: int, tasks: int, n: int, folder: str) -> None:
    uvloop.run(run_task(task, tasks, n, folder))


async def run_root(tasks: int, n: int, seconds: float, folder: str) -> None:
    root = Root(tasks, n, seconds)
    await listen(root, folder)
    root.begin()
    await root.over.wait()
    tell(root.meter.figures)


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, tasks_of(start, given.tasks, given.tasks, given.n, folder):
        uvloop.run(run_root(given.tasks, given.n, given.seconds, folder))
