"""Options of a connection to etcd: endpoints, TLS, user. Creates gRPC channels from them."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.errors import CoordinationError, TransportError, Unavailable
from taskgraph.network import rpc
from taskgraph.network.tls import load_files, read_pem

__all__ = ["Endpoint", "EtcdOptions", "NoAddress"]

#: The reasons:
#: - keepalive: a connection whose peer vanished without a word (power, a dropped NAT entry) or is frozen is noticed
#:   in 15 s. etcd refuses clients that ping more often than every 5 s. It is the ping's own timeout that counts where
#:   the peer's kernel still acknowledges: measured, without it 60 s.
#: - reconnect backoff: gRPC's default grows to 120 s; a restarted etcd must be found within a second.
#: - min reconnect backoff is, in spite of its name, the limit of one attempt to connect. TCP, TLS and HTTP/2 take three
#:   to four round trips, and a satellite's is 0.6 s. `connection.py`, `lease.py` and `login.py` leave a silent member
#:   earlier, if there is another one.
#: - message sizes: a listing may be larger than gRPC's 4 MiB; etcd bounds what can be in it.
#: - http proxy: an `http_proxy` in the environment must not capture connections to etcd.
#: - local subchannel pool: the lease's connection must not be the one that bulk reads fill.
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 4_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


_MAX_PORT = 65535


class NoAddress(Unavailable):
    """The file that would have a member's address is not there, since the member does not run."""


_FILE = "file:"


