"""certs: an authority and a certificate of it, for a test cluster. A real one has its own authority."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from taskgraph.errors import JobError
from taskgraph.network.tls import CA, CERT, KEY, Tls
from taskgraph.system.files import write_whole

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise JobError("`taskgraph certs` needs the package cryptography: `pip install 'taskgraph-aio[tls]'`") from error

__all__ = ["CA_KEY", "Made", "certs", "make_certs"]

#: The authority's private key: nobody needs it but `certs --ca`.
CA_KEY = "ca-key.pem"
_BEFORE = datetime.timedelta(minutes=5)
"""Clocks of a cluster differ a little: what was made here is to be valid there at once."""
_AUTHORITY_DAYS = 3650
"""Much longer than its certificates: while it is the same, renewing one concerns its host alone."""


class Made(NamedTuple):
    """What there is now.

    Attributes:
        hosts: the names and addresses in the certificate.
        end: until when it is valid.
        cut: whether that is sooner than was asked for, since its authority ends.
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
) -> Made:
    """Writes a set for nodes and clients; private keys are readable by their owner only.

    Args:
        hosts: names and addresses that nodes are reached by, besides this host's name and loopback.
        days: how long the certificate is valid; not beyond its authority's end.
        authority: a directory with an authority that was made here before; None: a new one.
        force: overwrite what is there.

    Raises:
        JobError: something is there already, or cannot be written or read; the authority has ended.
    """
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise JobError(f"--days {days}: from 1 to {_AUTHORITY_DAYS}")
    now = datetime.datetime.now(datetime.UTC)
    names = _names(hosts)
    made = [CA, CERT, KEY] if authority is not None else [CA, CA_KEY, CERT, KEY]
    there = [name for name in made if (folder / name).exists()]
    if there and not force:
        raise JobError(f"{folder} has {', '.join(there)} already: name another directory, or overwrite with --force")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca, ca_key = _new_authority(now) if authority is None else _read_authority(authority, now)
        wanted = now + datetime.timedelta(days=days)
        end = min(wanted, ca.not_valid_after_utc)
        key, cert = _issue(ca, ca_key, names, _builder(now, end))
        if authority is None:
            write_whole(folder / CA_KEY, _pem(ca_key), 0o600)
        write_whole(folder / KEY, _pem(key), 0o600)
        write_whole(folder / CERT, cert.public_bytes(Encoding.PEM), 0o644)
        write_whole(folder / CA, ca.public_bytes(Encoding.PEM), 0o644)
    except OSError as error:
        raise JobError(f"{error.filename or folder}: {error.strerror}") from error
    Tls(folder / CA, folder / CERT, folder / KEY).check(names[0])
    return Made(names, end, cut=wanted - end >= datetime.timedelta(days=1))


def _names(hosts: tuple[str, ...] | list[str]) -> list[str]:
    for host in hosts:
        if not host or (any(c.isspace() or c in "/,:@" for c in host) and not _address(host)):
            raise JobError(f"--host {host!r} is neither a name nor an address")
    ours = socket.gethostname()
    return list(dict.fromkeys([*hosts, ours, "localhost", "127.0.0.1", "::1"]))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _builder(now: datetime.datetime, end: datetime.datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(end)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_authority(now: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"taskgraph test authority {secrets.token_hex(4)}")
    ca = (
        _builder(now, now + datetime.timedelta(days=_AUTHORITY_DAYS))
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return ca, key


def _read_authority(folder: Path, now: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise JobError(f"--ca {folder}: {CA} or {CA_KEY} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise JobError(f"--ca {folder}: {CA_KEY} is not the key of {CA}")
    if (end := ca.not_valid_after_utc) <= now:
        raise JobError(
            f"--ca {folder}: that authority ended on {end:%Y-%m-%d}; make another with `taskgraph certs DIR`, "
            f"and give all hosts certificates of it"
        )
    return ca, key


def _issue(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, names: list[str], builder: x509.CertificateBuilder
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """One certificate for a node and for a client: a node is both."""
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives: list[x509.GeneralName] = []
    for name in names:
        address = _address(name)
        alternatives.append(x509.IPAddress(address) if address is not None else x509.DNSName(name))
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    cert = (
        builder.subject_name(_name("taskgraph node"))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, SHA256())
    )
    return key, cert


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
