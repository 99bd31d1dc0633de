"""The headers of gRPC's calls as HTTP/2 packs them (RFC 7541), as far as a client needs it.

What we send is packed without a table, so that one call's headers are the bytes of the next one's. We tell our peer to
use no table either (`SETTINGS_HEADER_TABLE_SIZE` is 0), so that what it sends means the same each time: both ways are
cached.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["HeadersError", "pack", "unpack"]

#: RFC 7541, appendix A, from 1 on.
_STATIC_TEXT = """
:authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|:status=200|:status=204
:status=206|:status=304|:status=400|:status=404|:status=500|accept-charset|accept-encoding=gzip, deflate
accept-language|accept-ranges|accept|access-control-allow-origin|age|allow|authorization|cache-control
content-disposition|content-encoding|content-language|content-length|content-location|content-range|content-type|cookie
date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified
link|location|max-forwards|proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|server|set-cookie
strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate
"""
_STATIC = [(name, value) for name, _, value in (e.partition("=") for e in re.split(r"[|\n]", _STATIC_TEXT.strip()))]

#: RFC 7541, appendix B: the symbols of each length in bits. Codes count up through them, as in every canonical code.
#: What gRPC writes into headers is printable ASCII, bytes beyond it as %xx or in base64; the codes of all other
#: symbols are longer than these, and 19 bits are more symbols than the one here.
_HUFFMAN = {
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
    10: '!"()?',
    11: "'+|",
    12: "#>",
    13: "\0$@[]~",
    14: "^}",
    15: "<`{",
    19: "\\",
}
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class HeadersError(Exception):
    """This is no block of headers."""


def _codes() -> dict[tuple[int, int], str]:
    codes: dict[tuple[int, int], str] = {}
    code, length = 0, 0
    for bits, symbols in _HUFFMAN.items():
        code, length = code << (bits - length), bits
        for symbol in symbols:
            codes[bits, code] = symbol
            code += 1
    return codes


_CODES = _codes()


@lru_cache(maxsize=64)
def pack(*headers: tuple[str, str]) -> bytes:
    """A block of headers: pairs of the static table as its numbers, all others as they are."""
    block = bytearray()
    for name, value in headers:
        if (name, value) in _STATIC:
            block += _packed_int(_STATIC.index((name, value)) + 1, 7, 0x80)
            continue
        block += b"\0"  # a literal that is in no table, and comes into none
        for text in (name.encode(), value.encode()):
            block += _packed_int(len(text), 7, 0) + text
    return bytes(block)


@lru_cache(maxsize=64)
def unpack(block: bytes) -> dict[str, str]:
    """The headers of a block that was packed without a table; of a name that comes twice, the last one.

    Raises:
        HeadersError: it is none, or refers to a table.
    """
    headers: dict[str, str] = {}
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _int(block, at, 7)
                name, value = _static(index)
            elif first & 0xE0 == 0x20:
                size, at = _int(block, at, 5)
                if size:
                    raise HeadersError(f"a table of {size} bytes, where none is allowed")
                continue
            else:
                index, at = _int(block, at, 6 if first & 0x40 else 4)
                if index:
                    name = _static(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
            headers[name] = value
    except IndexError:
        raise HeadersError("it ends too early") from None
    return headers


def _static(index: int) -> tuple[str, str]:
    if not 1 <= index <= len(_STATIC):
        raise HeadersError(f"entry {index} of a table that there is not")
    return _STATIC[index - 1]


def _packed_int(value: int, bits: int, flags: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([flags | value])
    packed = bytearray([flags | most])
    value -= most
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def _int(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        value += (block[at] & 0x7F) << shift
        at += 1
        if block[at - 1] < 0x80:
            return value, at
    raise HeadersError("a number that does not end")


def _text(block: bytes, at: int) -> tuple[str, int]:
    coded = block[at] & 0x80
    length, at = _int(block, at, 7)
    raw = block[at : at + length]
    if len(raw) < length:
        raise HeadersError("it ends too early")
    return _unhuffman(raw) if coded else raw.decode("latin-1"), at + length


def _unhuffman(raw: bytes) -> str:
    text: list[str] = []
    code = length = 0
    for byte in raw:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            symbol = _CODES.get((length, code))
            if symbol is not None:
                text.append(symbol)
                code = length = 0
    # The last byte is filled with ones, less than eight; anything else that is left began with a symbol we do not know.
    return "".join(text) if length < 8 and code == (1 << length) - 1 else _UNREADABLE
