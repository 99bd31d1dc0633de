"""A client of a node's control service."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import signal as signals
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import grpc
import xxhash

from taskgraph.errors import DecodeError, PeerGone, PeerLost, TaskGraphError
from taskgraph.network import rpc
from taskgraph.network.tls import Tls
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import Event
from taskgraph.observe.queues import QueueStatus
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus, ReportRow, TaskResult
from taskgraph.observe.trace import clock
from taskgraph.observe.usage import Usage
from taskgraph.protocol.dealing import PassCounts, SlowPiece
from taskgraph.protocol.messages import Encoded
from taskgraph.protocol.reach import host_of, unix_socket

__all__ = [
    "SERVICE",
    "TOKEN_KEY",
    "ClockReading",
    "ControlClient",
    "StillComputing",
    "TraceCall",
    "control_address",
    "credential",
]

SERVICE = "taskgraph.v1.Control"
TOKEN_KEY = "taskgraph-token"
_MAX_MESSAGE_BYTES = 64 << 20
_PING_S = 5.0
"""How often a call that waits pings a node on another host. If a router forgot the connection, or the host died, no
packet says so: a call that only listens would listen for ever."""
_UNACKNOWLEDGED_S = 20.0
"""A connection whose other end acknowledges nothing for this long is broken: as between nodes."""
_UNANSWERED_S = 300.0
"""Likewise if a proxy acknowledges, and the node does not answer a ping. Over a slow network the answer comes after the
results that were sent before: with gRPC's 60 s, results at 30 kB/s would never arrive."""
_RESET_SIGNS = ("Socket closed", "Connection reset", "connection closed")
_EXPIRED = "certificate has expired"
_OTHER_NAME = ("Hostname Verification Check failed", "is not in peer certificate")
"""Words of gRPC, newer and older, for a certificate without the name that was asked for."""
_NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
"""gRPC's words if it had no connection for a call."""
_NO_LISTENER = ("Connection refused", "No such file or directory")
"""gRPC's words for an address whose process is gone."""
_LAST_ERROR = re.compile(r"^failed to connect to all addresses; last error: (\w+: )?")
"""gRPC's words before the cause."""


def credential(token: bytes) -> str:
    """Returns a hash of the job's token, which calls send in its place: no eavesdropper can join as a node."""
    return hashlib.sha256(b"taskgraph control\0" + token).hexdigest()


def control_address(control: str, host_key: str) -> str:
    """Returns the gRPC target of a node record's `control`, e.g. `unix:KEY:/path|tcp:host:port`.

    Args:
        host_key: the key of this host.

    Raises:
        TaskGraphError: none of the addresses can be reached from this host.
    """
    another_users = ""
    for endpoint in control.split("|"):
        key, path = unix_socket(endpoint)
        if key == host_key:
            return f"unix:{path}"
        if host_of(key) == host_of(host_key):
            another_users = f"unix:{path}"
        if endpoint.startswith("tcp:"):
            return endpoint.removeprefix("tcp:")
    if another_users:  # root may use it; others get an error that says so
        return another_users
    raise TaskGraphError(
        f"the node's control service listens at {control or 'no address'}, which cannot be reached from this host: "
        f"start nodes with --listen HOST to control them from elsewhere"
    )


_BUSY_S = 10.0
"""How long a node may take to answer while it computes."""


_KILL_TRIES = 10
"""Tries to kill a node and to see that it died: a process, and its port, take a moment to end."""
_KILL_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A node's clock compared with ours, by one round trip.

    Attributes:
        ahead_ns: how far the node's clock is ahead of ours, if both ways took the same time.
        within_ns: the largest error of `ahead_ns`: half of the round trip.
        host_key: the key of the node's host, whose processes share the clock.
    """

    ahead_ns: int
    within_ns: int
    host_key: str


class TraceCall:
    """A call that receives a node's spans. The first chunk has no spans: the node traces from then on."""

    def __init__(self, call: Any, decode_key: Callable[[Any], Any]) -> None:
        self._call = call
        self._require_message = decode_key

    async def finish(self) -> None:
        """Asks the node to stop tracing. Does not wait: `next` returns the remaining spans, then None."""
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: `next` says why
            await self._call.done_writing()

    async def next(self) -> pb.TraceChunk | None:
        """Returns the next chunk of spans; None after the last."""
        chunk = await self._call.read()
        return None if chunk is grpc.aio.EOF else self._require_message(chunk)


class StillComputing(PeerLost):
    """A node answers, but has no results yet."""


