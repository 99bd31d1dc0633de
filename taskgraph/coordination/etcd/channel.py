"""What is called through: one endpoint's calls, by gRPC or by ourselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

if TYPE_CHECKING:
    from taskgraph.coordination.etcd.methods import Method

__all__ = ["Call", "Channel", "GrpcChannel"]

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Told = TypeVar("Told", bound=Message, covariant=True)
Metadata = Sequence[tuple[str, str]]


class Call(Protocol[Told]):
    """A call that is answered for as long as it is open."""

    def messages(self) -> AsyncGenerator[Told, None]:
        """What comes, until the server ends it. To be iterated once.

        Raises:
            grpc.aio.AioRpcError: it failed.
        """

    def cancel(self) -> None:
        """Ends it; who iterates its messages gets an AioRpcError or a CancelledError."""


class Channel(Protocol):
    """One endpoint. Connects when it is called, and again after it broke."""

    @property
    def ready(self) -> bool:
        """Whether a connection stands: whether a call will be sent over one that was there before it."""

    async def call(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> Response:
        """One answer to one request.

        Raises:
            grpc.aio.AioRpcError: it failed.
            grpc.aio.UsageError, asyncio.CancelledError: the channel was closed.
        """

    async def open(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> Call[Response]:
        """Opens a call whose requests go on, and sends the first. What fails may be told when its answers are read."""

    async def close(self) -> None:
        """Ends all calls."""


class GrpcChannel:
    """A channel of gRPC's own, for endpoints with TLS."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._calls: dict[str, Any] = {}  # what gRPC makes of a method's path: once

    @property
    def ready(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def call(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> Response:
        send = self._calls.get(method.path)
        if send is None:
            send = self._calls[method.path] = self._channel.unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )
        return cast(Response, await send(request, timeout=timeout_s, metadata=metadata))

    async def open(
        self, method: Method[Request, Response], request: Request, *, timeout_s: float, metadata: Metadata
    ) -> Call[Response]:
        opened: grpc.aio.StreamStreamMultiCallable[Message, Response] = self._channel.stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        call = opened(None, metadata=metadata)
        try:
            await call.write(request)
        except BaseException:
            call.cancel()
            raise
        return _GrpcCall(call)

    async def close(self) -> None:
        await self._channel.close(None)


class _GrpcCall(Generic[Response]):
    def __init__(self, call: grpc.aio.StreamStreamCall[Message, Response]) -> None:
        self._call = call

    def messages(self) -> AsyncGenerator[Response, None]:
        return cast("AsyncGenerator[Response, None]", self._call.__aiter__())

    def cancel(self) -> None:
        self._call.cancel()
