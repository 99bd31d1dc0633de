"""The node's control service over gRPC, for people and tools: status, kill, drain, events, results, traces.

Every call proves the job's token first. The service listens before the node is registered, since the node's key holds
its address; until `attach` it answers that the node is starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import resource
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import xxhash

from taskgraph.errors import TaskGraphError, TransportError
from taskgraph.network.listening import ANY_PORT
from taskgraph.network.tls import Tls, check_listener
from taskgraph.node.tracing import TracedNode, stream_spans
from taskgraph.node.usercode import lastwords
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.control_client import SERVICE, TOKEN_KEY, credential
from taskgraph.observe.events import Event, EventLog
from taskgraph.observe.status import NodeStatus, ReportRow, TaskResult
from taskgraph.observe.trace import clock
from taskgraph.system import host
from taskgraph.system.files import remove_file
from taskgraph.transport.endpoints import host_key, is_port_free, no_free_port_error, tcp_endpoint, unix_endpoint
from taskgraph.transport.refusals import RefusalLog

__all__ = ["ControlServer", "ControlledNode"]

log = logging.getLogger("taskgraph.control")

_CHUNK_BYTES = 1 << 20
"""Size of a streamed message: well below the 4 MiB that gRPC clients accept by default."""
_REPLY_BYTES = 256 << 10
"""Size of a message of events to a follower, roughly."""
_QUEUE = 10_000
"""Events that a slow follower may be behind. Older ones are dropped, and the follower learns how many."""
_PACE_S = 0.05
"""Commits of this interval are sent in one message, since there may be hundreds per second. A durable event is sent at
once, with all waiting events."""
_CLOSE_S = 0.5
"""Time for calls under way when the node ends."""
_READ_S = 2.0
"""Time for the client to read the last spans of a trace: data that it has not read is lost when gRPC closes the
connection."""
_SIGNAL_AFTER_S = 0.05
"""Pause between the reply to a kill and the signal."""


_CONNECTIONS = 1024
"""The most connections at a time, each some 20 KiB. gRPC refuses further ones, so silent clients must not fill it."""
_SHARE_OF_FILES = 4
"""Connections take at most 1/4 of the files that the process may open."""
_SILENT_MS = 5_000
"""A connection without calls ends after this time, to make room for others. Our own clients reconnect by themselves."""
_PING_INTERVAL_MS = 1_000
"""A client that pings more often is disconnected. Our clients ping every 5 s; gRPC's default allows five minutes."""


class ControlledNode(TracedNode, Protocol):
    """What the control service uses of a node."""

    def status(self) -> NodeStatus: ...
    def drain(self, why: str) -> None: ...
    async def results(self) -> list[TaskResult]: ...


