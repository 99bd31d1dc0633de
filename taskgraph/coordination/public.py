"""What an etcd needs that `embedded.py` starts for other hosts, and that may go on with its data on another host."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from taskgraph.errors import CoordinationError

__all__ = ["PublicEtcd", "address_of", "durability_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicEtcd:
    """An etcd that other hosts reach.

    Attributes:
        host: this host's name or address, as others reach it.
        data: the folder for its data, on a file system that all hosts see. The data survives the server, so writes are
            synced.
        tls: ca, cert and key files: clients need a certificate of the same authority; {}: without TLS.
        name: the name in the certificate, if it is not the host's.
    """

    host: str
    data: Path
    tls: Mapping[str, str]
    name: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def tls_options(self) -> list[str]:
        """Returns etcd's options for TLS."""
        if not self.tls:
            return []
        files = {"cert-file": "cert", "key-file": "key", "trusted-ca-file": "ca"}
        return ["--client-cert-auth", *(f"--{option}={self.tls[name]}" for option, name in files.items())]


def address_of(host: str) -> str:
    """Returns the address of this host that the name `host` has: etcd listens on addresses only.

    Raises:
        CoordinationError: the name has no address.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise CoordinationError(f"etcd cannot listen on {host}: {error.strerror}") from error


def durability_options(version: str) -> list[str]:
    """Returns the options that keep this version of etcd from losing acknowledged writes at a SIGKILL; []: needs none.

    etcd 3.5.0 to 3.5.2 may write to its store that an entry of the log was applied before it is (etcd's issue 13766):
    killed just then, it never applies it, and a member of a cluster disagrees with the others from then on. So the
    store is written when the log is cut, and not ten times a second: etcd applies all of the log since then again.
    """
    if not (3, 5, 0) <= tuple(int(part) for part in version.split(".")[:3]) < (3, 5, 3):
        return []
    return ["--backend-batch-interval", "1h", "--backend-batch-limit", "1000000"]
