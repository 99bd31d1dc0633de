"""A hand-written grpc.aio tree, pulled: every consumer asks its producer, two RPCs an edge, as channels of ours do."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Meter, arguments, check, children, parent, tasks_of, tell

Calls = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Items:
    """What a task offers, by (what, epoch): each is taken `takers` times."""

    def __init__(self) -> None:
        self._offered: dict[bytes, asyncio.Future[bytes]] = {}
        self._left: dict[bytes, int] = {}
        self._empty = asyncio.Event()

    def _at(self, key: bytes) -> asyncio.Future[bytes]:
        if key not in self._offered:
            self._offered[key] = asyncio.get_running_loop().create_future()
        return self._offered[key]

    def put(self, what: str, epoch: int, value: bytes, takers: int) -> None:
        if takers:
            key = f"{what}{epoch}".encode()
            self._left[key] = takers
            self._empty.clear()
            self._at(key).set_result(value)

    async def pull(self, key: bytes, context: object) -> bytes:
        value = await self._at(key)
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key], self._offered[key]
            if not self._left:
                self._empty.set()
        return value

    async def all_taken(self) -> None:
        async with asyncio.timeout(10.0):
            await self._empty.wait()


class Task:
    def __init__(self, task: int, tasks: int, folder: str) -> None:
        self.id, self.tasks, self.folder = task, tasks, folder
        self.items = Items()
        self.below = [self._calls(child) for child in children(task, tasks)]
        self.above = self._calls(parent(task)) if task else None

    def _calls(self, task: int) -> Calls:
        return grpc.aio.insecure_channel(f"unix:{self.folder}/{task}", _OPTIONS).unary_unary("/bench.Tree/Pull")

    def pull(self, calls: Calls, what: str, epoch: int) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        return calls(f"{what}{epoch}".encode(), wait_for_ready=True, timeout=60.0)

    async def listen(self) -> None:
        self.server = grpc.aio.server(options=_OPTIONS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self.items.pull)
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Tree", {"Pull": handler})])
        self.server.add_insecure_port(f"unix:{self.folder}/{self.id}")
        await self.server.start()

    async def epoch(self, number: int) -> bool:
        """One of a task that is not the root; all of its pulls are on their way at once. False: x is the end."""
        assert self.above is not None
        sums = [
            self.pull(one, f"{c}s", number) for one, c in zip(self.below, children(self.id, self.tasks), strict=True)
        ]
        x = await self.pull(self.above, "x", number)
        self.items.put("x", number, x, len(self.below))
        if not x:
            for one in sums:
                one.cancel()
            if self.below:
                await self.items.all_taken()
            return False
        total = np.multiply(np.frombuffer(x), float(self.id))
        for one in sums:
            np.add(total, np.frombuffer(await one), out=total)
        self.items.put(f"{self.id}s", number, total.tobytes(), 1)
        return True


async def serve(task: int, tasks: int, folder: str) -> None:
    mine, number = Task(task, tasks, folder), 0
    await mine.listen()
    while await mine.epoch(number):
        number += 1
    await mine.server.stop(None)


def start(task: int, tasks: int, folder: str) -> None:
    asyncio.run(serve(task, tasks, folder))


async def root(tasks: int, n: int, seconds: float, folder: str) -> None:
    mine, meter, number = Task(0, tasks, folder), Meter(seconds), 0
    await mine.listen()
    while True:
        sums = [mine.pull(one, f"{c}s", number) for one, c in zip(mine.below, children(0, tasks), strict=True)]
        mine.items.put("x", number, np.full(n, float(number)).tobytes(), len(mine.below))
        total = np.zeros(n)
        for one in sums:
            np.add(total, np.frombuffer(await one), out=total)
        check(total, tasks, number)
        number += 1
        if not meter.again():
            tell(meter.figures)
            mine.items.put("x", number, b"", len(mine.below))
            return await mine.items.all_taken()


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, tasks_of(start, given.tasks, given.tasks, folder):
        asyncio.run(root(given.tasks, given.n, given.seconds, folder))
