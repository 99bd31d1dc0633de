"""What Python's `ssl` does not tell of our certificates: of what kind their keys are, and until when they are valid.

Nodes talk over OpenSSL (`ssl`), and their control service over gRPC, which has BoringSSL: it takes fewer kinds of keys,
and only says of another that the handshake failed. Hence the few lines of DER here. They read certificates that
OpenSSL has read before, and are made for no others.
"""

from __future__ import annotations

import binascii
import datetime
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Span", "spans", "unfit_for_grpc"]

_PEM = re.compile(rb"^-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)^-----END ", re.DOTALL | re.MULTILINE)
"""Elsewhere than at the beginning of a line it is a comment."""
_VERSION = 0xA0
"""The tag of the one field that may be missing before those read here."""
_UTC_TIME = 0x17
_ELLIPTIC = "2a8648ce3d0201"
"""Such a key's kind is that of its curve, its algorithm's parameter."""

_KINDS = {
    "2a864886f70d010101": "RSA",
    "2a8648ce3d030107": "P-256",
    "2b81040022": "P-384",
    "2b81040023": "P-521",
    "2b8104000a": "secp256k1",
    "2b6570": "Ed25519",
    "2b6571": "Ed448",
    "2a864886f70d01010a": "RSA-PSS",
    "2a8648ce380401": "DSA",
}
"""By object identifier. Measured with grpcio 1.85: who shakes hands may have one of `_SHAKES_HANDS`, and an authority
one of `_SIGNS`."""
_SHAKES_HANDS = ("RSA", "P-256", "P-384")
_SIGNS = (*_SHAKES_HANDS, "P-521", "Ed25519")


class Span(NamedTuple):
    """When a certificate is valid, in unix time."""

    begins: float
    ends: float


class _Certificate(NamedTuple):
    issuer: bytes
    subject: bytes
    kind: str
    valid: bytes


def unfit_for_grpc(ca: bytes, cert: bytes) -> str:
    """Why gRPC would refuse our certificate for its key, or an authority's that it depends on; "" where it would not.

    Args:
        ca: what is in the PEM file of the authority.
        cert: what is in that of our certificate and its intermediates.
    """
    try:
        chain, known = list(_certificates(cert)), list(_certificates(ca))
    except (ValueError, IndexError):  # what we cannot read gRPC may: it decides
        return ""
    if not chain:
        return ""
    ours, *more = chain
    if ours.kind not in _SHAKES_HANDS:
        return f"its key is {ours.kind}, and gRPC takes {_listed(_SHAKES_HANDS)}: make one with such a key"
    issuers = {each.issuer for each in chain}
    for each in (*more, *known):  # others in a bundle do no harm
        if each.subject in issuers and each.kind not in _SIGNS:
            return f"an authority's key is {each.kind}, and gRPC takes {_listed(_SIGNS)}: use one with such a key"
    return ""


def spans(ca: bytes, cert: bytes) -> tuple[Span | None, Span | None]:
    """When what is in these files is valid: the authority that we depend on, and what ends first of our chain.

    None where there is nothing, or what cannot be read.
    """
    try:
        chain, known = list(_certificates(cert)), list(_certificates(ca))
        issuers = {each.issuer for each in chain}
        # Of one name there are two where an authority was renewed: the one that ends later will do.
        authorities = [_span(each.valid) for each in known if each.subject in issuers]
        ours = [_span(each.valid) for each in chain]
    except (ValueError, IndexError):
        return None, None
    return max(authorities, key=_end, default=None), min(ours, key=_end, default=None)


def _end(span: Span) -> float:
    return span.ends


def _span(valid: bytes) -> Span:
    return Span(*(_time(tag, content.decode()) for tag, content in _parts(valid)))


def _time(tag: int, text: str) -> float:
    """A UTCTime has two digits for its year, of 1950 on; a GeneralizedTime has all four."""
    if tag == _UTC_TIME:
        text = f"{20 if text < '5' else 19}{text}"
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _listed(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} and {kinds[-1]} only"


def _certificates(pem: bytes) -> Iterator[_Certificate]:
    for found in _PEM.finditer(pem):
        whole = _parts(binascii.a2b_base64(found[1]))[0][1]
        fields = _parts(_parts(whole)[0][1])
        if fields[0][0] == _VERSION:
            del fields[0]
        _, _, issuer, valid, subject, key = (content for _, content in fields[:6])
        algorithm = [content.hex() for _, content in _parts(_parts(key)[0][1])]
        kind = algorithm[1] if algorithm[0] == _ELLIPTIC else algorithm[0]
        yield _Certificate(issuer, subject, _KINDS.get(kind, "of another kind"), valid)


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value, one after another."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            more = size & 0x7F
            size, at = int.from_bytes(der[at : at + more]), at + more
        found.append((tag, der[at : at + size]))
        at += size
    return found
