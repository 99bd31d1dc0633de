"""What comes back of one gRPC call over HTTP/2: messages, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from taskgraph.coordination.etcd.http2 import WINDOW, Http2Connection

__all__ = ["End", "failed"]

Response = TypeVar("Response", bound=Message)

#: The server is told of what came by as much at a time.
_GRANT = WINDOW // 2

_CODES = {code.value[0]: code for code in grpc.StatusCode}
#: What gRPC says a proxy's answer means that is none of gRPC's.
_HTTP_CODES = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}


class End(Generic[Response]):
    """Our end of one call: the messages that came, and how it ended."""

    def __init__(self, connection: Http2Connection, response: type[Response]) -> None:
        self._connection = connection
        self._response = response
        self._number = 0
        self._partial = bytearray()
        self._messages: deque[bytes] = deque()
        self._waiting = 0  # bytes of messages that nobody has taken yet
        self._owed = 0  # bytes that came, and the server was not told of: while too many wait, it is to send no more
        self._headers: dict[str, str] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: grpc.aio.AioRpcError | None = None
        self._ended = False

    def begin(self, headers: bytes, first: Message, *, last: bool) -> None:
        """Opens the call with its first message, which is the last one where `last`."""
        data = first.SerializeToString()
        data = b"\0" + len(data).to_bytes(4, "big") + data
        self._number = self._connection.open(self, headers, data, last=last)

    async def next(self) -> Response | None:
        """The next message; None at the end.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._messages.popleft()
        self._waiting -= len(data)
        if self._owed >= _GRANT:
            self._let_come()
        try:
            return self._response.FromString(data)
        except DecodeError as error:
            raise failed(grpc.StatusCode.INTERNAL, f"etcd answered something else: {error}") from error

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call from our side, where it has not ended."""
        if not self._ended:
            self._connection.reset(self._number)
            self._finish(failed(code, details))

    # -- what the connection calls ----------------------------------------------------------------

    def on_headers(self, headers: dict[str, str]) -> None:
        self._headers = {**self._headers, **headers} if self._headers else headers

    def on_data(self, data: bytes) -> None:
        self._owed += len(data)
        if self._partial:
            self._partial += data
            if len(self._partial) < 5 or len(self._partial) < 5 + int.from_bytes(self._partial[1:5], "big"):
                if self._owed >= _GRANT:
                    self._let_come()
                return
            data, self._partial = bytes(self._partial), bytearray()
        at = 0
        while len(data) - at >= 5 and len(data) >= (end := at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")):
            if data[at]:
                self.fail(grpc.StatusCode.INTERNAL, "etcd compressed an answer, which nobody asked for")
                return
            self._messages.append(data[at + 5 : end])
            self._waiting += end - at - 5
            at = end
        if at < len(data):
            self._partial += data[at:]
        if self._owed >= _GRANT:
            self._let_come()
        self._wake()

    def _let_come(self) -> None:
        """The server may send as much again as came, unless too much waits for whoever takes it."""
        if self._waiting <= WINDOW:
            self._connection.grant(self._number, self._owed)
            self._owed = 0

    def on_end(self) -> None:
        status = self._headers.get("grpc-status")
        if status == "0":
            self._finish(None)
        elif status is not None:
            code = _CODES.get(int(status), grpc.StatusCode.UNKNOWN) if status.isdecimal() else grpc.StatusCode.UNKNOWN
            self._finish(failed(code, unquote(self._headers.get("grpc-message", ""))))
        else:
            status = self._headers.get(":status", "no status")
            self._finish(failed(_HTTP_CODES.get(status, grpc.StatusCode.UNKNOWN), f"no answer of gRPC: {status}"))

    def on_lost(self, why: str) -> None:
        self._finish(failed(grpc.StatusCode.UNAVAILABLE, why))

    def _finish(self, error: grpc.aio.AioRpcError | None) -> None:
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """The error of a call, as gRPC makes it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
