"""The transport between processes: unix sockets on one host, TCP between hosts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import math
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from taskgraph.device import shared
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import PeerGone, PeerLost, TransportError
from taskgraph.graph.values import copy_to_host
from taskgraph.network.listening import ANY_PORT
from taskgraph.network.tls import Tls, advice, check_listener
from taskgraph.protocol.messages import Call, Encoded, Pull, Reply
from taskgraph.settings import Settings
from taskgraph.system.files import remove_file
from taskgraph.system.host import memory_bytes
from taskgraph.transport import endpoints
from taskgraph.transport.accepting import CLOSE_S, TlsListener
from taskgraph.transport.api import OnLost, Peer, PendingReply, Serve
from taskgraph.transport.calls import OpenCall, OwnedTasks, answer_now, call_self, describe, try_answer_all_now
from taskgraph.transport.hello import DiallerHello, ListenerHello
from taskgraph.transport.incoming import Digesting
from taskgraph.transport.mappings import Mappings
from taskgraph.transport.refusals import RefusalLog
from taskgraph.transport.segments import Pool
from taskgraph.transport.session import VERIFY_AT_ONCE_BYTES, Session
from taskgraph.transport.sides import AcceptedSession, DialledSession

__all__ = ["StreamTransport"]

log = logging.getLogger("taskgraph.transport")

MIN_TOKEN_BYTES = 16
#: Connections without a hello. The oldest is closed beyond that: an honest hello takes a millisecond.
MAX_STRANGERS = 256
#: How long `close` waits for peers to read.
_FLUSH_S = 1.0
_VERIFY_THREADS = 2
#: Threads that wait for a device.
_STAGING_THREADS = 2
#: Pauses before dialling again after a connection broke during the hello.
_DIAL_AGAIN_S = (0.005, 0.02, 0.05)


#: How often idle memory and stuck sessions are looked for.
_TRIM_S = 2.0
_LEAST_IDLE_BYTES = 256 << 20


class _Listener(Protocol):
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


T = TypeVar("T")


_CLOSED_ERRORS = (errno.ECONNRESET, errno.ENOTCONN)
"""Errors of a connection whose listener ended at the same time."""


_LIKELY_CAUSES = (
    "the network drops large packets (the MTU of a tunnel or VPN), a proxy answers in its place, or its process is "
    "stopped"
)


class _DialStep(Enum):
    """A step of dialling. Its value is the text of the error if it times out, with likely causes."""

    CONNECTION = "no connection within {}"
    HANDSHAKE = f"connected, but the TLS handshake did not end within {{}}: {_LIKELY_CAUSES}"
    HELLO_IN_TLS = f"connected with TLS, but no hello came within {{}}: {_LIKELY_CAUSES}"
    HELLO = "connected, but no hello came within {}: another program listens there, or its process is stopped"


class _DialProgress:
    """How far the dialling of a peer has come, for the error of a timeout.

    Attributes:
        endpoint: the endpoint that is tried.
        awaited: the step that has not ended yet.
        connected: a connection to any endpoint was made.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.awaited = _DialStep.CONNECTION
        self.connected = False

    def try_endpoint(self, endpoint: str) -> None:
        """Notes which endpoint is tried now."""
        self.endpoint, self.awaited = endpoint, _DialStep.CONNECTION

    def reach(self, awaited: _DialStep) -> None:
        """Notes that a connection was made, and which step is awaited now."""
        self.awaited, self.connected = awaited, True

    def describe_timeout(self, limit_s: float) -> str:
        """Returns the text of a timeout: which step did not end, and likely causes."""
        return f"{self.endpoint}: {self.awaited.value.format(f'{limit_s:g} s')}"


class _LostInHello(PeerLost):
    """The connection broke during the hello."""


