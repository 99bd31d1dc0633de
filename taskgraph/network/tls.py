"""Mutual TLS between nodes, and between a node and its clients: three files, and the contexts made of them.

Both sides show a certificate, and both require that the one authority in `ca` signed it: the system's authorities do
not count. Between nodes, TLS 1.3 only. Files are read again when they changed, so that the next connection uses renewed
certificates, also to a node's control service.

Nothing here knows what travels inside.
"""

from __future__ import annotations

import codecs
import ipaddress
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import grpc

from taskgraph.errors import TransportError
from taskgraph.network.certificates import Validity, unfit_for_grpc, validities

__all__ = ["CA", "CERT", "KEY", "Tls", "advice", "channel_binding", "check_listener", "load_files", "read_pem"]

log = logging.getLogger("taskgraph.network.tls")

#: What the files are called in a directory.
CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"

_OF_ANOTHER_TIME = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_OF_ANOTHER_AUTHORITY = (7, 18, 19, 20, 21)
"""OpenSSL's X509_V_ERR_CERT_SIGNATURE_FAILURE, and its errors for a chain that ends at no authority in ca.pem."""
_OF_ANOTHER_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_AGAIN_S = 60.0
"""When to read a file again that could not be read, even if it did not change: the process may have lacked a file
descriptor."""
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Tls:
    """The certificate of a node or a client, and the authority that others must have.

    Args:
        ca: PEM file of the authority whose certificates are accepted.
        cert: PEM file of our certificate, with intermediates if there are any; used as a server's and as a client's.
        key: PEM file of its private key, not encrypted.
        name: the name that the certificates of all nodes must have; "": each must have the name of its host.
    """

    def __init__(self, ca: str | Path, cert: str | Path, key: str | Path, name: str = "") -> None:
        self.ca, self.cert, self.key = Path(ca), Path(cert), Path(key)
        self.name = name
        self._contexts: dict[bool, ssl.SSLContext] = {}
        self._read = (b"", b"", b"")  # the files' contents, in this order, when the contexts were made
        self._stamp: _Stamp = ()
        self._again_at = math.inf

    @staticmethod
    def of(given: Mapping[str, str]) -> Tls | None:
        """Makes a `Tls` of `{"ca": ..., "cert": ..., "key": ...}`, perhaps with a "name"; None of an empty mapping."""
        return Tls(given["ca"], given["cert"], given["key"], given.get("name", "")) if given else None

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Returns the context of one side; reads renewed files.

        Raises:
            TransportError: a file cannot be used. If it could be used before, the former context stays, and the log
                says why: certificates are renewed file by file.
        """
        stamp = self._file_states()
        if stamp != self._stamp or time.monotonic() >= self._again_at:
            self._again_at = math.inf
            try:
                contexts = {side: self._make_context(server=side) for side in (False, True)}
                self._read = (read_pem(self.ca), read_pem(self.cert), read_pem(self.key))
                self._contexts = contexts
            except TransportError as error:
                if not self._contexts:
                    raise
                # The log says it once for each change, and each minute: every connection comes here.
                self._again_at = time.monotonic() + _AGAIN_S
                log.warning("%s; going on with the files of before", error)
            self._stamp = stamp
        return self._contexts[server]

    def _file_states(self) -> _Stamp:
        """Returns the state of the files, which changes once a file was renewed, added or removed."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self.ca, self.cert, self.key):
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                # Other permissions change the time. A file that is written in place may grow within one tick of the
                # clock: the size shows it.
                found.append((status.st_ctime_ns, status.st_ino, status.st_size))
        return tuple(found)

    def _make_context(self, *, server: bool) -> ssl.SSLContext:
        """Makes a context of one side from the files. Raises TransportError if one of them cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The hello proves the node, and is bound to the connection (`channel_binding`); a host's name would prove less:
        # several nodes share a host. A fixed name keeps out what the same authority signed for others.
        context.check_hostname = bool(self.name) and not server
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # nodes resume no sessions: they keep connections open
        ca, cert, _ = (read_pem(path) for path in (self.ca, self.cert, self.key))
        load_files(context, self.ca, self.cert, self.key)
        if why := unfit_for_grpc(ca, cert):
            raise _unusable(self.cert, why)
        return context

    def check(self, host: str) -> None:
        """Makes a TLS handshake with itself in memory, to check that peers will accept our certificate for `host`.

        So a node with a wrong certificate says so when it starts, not each node that dials it. A fixed `name` counts in
        place of the host.

        Raises:
            TransportError: the certificate was not signed by our authority, is expired, is not for servers or not for
                clients, has a key that gRPC does not take, or does not have the name.
        """
        client_context = self._make_context(server=False)
        client_context.check_hostname = True
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context.wrap_bio(to_client, to_server, server_hostname=self.name or host)
        server = self._make_context(server=True).wrap_bio(to_server, to_client, server_side=True)
        try:
            for side in (client, server, client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:  # the other side's turn
                    continue
        except ssl.SSLError as error:
            raise _unusable(self._refused_file(error), _reason_text(error) + self._name_advice(error, host)) from error

    def _name_advice(self, error: ssl.SSLError, host: str) -> str:
        """Returns what to do about a certificate for another name; "" for other errors."""
        if "mismatch" not in str(error):
            return ""
        if not self.name:
            return f"; others reach this node as {host!r}"
        return f"; --tls-name {self.name} requires it: `taskgraph certs DIR --host {self.name}` makes such certificates"

    def _refused_file(self, error: ssl.SSLError) -> Path:
        """Finds which file was refused, `ca` or `cert`: OpenSSL has one error for both if one of them has expired."""
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OF_ANOTHER_TIME:
            authority, _ = validities(read_pem(self.ca), read_pem(self.cert))
            if authority is not None and not authority.begins <= time.time() < authority.ends:
                return self.ca
        return self.cert

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a gRPC server, which asks before each handshake for renewed files.

        It gets new ones only if they were renewed. That gRPC replaces its files is not safe (grpcio 1.66 to 1.85): a
        handshake that begins in the same microseconds may use freed memory, and servers that got the same files at each
        handshake crashed soon.
        """
        files = Tls(
            self.ca, self.cert, self.key, self.name
        )  # its own state: gRPC asks in threads of its own, one by one
        used = files.context(server=True)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            if (now := files.context(server=True)) is used:
                return None
            used = now
            return files._configuration()

        # gRPC allows None, unlike its types.
        ask = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(files._configuration(), ask, require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """Returns the files that were read last, for a gRPC server."""
        ca, cert, key = self._read
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for a gRPC client, which also checks the name in the server's certificate."""
        self.context(server=False)  # raises for unusable files; gRPC would not
        ca, cert, key = self._read
        return grpc.ssl_channel_credentials(ca, key, cert)

    def channel_options(self) -> list[tuple[str, str]]:
        """Returns options of gRPC for a client: the name to check, if it is not the host's."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []

    def validity(self) -> dict[Path, Validity]:
        """Returns when the certificates in use are valid, by file: ours, and its authority's."""
        self.context(server=True)
        ca, cert, _ = self._read
        found = zip((self.ca, self.cert), validities(ca, cert), strict=True)
        return {path: validity for path, validity in found if validity is not None}


def load_files(context: ssl.SSLContext, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Loads an authority, and a certificate with its key, into a context; None: leaves it out.

    Raises:
        TransportError: a file cannot be used.
    """
    try:
        if ca is not None:
            context.load_verify_locations(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(ca, _reason_text(error)) from error
    if cert is None:
        return
    try:
        context.load_cert_chain(cert, key, password="")  # else OpenSSL asks for it on the terminal
    except (OSError, ssl.SSLError) as error:
        raise _unusable_pair(cert, key or cert, error) from error


def read_pem(path: Path) -> bytes:
    """Reads a PEM file without the mark that some editors put before UTF-8: gRPC does not accept the mark.

    Raises:
        TransportError: it cannot be read.
    """
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise _unusable(path, _reason_text(error)) from error


def _unusable_pair(cert: Path, key: Path, error: OSError) -> TransportError:
    """Makes the error for a certificate and its key. Finds out which of them is wrong: OpenSSL often does not say."""
    for path, what in ((cert, "CERTIFICATE"), (key, "PRIVATE KEY")):
        found = read_pem(path)
        if f"{what}-----".encode() not in found:
            return _unusable(path, f"there is no {what.lower()} in it, as PEM")
    if b"ENCRYPTED" in found:
        return _unusable(key, f"it is encrypted; `openssl pkey -in {key} -out FILE` writes it without a password")
    return _unusable(f"{cert} and {key}", _reason_text(error))


def _unusable(what: object, why: str) -> TransportError:
    return TransportError(f"the TLS file {what} cannot be used: {why}")


def advice(error: Exception) -> str:
    """Returns what to do about a refused certificate of a peer, to be put after the error; "" for other errors."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return ""
    if error.verify_code in _OF_ANOTHER_TIME:
        return ": look at this host's clock, and at the other's certificate"
    if error.verify_code in _OF_ANOTHER_AUTHORITY:
        return ": give all hosts certificates of one authority, and the same ca.pem"
    if error.verify_code in _OF_ANOTHER_NAME:
        return ": give all hosts certificates for that name, and the same --tls-name"
    return ""


def _reason_text(error: OSError) -> str:
    """Returns the reason in an error of OpenSSL or of the system, as text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error)


def channel_binding(connection: ssl.SSLObject | None) -> bytes:
    """Returns a value that both ends of a TLS connection know, and that no two connections share; b"" without TLS.

    It is the dialler's Finished message, a MAC over the whole handshake. A node in the middle, even with a certificate
    of the same authority, has two connections with two different values.

    Raises:
        TransportError: the TLS library does not know it.
    """
    if connection is None:
        return b""
    found = connection.get_channel_binding("tls-unique")
    if not found:
        raise TransportError("TLS without a channel binding")
    return found


def check_listener(host: str, tls: bool, insecure: bool) -> None:
    """Refuses to listen beyond loopback without TLS.

    Raises:
        TransportError: says what to do.
    """
    if not host or tls or insecure or _is_loopback(host):
        return
    raise TransportError(
        f"refusing to listen on {host} without TLS: others on that network could read and change what nodes send. "
        f"Give --tls DIR (`taskgraph certs DIR --host {host}` makes the files), or --insecure-listen if you trust it"
    )


def _is_loopback(host: str) -> bool:
    """Returns True if all addresses of a host are loopback's. Raises TransportError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise TransportError(f"cannot listen on {host}: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