class ControlServer:
    """The control service of one node.

    Args:
        events: the node's events, which followers get.
        token: the job's token.
    """

    def __init__(self, events: EventLog, token: bytes) -> None:
        self._events = events
        self._credential = credential(token).encode()
        self._refusals = RefusalLog(log, time.monotonic)
        self._host_key = host_key()
        self._node: ControlledNode | None = None
        self._servers: list[grpc.aio.Server] = []
        self._path: Path | None = None
        self._followers: set[_EventSubscriber] = set()
        self._traces: set[asyncio.Task[Any]] = set()  # trace calls under way
        self._ending = False
        self._end = asyncio.Event()

    def attach(self, node: ControlledNode) -> None:
        """Lets `node` answer the calls from now on."""
        self._node = node

    async def start(
        self,
        *,
        unix_path: Path | None = None,
        tcp_host: str | None = None,
        tcp_ports: Sequence[int] = ANY_PORT,
        advertise: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> str:
        """Begins to listen for calls.

        Args:
            unix_path: a socket for its owner only; its folder must be private, too.
            tcp_host: a name or address to listen on.
            tcp_ports: ports to try, in order; 0 takes a free one.
            advertise: the name or address that others use for `tcp_host`, if it differs.
            tls: for TCP; the unix socket needs none.
            insecure: allows addresses other than loopback without TLS.

        Returns:
            The endpoints for the node's key: `unix:HOSTKEY:/path|tcp:host:port`, or one of them, or "".

        Raises:
            TransportError: the address cannot be listened on, or needs TLS; or others would refuse the certificate.
        """
        if tcp_host:
            check_listener(tcp_host, tls is not None, insecure)
            if tls is not None:
                tls.check(advertise or tcp_host)
        server = self._new_server()
        found = []
        if unix_path is not None:
            _bind_unix(server, unix_path)
            self._path = unix_path
            found.append(unix_endpoint(unix_path))
        if tcp_host:
            port = _bind_tcp(server, tcp_host, tcp_ports, tls)
            found.append(tcp_endpoint(advertise or tcp_host, port))
        await server.start()
        self._servers.append(server)
        return "|".join(found)

    def _new_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=_server_options())
        server.add_generic_rpc_handlers((self._handlers(),))
        return server

    @property
    def unreachable(self) -> bool:
        """True if another program removed the file of the unix socket."""
        return not self._ending and self._path is not None and not self._path.exists()

    async def listen_anew(self) -> None:
        """Listens again at the removed file's path. Calls under way go on.

        Raises:
            OSError, TransportError: the service cannot listen there.
        """
        if self._ending or self._path is None:
            return
        server = self._new_server()  # gRPC adds no address to a running server
        _bind_unix(server, self._path)
        await server.start()
        self._servers.append(server)  # the stopped server removes the file at its path, even a new one

    async def stop(self) -> None:
        """Sends followers their last events, ends every call, removes the socket."""
        self._ending = True
        self._end.set()
        for follower in self._followers:
            follower.end()
        if self._traces:
            await asyncio.wait(self._traces, timeout=_READ_S)
        await asyncio.gather(*(server.stop(_CLOSE_S) for server in self._servers))
        self._servers.clear()
        if self._path is not None:
            remove_file(self._path)

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        both = grpc.stream_stream_rpc_method_handler

        def make_handler(
            make: Callable[..., Any],
            function: Callable[..., Any],
            request: Any,
            write: Callable[[Any], bytes] = _to_bytes,
        ) -> Any:
            return make(function, request_deserializer=request.FromString, response_serializer=write)

        methods = grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Status": make_handler(unary, self._unary_handler(self._status), pb.StatusRequest),
                "Kill": make_handler(unary, self._unary_handler(self._kill), pb.KillRequest),
                "Drain": make_handler(unary, self._unary_handler(self._drain), pb.DrainRequest),
                "Events": make_handler(stream, self._stream_handler(self._follow), pb.EventsRequest),
                "Results": make_handler(
                    stream, self._stream_handler(_with_digest(self._results)), pb.ResultsRequest, bytes
                ),
                "Clock": make_handler(unary, self._unary_handler(self._clock), pb.ClockRequest),
                "Trace": make_handler(both, self._stream_handler(self._trace), pb.TraceRequest),
            },
        )
        return _TokenGate(methods, self._credential, self._refusals)

    # -- before a call -----------------------------------------------------------------------------------

    async def _attached_node(self, context: grpc.aio.ServicerContext[Any, Any]) -> ControlledNode:
        """Returns the attached node; aborts the call if there is none yet."""
        if self._node is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the node is starting: try again")
        assert self._node is not None
        return self._node

    def _unary_handler(
        self, function: Callable[[ControlledNode, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Makes the handler of a call with one reply; while no node is attached, and after a ValueError, it aborts the
        call.
        """

        async def checked(request: Any, context: Any) -> Any:
            node = await self._attached_node(context)
            try:
                return await function(node, request)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return checked

    def _stream_handler(
        self, function: Callable[[ControlledNode, Any], AsyncGenerator[Any, None]]
    ) -> Callable[[Any, Any], AsyncGenerator[Any, None]]:
        """Makes the handler of a call with a stream of replies; it aborts the call while no node is attached, or after
        an error of ours.
        """

        async def checked(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            node = await self._attached_node(context)
            # Closed as soon as the caller goes, not by the garbage collector: a follower would get events until then.
            async with contextlib.aclosing(function(node, request)) as replies:
                try:
                    async for reply in replies:
                        yield reply
                except TaskGraphError as error:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

        return checked

    # -- the calls ---------------------------------------------------------------------------------------

    async def _status(self, node: ControlledNode, request: pb.StatusRequest) -> pb.StatusReply:
        return _status_reply(node.status())

    async def _kill(self, node: ControlledNode, request: pb.KillRequest) -> pb.KillReply:
        """Sends a signal to this process: SIGKILL at once, others soon after the reply."""
        number = signal.Signals(request.signal)
        obey: Callable[[], object] = partial(os.kill, os.getpid(), number)
        if host.is_first_process():
            if number == signal.SIGKILL:
                obey = partial(os._exit, 128 + number)
            elif signal.getsignal(number) == signal.SIG_DFL and number != signal.SIGCONT:
                raise ValueError(
                    f"this node is the first process (pid 1) of its container, which {number.name} from within does "
                    f"not reach: send it from outside of the container, or run an init in it (`docker run --init`, "
                    f"shareProcessNamespace)"
                )
        log.warning("a client had %s sent to this process", number.name)
        if number == signal.SIGKILL:
            lastwords.intend_end()
        after_s = 0.0 if number == signal.SIGKILL else _SIGNAL_AFTER_S
        asyncio.get_running_loop().call_later(after_s, obey)
        return pb.KillReply(pid=os.getpid())

    async def _drain(self, node: ControlledNode, request: pb.DrainRequest) -> pb.DrainReply:
        node.drain(request.why or "asked to")
        return pb.DrainReply()

    async def _follow(self, node: ControlledNode, request: pb.EventsRequest) -> AsyncGenerator[pb.EventReply, None]:
        """Yields the last events, and then new ones if the caller follows."""
        follower = _EventSubscriber()
        for event in self._events.recent()[-request.last :]:
            follower.queue(event)
        if not request.follow or self._ending:
            follower.end()
        self._followers.add(follower)
        stop = self._events.listen(follower.queue)
        try:
            while (item := await follower.next()) is not None:
                (first, *more), lost = item
                yield pb.EventReply(json=first, lost=lost, more=more)
        finally:
            stop()
            follower.end()
            self._followers.discard(follower)

    async def _results(self, node: ControlledNode, request: pb.ResultsRequest) -> AsyncGenerator[pb.ResultChunk, None]:
        found = await node.results()
        await self._events.wait_until_kept()
        for result in found:
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
                    log_bytes=[len(block) for block in result.log],
                    lasted_s=result.lasted_s,
                )
            )
            parts = (memoryview(value.meta), *value.buffers) if value else ()
            for part in (*parts, *[memoryview(block) for block in result.log]):
                for start in range(0, part.nbytes, _CHUNK_BYTES):
                    yield pb.ResultChunk(data=bytes(part[start : start + _CHUNK_BYTES]))
            for rows in _row_chunks(result.reports):
                yield pb.ResultChunk(reports=rows)

    async def _clock(self, node: ControlledNode, request: pb.ClockRequest) -> pb.ClockReply:
        return pb.ClockReply(at_ns=clock(), host_key=self._host_key)

    async def _trace(
        self, node: ControlledNode, requests: AsyncIterator[pb.TraceRequest]
    ) -> AsyncGenerator[pb.TraceChunk, None]:
        call = asyncio.current_task()
        assert call is not None
        self._traces.add(call)
        over = False
        try:
            async with contextlib.aclosing(stream_spans(node, self._events, requests, self._end)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    over = chunk.over
            if over:
                await asyncio.sleep(_READ_S)  # the client ends the call after the last span
        finally:
            self._traces.discard(call)


class _TokenGate(grpc.GenericRpcHandler):
    """Checks a call's token as soon as its head arrives, so that a client without token cannot keep a connection."""

    def __init__(self, methods: grpc.GenericRpcHandler, credential: bytes, refusals: RefusalLog) -> None:
        self._methods = methods
        self._credential = credential
        self._refusals = refusals

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns gRPC's handler of a call: that of its method, or one that refuses it for its token."""
        token = next((v for k, v in details.invocation_metadata or () if k == TOKEN_KEY), b"")
        if hmac.compare_digest(token if isinstance(token, bytes) else token.encode(), self._credential):
            return self._methods.service(details)
        text = "a call with a wrong token" if token else "a call without a token"

        async def refuse(requests: object, context: Any) -> None:
            self._refusals.add(context.peer(), text)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's token is missing or wrong")

        return grpc.stream_stream_rpc_method_handler(refuse)  # this kind begins before there is any request


class _EventSubscriber:
    """One caller of Events: queues the events that the caller has not received yet."""

    def __init__(self) -> None:
        self._queue: deque[Event] = deque()  # bounded by `take`
        self._dropped = 0
        self._ended = False
        self._wake = asyncio.Event()  # set when something has to be sent now
        self._loop = asyncio.get_running_loop()
        self._sent_at = -_PACE_S
        self._timer: asyncio.TimerHandle | None = None

    def queue(self, event: Event) -> None:
        """Queues an event for the stream. If the follower reads too slowly, the oldest events are dropped."""
        if len(self._queue) >= _QUEUE:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(event)
        if not event.transient:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._sent_at + _PACE_S, self._wake.set)

    def end(self) -> None:
        """Makes the stream end after the events that are queued."""
        self._ended = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()

    async def next(self) -> tuple[list[str], int] | None:
        """Waits for the next events, and returns them as JSON with the number dropped before them; None: the stream
        ends.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._queue:
                break
            if self._ended:
                return None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sent_at = self._loop.time()
        found: list[str] = []
        size, lost, self._dropped = 0, self._dropped, 0
        while self._queue and size < _REPLY_BYTES:
            found.append(self._queue.popleft().to_json())
            size += len(found[-1])
        if self._queue or self._ended:
            self._wake.set()
        return found, lost


def _server_options() -> list[tuple[str, int]]:
    """Returns gRPC's options: limits for strangers on connections, on their silence and on the size of requests."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < _CONNECTIONS * _SHARE_OF_FILES
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_allowed_incoming_connections", files // _SHARE_OF_FILES if few else _CONNECTIONS),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.max_receive_message_length", 64 << 10),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.max_connection_idle_ms", _SILENT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
    ]


