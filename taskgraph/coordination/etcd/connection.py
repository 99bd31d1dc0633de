"""Makes calls to an etcd cluster: chooses the endpoint, retries, bounds the time, and logs in.

There is a channel for each endpoint, and one endpoint in use. If it fails, calls go to the next endpoint. A write is
sent only over an established connection, so that "nothing listens there" differs from "sent, and no answer came".

The first member that answers determines the cluster. Answers of another cluster, whose endpoint was given by mistake,
are ignored, and no write is sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakSet

import grpc
import grpc.aio
from google.protobuf.message import Message

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.failures import (
    FailureKind,
    advice_on_failure,
    classify_failure,
    is_space_used_up,
    refusal,
)
from taskgraph.coordination.etcd.login import Login, LoginFailed, credentials
from taskgraph.coordination.etcd.methods import STATUS, Method
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions, NoAddress
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.network import rpc

__all__ = ["Connection", "OtherCluster", "Stream", "is_cancelled", "pause_s"]

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

#: The backoff doubles from the first to the last, with jitter, so that nodes do not retry in step.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
#: The limit of a connection attempt (packets may be dropped), if there is another endpoint. gRPC continues the attempt:
#: behind a slow link, the connection is ready when the endpoint's turn comes again.
_CONNECT_S = 1.0


_random = random.SystemRandom()  # user code may have seeded `random`


def pause_s(tries: int) -> float:
    """Returns the backoff after `tries` failures in a row."""
    return float(min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10))) * _random.uniform(0.5, 1.0)


def is_cancelled() -> bool:
    """True if the current asyncio task is cancelled. If not, gRPC itself raised CancelledError.

    It is a function so that no frame that a cancellation passes refers to the task: a cancelled task keeps these
    frames, and the cycle would keep channels alive until a garbage collection.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class OtherCluster(Exception):
    """Raised for an answer of an etcd of another cluster."""


class _LoginTakesLonger(Exception):
    """Raised for a call that reached its timeout while it waited for a login."""


class Stream(Generic[Response]):
    """One open bidirectional RPC.

    Attributes:
        endpoint: the member at the other end.
        token: the token with which the stream was opened, if etcd has users.
        left: the stream was cancelled since calls left its endpoint (`Connection.move_from`); its reader opens another.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Message, Response],
        endpoint: Endpoint,
        token: str | None,
        connect_s: float | None,
    ) -> None:
        self._call = call
        self._connect_limit_s = connect_s
        self._writing: asyncio.Future[None] | None = None
        self.endpoint = endpoint
        self.token = token
        self.left = False

    async def write(self, message: Message) -> None:
        """Sends a message as soon as the endpoint is connected.

        Raises:
            asyncio.InvalidStateError: the stream has ended, or the endpoint is not connected in time.
        """
        writing = self._writing = asyncio.ensure_future(self._call.write(message))
        try:
            if not await rpc.wait_within(writing, self._connect_limit_s):
                raise asyncio.InvalidStateError(f"no connection within {self._connect_limit_s:g} s")
            if writing.cancelled():
                raise asyncio.InvalidStateError("the stream was cancelled before it was connected")
            writing.result()
        finally:
            writing.cancel()
            self._writing = None
            del writing  # no cycle with its exception

    def messages(self) -> AsyncGenerator[Response, None]:
        """Yields the messages until the server ends the stream."""
        return cast("AsyncGenerator[Response, None]", self._call.__aiter__())

    def cancel(self) -> None:
        """Ends the stream, and a write that is under way."""
        self._call.cancel()
        # Without a connection gRPC's write would wait for ever. A done callback on the call would not help: some
        # versions of gRPC keep the callback, and with it the call and its channel.
        if self._writing is not None:
            self._writing.cancel()


@dataclass(slots=True)
class _FailedTries:
    """Counts the failed tries of one call, and has the last failure of each endpoint, for its error message."""

    count: int = 0
    last: dict[str, str] = field(default_factory=dict)

    def add(self, endpoint: Endpoint, details: str) -> None:
        """Counts a failed try, and keeps its failure in place of the endpoint's last one."""
        self.count += 1
        self.last[f"https://{endpoint.target}" if endpoint.tls else endpoint.target] = details

    def __str__(self) -> str:
        return "; ".join(f"{target}: {details}" for target, details in self.last.items()) or "no answer"


