"""The node's control service: status, kill, drain, events, results, over gRPC, for people and tools."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc

from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.control_client import SERVICE, TOKEN_KEY
from taskgraph.observe.events import Event, EventLog
from taskgraph.observe.status import NodeStatus, TaskResult

__all__ = ["ControlServer", "Controlled"]

log = logging.getLogger("taskgraph.control")

_CHUNK_BYTES = 1 << 20
_QUEUE = 10_000
"""Events a slow follower may be behind; older ones are left out, and it is told how many."""
_CLOSE_S = 0.5


class Controlled(Protocol):
    """What the service needs of a node."""

    def status(self) -> NodeStatus: ...
    def drain(self, why: str) -> None: ...
    async def results(self) -> list[TaskResult]: ...


class ControlServer:
    """Serves one node."""

    def __init__(self, node: Controlled, events: EventLog, token: bytes) -> None:
        self._node = node
        self._events = events
        self._token = token.hex()
        self._server: grpc.aio.Server | None = None
        self._path: Path | None = None

    async def start(self, *, unix_path: Path | None, tcp_host: str | None = None) -> int:
        """Listens; returns the TCP port, or 0. The unix socket is for its owner only: its directory must be, too."""
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((self._handlers(),))
        port = 0
        if unix_path is not None:
            server.add_insecure_port(f"unix:{unix_path}")
            self._path = unix_path
        if tcp_host is not None:
            port = server.add_insecure_port(f"{tcp_host}:0")
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(_CLOSE_S)
            self._server = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler

        def method(make: Callable[..., Any], function: Callable[..., Any], request: Any) -> Any:
            return make(
                function,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Status": method(unary, self._checked(self._status), pb.StatusRequest),
                "Kill": method(unary, self._checked(self._kill), pb.KillRequest),
                "Drain": method(unary, self._checked(self._drain), pb.DrainRequest),
                "Events": method(stream, self._checked_stream(self._follow), pb.EventsRequest),
                "Results": method(stream, self._checked_stream(self._results), pb.ResultsRequest),
            },
        )

    # -- the token ---------------------------------------------------------------------------------------

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        given = next((v for k, v in context.invocation_metadata() or () if k == TOKEN_KEY), "")
        if not hmac.compare_digest(str(given).encode(), self._token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's token is missing or wrong")

    def _checked(self, function: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def checked(request: Any, context: Any) -> Any:
            await self._check(context)
            return await function(request)

        return checked

    def _checked_stream(
        self, function: Callable[[Any], AsyncIterator[Any]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def checked(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(context)
            async for reply in function(request):
                yield reply

        return checked

    # -- the calls ---------------------------------------------------------------------------------------

    async def _status(self, request: pb.StatusRequest) -> pb.StatusReply:
        status = self._node.status()
        attempt, epoch = status.stamp or (0, -1)
        return pb.StatusReply(
            node=status.node,
            name=status.name,
            host=status.host,
            pid=status.pid,
            paused=status.paused,
            draining=status.draining,
            attempt=attempt,
            epoch=epoch,
            revision=status.revision,
            leader=status.leader,
            waits=status.waits,
            replicas=[
                pb.Replica(
                    task=r.task,
                    role=r.role,
                    term=r.term,
                    boundary=-1 if r.boundary is None else r.boundary,
                    processor=r.processor,
                    running_s=r.running_s,
                    waits=r.waits,
                    in_sync=r.in_sync,
                )
                for r in status.replicas
            ],
        )

    async def _kill(self, request: pb.KillRequest) -> pb.KillReply:
        number = signal.Signals(request.signal)
        log.warning("told to send %s to this process", number.name)
        # After the reply is on its way, where the signal leaves time for one.
        asyncio.get_running_loop().call_later(0.0 if number == signal.SIGKILL else 0.05, os.kill, os.getpid(), number)
        return pb.KillReply(pid=os.getpid())

    async def _drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        self._node.drain(request.why or "asked to")
        return pb.DrainReply()

    async def _follow(self, request: pb.EventsRequest) -> AsyncIterator[pb.EventReply]:
        queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUE)
        lost = 0

        def take(event: Event) -> None:
            nonlocal lost
            if queue.full():
                queue.get_nowait()
                lost += 1
            queue.put_nowait(event)

        for event in self._events.recent():
            take(event)
        stop = self._events.listen(take)
        try:
            while request.follow or not queue.empty():
                event = await queue.get()
                left_out, lost = lost, 0
                yield pb.EventReply(json=event.to_bytes().decode(), lost=left_out)
        finally:
            stop()

    async def _results(self, request: pb.ResultsRequest) -> AsyncIterator[pb.ResultChunk]:
        for result in await self._node.results():
            value = result.value
            yield pb.ResultChunk(
                head=pb.ResultHead(
                    task=result.task,
                    epoch=result.epoch,
                    attempt=result.attempt,
                    has_value=value is not None,
                    digest=value.digest if value else b"",
                    meta_bytes=len(value.meta) if value else 0,
                    buffer_bytes=[b.nbytes for b in value.buffers] if value else [],
                    reports=[pb.ReportRow(epoch=r.epoch, task=r.task, numbers=r.numbers) for r in result.reports],
                )
            )
            for part in (memoryview(value.meta), *value.buffers) if value else ():
                for start in range(0, part.nbytes, _CHUNK_BYTES):
                    yield pb.ResultChunk(data=bytes(part[start : start + _CHUNK_BYTES]))
