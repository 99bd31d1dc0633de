"""A hand-written grpc.aio tree, called: one RPC an edge. The answer to x is the sum of the tree below."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Array, Meter, arguments, check, children, tasks_of, tell

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_METHOD = "/bench.Tree/Epoch"


class Below:
    """The children of a task, called at the same time."""

    def __init__(self, task: int, tasks: int, folder: str) -> None:
        channels = [grpc.aio.insecure_channel(f"unix:{folder}/{c}", _OPTIONS) for c in children(task, tasks)]
        self._calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(_METHOD)
            for channel in channels  # without serializers: bytes
        ]

    async def add(self, total: Array, x: bytes) -> Array:
        pending = [call(x, wait_for_ready=True, timeout=60.0) for call in self._calls]
        for one in pending:
            np.add(total, np.frombuffer(await one), out=total)
        return total


async def serve(task: int, tasks: int, folder: str) -> None:
    below = Below(task, tasks, folder)

    async def epoch(x: bytes, context: object) -> bytes:
        total = np.multiply(np.frombuffer(x), float(task))
        return (await below.add(total, x)).tobytes()

    server = grpc.aio.server(options=_OPTIONS)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(epoch)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Tree", {"Epoch": handler})])
    server.add_insecure_port(f"unix:{folder}/{task}")
    await server.start()
    await server.wait_for_termination()


def start(task: int, tasks: int, folder: str) -> None:
    asyncio.run(serve(task, tasks, folder))


async def root(tasks: int, n: int, seconds: float, folder: str) -> None:
    below, meter, number = Below(0, tasks, folder), Meter(seconds), 0
    while True:
        total = await below.add(np.zeros(n), np.full(n, float(number)).tobytes())
        check(total, tasks, number)
        number += 1
        if not meter.again():
            return tell(meter.figures)


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, tasks_of(start, given.tasks, given.tasks, folder):
        asyncio.run(root(given.tasks, given.n, given.seconds, folder))