class ControlClient:
    """A client of one node's control service.

    Every call raises PeerGone if no process listens there, PeerLost if the node does not answer (NoAnswer: not in
    time) or its answer is damaged, and TaskGraphError if it refuses, e.g. a wrong token.

    Args:
        address: from `control_address`.
        token: the job's token.
        tls: for nodes on other hosts; TransportError if its files cannot be used.
    """

    def __init__(self, address: str, token: bytes, tls: Tls | None = None) -> None:
        options: list[tuple[str, int | str]] = [*_channel_options(address)]
        self._encrypted = tls is not None and not address.startswith("unix:")
        credentials = None
        if tls is not None and self._encrypted:
            credentials = tls.channel_credentials()
            options += tls.channel_options()
        self._name = tls.name if tls is not None else ""
        self._channel = rpc.aio_channel(address, credentials, options)
        self._metadata = ((TOKEN_KEY, credential(token)),)
        self._address = address
        self._answered = False

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await rpc.close(self._channel)

    async def status(self, timeout_s: float = 2.0) -> NodeStatus:
        """Asks the node for its status."""
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
            usage=Usage(reply.memory_bytes, reply.files, reply.threads, reply.coroutines),
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
            queues=tuple(
                QueueStatus(
                    name=q.name,
                    kind=q.kind,
                    pieces=q.pieces,
                    passes=None if q.passes < 0 else q.passes,
                    left=q.left,
                    set_aside=q.set_aside,
                    counts=tuple(
                        PassCounts(c.pass_number, c.done, c.dealt, c.open, c.set_aside, c.rows) for c in q.counts
                    ),
                    slow=tuple(SlowPiece(s.pass_number, s.piece, s.holder, s.seconds) for s in q.slow),
                    rows_per_s=q.rows_per_s,
                )
                for q in reply.queues
            ),
        )

    async def kill(self, number: int, timeout_s: float = 2.0) -> None:
        """Sends signal `number` to the node's process. A node that dies of SIGKILL before it answers has obeyed.

        Raises:
            PeerGone: no process listens there: it ended before.
            PeerLost: it does not answer: it may be stopped, or not reachable from here.
        """
        if number == signals.SIGKILL:
            await self._kill_and_check(timeout_s)
        else:
            await self._call("Kill", pb.KillRequest(signal=number), pb.KillReply, timeout_s)

    async def _kill_and_check(self, timeout_s: float) -> None:
        """Sends SIGKILL until the node accepts it, or refuses connections: a broken connection may mean either.

        Raises:
            PeerGone: the node had died before.
            PeerLost: whether it died is not known.
        """
        await self.clock(timeout_s)  # a node that cannot be reached has not died
        lives, lost = True, None
        for _ in range(_KILL_TRIES):
            try:
                if lives:
                    await self._call("Kill", pb.KillRequest(signal=signals.SIGKILL), pb.KillReply, timeout_s)
                    return
                await self.clock(timeout_s)
                lives = True
            except PeerGone:
                if lost is None:
                    raise
                return
            except PeerLost as error:
                if not _is_broken_connection(error):
                    raise
                lives, lost = False, error
                await asyncio.sleep(_KILL_RETRY_S)
        raise PeerLost(f"{lost}; whether it died is not known: see `taskgraph status`") from lost

    async def drain(self, why: str, timeout_s: float = _BUSY_S) -> None:
        """Asks the node to hand its tasks over and leave.

        Raises:
            PeerLost: the node does not answer. If the order was sent, a busy node may still drain; the message says so.
        """
        try:
            await self._call("Drain", pb.DrainRequest(why=why), pb.DrainReply, timeout_s)
        except PeerLost as error:
            if _is_unsent(error):
                raise
            raise PeerLost(f"{error}; whether it drains is not known: see `taskgraph status`") from error

    async def events(self, *, follow: bool, last: int = 0) -> AsyncIterator[tuple[Event, int]]:
        """Yields each event with the number of events that were left out before it.

        Args:
            last: yields only this many of the events so far, the newest; 0: all that the node remembers.
        """
        request = pb.EventsRequest(follow=follow, last=last)
        async for reply in self._stream("Events", request, pb.EventReply.FromString, None):
            yield Event.from_json(reply.json), reply.lost
            for event in reply.more:
                yield Event.from_json(event), 0

    async def results(self, silent_s: float | None = None) -> list[TaskResult]:
        """Returns the results of the tasks that this node is primary of; waits until they are computed.

        Args:
            silent_s: how long the node may send nothing; None: for ever.

        Raises:
            StillComputing: the node sent nothing for this long, but answers: it computes.
            DecodeError: the results were damaged on their way.
            TaskGraphError: the node does not answer, or not with results.
        """
        found: list[_IncomingResult] = []
        whole, digest = xxhash.xxh3_128(), b""
        async for data, chunk in self._stream("Results", pb.ResultsRequest(), _parse_with_bytes, silent_s):
            if chunk.digest:
                digest = chunk.digest
                continue
            whole.update(data)
            if chunk.HasField("head"):
                found.append(_IncomingResult(chunk.head))
            elif not found:
                raise DecodeError(f"the node at {self._address} sent a part of a result before its head")
            else:
                found[-1].take(chunk)
        results = [each.result() for each in found]
        if digest != whole.digest():
            raise DecodeError(f"the results of the node at {self._address} were damaged on their way")
        return results

    async def clock(self, timeout_s: float = 2.0) -> ClockReading:
        """Reads the node's clock once; the shortest of several round trips is the most exact."""
        before = clock()
        reply = await self._call("Clock", pb.ClockRequest(), pb.ClockReply, timeout_s)
        after = clock()
        middle = (before + after) // 2
        return ClockReading(reply.at_ns - middle, (after - before) // 2, reply.host_key)

    @contextlib.asynccontextmanager
    async def trace(self, every: int = 1) -> AsyncIterator[TraceCall]:
        """Traces the node until `TraceCall.finish`, or until the block ends.

        Args:
            every: traces the epochs that this number divides.
        """
        call: Any = self._channel.stream_stream(
            f"/{SERVICE}/Trace",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.TraceChunk.FromString,
        )(metadata=self._metadata)
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: `next` says why
                await call.write(pb.TraceRequest(every=every))
            yield TraceCall(call, partial(self._require_message, "Trace"))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INTERNAL:  # gRPC loses the status of a call that ends as we write to it
                await self.clock(_BUSY_S)  # it fails for the same reason, if the node refused the call
            raise self._to_error("Trace", error) from error
        finally:
            call.cancel()

    async def _call(self, method: str, request: Any, reply: Any, timeout_s: float) -> Any:
        """Calls a method, and returns its reply."""
        call: Any = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            found = await rpc.await_answer(call(request, metadata=self._metadata), timeout_s)
            self._answered = True
            return self._require_message(method, found)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(method, error, timeout_s) from error

    async def _stream(
        self, method: str, request: Any, read: Callable[[bytes], Any], silent_s: float | None
    ) -> AsyncIterator[Any]:
        """Calls a method, and yields its replies, as `read` parses them.

        Raises:
            StillComputing: no reply came for `silent_s` (None: no limit), but the node answers other calls.
        """
        call: Any = self._channel.unary_stream(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=read,
        )(request, metadata=self._metadata)
        try:
            while True:
                async with asyncio.timeout(silent_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                self._answered = True
                yield self._require_message(method, message)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(method, error) from error
        except TimeoutError:
            await self.clock(_BUSY_S)  # raises if it does not answer
            raise StillComputing(f"the node at {self._address} sent nothing of {method} for {silent_s:g} s") from None
        finally:
            call.cancel()

    def _require_message(self, method: str, reply: Any) -> Any:
        """Returns the reply. Raises PeerLost if it is None, which gRPC returns for bytes that are no message."""
        if reply is None:
            raise PeerLost(f"the node at {self._address} sent an answer to {method} that cannot be read")
        return reply

    def _to_error(self, method: str, error: grpc.aio.AioRpcError, within_s: float | None = None) -> TaskGraphError:
        """Turns an error of gRPC into one of taskgraph, with advice."""
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and within_s is not None:
            return NoAnswer(f"the node at {self._address} did not answer {method} within {within_s:g} s", within_s)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return TaskGraphError(f"the node at {self._address} refuses: {details}; pass the job's --token-file")
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return TaskGraphError(f"the node at {self._address} refuses {method}: {details}")
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return TaskGraphError(f"the node at {self._address}: {details}")
        if code == grpc.StatusCode.UNAVAILABLE and (signs := [sign for sign in _NO_LISTENER if sign in details]):
            return PeerGone(f"no node listens at {self._address} ({signs[0].lower()})")
        details = _LAST_ERROR.sub("", details)
        first = code == grpc.StatusCode.UNAVAILABLE and not self._answered  # after an answer, TLS is right
        if first and self._encrypted and _EXPIRED in details:
            details += (
                "; the certificate of that node has ended: write a renewed one, and its key, to its files there, which "
                "it uses at once (or this host's clock is wrong)"
            )
        elif first and self._encrypted and any(sign in details for sign in _OTHER_NAME):
            details = (
                f"its certificate does not have the name {self._name!r}: give the --tls-name that its nodes have"
                if self._name
                else "its certificate does not name that host: give --tls-name, if its nodes have it"
            )
        elif first and self._encrypted:
            details += (
                "; with TLS: check that its certificate and ours are signed by the same --tls authority, that it names "
                "the host (or what --tls-name says), and that neither has ended"
            )
        elif first and not self._address.startswith("unix:") and any(sign in details for sign in _RESET_SIGNS):
            details += "; it may accept TLS only: give --tls; or it has too many connections"
        return PeerLost(f"the node at {self._address} did not answer {method}: {details or code.name}")


def _is_broken_connection(error: PeerLost) -> bool:
    """True if the connection broke or could not be made; False if the node was silent or answered with an error."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() == grpc.StatusCode.UNAVAILABLE


def _is_unsent(error: PeerLost) -> bool:
    """True if the call was not sent, since no connection could be made."""
    cause = error.__cause__
    return (
        _is_broken_connection(error)
        and isinstance(cause, grpc.RpcError)
        and (cause.details() or "").startswith(_NOT_CONNECTED)
    )


def _channel_options(address: str) -> list[tuple[str, int]]:
    """Returns gRPC's options for a channel to an address."""
    options = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        # A connection of its own: a new client must not get one that is lost, which gRPC has not noticed.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if not address.startswith("unix:"):
        options += [
            ("grpc.keepalive_time_ms", round(_PING_S * 1000)),
            ("grpc.keepalive_timeout_ms", round(_UNACKNOWLEDGED_S * 1000)),
            ("grpc.http2.ping_timeout_ms", round(_UNANSWERED_S * 1000)),
            ("grpc.http2.settings_timeout", round(_UNANSWERED_S * 1000)),  # its answer waits like that of a ping
            ("grpc.http2.max_pings_without_data", 0),  # a client that only listens sends no data
        ]
    return options


def _parse_with_bytes(data: bytes) -> tuple[bytes, pb.ResultChunk]:
    """Returns the bytes of a chunk, and the chunk."""
    return data, pb.ResultChunk.FromString(data)


class _IncomingResult:
    """One task's result while its chunks arrive. Each buffer gets aligned memory of its own."""

    def __init__(self, head: pb.ResultHead) -> None:
        self._head = head
        self._sizes = [*([head.meta_bytes, *head.buffer_bytes] if head.has_value else ()), *head.log_bytes]
        self._parts: list[bytearray] = []
        self._rows: list[ReportRow] = []

    def take(self, chunk: pb.ResultChunk) -> None:
        """Takes the next chunk. Raises DecodeError if it does not fit the head."""
        for row in chunk.reports:
            if len(row.names) != len(row.numbers):
                raise DecodeError(
                    f"a report of task {row.task} has {len(row.names)} names and {len(row.numbers)} numbers"
                )
            self._rows.append(ReportRow(row.epoch, row.task, dict(zip(row.names, row.numbers, strict=True))))
        if not chunk.data:
            return
        while not self._parts or len(self._parts[-1]) == self._sizes[len(self._parts) - 1]:
            if len(self._parts) == len(self._sizes):
                raise DecodeError(f"the result of task {self._head.task} has more bytes than its head says")
            self._parts.append(bytearray())
        if len(self._parts[-1]) + len(chunk.data) > self._sizes[len(self._parts) - 1]:
            raise DecodeError(f"the result of task {self._head.task} has a part that is too long")
        self._parts[-1] += chunk.data

    def result(self) -> TaskResult:
        """Returns the result, once all chunks have come. Raises DecodeError if some have not."""
        head = self._head
        parts = self._parts + [bytearray() for _ in self._sizes[len(self._parts) :]]
        if [len(part) for part in parts] != self._sizes:
            raise DecodeError(
                f"the result of task {head.task} has {sum(map(len, parts))} of {sum(self._sizes)} bytes: the node ended"
            )
        of_value = len(parts) - len(head.log_bytes)
        value = None
        if head.has_value:
            buffers = tuple(memoryview(part).toreadonly() for part in parts[1:of_value])
            value = Encoded(bytes(parts[0]), buffers, head.digest)
        log = tuple([bytes(part) for part in parts[of_value:]])
        return TaskResult(head.task, head.epoch, head.attempt, value, tuple(self._rows), log, head.lasted_s)
