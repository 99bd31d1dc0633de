"""A network that misbehaves: a TCP proxy that resets, stalls and delays, and a switchboard of one for every node."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

SHIM = Path(__file__).parent / "shim"
_CHUNK = 1 << 16
_CONNECT_S = 100.0


class Proxy:
    """Passes connections on to a port of this host; what happens to them is set while they stand.

    Attributes:
        delay_s: every chunk is held back for so long, in its order.
        damage: makes what is passed on of a chunk.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self.damage: Callable[[bytes], bytes] = bytes
        self.passed = 0
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._passing):
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def until(self, ends: int) -> None:
        """Returns when connections with so many ends stand."""
        async with asyncio.timeout(_CONNECT_S):
            while len(self._writers) < ends:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def reset(self) -> int:
        """Every connection is reset, at both ends; returns how many ends there were."""
        for writer in tuple(self._writers):
            writer.transport.abort()
        return len(self._writers)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Connections stand, new ones are taken, and nothing passes."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(onward)
            try:
                ways = [
                    asyncio.ensure_future(self._pass(reader, onward)),
                    asyncio.ensure_future(self._pass(onward_reader, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                self._writers.discard(onward)
                onward.transport.abort()
        except (OSError, asyncio.CancelledError):  # nobody listens, or the proxy ends
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._passing.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                writer.write(self.damage(chunk))
                self.passed += len(chunk)
                await writer.drain()


@contextlib.asynccontextmanager
async def proxy_to(endpoint: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(int(endpoint.rpartition(":")[2]))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


class Switchboard:
    """A proxy before every node: nodes ask for one as they start; see `shim/sitecustomize.py`."""

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self._server: asyncio.Server | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Of the command that starts the nodes."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        path = os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"TASKGRAPH_SWITCHBOARD": str(port), "PYTHONPATH": path}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._asked, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for proxy in self.proxies:
            await proxy.stop()

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy = Proxy(int(await reader.readline()))
        await proxy.start()
        self.proxies.append(proxy)
        writer.write(f"{proxy.port}\n".encode())
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def switchboard() -> AsyncIterator[Switchboard]:
    made = Switchboard()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
