"""certs: an authority and a certificate of it, for a test cluster. A real cluster has its own authority."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

from taskgraph.errors import JobError, TransportError
from taskgraph.network.certificates import validities
from taskgraph.network.tls import CA, CERT, KEY, Tls
from taskgraph.system.files import write_whole

try:
    import trustme
except ImportError as error:
    raise JobError("`taskgraph certs` needs the package trustme: `pip install 'taskgraph-aio[tls]'`") from error

__all__ = ["CA_KEY", "NewCertificate", "certs", "make_certs"]

#: The authority's private key: only `certs --ca` needs it.
CA_KEY = "ca-key.pem"
_BEFORE = datetime.timedelta(minutes=5)
"""A certificate is valid this long before it is made: clocks of a cluster differ a little."""
_MOST_DAYS = 3650


class NewCertificate(NamedTuple):
    """A certificate that was just written.

    Attributes:
        hosts: the names and addresses in it.
        end: when it ends.
        cut: it ends sooner than was asked for, with its authority.
    """

    hosts: list[str]
    end: datetime.datetime
    cut: bool


def certs(options: argparse.Namespace) -> int:
    """Writes the files and says what to do with them."""
    folder = Path(options.directory)
    made = make_certs(
        folder,
        options.host or (),
        days=options.days,
        authority=Path(options.ca) if options.ca else None,
        force=options.force,
    )
    print(f"wrote {CA}, {CERT} and {KEY} to {folder}: valid until {made.end:%Y-%m-%d}, for {', '.join(made.hosts)}")
    if made.cut:
        print(f"That is when the authority ends, before --days {options.days}; without --ca a new one is made")
    print(f"Copy these three to the hosts they are for, and give them to every node and client there: --tls {folder}")
    authority = options.ca or folder
    more = f"`taskgraph certs DIR --ca {authority} --host HOST`"
    print(f"Another host needs its own, which {Path(authority) / CA_KEY} makes ({more}); this key stays here")
    return 0


def make_certs(
    folder: Path, hosts: tuple[str, ...] | list[str] = (), *, days: int = 90, authority: Path | None = None, force: bool
) -> NewCertificate:
    """Writes a set for nodes and clients; private keys are readable by their owner only.

    Args:
        hosts: names and addresses that nodes are reached by, besides this host's name and loopback.
        days: how long the certificate is valid; not beyond its authority's end.
        authority: a directory with an authority that was made here before; None: a new one.
        force: overwrite existing files.

    Raises:
        JobError: files exist, or cannot be written or read; the authority has ended.
    """
    if not 1 <= days <= _MOST_DAYS:
        raise JobError(f"--days {days}: from 1 to {_MOST_DAYS}")
    now = datetime.datetime.now(datetime.UTC)
    names = list(dict.fromkeys([*map(_checked_host, hosts), *_own_names(), "localhost", "127.0.0.1", "::1"]))
    made = [CA, CERT, KEY] if authority is not None else [CA, CA_KEY, CERT, KEY]
    there = [name for name in made if (folder / name).exists()]
    if there and not force:
        raise JobError(f"{folder} has {', '.join(there)} already: name another directory, or overwrite with --force")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca = trustme.CA(path_length=0) if authority is None else _read_authority(authority)
        wanted = now + datetime.timedelta(days=days)
        end = min(wanted, _expiry(ca))
        if end <= now:
            raise JobError(
                f"--ca {authority}: that authority ended on {end:%Y-%m-%d}; make another with `taskgraph certs DIR`, "
                f"and give all hosts certificates of it"
            )
        cert = ca.issue_cert(*names, common_name="taskgraph node", not_before=now - _BEFORE, not_after=end)
        if authority is None:
            write_whole(folder / CA_KEY, ca.private_key_pem.bytes(), 0o600)
        write_whole(folder / KEY, cert.private_key_pem.bytes(), 0o600)
        write_whole(folder / CERT, cert.cert_chain_pems[0].bytes(), 0o644)
        write_whole(folder / CA, ca.cert_pem.bytes(), 0o644)
    except OSError as error:
        raise JobError(f"{error.filename or folder}: {error.strerror}") from error
    Tls(folder / CA, folder / CERT, folder / KEY).check(names[0])
    return NewCertificate(names, end, cut=wanted - end >= datetime.timedelta(days=1))


def _checked_host(text: str) -> str:
    """Returns the host. Raises JobError if it is no name or address, which a certificate needs."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if all(part and part.replace("-", "").isalnum() for part in text.removeprefix("*.").split(".")):
            return text
        raise JobError(f"--host {text!r} is neither a name nor an address") from None


def _own_names() -> list[str]:
    """Returns this host's name, unless it has an underscore, which no name in a certificate can have."""
    try:
        return [_checked_host(socket.gethostname())]
    except JobError:
        return []


def _expiry(ca: trustme.CA) -> datetime.datetime:
    """Returns when an authority's certificate ends."""
    pem = ca.cert_pem.bytes()
    found, _ = validities(pem, pem)
    assert found is not None, "trustme wrote it, or read it"
    return datetime.datetime.fromtimestamp(found.ends, datetime.UTC)


def _read_authority(folder: Path) -> trustme.CA:
    """Reads an authority that was made here. Raises JobError if its files are damaged, or do not fit."""
    cert, key = (folder / CA).read_bytes(), (folder / CA_KEY).read_bytes()
    try:
        ca = trustme.CA.from_pem(cert, key)
        Tls(folder / CA, folder / CA, folder / CA_KEY).context(server=True)
    except (ValueError, TypeError) as error:
        raise JobError(f"--ca {folder}: {CA} or {CA_KEY} cannot be read: {error}") from error
    except TransportError as error:
        raise JobError(f"--ca {folder}: {CA_KEY} is not the key of {CA}: {error}") from error
    return ca
