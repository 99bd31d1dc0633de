"""Which certificates gRPC can use: of what kind a key is, read from its certificate.

Nodes talk over OpenSSL (`ssl`), and their control service over gRPC, which has BoringSSL: it takes fewer kinds of keys,
and only says of another that the handshake failed. Python's `ssl` does not tell what a key is, hence the few lines of
DER here. They read certificates that OpenSSL has read before, and are made for no others.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["unfit_for_grpc"]

_PEM = re.compile(rb"^-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)^-----END ", re.DOTALL | re.MULTILINE)
"""Elsewhere than at the beginning of a line it is a comment."""
_VERSION = 0xA0
"""The tag of the one field that may be missing before those read here."""
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


class _Certificate(NamedTuple):
    issuer: bytes
    subject: bytes
    kind: str


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


def _listed(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} and {kinds[-1]} only"


def _certificates(pem: bytes) -> Iterator[_Certificate]:
    for found in _PEM.finditer(pem):
        whole = _parts(binascii.a2b_base64(found[1]))[0][1]
        fields = _parts(_parts(whole)[0][1])
        if fields[0][0] == _VERSION:
            del fields[0]
        _, _, issuer, _, subject, key = (content for _, content in fields[:6])
        algorithm = [content.hex() for _, content in _parts(_parts(key)[0][1])]
        kind = algorithm[1] if algorithm[0] == _ELLIPTIC else algorithm[0]
        yield _Certificate(issuer, subject, _KINDS.get(kind, "of another kind"))


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
