"""A hand-written grpc.aio tree, streamed: one stream an edge, for all epochs. x goes down it, the sum comes up."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Array, Meter, arguments, check, children, tasks_of, tell

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_METHOD = "/bench.Tree/Epochs"


class Below:
    """The children of a task. Each has a stream."""

    def __init__(self, task: int, tasks: int, folder: str) -> None:
        self._channels = [grpc.aio.insecure_channel(f"unix:{folder}/{c}", _OPTIONS) for c in children(task, tasks)]
        self._streams: list[Any] = [
            channel.stream_stream(_METHOD)(wait_for_ready=True)
            for channel in self._channels  # without serializers: bytes
        ]

    async def send(self, x: bytes) -> None:
        for stream in self._streams:
            await stream.write(x)

    async def add(self, total: Array) -> Array:
        for stream in self._streams:
            np.add(total, np.frombuffer(await stream.read()), out=total)
        return total


async def serve(task: int, tasks: int, folder: str) -> None:
    below = Below(task, tasks, folder)

    async def epochs(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(x := await context.read(), bytes):  # else it is grpc.aio.EOF
            await below.send(x)
            await context.write((await below.add(np.multiply(np.frombuffer(x), float(task)))).tobytes())

    server = grpc.aio.server(options=_OPTIONS)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(epochs)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Tree", {"Epochs": handler})])
    server.add_insecure_port(f"unix:{folder}/{task}")
    await server.start()
    await server.wait_for_termination()


def start(task: int, tasks: int, folder: str) -> None:
    asyncio.run(serve(task, tasks, folder))


async def root(tasks: int, n: int, seconds: float, folder: str) -> None:
    below, meter, number = Below(0, tasks, folder), Meter(seconds), 0
    while True:
        await below.send(np.full(n, float(number)).tobytes())
        check(await below.add(np.zeros(n)), tasks, number)
        number += 1
        if not meter.again():
            return tell(meter.figures)


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, tasks_of(start, given.tasks, given.tasks, folder):
        asyncio.run(root(given.tasks, given.n, given.seconds, folder))
