"""The floor of a pull: 8 bytes there and back between two processes, uvloop on a unix socket. Microseconds."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import arguments, tasks_of, tell

_WARM = 0.25


class Pong(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Ping(Pong):
    def __init__(self, size: int, seconds: float) -> None:
        self.message, self.got = b"p" * size, 0
        self.seconds, self.created = seconds, time.monotonic()
        self.took: list[float] = []
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send()

    def send(self) -> None:
        self.began = time.perf_counter()
        self.transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.got += len(data)
        if self.got < len(self.message):
            return
        self.got = 0
        elapsed = time.monotonic() - self.created
        if elapsed > self.seconds * _WARM:
            self.took.append(time.perf_counter() - self.began)
        if elapsed > self.seconds * (1 + _WARM):
            self.over.set()
        else:
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set()


async def echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Pong, path)
    await server.serve_forever()


def start(task: int, path: str) -> None:
    uvloop.run(echo(path))


async def main(path: str, size: int, seconds: float) -> None:
    async with asyncio.timeout(30.0 + 2 * seconds):
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                loop = asyncio.get_running_loop()
                transport, ping = await loop.create_unix_connection(lambda: Ping(size, seconds), path)
                break
            await asyncio.sleep(0.02)
        await ping.over.wait()
        transport.close()
    tell({"us": statistics.median(ping.took) * 1e6, "round_trips": len(ping.took)})


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder, tasks_of(start, 2, f"{folder}/s"):
        uvloop.run(main(f"{folder}/s", 8 * given.n, given.seconds))