class Connection:
    """Calls and streams to an etcd cluster, from one event loop.

    Args:
        options: the cluster's endpoints, and how to log in.

    Attributes:
        cluster: the cluster's id; 0 before the first answer.
        login: the token of calls and leases.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self.options = options
        self._files_of = {endpoint: options.file_states(endpoint) for endpoint in options.endpoints}
        """The files that each endpoint's channel depends on, as they were before the channel read them."""
        self._channels = {endpoint: options.aio_channel(endpoint) for endpoint in options.endpoints}
        self._former_channels: dict[grpc.aio.Channel, float] = {}
        """Channels with older files -> the loop's time after which no call uses them."""
        self._calls: dict[tuple[Endpoint, str], Any] = {}  # the callable of a method on a channel
        self._current = 0
        self.cluster = 0
        self._first_endpoint = ""
        self._other_clusters: set[Endpoint] = set()  # endpoints whose last answer was of another cluster
        self.login = Login(options)
        self._closed = False
        self._streams: WeakSet[Stream[Any]] = WeakSet()

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that the next call goes to."""
        return self.options.endpoints[self._current]

    def move_from(self, endpoint: Endpoint) -> None:
        """Moves calls and streams from a failed endpoint, if it is the one in use, to the next one, if there is one.

        The kernel of a frozen member keeps the connection open, so a watch alone would notice only after 15 s.
        """
        if endpoint.tls or endpoint.file is not None:
            self._renew_channel(endpoint)
        if endpoint != self.endpoint or not self._has_several:
            return
        self._current = (self._current + 1) % len(self.options.endpoints)
        self._cancel_streams(endpoint)

    def _cancel_streams(self, endpoint: Endpoint) -> None:
        """Cancels the streams to an endpoint, so that their readers open others."""
        for stream in tuple(self._streams):
            if stream.endpoint == endpoint:
                stream.left = True
                stream.cancel()

    def _renew_channel(self, endpoint: Endpoint) -> None:
        """Creates a new channel if the files were renewed: the old one uses expired TLS files or an old address."""
        files = self.options.file_states(endpoint)
        if files == self._files_of[endpoint] or self._closed:
            return
        try:
            channel = self.options.aio_channel(endpoint)
        except NoAddress:  # the member is down: the next failure tries again
            return
        except CoordinationError as error:
            log.warning("etcd's TLS files were renewed, but: %s", error)
            return
        log.info("etcd's files were renewed: %s is connected to as they say", endpoint.target)
        # A try may outlast its timeout for a moment, if the event loop was busy.
        self._former_channels[self._channels[endpoint]] = asyncio.get_running_loop().time() + 2 * self.options.timeout_s
        self._cancel_streams(endpoint)
        self._channels[endpoint], self._files_of[endpoint] = channel, files
        self._calls = {key: call for key, call in self._calls.items() if key[0] != endpoint}

    async def _close_former(self) -> None:
        """Closes the channels that a renewal replaced and that no call uses now."""
        now = asyncio.get_running_loop().time()
        for channel in [channel for channel, until in self._former_channels.items() if until <= now]:
            del self._former_channels[channel]
            await rpc.close(channel)

    async def call(
        self,
        method: Method[Request, Response],
        request: Request,
        *,
        what: object,
        again: bool,
        timeout_s: float | None = None,
        anonymous: bool = False,
    ) -> Response:
        """Makes one RPC, with retries until it succeeds or the timeout passes.

        Args:
            method: which RPC.
            request: its request.
            what: the call in words, for errors: a text, or an object with a `__str__`.
            again: the call may be sent twice, since it is a read or an idempotent write.
            timeout_s: the limit for all tries; None: the limit of the options.
            anonymous: do not log in.

        Raises:
            Unavailable: the timeout passed, and nothing was done.
            OutcomeUnknown: the call may have been executed (`again=False` only).
            CoordinationError: etcd refused the call.
        """
        if self._former_channels:
            await self._close_former()
        loop = asyncio.get_running_loop()
        limit_s = self.options.timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + limit_s
        tries, logins = _FailedTries(), 0
        while (left := deadline - loop.time()) > 0 and not self._closed:
            endpoint, sent, token = self.endpoint, False, None
            try:
                if not again or self._has_several:
                    await self._connect(endpoint, left)
                if not anonymous:
                    token = await self._get_token(endpoint, deadline)
                if (left := deadline - loop.time()) <= 0:  # connecting and logging in took all the time
                    break
                sent = True
                return await self._try_once(endpoint, method, request, self._try_limit_s(left), token)
            except _LoginTakesLonger as longer:
                tries.add(endpoint, str(longer))
            except (grpc.aio.UsageError, asyncio.CancelledError) as error:
                if self._was_closed(error):
                    break
                raise
            except OtherCluster as other:  # our cluster did not execute the call
                tries.add(endpoint, str(other))
                self.move_from(endpoint)
            except grpc.aio.AioRpcError as error:
                details = _details(error)
                tries.add(endpoint, details)
                verdict = classify_failure(error.code(), details)
                if verdict is FailureKind.REFUSED:
                    raise refusal(str(what), error.code(), details) from error
                if verdict is FailureKind.LOGIN and logins < 3:
                    logins += 1
                    self.login.drop_token(token)
                    continue
                if not is_space_used_up(details):
                    self.move_from(endpoint)  # so that a later read does not ask the silent member
                if verdict is FailureKind.UNKNOWN and sent and not again:
                    raise OutcomeUnknown(
                        f"{what}: it was sent to etcd at {endpoint.target}, without a usable answer ({details}). "
                        "It may have happened; read again to find out."
                    ) from error
            left = deadline - loop.time()
            if left > 0:
                await asyncio.sleep(min(left, pause_s(tries.count)))
        if self._closed:
            raise Unavailable(f"{what}: the connection to etcd was closed")
        raise Unavailable(f"{what}: no usable answer from etcd within {limit_s:g} s ({tries})")

    async def stream(self, method: Method[Request, Response]) -> Stream[Response]:
        """Opens a stream on the endpoint in use. Errors are raised when the stream is read.

        Raises:
            grpc.aio.AioRpcError, OtherCluster: the login failed.
            Unavailable: the connection is closed.
        """
        endpoint = self.endpoint
        if self._closed:
            raise Unavailable(f"{method.name}: the connection to etcd was closed")
        token = await self._get_token(endpoint)
        channel = self._channel_unless_closed(endpoint)
        open_stream: grpc.aio.StreamStreamMultiCallable[Message, Response] = channel.stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        # `hasleader`: a member cut off from the majority ends the stream instead of staying silent.
        metadata = [("hasleader", "true"), *credentials(token)]
        connect_s = _CONNECT_S if self._has_several else None
        stream = Stream(open_stream(None, metadata=metadata), endpoint, token, connect_s)
        self._streams.add(stream)
        return stream

    def check_cluster(self, endpoint: Endpoint, header: v3.ResponseHeader) -> None:
        """Checks that an answer from `endpoint` is of the connection's cluster, which the first answer determines.

        If all endpoints belong to another cluster, etcd was set up anew, perhaps with its data. That cluster
        is then the connection's cluster.

        Raises:
            OtherCluster: the answer is of another cluster.
        """
        cluster = header.cluster_id
        if cluster == self.cluster or not cluster:
            self._other_clusters.discard(endpoint)
            return
        first, why = endpoint not in self._other_clusters, f"it belongs to another cluster than {self._first_endpoint}"
        self._other_clusters.add(endpoint)
        if not self.cluster or self._other_clusters.issuperset(self.options.endpoints):
            self.cluster, self._first_endpoint = cluster, endpoint.target
            self._other_clusters.clear()
            return
        if first:
            log.warning("etcd at %s is passed over: %s; take one of them out of --etcd", endpoint.target, why)
        raise OtherCluster(why)

    async def close(self) -> None:
        """Ends all calls and streams."""
        self._closed = True
        for stream in tuple(self._streams):
            stream.cancel()
        await self.login.close()
        channels = [*self._channels.values(), *self._former_channels]
        self._channels.clear()  # frames of an exception that a caller keeps may refer to this connection
        self._calls.clear()
        self._former_channels.clear()
        for channel in channels:
            await rpc.close(channel)

    @property
    def _has_several(self) -> bool:
        """True if the options name several endpoints."""
        return len(self.options.endpoints) > 1

    def _channel_unless_closed(self, endpoint: Endpoint) -> grpc.aio.Channel:
        """Returns the channel to an endpoint. Raises UsageError if the connection is closed."""
        if self._closed:
            raise grpc.aio.UsageError("the connection was closed")
        return self._channels[endpoint]

    def _try_limit_s(self, left: float) -> float:
        """Returns the limit of one try. With several endpoints, it leaves time for the others."""
        count = len(self.options.endpoints)
        return left if count == 1 else min(left, max(1.0, self.options.timeout_s / (count + 1)))

    async def _connect(self, endpoint: Endpoint, left: float) -> None:
        """Waits until `endpoint` is connected; raises AioRpcError or OtherCluster if that fails."""
        ready = self._channel_unless_closed(endpoint).get_state() is grpc.ChannelConnectivity.READY
        if ready and endpoint not in self._other_clusters:
            return
        # Any answer, also a refusal, proves the connection, and names the cluster.
        try:
            limit_s = min(left, self._connect_limit_s())
            await self._try_once(endpoint, STATUS, v3.StatusRequest(), limit_s, self.login.token)
        except grpc.aio.AioRpcError as error:
            if classify_failure(error.code(), _details(error)) in (FailureKind.NOT_EXECUTED, FailureKind.UNKNOWN):
                raise

    async def _get_token(self, endpoint: Endpoint, deadline: float | None = None) -> str | None:
        """Returns the token for a call, after a login if necessary; None if the options name no user.

        Raises:
            _LoginTakesLonger: there is no token at `deadline`. The login continues.
            grpc.aio.AioRpcError, OtherCluster: the login failed.
        """
        if not self.login.needed:
            return None
        while (token := self.login.token) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    entered = await asyncio.wrap_future(self.login.join_or_begin(endpoint))
            except TimeoutError:
                raise _LoginTakesLonger(self.login.waits()) from None
            except LoginFailed as failed:
                if failed.endpoint != endpoint:  # a lease began the login at another endpoint
                    continue
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(failed.code, nothing, nothing, failed.details) from None
            try:
                self.check_cluster(entered.endpoint, entered.answer.header)
            except OtherCluster:
                self.login.drop_token(entered.answer.token)
                if entered.endpoint == endpoint:
                    raise
        return token

    def _connect_limit_s(self) -> float:
        """Returns the time limit for connecting: short if there are other endpoints."""
        return _CONNECT_S if self._has_several else self.options.timeout_s

    async def _try_once(
        self,
        endpoint: Endpoint,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        token: str | None,
    ) -> Response:
        """Sends a request once, and returns the response. Raises AioRpcError, or OtherCluster."""
        send = self._calls.get((endpoint, method.path))
        if send is None:
            send = self._calls[endpoint, method.path] = self._channel_unless_closed(endpoint).unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )
        answer = await rpc.await_answer(send(request, metadata=credentials(token)), timeout_s)
        if answer is None:  # gRPC returns None for bytes that are no message
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "its answer cannot be read")
        assert isinstance(answer, method.response)
        self.check_cluster(endpoint, cast("v3.RangeResponse", answer).header)  # each response has a header
        return answer

    @contextlib.contextmanager
    def closed_as_error(self, what: str) -> Iterator[None]:
        """Converts errors that gRPC raises because this connection was closed. A cancellation of the caller passes.

        Raises:
            Unavailable: this connection was closed.
        """
        try:
            yield
        except (grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            if self._was_closed(error):
                raise Unavailable(f"{what}: the connection to etcd was closed") from error
            raise

    def _was_closed(self, error: BaseException) -> bool:
        """True if gRPC raised the error because this connection was closed, not because the caller was cancelled."""
        return self._closed and not (isinstance(error, asyncio.CancelledError) and is_cancelled())


def _details(error: grpc.aio.AioRpcError) -> str:
    """Returns a failure's text, with advice if there is some."""
    details = error.details() or error.code().name
    return details + advice_on_failure(details)
