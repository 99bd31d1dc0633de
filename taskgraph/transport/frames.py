"""Frames: the unit that sessions send, and its limits.

    head (56 bytes, big endian) | sizes of the buffers (8 bytes each) | header | body

A CALL, TELL or REPLY frame opens a message. Its head has the size of the whole payload: the meta of the value, then its
buffers, without padding. The body is the first part of the payload; the rest follows in CHUNK frames of the same call,
so a large value delays small messages by one chunk.

Over TCP the head contains two digests: of the sizes and the header, and of the head itself. A reader checks the head
before it uses any number in it. Values have digests of their own.

`reader` parses streams of frames.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest

from taskgraph.errors import DecodeError

__all__ = [
    "CHUNK_BYTES",
    "HEAD",
    "HEAD_BYTES",
    "INLINE_BYTES",
    "KINDS",
    "LENT",
    "MAGIC",
    "MAX_BODY_BYTES",
    "MAX_BUFFERS",
    "MAX_HEADER_BYTES",
    "MAX_LENT",
    "OPENING_KINDS",
    "PROTOCOL_VERSION",
    "FrameKind",
    "Head",
    "Limits",
    "OtherVersion",
    "add_digests",
    "check_head",
    "check_rest",
    "pack_frame",
    "pack_head",
    "unpack_head",
]

PROTOCOL_VERSION = 7

#: A payload up to this size is sent in the frame that opens the message, copied into one write.
INLINE_BYTES = 136 << 10
#: Size of the chunks of a large payload. 1 MiB takes 0.3 ms on a unix socket; a small message waits no longer.
CHUNK_BYTES = 1 << 20
#: The largest body that a reader accepts. Larger than a chunk, so that other versions may cut differently.
MAX_BODY_BYTES = 16 << 20
#: The largest header. The longest in practice is a ledger page: some 60 bytes for each edge of an epoch.
MAX_HEADER_BYTES = 64 << 20
#: Buffers of one value: one for each large array in it.
MAX_BUFFERS = 1 << 20
#: Lent buffers of a message; further buffers are sent.
MAX_LENT = 1024
#: Bit in the size of a lent buffer, which is not part of the payload: the header has a reference to it.
LENT = 1 << 63

MAGIC = b"TG"
_OURS = MAGIC + bytes((PROTOCOL_VERSION,))
HEAD: Final = struct.Struct("!2sBBQIIIQQ16x")
"""Layout of a head: magic, version, the fields of `Head`, room for the digests."""
HEAD_BYTES = HEAD.size
_REST_DIGEST_AT = HEAD_BYTES - 16
_DIGEST_AT = HEAD_BYTES - 8
pack_head: Final = HEAD.pack  # a global: faster than an attribute of an imported name
_TLS_HANDSHAKE, _TLS_MAJOR = 22, 3


class FrameKind(enum.IntEnum):
    """Kinds of frames. The HELLO kinds keep their numbers in every version."""

    HELLO_OPEN = 1
    HELLO_CHALLENGE = 2
    HELLO_PROOF = 3
    HELLO_WELCOME = 4
    HELLO_REFUSE = 5
    CALL = 16  # opens a call
    REPLY = 17  # opens the reply to a call
    CHUNK = 18  # more of the payload of the call or reply of that id
    CANCEL = 19  # the caller no longer wants the reply
    GOODBYE = 20  # the session ends here on purpose
    RETURN = 21  # the borrower returns leases of lent memory
    DECLINE = 22  # the memory lent with the message of that call cannot be opened: send bytes
    TELL = 23  # opens a quiet call: no reply if it is accepted at once
    REPLY_ON_DEVICE = 24  # a REPLY some of whose buffers are tickets for memory of a device
    RETURN_ON_DEVICE = 25  # returns tickets for memory of a device
    DECLINE_ON_DEVICE = 26  # no such memory can be opened here


KINDS = {int(kind): kind for kind in FrameKind}
OPENING_KINDS = (FrameKind.CALL, FrameKind.REPLY, FrameKind.TELL, FrameKind.REPLY_ON_DEVICE)


class OtherVersion(DecodeError):
    """A frame of another version of this protocol."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"the peer speaks protocol version {theirs}; this node speaks {PROTOCOL_VERSION}")


