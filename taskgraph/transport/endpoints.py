"""Sockets of endpoints (`taskgraph.protocol.reach`): listening, and connecting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import ipaddress
import os
import platform
import resource
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from taskgraph.errors import PeerGone, PeerLost, TransportError
from taskgraph.protocol.reach import tcp_address, unix_socket
from taskgraph.settings import Settings

__all__ = [
    "can_dial",
    "connect",
    "descriptor_limit",
    "handed_over",
    "host_key",
    "is_port_free",
    "listen_tcp",
    "listen_unix",
    "no_free_port_error",
    "peer_pid",
    "tcp_endpoint",
    "tune_tcp",
    "unix_endpoint",
]

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid
_MANY = 1 << 20

#: The limit of the kernel is 108 on Linux and 104 on macOS, with the closing zero.
MAX_UNIX_PATH = 100
#: Connections that wait in the kernel while the event loop is busy. Linux limits it to net.core.somaxconn.
BACKLOG = 1024
_UNIX_RETRY_S = 0.01


@functools.cache
def host_key() -> str:
    """Returns the key of this host. Processes with the same key (kernel, file system, user) can share unix sockets."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # only Linux has these two
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/mnt"))
    root = os.stat("/")
    parts.append(f"{root.st_dev} {root.st_ino}")
    host = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{host}.{os.geteuid()}"


def unix_endpoint(path: Path) -> str:
    """Returns the endpoint of a unix socket of this host."""
    return f"unix:{host_key()}:{path}"


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def can_dial(endpoint: str) -> bool:
    """True if the endpoint is of a kind that this process can dial: TCP, or a unix socket of this host and user."""
    return unix_socket(endpoint)[0] == host_key() or endpoint.startswith("tcp:")


# Listening.


def listen_unix(folder: Path, name: str) -> tuple[socket.socket, Path]:
    """Listens on a unix socket in `folder`, which is created if it is missing and must be private; returns the socket
    and its path.

    Raises:
        TransportError: the path is too long, or other users may enter the folder.
    """
    path = folder.absolute() / name
    if len(os.fsencode(path)) >= MAX_UNIX_PATH:
        raise TransportError(
            f"the unix socket's path {path} has {len(os.fsencode(path))} bytes, {MAX_UNIX_PATH - 1} are allowed: "
            "choose a folder with a shorter path"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TransportError(f"the folder for unix sockets, {folder}, must belong to this user alone (mode 0700)")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # node ids are never used again: an old file has no owner
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener, path


def listen_tcp(host: str, ports: Sequence[int]) -> socket.socket:
    """Listens on the first free port. Port 0 means any.

    Raises:
        TransportError: the address cannot be used, or no port is free.
    """
    for port in ports:
        if (listener := _listen_at(host, port)) is not None:
            return listener
    raise no_free_port_error(host, ports)


def is_port_free(host: str, port: int) -> bool:
    """True if `listen_tcp` would get the port now. Raises TransportError if the address cannot be used."""
    if (listener := _listen_at(host, port)) is not None:
        listener.close()
    return listener is not None


def no_free_port_error(host: str, ports: Sequence[int]) -> TransportError:
    return TransportError(
        f"cannot listen on {host}: its ports {min(ports)}-{max(ports)} are all taken, and a node takes two: give it a "
        f"wider range of --ports"
    )


def _listen_at(host: str, port: int) -> socket.socket | None:
    """Listens on one port. Returns None if the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return None
        raise TransportError(f"cannot listen on {host} port {port or '(any)'}: {error}") from error
    return listener


# Connecting.


def peer_pid(sock: socket.socket | None) -> int:
    """Returns the id of the process at the other end of a unix socket; 0: not a unix socket, of another user, or not
    visible here."""
    if sock is None or sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid if uid == os.geteuid() else 0


def descriptor_limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft


def tune_tcp(sock: socket.socket, settings: Settings) -> None:
    """Sets the options of a TCP socket: the kernel sends small frames at once, and detects a cut network.

    The kernel of the peer answers keep-alive probes even if the process is stopped or busy; then its lease decides.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, round(settings.ping_s))
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)  # the latter on macOS
    if idle is not None:
        sock.setsockopt(socket.IPPROTO_TCP, idle, every_s)
    if hasattr(socket, "TCP_KEEPINTVL"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    if hasattr(socket, "TCP_KEEPCNT"):
        count = max(1, min(127, round(settings.ping_timeout_s / every_s)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # For data that is not acknowledged: the kernel would retry for a quarter of an hour.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.ping_timeout_s * 1000))


async def connect(endpoint: str, settings: Settings) -> socket.socket:
    """Returns a connected, non-blocking socket. The caller limits the time.

    Raises:
        PeerGone: the port refuses, or there is no socket file.
        PeerLost: any other failure.
    """
    try:
        _, path = unix_socket(endpoint)
        return await (_connect_unix(path) if path else _connect_tcp(endpoint, settings))
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise PeerGone(f"{endpoint}: it refuses connections ({error.strerror or error})") from error
    except OSError as error:
        raise PeerLost(f"{endpoint}: {error}") from error


@contextlib.contextmanager
def handed_over(sock: socket.socket) -> Iterator[None]:
    """Hands a connected socket over to the event loop in this block; the loop closes it from then on.

    uvloop closes the descriptor and detaches it from the socket, except if the connection breaks in the turn in which
    it is made. Then the garbage socket would close the same number again, which may belong to another file by then.
    """
    try:
        yield
    finally:
        if isinstance(asyncio.get_running_loop(), uvloop.Loop):  # nodes use a subclass
            sock.detach()


async def _connect_unix(path: str) -> socket.socket:
    """Connects to a unix socket; tries again while its queue of connections is full."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)  # a local connect does not wait
            return sock
        except BlockingIOError:  # the backlog is full; there is no event for its end
            sock.close()
            await asyncio.sleep(_UNIX_RETRY_S)
        except BaseException:
            sock.close()
            raise


async def _addresses(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Returns (family, address) of each address of a host."""
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(entry[0], entry[4]) for entry in found]


async def _connect_tcp(endpoint: str, settings: Settings) -> socket.socket:
    """Connects to the first address of a TCP endpoint that answers."""
    host, port = tcp_address(endpoint)
    if not host or not port.isdigit():
        raise PeerLost(f"{endpoint!r} is not an endpoint: it should read tcp:host:port")
    failures: list[OSError] = []
    addresses = await _addresses(host, int(port))
    for number, (family, address) in enumerate(addresses, start=1):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no IPv6 in this kernel
            failures.append(error)
            continue
        # An address that does not answer leaves the other addresses their share of the time.
        limit = asyncio.timeout(settings.connect_s / len(addresses) if number < len(addresses) else None)
        try:
            sock.setblocking(False)
            tune_tcp(sock, settings)
            async with limit:
                await asyncio.get_running_loop().sock_connect(sock, address)
            if sock.getsockname() == sock.getpeername():
                # To dial a free port of the own host, the kernel may choose the same port as the source.
                raise ConnectionRefusedError("the connection led back to itself")
            return sock
        except OSError as error:
            sock.close()
            failures.append(TimeoutError(f"{address[0]} does not answer") if limit.expired() else error)
        except BaseException:
            sock.close()
            raise
    # Refused only if all addresses refuse. Otherwise another error says that it is not known.
    raise next((f for f in failures if not isinstance(f, ConnectionRefusedError)), failures[0])
