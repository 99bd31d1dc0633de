"""Calling a node's control service."""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc

from taskgraph.errors import DecodeError, PeerLost, TaskGraphError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import Event
from taskgraph.observe.status import NodeStatus, ReplicaStatus, ReportRow, TaskResult
from taskgraph.protocol.messages import Encoded

__all__ = ["SERVICE", "TOKEN_KEY", "ControlClient", "control_address"]

SERVICE = "taskgraph.v1.Control"
TOKEN_KEY = "taskgraph-token"
_MAX_MESSAGE_BYTES = 64 << 20


def control_address(control: str, host_key: str) -> str:
    """The gRPC target of a node record's `control`, e.g. `unix:KEY:/path|tcp:host:port`; raises TaskGraphError."""
    for endpoint in control.split("|"):
        kind, _, rest = endpoint.partition(":")
        key, _, path = rest.partition(":")
        if kind == "unix" and key == host_key:
            return f"unix:{path}"
        if kind == "tcp":
            return rest
    raise TaskGraphError(
        f"the node's control service listens at {control or 'no address'}, which cannot be reached from this host: "
        f"start nodes with --listen HOST to control them from elsewhere"
    )


class ControlClient:
    """One node's control service. Every call raises PeerLost where the node does not answer."""

    def __init__(self, address: str, token: bytes) -> None:
        options = (("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._metadata = ((TOKEN_KEY, token.hex()),)
        self._address = address

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def status(self, timeout_s: float = 2.0) -> NodeStatus:
        reply = await self._call("Status", pb.StatusRequest(), pb.StatusReply, timeout_s)
        return NodeStatus(
            node=reply.node,
            name=reply.name,
            host=reply.host,
            pid=reply.pid,
            paused=reply.paused,
            draining=reply.draining,
            stamp=None if reply.epoch < 0 else (reply.attempt, reply.epoch),
            revision=reply.revision,
            leader=reply.leader,
            waits=tuple(reply.waits),
            replicas=tuple(
                ReplicaStatus(
                    task=r.task,
                    role=r.role,
                    term=r.term,
                    boundary=None if r.boundary < 0 else r.boundary,
                    processor=r.processor,
                    running_s=r.running_s,
                    waits=tuple(r.waits),
                    in_sync=r.in_sync,
                )
                for r in reply.replicas
            ),
        )

    async def kill(self, number: int, timeout_s: float = 2.0) -> None:
        """Sends a signal to the node's process. A node that dies of it before it answers did as told.

        Raises:
            PeerLost: it does not answer: stopped, perhaps.
        """
        try:
            await self._call("Kill", pb.KillRequest(signal=number), pb.KillReply, timeout_s)
        except PeerLost as error:
            cause = error.__cause__
            silent = isinstance(cause, grpc.aio.AioRpcError) and cause.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if silent or number != signals.SIGKILL:
                raise

    async def drain(self, why: str, timeout_s: float = 2.0) -> None:
        await self._call("Drain", pb.DrainRequest(why=why), pb.DrainReply, timeout_s)

    async def events(self, *, follow: bool) -> AsyncIterator[tuple[Event, int]]:
        """(event, how many were left out before it)."""
        async for reply in self._stream("Events", pb.EventsRequest(follow=follow), pb.EventReply, None):
            yield Event.from_bytes(reply.json.encode()), reply.lost

    async def results(self, timeout_s: float | None = None) -> list[TaskResult]:
        """Results of the tasks this node is primary of; waits until they are computed."""
        found: list[TaskResult] = []
        head: Any = None
        data = bytearray()

        def finish() -> None:
            if head is not None:
                found.append(_result(head, data))

        async for chunk in self._stream("Results", pb.ResultsRequest(), pb.ResultChunk, timeout_s):
            if chunk.HasField("head"):
                finish()
                head, data = chunk.head, bytearray()
            else:
                data += chunk.data
        finish()
        return found

    async def _call(self, method: str, request: Any, reply: Any, timeout_s: float) -> Any:
        call: Any = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(method, error) from error

    async def _stream(self, method: str, request: Any, reply: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        call: Any = self._channel.unary_stream(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )(request, metadata=self._metadata, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._error(method, error) from error
        finally:
            call.cancel()

    def _error(self, method: str, error: grpc.aio.AioRpcError) -> TaskGraphError:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return TaskGraphError(
                f"the node at {self._address} refuses: {error.details()}; pass the job's --token-file"
            )
        return PeerLost(f"the node at {self._address} did not answer {method}: {error.code().name}: {error.details()}")


def _result(head: Any, data: bytearray) -> TaskResult:
    value = None
    if head.has_value:
        sizes = [head.meta_bytes, *head.buffer_bytes]
        if sum(sizes) != len(data):
            raise DecodeError(f"the result of task {head.task} has {len(data)} bytes of {sum(sizes)}")
        view, parts = memoryview(bytes(data)), []
        for size in sizes:
            parts.append(view[:size])
            view = view[size:]
        value = Encoded(bytes(parts[0]), tuple(parts[1:]), head.digest)
    rows = tuple(ReportRow(r.epoch, r.task, dict(r.numbers)) for r in head.reports)
    return TaskResult(head.task, head.epoch, head.attempt, value, rows)