class Head(NamedTuple):
    """The fixed part of a frame. Sizes in bytes.

    Attributes:
        kind: the kind of the frame.
        call: id of the call, chosen by the caller, unique in the session; 0: no call.
        header: size of the header, including the references to lent buffers in front of it.
        buffers: number of buffer sizes before the header.
        body: size of the part of the payload in this frame.
        payload: size of the whole payload of the message.
        meta: size of the meta in the payload.
    """

    kind: FrameKind
    call: int
    header: int = 0
    buffers: int = 0
    body: int = 0
    payload: int = 0
    meta: int = 0

    def pack(self, rest: bytes = b"") -> bytes:
        """Returns the head, with digests, followed by `rest`: the sizes of the buffers and the header."""
        return add_digests(HEAD.pack(MAGIC, PROTOCOL_VERSION, *self) + rest, len(rest))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes that a reader accepts."""

    header: int = MAX_HEADER_BYTES
    buffers: int = MAX_BUFFERS
    payload: int = 1 << 40


def unpack_head(data: memoryview, limits: Limits) -> Head:
    """Parses a head. Raises DecodeError if a number is out of bounds."""
    magic, version, kind, call, header, buffers, body, payload, meta = HEAD.unpack_from(data)
    if magic != MAGIC:
        tls = data[0] == _TLS_HANDSHAKE and data[1] == _TLS_MAJOR
        raise DecodeError("TLS, which this node does not speak here" if tls else "not a frame of ours")
    if version != PROTOCOL_VERSION:
        raise OtherVersion(version)
    if kind not in KINDS:
        raise DecodeError(f"a frame of unknown kind {kind}")
    if header > limits.header:
        raise DecodeError(f"a header of {header} bytes; the limit is {limits.header}")
    if buffers > limits.buffers:
        raise DecodeError(f"a value of {buffers} buffers; the limit is {limits.buffers}")
    if payload > limits.payload:
        raise DecodeError(f"a value of {payload} bytes; the limit is {limits.payload}")
    if kind in OPENING_KINDS:
        if body > min(payload, MAX_BODY_BYTES) or meta > payload:
            raise DecodeError(f"a frame with {body} bytes of body and {meta} of meta in a payload of {payload}")
    elif kind == FrameKind.CHUNK:
        if header or buffers or payload or meta or not 0 < body <= min(limits.payload, MAX_BODY_BYTES):
            raise DecodeError(f"a chunk of {body} bytes, or one with a header")
    elif buffers or body or payload or meta:
        raise DecodeError(f"a {FrameKind(kind).name} frame with a payload")
    return Head(KINDS[kind], call, header, buffers, body, payload, meta)


def add_digests(frame: bytes, rest_bytes: int) -> bytes:
    """Returns a frame with its two digests. `rest_bytes`: the number of bytes of its sizes and header."""
    head = frame[:_REST_DIGEST_AT] + xxh3_64_digest(frame[HEAD_BYTES : HEAD_BYTES + rest_bytes])
    return b"".join((head, xxh3_64_digest(head), frame[HEAD_BYTES:]))


def check_head(head: memoryview) -> None:
    """Raises DecodeError if a head of this version was damaged."""
    if xxh3_64_digest(head[:_DIGEST_AT]) != head[_DIGEST_AT:] and head[:3] == _OURS:
        raise DecodeError("a damaged frame head")


def check_rest(head: memoryview, rest: memoryview) -> None:
    """Raises DecodeError if the sizes or the header of a frame were damaged."""
    if xxh3_64_digest(rest) != head[_REST_DIGEST_AT:_DIGEST_AT]:
        raise DecodeError("a damaged frame header")


def pack_frame(head: Head, sizes: Sequence[int] = (), header: bytes = b"") -> bytes:
    """Returns a frame without its body, with digests."""
    return head.pack(struct.pack(f"!{len(sizes)}Q", *sizes) + header)
