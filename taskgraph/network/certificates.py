"""The kind of a certificate's key, and when a certificate is valid: Python's `ssl` tells neither of our own files.

Nodes talk over OpenSSL (`ssl`), and their control service over gRPC with BoringSSL, which takes fewer kinds of keys and
says of others only that the handshake failed. Hence this reader of DER, for certificates that OpenSSL accepted.
"""

from __future__ import annotations

import binascii
import datetime
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Validity", "unfit_for_grpc", "validities"]

_PEM = re.compile(rb"^-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)^-----END ", re.DOTALL | re.MULTILINE)
_VERSION, _UTC_TIME = 0xA0, 0x17
"""DER tags: the optional field before those read here; a time whose year has two digits."""
_ELLIPTIC = "2a8648ce3d0201"
"""The algorithm of elliptic-curve keys; its parameter is the curve, which is the kind."""
_KINDS = {
    "2a864886f70d010101": "RSA",
    "2a8648ce3d030107": "P-256",
    "2b81040022": "P-384",
    "2b81040023": "P-521",
    "2b8104000a": "secp256k1",
    "2b6570": "Ed25519",
    "2b6571": "Ed448",
}
"""By object identifier."""
_NODE_KINDS = ("RSA", "P-256", "P-384")
_AUTHORITY_KINDS = (*_NODE_KINDS, "P-521", "Ed25519")
"""The kinds that gRPC takes; measured with grpcio 1.85."""


class Validity(NamedTuple):
    """The time in which a certificate is valid, in unix time."""

    begins: float
    ends: float


class _Certificate(NamedTuple):
    """What this module reads of a certificate."""

    issuer: bytes
    subject: bytes
    kind: str
    validity: Validity


def unfit_for_grpc(ca: bytes, cert: bytes) -> str:
    """Says why gRPC would refuse the key of our certificate or its authority; "": it would not, or that is unknown.

    Args:
        ca: the PEM file of authorities.
        cert: the PEM file of our certificate and its intermediates.
    """
    ours, authorities = _read_chain(ca, cert)
    for kind in [each.kind for each in ours[:1] if each.kind not in _NODE_KINDS]:
        return f"its key is {kind}, and gRPC takes {', '.join(_NODE_KINDS)} only: make one with such a key"
    for kind in [each.kind for each in (*ours[1:], *authorities) if each.kind not in _AUTHORITY_KINDS]:
        kinds = ", ".join(_AUTHORITY_KINDS)
        return f"an authority's key is {kind}, and gRPC takes {kinds} only: use one with such a key"
    return ""


def validities(ca: bytes, cert: bytes) -> tuple[Validity | None, Validity | None]:
    """Returns the validities of our authority, and of the certificate of our chain that ends first; None for what
    cannot be read.
    """
    ours, authorities = _read_chain(ca, cert)
    return (
        # A renewed authority is there twice by the same name: the one that ends later counts.
        max((each.validity for each in authorities), key=lambda found: found.ends, default=None),
        min((each.validity for each in ours), key=lambda found: found.ends, default=None),
    )


def _read_chain(ca: bytes, cert: bytes) -> tuple[list[_Certificate], list[_Certificate]]:
    """Parses our chain, and the authorities in `ca` that it depends on; both empty if one cannot be parsed."""
    try:
        ours = list(_certificates(cert))
        issuers = {each.issuer for each in ours}
        return ours, [each for each in _certificates(ca) if each.subject in issuers]
    except (ValueError, IndexError):  # gRPC and OpenSSL may read it all the same
        return [], []


def _certificates(pem: bytes) -> Iterator[_Certificate]:
    """Yields the certificates of a PEM file. Raises ValueError or IndexError for others than DER's."""
    for found in _PEM.finditer(pem):
        whole = _parts(binascii.a2b_base64(found[1]))[0][1]
        fields = _parts(_parts(whole)[0][1])
        if fields[0][0] == _VERSION:
            del fields[0]
        _, _, issuer, valid, subject, key = (content for _, content in fields[:6])
        algorithm = [content.hex() for _, content in _parts(_parts(key)[0][1])]
        kind = algorithm[1] if algorithm[0] == _ELLIPTIC else algorithm[0]
        validity = Validity(*(_time(tag, content.decode()) for tag, content in _parts(valid)))
        yield _Certificate(issuer, subject, _KINDS.get(kind, "of another kind"), validity)


def _time(tag: int, text: str) -> float:
    """Returns a DER time as unix time."""
    if tag == _UTC_TIME:
        text = f"{20 if text < '5' else 19}{text}"
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Returns tag and content of each value of a DER sequence."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            more = size & 0x7F
            size, at = int.from_bytes(der[at : at + more]), at + more
        found.append((tag, der[at : at + size]))
        at += size
    return found
