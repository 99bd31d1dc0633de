"""A proxy in front of an API server, which makes it busy, forgetful, or gone for a moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
from kubelet_kit import Api

HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "accept-encoding"}


class ApiProxy:
    """Passes requests on, with their users' tokens.

    Attributes:
        busy: so many of the next requests are refused with 429.
        expired: so many of the next watches are answered with 410.
        refused: how often it did either.
    """

    def __init__(self, api: Api) -> None:
        self.api = api
        self.busy = self.expired = self.refused = 0
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def __aenter__(self) -> ApiProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        serving = list(self._open.values())
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def cut(self) -> None:
        """Breaks all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[writer] = task
        try:
            while True:
                await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, httpx2.HTTPError, asyncio.CancelledError):
            pass
        finally:
            del self._open[writer]
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.busy:
            self.busy, self.refused = self.busy - 1, self.refused + 1
            await _write(writer, 429, _status(429, "TooManyRequests", "too many requests"), "Retry-After: 0.3\r\n")
            return
        if self.expired and "watch=true" in path:
            self.expired, self.refused = self.expired - 1, self.refused + 1
            gone = {"type": "ERROR", "object": _status(410, "Expired", "too old resource version")}
            await _write(writer, 200, gone)
            return
        sent = {name: value for name, value in headers.items() if name not in HOP}
        async with self.api.http.stream(method, path, content=body, headers=sent) as answer:
            kind = answer.headers.get("content-type", "application/json")
            head_text = f"HTTP/1.1 {answer.status_code} -\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head_text.encode())
            async for chunk in answer.aiter_bytes():
                if chunk:
                    writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {}}
    return {**status, "code": code, "reason": reason, "message": message}


async def _write(writer: asyncio.StreamWriter, code: int, body: dict[str, Any], headers: str = "") -> None:
    text = json.dumps(body).encode() + b"\n"
    length = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"HTTP/1.1 {code} -\r\n{length}{headers}\r\n".encode() + text)
    await writer.drain()
