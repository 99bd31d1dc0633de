"""Calls to a cluster: to which endpoint, how often, for how long, as which user.

One channel per endpoint, one endpoint in use at a time. An endpoint that fails is left for the next one. A write is
only sent over a connection that is known to stand, so that "nothing listens there" is never confused with "it was sent
and no answer came".

The first member that answers decides the cluster. Answers of another cluster, whose endpoint was given by mistake, are
ignored, and no write is sent to it.
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
from taskgraph.coordination.etcd.failures import Verdict, judge, refusal, space_used_up, way_out
from taskgraph.coordination.etcd.login import Login, LoginFailed, credentials
from taskgraph.coordination.etcd.methods import STATUS, Method
from taskgraph.coordination.etcd.options import Endpoint, EtcdOptions
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.network import rpc

__all__ = ["Connection", "OtherCluster", "Stream", "is_cancelled", "pause_s"]

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

#: Between two tries: doubled from the first to the last, with jitter, so that nodes that lost the same etcd do not
#: come back in step.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
#: An endpoint that is not connected after this (packets dropped) is left, if there is another one. gRPC goes on with
#: the attempt: behind a slow link, the connection stands when the endpoint's turn comes again.
_CONNECT_S = 1.0


_random = random.SystemRandom()  # the program that runs a job may have seeded `random` itself


def pause_s(tries: int) -> float:
    """Returns how long to wait after the `tries`-th failure in a row, counted from 1."""
    return float(min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10))) * _random.uniform(0.5, 1.0)


def is_cancelled() -> bool:
    """True if the current asyncio task is cancelled. If not, gRPC itself raised CancelledError.

    A function of its own, so that no frame that a cancellation passes holds the task: a cancelled task keeps these
    frames, and in a cycle all that they hold stays until a garbage collection, also channels.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class OtherCluster(Exception):
    """An etcd of another cluster answered."""


class _LoginTakesLonger(Exception):
    """A call reached its time limit while it waited for a login."""