def _bind_unix(server: grpc.aio.Server, path: Path) -> None:
    _bind(server, f"unix:{path}", None)
    os.chmod(path, 0o600)


def _bind_tcp(server: grpc.aio.Server, host: str, ports: Sequence[int], tls: Tls | None) -> int:
    """Binds to the first of these ports that is free; returns the port."""
    for port in ports:
        if not is_port_free(host, port):  # also raises with the reason, which gRPC does not give
            continue
        try:
            return _bind(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tls)
        except TransportError:
            if not port or is_port_free(host, port):
                raise
    raise no_free_port_error(host, ports)


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    try:
        if tls is not None:
            return server.add_secure_port(address, tls.server_credentials())
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise TransportError(f"the control service cannot listen on {address}: {error}") from error
    return port


def _status_reply(status: NodeStatus) -> pb.StatusReply:
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
        memory_bytes=status.usage.memory_bytes,
        files=status.usage.files,
        threads=status.usage.threads,
        coroutines=status.usage.coroutines,
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
        queues=[
            pb.Queue(
                name=q.name,
                kind=q.kind,
                pieces=q.pieces,
                passes=-1 if q.passes is None else q.passes,
                left=q.left,
                set_aside=q.set_aside,
                counts=[pb.Pass(**counts._asdict()) for counts in q.counts],
                slow=[pb.SlowPiece(**slow._asdict()) for slow in q.slow],
                rows_per_s=q.rows_per_s,
            )
            for q in status.queues
        ],
    )


def _to_bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _with_digest(
    chunks: Callable[[ControlledNode, Any], AsyncGenerator[pb.ResultChunk, None]],
) -> Callable[[ControlledNode, Any], AsyncGenerator[bytes, None]]:
    """Adds to a stream of results a last message with its digest: without TLS, damaged bytes may parse as a message."""

    async def stream(node: ControlledNode, request: Any) -> AsyncGenerator[bytes, None]:
        whole = xxhash.xxh3_128()
        async with contextlib.aclosing(chunks(node, request)) as found:
            async for chunk in found:
                whole.update(data := _to_bytes(chunk))
                yield data
        yield _to_bytes(pb.ResultChunk(digest=whole.digest()))

    return stream


def _row_chunks(reports: tuple[ReportRow, ...]) -> Iterator[list[pb.ReportRow]]:
    """Yields the rows of all reports in lists of about `_CHUNK_BYTES`."""
    rows: list[pb.ReportRow] = []
    size = 0
    for report in reports:
        row = pb.ReportRow(
            epoch=report.epoch, task=report.task, names=report.numbers.keys(), numbers=report.numbers.values()
        )
        rows.append(row)
        size += row.ByteSize()
        if size >= _CHUNK_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows
