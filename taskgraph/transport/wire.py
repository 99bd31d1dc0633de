"""Messages as bytes and back: MessagePack, by `msgspec`.

A header is an array: the name of the message's class, then its fields in order. The decoder checks the number and the
type of all fields, and allocates nothing for data that did not come. Of a value the header has the digest only; meta
and buffers are the payload of the frame.

A new field of a message needs no line here.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from taskgraph.errors import DecodeError
from taskgraph.protocol import messages
from taskgraph.protocol.messages import Call, Encoded, Message, Refusal, Reply, RequestRestart
from taskgraph.protocol.numbers import Numbers

__all__ = ["CALLS", "DIGEST_BYTES", "REPLIES", "REPLY_OF", "from_header", "to_header", "value_of", "with_value"]

CALLS: Final[tuple[type, ...]] = typing.get_args(Call)
REPLIES: Final[tuple[type, ...]] = typing.get_args(Reply)

REPLY_OF: Final[dict[type, type]] = dict.fromkeys(CALLS, messages.Accepted) | {
    messages.Pull: messages.Item,
    messages.Request: messages.Answer,
    messages.Audit: messages.LedgerPage,
    messages.Waits: messages.WaitsPage,
    messages.FetchShared: messages.SharedState,
    messages.DescribeShared: messages.SharedDigests,
    messages.CopyState: messages.StateCopy,
    messages.FollowTotals: messages.TotalsPage,
    messages.DescribeState: messages.StateDigests,
    messages.DescribeValue: messages.ValueDigest,
}
"""Class of a call -> class of its reply, if it is not refused."""

DIGEST_BYTES = 16  # xxh3-128


def value_of(message: Message) -> Encoded | None:
    """Returns the value that a message carries, or None."""
    value: Encoded | None = getattr(message, "value", None)
    return value


def with_value(message: Message, value: Encoded) -> Message:
    """Returns a copy of the message that carries another value."""
    return msgspec.structs.replace(message, value=value)


def _to_wire(part: Any) -> bytes | Mapping[str, float]:
    """Returns what a header has of a value, its digest, or of reported numbers, a plain dict."""
    if isinstance(part, Encoded):
        return part.digest
    if isinstance(part, Numbers):
        return part.plain()
    raise TypeError(f"a {type(part).__name__} cannot travel in a message")


def _from_wire(cls: type, part: object) -> Encoded:
    """Makes a value that has its digest only, from a header's part. Raises ValueError."""
    if type(part) is not bytes or len(part) != DIGEST_BYTES:
        raise ValueError(f"{cls.__name__}: {DIGEST_BYTES} bytes were expected")
    return Encoded(b"", (), part)


_encode = msgspec.msgpack.Encoder(enc_hook=_to_wire).encode
_decode = msgspec.msgpack.Decoder(Message, dec_hook=_from_wire).decode


def to_header(message: Message) -> bytes:
    """Encodes a message as the header of a frame.

    Raises:
        TypeError, ValueError, OverflowError: a field has a value that its type does not allow.
    """
    try:
        return _encode(message)
    except UnicodeEncodeError:
        # Texts of exceptions may hold half a surrogate pair, as some file names do.
        if isinstance(message, Refusal):
            return _encode(msgspec.structs.replace(message, text=_escaped(message.text)))
        if isinstance(message, RequestRestart):
            return _encode(msgspec.structs.replace(message, why=_escaped(message.why)))
        raise


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def from_header(header: bytes) -> Message:
    """Decodes a header. A value in the message has its digest only: `Encoded.complete` adds the rest.

    Raises:
        DecodeError: `to_header` does not make such a header.
    """
    try:
        message: Message = _decode(header)
        return message
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"a header that cannot be read: {error}") from None