class Endpoint(NamedTuple):
    """The address of an etcd member for gRPC, and whether to use TLS.

    With the target `file:/path` the address is the first word of that file, which is read for each new connection: so a
    member may move to another host. A second word is the name that the member's certificate has in place of its host's.
    """

    target: str
    tls: bool

    @property
    def file(self) -> Path | None:
        """The file that has the address; None: the target is the address."""
        return Path(self.target.removeprefix(_FILE)) if self.target.startswith(_FILE) else None

    def resolve(self) -> tuple[Endpoint, str]:
        """Returns the present address, read from the file if there is one, and the name in the member's certificate;
        "": its host's.

        Raises:
            NoAddress: the file is not there, or has no address.
        """
        if self.file is None:
            return self, ""
        try:
            words = self.file.read_text().split()
        except OSError as error:
            raise NoAddress(f"etcd does not run: {self.file} would have its address ({error.strerror})") from error
        if not words:
            raise NoAddress(f"{self.file} is empty, and would have etcd's address")
        return Endpoint.parse(words[0], tls_default=self.tls), words[1] if len(words) > 1 else ""

    @staticmethod
    def parse(text: str, *, tls_default: bool) -> Endpoint:
        """Parses `host:port`, `http://host:port`, `https://host:port`, `unix:/path` or `file:/path`."""
        stripped = text.strip()
        if stripped.startswith(_FILE):
            return Endpoint(f"{_FILE}{Path(stripped.removeprefix(_FILE)).absolute()}", tls_default)
        scheme, separator, rest = stripped.partition("://")
        if not separator:
            scheme, rest = "", stripped
        rest = rest.rstrip("/")
        if scheme == "unix" or stripped.startswith("unix:"):
            return Endpoint(stripped, tls_default)
        if scheme not in ("", "http", "https") or not rest or "/" in rest:
            raise CoordinationError(f"{text!r} is not an etcd endpoint; write host:port or https://host:port")
        if ":" not in rest.rpartition("]")[2]:
            rest = f"{rest}:2379"
        port = rest.rpartition(":")[2]
        if port.isdecimal() and int(port) > _MAX_PORT:  # gRPC would take it modulo 65536
            raise CoordinationError(f"{text!r} is not an etcd endpoint: there is no port {port}")
        return Endpoint(rest, tls_default if scheme == "" else scheme == "https")


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Options of a connection to an etcd cluster.

    Attributes:
        endpoints: members, tried in order. A member stays in use until it fails.
        timeout_s: the limit of one call with its retries.
        ca: PEM file of the authority that signed the members' certificates; None: the system's authorities.
        cert: PEM file of our client certificate, or None.
        key: PEM file of its private key, or None.
        username: the user, if etcd has authentication enabled.
        password: the user's password.
        password_file: a file whose first line is the current password; None: the password does not change.
    """

    endpoints: tuple[Endpoint, ...]
    timeout_s: float = 10.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None

    @staticmethod
    def make(
        endpoints: str | Sequence[str],
        *,
        timeout_s: float = 10.0,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        username: str | None = None,
        password: str | None = None,
        password_file: str | Path | None = None,
    ) -> EtcdOptions:
        """Checks and normalises a user's options.

        Args:
            endpoints: `host:port`, `https://host:port`, `file:/path`; several as a sequence or separated by commas.

        Raises:
            CoordinationError: an endpoint is missing or invalid, or a certificate has no key, or a user no password.
        """
        texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
        tls = ca is not None or cert is not None
        parsed = tuple(Endpoint.parse(text, tls_default=tls) for text in texts if text.strip())
        if not parsed:
            raise CoordinationError("no etcd endpoint given; write host:port, several separated by commas")
        if (cert is None) != (key is None):
            raise CoordinationError("a client certificate and its key belong together: give both or none")
        if (username is None) != (password is None):
            raise CoordinationError("etcd's user name and password belong together: give both or none")
        paths = [None if path is None else Path(path) for path in (ca, cert, key, password_file)]
        return EtcdOptions(parsed, timeout_s, paths[0], paths[1], paths[2], username, password, paths[3])

    def login_request(self) -> v3.AuthenticateRequest:
        """Returns a login request with the user and the current password."""
        return v3.AuthenticateRequest(name=self.username or "", password=self._current_password() or "")

    def _current_password(self) -> str | None:
        """Returns the password, from its file if that can be read; None: the options name no user."""
        if self.password_file is None:
            return self.password
        with contextlib.suppress(OSError, UnicodeDecodeError):  # it is being replaced at this moment
            lines = self.password_file.read_text().splitlines()
            if lines and lines[0]:
                return lines[0]
        return self.password

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns TLS credentials. Reads the files each time, so that renewed certificates are used.

        Raises:
            CoordinationError: a file is unusable. gRPC's own error would not name it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # etcd and gRPC decide how strong a key must be
        try:
            given = [None if path is None else read_pem(path) for path in (self.ca, self.key, self.cert)]
            load_files(context, self.ca, self.cert, self.key)
        except TransportError as error:
            raise CoordinationError(f"for etcd: {error}") from error
        return grpc.ssl_channel_credentials(
            root_certificates=given[0], private_key=given[1], certificate_chain=given[2]
        )

    def file_states(self, endpoint: Endpoint) -> tuple[object, ...]:
        """Returns a value that changes when a TLS file, or the file with the endpoint's address, is replaced."""
        found: list[object] = []
        for path in (self.ca, self.cert, self.key, endpoint.file):
            with contextlib.suppress(OSError):  # it is being replaced at this moment
                at = path.stat() if path is not None else None
                found.append((at.st_ino, at.st_mtime_ns, at.st_size) if at is not None else None)
        return tuple(found)

    def aio_channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        """Returns a gRPC channel for the running event loop.

        Raises:
            NoAddress: the file with the endpoint's address is not there.
        """
        at, name = endpoint.resolve()
        credentials = self.channel_credentials() if at.tls else None
        return rpc.aio_channel(at.target, credentials, _channel_options(name))

    def sync_channel(self, endpoint: Endpoint) -> grpc.Channel:
        """Returns a synchronous gRPC channel, for use in a thread; raises as `aio_channel` does."""
        at, name = endpoint.resolve()
        if at.tls:
            return grpc.secure_channel(at.target, self.channel_credentials(), _channel_options(name))
        return grpc.insecure_channel(at.target, _CHANNEL_OPTIONS)


def _channel_options(name: str) -> tuple[tuple[str, int | str], ...]:
    """Returns gRPC's options for a channel to a member whose certificate has this name."""
    return (*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else _CHANNEL_OPTIONS