def _max_idle_bytes() -> int:
    """Returns how much idle memory a process keeps for its next values: little, since a host runs several nodes."""
    return max(_LEAST_IDLE_BYTES, memory_bytes() // 32)


def _run_logged(work: Callable[[], None]) -> None:
    """Calls a function that frees memory of a device; logs its error."""
    try:
        work()
    except Exception:  # tasks meet errors of the device themselves
        log.exception("memory of a device cannot be freed")


class _OwnCall(OpenCall):
    """The future of a node's call to itself.

    Attributes:
        calls: the pending calls of the node to itself, with their pending replies.
    """

    __slots__ = ("calls",)
    calls: dict[_OwnCall, PendingReply]

    def on_reply(self, _: int, reply: Reply) -> None:
        """Settles the call with the node's own reply."""
        if self.calls.pop(self, None) is not None:  # else cancelled
            self.settle(reply)

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        if (reply := self.calls.pop(self, None)) is not None:
            reply.cancel()
        self._call_listener_soon()
        return True


async def _not_started(caller: str, call: Call) -> Reply:
    raise TransportError("the transport is not started")


class StreamTransport:
    """Calls over sockets; see `taskgraph.transport.api.Transport`.

    Args:
        settings: limits and timeouts.
        token: the secret of the job, at least 16 random bytes.
        job: the name of the job. Nodes of other jobs are refused.
        verify: checks the digest of a received value; called in a thread for large values.
        digesting: begins the digest of a value while its buffers arrive.
        unix_dir: the folder for the unix socket of this node, created with mode 0700; None: no unix socket.
        tcp_host: the address to listen on; None: no TCP.
        tcp_ports: the ports to try in order; 0 means any free port.
        advertise: the host name or address of `tcp_host` for other nodes; required if it is a wildcard.
        tls: for TCP, in both directions; unix sockets need none.
        insecure: allows to listen without TLS on addresses other than loopback.
    """

    def __init__(
        self,
        settings: Settings,
        token: bytes,
        *,
        job: str,
        verify: Callable[[Encoded], bool],
        digesting: Digesting | None = None,
        unix_dir: Path | None = None,
        tcp_host: str | None = "127.0.0.1",
        tcp_ports: Sequence[int] = ANY_PORT,
        advertise: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        if len(token) < MIN_TOKEN_BYTES:
            raise ValueError(f"a token of {len(token)} bytes; it needs at least {MIN_TOKEN_BYTES}")
        if unix_dir is None and tcp_host is None:
            raise ValueError("neither unix_dir nor tcp_host: other nodes could not reach this node")
        if tcp_host in ("0.0.0.0", "::", "") and advertise is None:
            raise ValueError(f"listening on {tcp_host!r} needs advertise=: the address that others dial")
        self._settings = settings
        self._token = token
        self._job = job
        self.verify_now = verify
        self.digesting = digesting
        self._unix_dir = unix_dir
        self._tcp_host = tcp_host
        self._tcp_ports = tcp_ports
        self._advertise = advertise
        self._tls = tls
        self._insecure = insecure

        self.tasks = OwnedTasks()
        self._own_calls: dict[_OwnCall, PendingReply] = {}  # to this node itself
        self.serve: Serve = _not_started
        self.max_value_bytes = settings.max_value_bytes
        self._node = ""
        self._on_lost: OnLost = lambda node: None
        self._endpoints: tuple[str, ...] = ()
        self._servers: list[_Listener] = []
        self._socket_file: Path | None = None
        self._connections: dict[Session, asyncio.Future[None]] = {}  # done when the socket is closed
        self._strangers: dict[Session, None] = {}  # accepted, without a hello, oldest first
        self._open: dict[str, set[Session]] = {}
        self._dialled: dict[str, DialledSession] = {}
        self.returning: dict[str, Session] = {}
        self._dials: dict[str, asyncio.Task[DialledSession]] = {}
        self._refusals: RefusalLog | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._staging: ThreadPoolExecutor | None = None
        descriptors = endpoints.descriptor_limit()
        self._pool = Pool(max_segments=min(descriptors // 8, 1024), max_idle_bytes=_max_idle_bytes())
        self.allocate = self._pool.allocate
        self.mappings = Mappings(limit=min(descriptors // 8, 1024))
        self._trimming: asyncio.TimerHandle | None = None
        self._state = "not started"

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._endpoints

    # Life.

    async def start(self, node: str, serve: Serve, on_lost: OnLost) -> None:
        """Begins to listen, and passes calls of other nodes to `serve`.

        Raises:
            TransportError: the node cannot listen, the folder is not private, the path is too long, the TLS files
                cannot be used, or the address is public and there is no TLS.
        """
        if self._state != "not started":
            raise RuntimeError(f"the transport is {self._state}")
        self._node, self.serve, self._on_lost = node, serve, on_lost
        self._state = "running"
        self._refusals = RefusalLog(log, asyncio.get_running_loop().time)
        try:
            await self._listen()
        except BaseException:
            await self.close()
            raise
        self._trim()

    def _trim(self) -> None:
        """Frees what was idle for long and ends stuck sessions, every `_TRIM_S`."""
        self._pool.trim()
        self.mappings.trim()
        checks = max(2, math.ceil(self._settings.ping_timeout_s / _TRIM_S))
        for session in list(self._connections):
            session.end_if_stuck(checks)
            session.trim()
        if shared.may_trim():
            self.in_thread_soon(shared.trim)
        self._trimming = asyncio.get_running_loop().call_later(_TRIM_S, self._trim)

    async def _listen(self) -> None:
        """Listens on the unix socket and on TCP, as configured; sets the endpoints."""
        loop = asyncio.get_running_loop()
        found = []
        if self._unix_dir is not None:
            self._socket_file = await self._listen_unix(self._unix_dir)
            found.append(endpoints.unix_endpoint(self._socket_file))
        if self._tcp_host is not None:
            check_listener(self._tcp_host or "0.0.0.0", self._tls is not None, self._insecure)
            if self._tls is not None:
                self._tls.context(server=True)  # fails early if its files cannot be used
            tcp = endpoints.listen_tcp(self._tcp_host, self._tcp_ports)
            host, port = tcp.getsockname()[:2]
            if self._tls is not None:
                self._servers.append(self._tls_listener(tcp, self._tls))
            else:
                self._servers.append(await loop.create_server(self._accept, sock=tcp))
            found.append(endpoints.tcp_endpoint(self._advertise or host, port))
        self._endpoints = tuple(found)

    async def _listen_unix(self, folder: Path) -> Path:
        name = hashlib.sha256(self._node.encode()).hexdigest()[:16]
        unix, path = endpoints.listen_unix(folder, name)
        self._servers.append(await asyncio.get_running_loop().create_unix_server(self._accept, sock=unix))
        return path

    @property
    def unreachable(self) -> bool:
        """True if another program removed the file of the unix socket, so that no new peer can connect to it."""
        return self._state == "running" and self._socket_file is not None and not self._socket_file.exists()

    async def listen_anew(self) -> None:
        """Listens on the unix socket again, and keeps its connections.

        Raises:
            OSError, TransportError: it cannot listen.
        """
        if self._state == "running" and self._unix_dir is not None:
            await self._listen_unix(self._unix_dir)

    def _tls_listener(self, tcp: socket.socket, tls: Tls) -> TlsListener:
        return TlsListener(
            tcp,
            tls,
            self._accept,
            self.tasks,
            handshake_s=self._settings.connect_s,
            limit=MAX_STRANGERS,
            on_refused=self._on_refused,
        )

    async def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        for server in self._servers:
            server.close()
        if self._socket_file is not None:
            remove_file(self._socket_file)
        for session in list(self._connections):
            session.goodbye()
        for reply in tuple(self._own_calls):
            reply.cancel()
        await self.tasks.close()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=_FLUSH_S)
        for session in list(self._connections):
            session.abort()
        if self._connections:
            await asyncio.wait(self._connections.values())
        for server in self._servers:
            await server.wait_closed()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._staging is not None:
            self._staging.shutdown(wait=False, cancel_futures=True)  # a device may be slow
        if self._trimming is not None:
            self._trimming.cancel()
        self._pool.close()
        self.mappings.close()

    # Calls.

    async def call(self, peer: Peer, message: Call, *, timeout_s: float | None = None) -> Reply:
        if timeout_s is None:
            return await self._call(peer, message)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(peer, message)
        except TimeoutError:
            raise PeerLost(f"no answer from node {peer.node} within {timeout_s} s to {describe(message)}") from None

    def call_now(self, peer: Peer, message: Call, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        if self._state != "running":
            return None
        if peer.node == self._node:
            return self._begin_own_call(message)
        session = self._dialled.get(peer.node)
        return session.begin(message, quiet=quiet) if session is not None and session.open else None

    def calls_now(self, peer: Peer, message: Pull) -> list[asyncio.Future[Reply]] | None:
        if self._state != "running":
            return None
        if peer.node == self._node:
            return self._begin_own_calls(message)
        session = self._dialled.get(peer.node)
        return session.begin_all(message) if session is not None and session.open else None

    def _begin_own_call(self, message: Call) -> asyncio.Future[Reply] | None:
        """Begins a call of the node to itself, and returns its future; None: `answer_now` could not answer."""
        reply = answer_now(self.serve, self._node, message)
        return None if reply is None else self._make_own_call(message, reply)

    def _begin_own_calls(self, message: Pull) -> list[asyncio.Future[Reply]] | None:
        """Begins the calls of a node's pull from itself, and returns their futures; None: not all could be answered."""
        replies = try_answer_all_now(self.serve, self._node, message)
        if replies is None:
            return None
        known = [reply for reply in replies if reply is not None]
        if len(known) == len(replies):
            return [self._make_own_call(message, reply) for reply in known]
        for reply in known:
            if isinstance(reply, PendingReply):
                reply.cancel()
        return None

    def _make_own_call(self, message: Call, reply: Reply | PendingReply) -> _OwnCall:
        """Returns the future of a node's call to itself, settled by `reply`: now, or as soon as that arrives."""
        call = _OwnCall(loop=asyncio.get_running_loop())
        call.calls, call.message, call.listener = self._own_calls, message, None
        if isinstance(reply, PendingReply):
            self._own_calls[call] = reply
            reply.listen(call.on_reply)
        else:
            call.settle(reply)
        return call

    async def _call(self, peer: Peer, message: Call) -> Reply:
        self._check_running()
        if peer.node == self._node:
            return await call_self(self.tasks, self.serve, self._node, message)
        session = self._dialled.get(peer.node)
        if session is None or not session.open:
            session = await self._get_session(peer)
        return await session.begin(message)

    def _check_running(self) -> None:
        if self._state != "running":
            raise PeerLost(f"this node's transport is {self._state}")

    async def probe(self, peer: Peer, *, timeout_s: float) -> None:
        self._check_running()
        if peer.node == self._node:
            return
        progress = _DialProgress()
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._dial(peer, progress, probe=True)
        except TimeoutError:
            raise PeerLost(
                f"node {peer.node}: {progress.describe_timeout(timeout_s)}", connected=progress.connected
            ) from None
        session.goodbye()

    # Dialling.

    async def _get_session(self, peer: Peer) -> DialledSession:
        """Dials a session for calls to `peer`, and returns it. Concurrent callers share it."""
        dial = self._dials.get(peer.node)
        if dial is None:
            dial = self.tasks.spawn(self._dial(peer, _DialProgress(), probe=False), name=f"dial {peer.node}")
            self._dials[peer.node] = dial
            dial.add_done_callback(lambda _: self._dials.pop(peer.node))
        await asyncio.wait((dial,))
        if dial.cancelled():
            raise PeerLost(f"dialling node {peer.node} was cancelled")
        error = dial.exception()
        if isinstance(error, (PeerGone, PeerLost)):
            raise type(error)(str(error)) from error  # an instance for each caller
        return dial.result()

    async def _dial(self, peer: Peer, progress: _DialProgress, *, probe: bool) -> DialledSession:
        """Tries the endpoints in order; returns the open session. Raises PeerGone only if all usable endpoints
        refuse.
        """
        gone, lost = [], []
        for endpoint in peer.endpoints:
            if not endpoints.can_dial(endpoint):
                continue
            progress.try_endpoint(endpoint)
            try:
                async with asyncio.timeout(self._settings.connect_s):
                    return await self._dial_patiently(peer, endpoint, progress, probe=probe)
            except PeerGone as error:
                gone.append(str(error))
            except PeerLost as error:
                lost.append(str(error))
            except TimeoutError:
                lost.append(progress.describe_timeout(self._settings.connect_s))
        if lost:
            raise PeerLost(f"node {peer.node}: {'; '.join(lost + gone)}", connected=progress.connected)
        if gone:
            raise PeerGone(f"node {peer.node}: {'; '.join(gone)}")
        raise PeerLost(f"node {peer.node} has no endpoint that can be used from here: {peer.endpoints}")

    async def _dial_patiently(
        self, peer: Peer, endpoint: str, progress: _DialProgress, *, probe: bool
    ) -> DialledSession:
        """Dials one endpoint, again if the connection breaks during the hello; returns the open session.

        A dying process loses its connections and its port at slightly different times. The caller should learn that
        the peer is gone, not only lost.
        """
        for pause_s in _DIAL_AGAIN_S:
            try:
                return await self._dial_endpoint(peer, endpoint, progress, probe=probe)
            except _LostInHello:
                await asyncio.sleep(pause_s)
        return await self._dial_endpoint(peer, endpoint, progress, probe=probe)

    async def _dial_endpoint(
        self, peer: Peer, endpoint: str, progress: _DialProgress, *, probe: bool
    ) -> DialledSession:
        """Connects to one endpoint, and returns its session after the hello.

        Raises:
            PeerGone: the port refuses, or another node listens there.
            PeerLost: no connection came about in time.
            _LostInHello: the connection broke before the hello was over.
        """
        loop = asyncio.get_running_loop()
        try:
            sock = await endpoints.connect(endpoint, self._settings)
        except PeerLost as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _CLOSED_ERRORS:
                raise _LostInHello(str(error)) from error
            raise
        hello = DiallerHello(self._token, self._job, self._node, probe=probe)
        session = DialledSession(self, hello, wanted=peer.node, hello_s=self._settings.connect_s)
        session.where = endpoint
        try:
            context = self._tls.context(server=False) if self._tls and sock.family != socket.AF_UNIX else None
            progress.reach(_DialStep.HELLO if context is None else _DialStep.HANDSHAKE)
            with endpoints.handed_over(sock):
                if sock.family == socket.AF_UNIX:
                    await loop.create_unix_connection(lambda: session, sock=sock)
                elif context is None:
                    await loop.create_connection(lambda: session, sock=sock)
                else:
                    await loop.create_connection(
                        lambda: session,
                        sock=sock,
                        ssl=context,
                        server_hostname=self._tls.name if self._tls is not None else "",  # the hello proves the node
                        ssl_handshake_timeout=self._settings.connect_s,
                        ssl_shutdown_timeout=CLOSE_S,
                    )
            if context is not None:
                progress.reach(_DialStep.HELLO_IN_TLS)
            await session.hello_done
        except PeerLost as error:
            if not session.cut_off:
                raise PeerLost(f"{endpoint}: {error}") from error
            hint = ""
            if session.encrypted:  # the dialler's handshake ends before the listener checks our certificate
                hint = " (it may not accept our certificate: see its log)"
            elif self._tls is None and endpoint.startswith("tcp:"):
                hint = " (perhaps it speaks TLS only: give --tls)"
            raise _LostInHello(f"{endpoint}: {error}{hint}") from error
        except OSError as error:
            sock.close()
            why = str(error)
            if self._tls is not None and endpoint.startswith("tcp:"):
                why = f"no TLS handshake: {why or 'its end closed the connection: was it started without TLS (--tls)?'}"
            lost = _LostInHello if error.errno == errno.ENOTCONN else PeerLost
            raise lost(f"{endpoint}: {why}{advice(error)}") from error
        except BaseException:
            session.abort()
            raise
        if session.peer != peer.node:
            session.goodbye()
            raise PeerGone(f"{endpoint}: node {session.peer} listens there now")
        return session

    # Accepting, and calls from sessions.

    def _accept(self) -> AcceptedSession:
        """Makes the session of an accepted connection."""
        hello = ListenerHello(self._token, self._job, self._node)
        return AcceptedSession(self, hello, hello_s=self._settings.connect_s)

    def on_connected(self, session: Session) -> None:
        self._connections[session] = asyncio.get_running_loop().create_future()
        if self._state != "running":
            session.abort()
        elif isinstance(session, AcceptedSession):
            session.tune(self._settings)
            self._strangers[session] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                oldest.end("too many connections without a hello")
                self._strangers.pop(oldest, None)
                oldest.abort()  # also if it ended, and its refusal was not read

    def on_opened(self, session: Session) -> None:
        self._strangers.pop(session, None)
        if session.probe:
            return
        if isinstance(session, DialledSession):
            if session.peer != session.wanted:
                return
            self._dialled[session.peer] = session
        self._open.setdefault(session.peer, set()).add(session)

    def on_ended(self, session: Session) -> None:
        if session in self._strangers:  # until its socket is closed
            self._on_refused(session.where, session.why)
        node = session.peer
        if isinstance(session, DialledSession) and self._dialled.get(node) is session:
            del self._dialled[node]
        if self.returning.get(node) is session:
            del self.returning[node]
        sessions = self._open.get(node)
        if sessions is None or session not in sessions:
            return
        sessions.discard(session)
        if not sessions:
            del self._open[node]
            if not session.clean and self._state == "running":
                log.info("lost node %s: %s", node, session.why)
                self._on_lost(node)

    def on_disconnected(self, session: Session) -> None:
        self._strangers.pop(session, None)
        closed = self._connections.pop(session, None)
        if closed is not None:  # else called before
            closed.set_result(None)

    def _on_refused(self, where: str, why: str) -> None:
        if self._refusals is not None and self._state == "running":
            self._refusals.add(where, why)

    async def copy_to_host(self, value: Encoded, *, but: Callable[[DeviceBuffer], bool]) -> Encoded:
        return await self.in_thread(partial(copy_to_host, value, allocate=self.allocate, but=but))

    def _staging_threads(self) -> ThreadPoolExecutor:
        if self._staging is None:
            self._staging = ThreadPoolExecutor(_STAGING_THREADS, thread_name_prefix="taskgraph-stage")
        return self._staging

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._staging_threads(), work)

    def in_thread_soon(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # shut down
            self._staging_threads().submit(_run_logged, work)

    async def verify(self, value: Encoded) -> bool:
        if value.size_bytes < VERIFY_AT_ONCE_BYTES:
            return self.verify_now(value)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="taskgraph-verify")
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self.verify_now, value)
        except RuntimeError:
            if self._state != "running":
                return False  # shut down: the session is closed
            # No thread can be started. The next value uses a new pool, since the queue of this one keeps the value.
            self._threads.shutdown(wait=False)
            self._threads = None
            return self.verify_now(value)
        return await work