class Stream(Generic[Response]):
    """One open bidirectional RPC.

    Attributes:
        endpoint: where.
        token: the token it was opened with, if etcd has users.
        left: it was cancelled since calls to its endpoint failed; its reader opens another stream.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Message, Response],
        endpoint: Endpoint,
        token: str | None,
        connect_s: float | None,
    ) -> None:
        self._call = call
        self._connect_s = connect_s
        self._writing: asyncio.Future[None] | None = None
        self.endpoint = endpoint
        self.token = token
        self.left = False

    async def write(self, message: Message) -> None:
        """Sends a message as soon as the endpoint is connected.

        Raises:
            asyncio.InvalidStateError: the stream ended before, or the endpoint is not connected in time.
        """
        writing = self._writing = asyncio.ensure_future(self._call.write(message))
        try:
            if not await rpc.within(writing, self._connect_s):
                raise asyncio.InvalidStateError(f"no connection within {self._connect_s:g} s")
            if writing.cancelled():
                raise asyncio.InvalidStateError("the stream was cancelled before it was connected")
            writing.result()
        finally:
            writing.cancel()
            self._writing = None
            del writing  # no cycle with its exception

    def messages(self) -> AsyncGenerator[Response, None]:
        """The messages, until the server ends the stream."""
        return cast("AsyncGenerator[Response, None]", self._call.__aiter__())

    def cancel(self) -> None:
        self._call.cancel()
        # Until it is connected, gRPC itself would wait for ever. A done callback on the call is no way out: some
        # versions of gRPC keep the callback, and with it the call and its channel.
        if self._writing is not None:
            self._writing.cancel()


@dataclass(slots=True)
class _Tries:
    """The tries of one call, for its error message."""

    count: int = 0
    last: dict[str, str] = field(default_factory=dict)

    def add(self, endpoint: Endpoint, details: str) -> None:
        self.count += 1
        self.last[f"https://{endpoint.target}" if endpoint.tls else endpoint.target] = details

    def __str__(self) -> str:
        return "; ".join(f"{target}: {details}" for target, details in self.last.items()) or "no answer"


class Connection:
    """A cluster as seen from one event loop.

    Args:
        options: where the cluster is and how to get in.

    Attributes:
        cluster: the cluster's id, from its first answer on; 0 before.
        login: the token that its calls are made with; leases use it, too.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self.options = options
        self._made_of = dict.fromkeys(options.endpoints, options.tls_files())  # looked at before they are read
        self._channels = {endpoint: options.aio_channel(endpoint) for endpoint in options.endpoints}
        self._former: dict[grpc.aio.Channel, float] = {}
        """Channels made with TLS files of before a renewal -> when no call uses them any more, by the loop's time."""
        self._calls: dict[tuple[Endpoint, str], Any] = {}  # the callable of a method on a channel
        self._current = 0
        self.cluster = 0
        self._answered_first = ""
        self._others: set[Endpoint] = set()  # whose last answer was of another cluster
        self.login = Login(options)
        self._closed = False
        self._streams: WeakSet[Stream[Any]] = WeakSet()

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that the next call goes to."""
        return self.options.endpoints[self._current]

    def leave(self, endpoint: Endpoint) -> None:
        """Leaves a failed endpoint: the next call and its open streams go to the endpoint after it.

        The kernel of a frozen member keeps the connection: a watch would wait 15 s for gRPC's pings, while calls have
        already found out.
        """
        if endpoint.tls:
            self._renew(endpoint)
        if endpoint != self.endpoint or not self._several:
            return
        self._current = (self._current + 1) % len(self.options.endpoints)
        self._leave_streams(endpoint)

    def _leave_streams(self, endpoint: Endpoint) -> None:
        for stream in tuple(self._streams):
            if stream.endpoint == endpoint:
                stream.left = True
                stream.cancel()

    def _renew(self, endpoint: Endpoint) -> None:
        """Makes a new channel if the TLS files were renewed: gRPC would go on connecting with the expired ones."""
        files = self.options.tls_files()
        if files == self._made_of[endpoint] or self._closed:
            return
        try:
            channel = self.options.aio_channel(endpoint)
        except CoordinationError as error:  # the next failure tries again
            log.warning("etcd's TLS files were renewed, but: %s", error)
            return
        log.info("etcd's TLS files were renewed: %s is connected to with the new ones", endpoint.target)
        # A try may go on after its time limit for a moment, if the event loop stood still.
        self._former[self._channels[endpoint]] = asyncio.get_running_loop().time() + 2 * self.options.timeout_s
        self._leave_streams(endpoint)
        self._channels[endpoint], self._made_of[endpoint] = channel, files
        self._calls = {key: call for key, call in self._calls.items() if key[0] != endpoint}

    async def _close_former(self) -> None:
        """Closes the channels of before a renewal that no call uses any more."""
        now = asyncio.get_running_loop().time()
        for channel in [channel for channel, until in self._former.items() if until <= now]:
            del self._former[channel]
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
        """Makes one RPC, tried until it succeeds or the time is over.

        Args:
            method: which RPC.
            request: its request.
            what: the call in words, for errors: a text, or an object with a `__str__`.
            again: whether it may be sent twice: a read, or an idempotent write.
            timeout_s: the limit with all tries; None: that of the options.
            anonymous: without logging in.

        Raises:
            Unavailable: the time is over and nothing was done.
            OutcomeUnknown: it may have been executed (`again=False` only).
            CoordinationError: etcd refused it.
        """
        if self._former:
            await self._close_former()
        loop = asyncio.get_running_loop()
        limit_s = self.options.timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + limit_s
        tries, logins = _Tries(), 0
        while (left := deadline - loop.time()) > 0 and not self._closed:
            endpoint, sent, token = self.endpoint, False, None
            try:
                if not again or self._several:
                    await self._connect(endpoint, left)
                if not anonymous:
                    token = await self._enter(endpoint, deadline)
                if (left := deadline - loop.time()) <= 0:  # connecting and logging in took all of it
                    break
                sent = True
                return await self._once(endpoint, method, request, self._try_s(left), token)
            except _LoginTakesLonger as longer:
                tries.add(endpoint, str(longer))
            except (grpc.aio.UsageError, asyncio.CancelledError) as error:
                if self._cut_off(error):
                    break
                raise
            except OtherCluster as other:  # our cluster did not execute the call
                tries.add(endpoint, str(other))
                self.leave(endpoint)
            except grpc.aio.AioRpcError as error:
                details = _details(error)
                tries.add(endpoint, details)
                verdict = judge(error.code(), details)
                if verdict is Verdict.REFUSED:
                    raise refusal(str(what), error.code(), details) from error
                if verdict is Verdict.LOGIN and logins < 3:
                    logins += 1
                    self.login.refused(token)
                    continue
                if not space_used_up(details):
                    self.leave(endpoint)  # else the caller, who reads to find out, asks the same silent member
                if verdict is Verdict.UNKNOWN and sent and not again:
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
        """Opens a stream on the endpoint in use. Messages and errors come when it is read.

        Raises:
            grpc.aio.AioRpcError, OtherCluster: logging in failed, however long it took.
            Unavailable: the connection is closed.
        """
        endpoint = self.endpoint
        if self._closed:
            raise Unavailable(f"{method.name}: the connection to etcd was closed")
        token = await self._enter(endpoint)
        open_stream: grpc.aio.StreamStreamMultiCallable[Message, Response] = self._channel(endpoint).stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        # `hasleader`: a member cut off from the majority ends the stream instead of staying silent.
        metadata = [("hasleader", "true"), *credentials(token)]
        connect_s = _CONNECT_S if self._several else None
        stream = Stream(open_stream(None, metadata=metadata), endpoint, token, connect_s)
        self._streams.add(stream)
        return stream

    def check_cluster(self, endpoint: Endpoint, header: v3.ResponseHeader) -> None:
        """Checks the cluster of an answer from `endpoint`.

        If all endpoints belong to another cluster, etcd was set up anew, perhaps with its data: that cluster counts
        from then on.

        Raises:
            OtherCluster: the answer is of another cluster.
        """
        cluster = header.cluster_id
        if cluster == self.cluster or not cluster:
            self._others.discard(endpoint)
            return
        first, why = endpoint not in self._others, f"it belongs to another cluster than {self._answered_first}"
        self._others.add(endpoint)
        if not self.cluster or self._others.issuperset(self.options.endpoints):
            self.cluster, self._answered_first = cluster, endpoint.target
            self._others.clear()
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
        channels = [*self._channels.values(), *self._former]
        self._channels.clear()  # a caller may keep an exception, whose frames hold us
        self._calls.clear()
        self._former.clear()
        for channel in channels:
            await rpc.close(channel)

    @property
    def _several(self) -> bool:
        return len(self.options.endpoints) > 1

    def _channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        if self._closed:
            raise grpc.aio.UsageError("the connection was closed")
        return self._channels[endpoint]

    def _try_s(self, left: float) -> float:
        """The limit of one try: with several endpoints, a silent one must leave time for the others."""
        count = len(self.options.endpoints)
        return left if count == 1 else min(left, max(1.0, self.options.timeout_s / (count + 1)))

    async def _connect(self, endpoint: Endpoint, left: float) -> None:
        """Returns once `endpoint` is connected."""
        ready = self._channel(endpoint).get_state() is grpc.ChannelConnectivity.READY
        if ready and endpoint not in self._others:
            return
        # Any answer, also a refusal, proves the connection, and names the cluster.
        try:
            await self._once(endpoint, STATUS, v3.StatusRequest(), min(left, self._connect_s()), self.login.token)
        except grpc.aio.AioRpcError as error:
            if judge(error.code(), _details(error)) in (Verdict.NOT_EXECUTED, Verdict.UNKNOWN):
                raise

    async def _enter(self, endpoint: Endpoint, deadline: float | None = None) -> str | None:
        """The token for a call; None if no user was given.

        Raises:
            _LoginTakesLonger: there is no token at `deadline`. The login goes on.
            grpc.aio.AioRpcError, OtherCluster: the login failed.
        """
        if not self.login.needed:
            return None
        while (token := self.login.token) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    entered = await asyncio.wrap_future(self.login.begin(endpoint))
            except TimeoutError:
                raise _LoginTakesLonger(self.login.waits()) from None
            except LoginFailed as failed:
                if failed.endpoint != endpoint:  # a lease began it there
                    continue
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(failed.code, nothing, nothing, failed.details) from None
            try:
                self.check_cluster(entered.endpoint, entered.answer.header)
            except OtherCluster:
                self.login.refused(entered.answer.token)
                if entered.endpoint == endpoint:
                    raise
        return token

    def _connect_s(self) -> float:
        return _CONNECT_S if self._several else self.options.timeout_s

    async def _once(
        self,
        endpoint: Endpoint,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        token: str | None,
    ) -> Response:
        send = self._calls.get((endpoint, method.path))
        if send is None:
            send = self._calls[endpoint, method.path] = self._channel(endpoint).unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )
        answer = await rpc.answered(send(request, metadata=credentials(token)), timeout_s)
        if answer is None:  # gRPC returns None for bytes that are no message
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "its answer cannot be read")
        assert isinstance(answer, method.response)
        self.check_cluster(endpoint, cast("v3.RangeResponse", answer).header)  # each has one
        return answer

    @contextlib.contextmanager
    def closed_as_error(self, what: str) -> Iterator[None]:
        """Tells the caller's cancellation from the errors that gRPC raises if the channel of a call is closed.

        Raises:
            Unavailable: this connection was closed.
        """
        try:
            yield
        except (grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            if self._cut_off(error):
                raise Unavailable(f"{what}: the connection to etcd was closed") from error
            raise

    def _cut_off(self, error: BaseException) -> bool:
        """True if gRPC raised the error because this connection was closed, not because the caller was cancelled."""
        return self._closed and not (isinstance(error, asyncio.CancelledError) and is_cancelled())


def _details(error: grpc.aio.AioRpcError) -> str:
    details = error.details() or error.code().name
    return details + way_out(details)
