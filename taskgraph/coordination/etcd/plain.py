"""gRPC's calls over one plain HTTP/2 connection, on the event loop itself.

Why not gRPC's own client: its core reads and writes in threads of its own, and every message passes through four of
them. Measured, with a watch event at each node and a transaction in every epoch, that is more than half of what etcd
costs a node. What is left to gRPC: connections over TLS (`channel.py: GrpcChannel`), and leases, which must not depend
on the event loop.

What fails, fails with gRPC's errors, and in its words where `failures.py: judge` goes by them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from taskgraph.coordination.etcd.answers import End, failed
from taskgraph.coordination.etcd.hpack import pack
from taskgraph.coordination.etcd.http2 import Http2Connection

if TYPE_CHECKING:
    from taskgraph.coordination.etcd.methods import Method

__all__ = ["PlainChannel"]

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Metadata = Sequence[tuple[str, str]]

#: For a host that answers nothing at all; a call that waits for it may have less time. Longer would be no better: the
#: kernel asks again after 1, 3, 7 and 15 s only, a new attempt asks at once.
_CONNECT_S = 2.0

#: `failures.py: judge` goes by gRPC's own words for it.
_NOT_CONNECTED = "failed to connect to all addresses"


class PlainStream(Generic[Response]):
    """See `channel.py: Call`."""

    def __init__(self, end: End[Response]) -> None:
        self._end = end

    async def messages(self) -> AsyncGenerator[Response, None]:
        while (message := await self._end.next()) is not None:
            yield message

    def cancel(self) -> None:
        self._end.fail(grpc.StatusCode.CANCELLED, "it was cancelled")


class PlainChannel:
    """See `channel.py: Channel`. One connection at a time, made when a call needs it.

    Args:
        target: `host:port` or `unix:/path`.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._connection: Http2Connection | None = None
        self._left: list[Http2Connection] = []  # that take no more calls; what is open on them may end there
        self._connecting: asyncio.Task[Http2Connection] | None = None
        self._closed = False
        host = "localhost" if target.startswith("unix:") else target
        self._common = ((":method", "POST"), (":scheme", "http"), (":authority", host))

    @property
    def ready(self) -> bool:
        """Whether a connection stands."""
        return self._connection is not None and self._connection.usable

    async def call(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> Response:
        """One answer to one request.

        Raises:
            grpc.aio.AioRpcError: it failed.
            grpc.aio.UsageError: the channel was closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await self._connected(timeout_s)
        end = End(connection, method.response)
        end.begin(self._headers(method.path, metadata), request, last=True)
        timer = loop.call_at(deadline, end.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        try:
            answer = await end.next()
            if answer is None or await end.next() is not None:
                raise failed(grpc.StatusCode.INTERNAL, "not one answer to one request")
            return answer
        finally:
            timer.cancel()
            end.fail(grpc.StatusCode.CANCELLED, "it was cancelled")

    async def open(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> PlainStream[Response]:
        """Opens a stream of answers. `timeout_s` is for the connection only."""
        connection = await self._connected(timeout_s)
        end = End(connection, method.response)
        end.begin(self._headers(method.path, metadata), request, last=False)
        return PlainStream(end)

    async def close(self) -> None:
        """Ends all calls."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        for connection in (self._connection, *self._left):
            if connection is not None:
                connection.close("the channel was closed")

    def _headers(self, path: str, metadata: Metadata) -> bytes:
        return pack(*self._common, (":path", path), ("content-type", "application/grpc"), ("te", "trailers"), *metadata)

    async def _connected(self, timeout_s: float) -> Http2Connection:
        """A connection that stands. Who wait for one at the same time wait for the same."""
        if self._closed:
            raise grpc.aio.UsageError("the channel was closed")
        if self._connection is not None:
            if self._connection.usable:
                return self._connection
            self._connection.leave()
            self._left = [old for old in (*self._left, self._connection) if not old.lost]
            self._connection = None
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to etcd {self._target}")
            self._connecting.add_done_callback(_seen)
        done, _ = await asyncio.wait([self._connecting], timeout=timeout_s)
        if not done:
            raise failed(grpc.StatusCode.UNAVAILABLE, f"{_NOT_CONNECTED}: no answer within {timeout_s:.3g} s")
        if self._closed:
            raise grpc.aio.UsageError("the channel was closed")
        return self._connecting.result()

    async def _connect(self) -> Http2Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._target.startswith("unix:"):
                    path = self._target.removeprefix("unix:")
                    path = path.removeprefix("//")
                    _, connection = await loop.create_unix_connection(Http2Connection, path)
                else:
                    host, _, port = self._target.rpartition(":")
                    _, connection = await loop.create_connection(Http2Connection, host.strip("[]"), int(port))
                try:
                    await connection.ready
                except BaseException:
                    connection.close("it was not waited for")
                    raise
        except (OSError, TimeoutError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number) if number and number > 0 else str(error) or f"no answer within {_CONNECT_S:g} s"
            raise failed(grpc.StatusCode.UNAVAILABLE, f"{_NOT_CONNECTED}: {why}") from error
        self._connection = connection
        return connection


def _seen(connecting: asyncio.Task[Http2Connection]) -> None:
    """It failed when nobody waited for it any more: whoever calls next will hear of it."""
    if not connecting.cancelled():
        connecting.exception()
