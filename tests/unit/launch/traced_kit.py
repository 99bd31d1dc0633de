"""Nodes that can be traced over real sockets."""

from __future__ import annotations

import asyncio

from taskgraph.node.control import ControlServer
from taskgraph.observe.control_client import ControlClient, control_address
from taskgraph.observe.trace import Tracing
from taskgraph.transport.endpoints import host_key

__all__ = ["LIMIT_S", "TOKEN", "Service", "TracedNode"]

TOKEN = bytes(range(32))
LIMIT_S = 60.0


class TracedNode:
    """A node for tracing only."""

    def __init__(self) -> None:
        self.tracing = Tracing(room=5_000)
        self.epoch = self.latest_epoch = 7

    def move(self, epoch: int) -> None:
        self.epoch = self.latest_epoch = epoch


class Service:
    def __init__(self, control: str, server: ControlServer) -> None:
        self.node, self.server, self.events, self.control = TracedNode(), server, server._events, control
        server.attach(self.node)  # type: ignore[arg-type]

    def client(self, token: bytes = TOKEN) -> ControlClient:
        return ControlClient(control_address(self.control, host_key()), token)

    async def off(self) -> None:
        await self._until(False)

    async def on(self) -> None:
        await self._until(True)

    async def _until(self, on: bool) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.node.tracing.on != on:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)
