"""The frame: what one session writes after another, and the bounds of what it may say.

    head (56 bytes, big endian) | sizes of the buffers (8 bytes each) | header | body

A CALL, TELL or REPLY frame opens a message: its head tells the size of the whole payload (the value's meta, then its
buffers, without padding). The body is the first part of that payload; what does not fit travels in CHUNK frames of the
same call, so that a large value never stands between two small messages for longer than one chunk takes.

Values have digests of their own. What stands before the body has two in the head, which are there and looked at where a
frame may be damaged on its way, on TCP: one of the sizes and the header, and one of the head itself. So a head is
known to be whole before anything it says is done, waiting for more included.

`reader` takes them out of a stream again.
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
    "OPENING",
    "PROTOCOL_VERSION",
    "Head",
    "Kind",
    "Limits",
    "OtherVersion",
    "check_head",
    "check_rest",
    "pack_frame",
    "pack_head",
    "seal",
    "unpack_head",
]

PROTOCOL_VERSION = 7

#: A payload up to this size travels in the frame that opens the message, copied into one write.
INLINE_BYTES = 136 << 10
#: What a large payload is cut into. 1 MiB takes 0.3 ms on a unix socket: the longest a small message waits behind it.
CHUNK_BYTES = 1 << 20
#: The largest body a reader accepts; leaves other versions room to cut differently.
MAX_BODY_BYTES = 16 << 20
#: The largest header. The longest in practice is a ledger page: some 60 bytes for each edge of an epoch.
MAX_HEADER_BYTES = 64 << 20
#: Buffers of one value: one for each large array in it.
MAX_BUFFERS = 1 << 20
#: Buffers of one message that are lent; further ones are sent.
MAX_LENT = 1024
#: Set in the size of a buffer that is lent: it is no part of the payload, and a reference to it stands in the header.
LENT = 1 << 63

MAGIC = b"TG"
_OURS = MAGIC + bytes((PROTOCOL_VERSION,))
HEAD: Final = struct.Struct("!2sBBQIIIQQ16x")
"""Of a head: the magic, the version, and the fields of `Head`; then room for the digests."""
HEAD_BYTES = HEAD.size
_REST_DIGEST_AT = HEAD_BYTES - 16
_DIGEST_AT = HEAD_BYTES - 8
pack_head: Final = HEAD.pack  # what is looked up on an imported name is looked up anew in every call (Python 3.11)
_TLS_HANDSHAKE, _TLS_MAJOR = 22, 3


class Kind(enum.IntEnum):
    """What a frame is. The HELLO kinds keep their numbers in every version."""

    HELLO_OPEN = 1
    HELLO_CHALLENGE = 2
    HELLO_PROOF = 3
    HELLO_WELCOME = 4
    HELLO_REFUSE = 5
    CALL = 16  # opens a call
    REPLY = 17  # opens the reply to a call
    CHUNK = 18  # more of the payload of the call or reply of that id
    CANCEL = 19  # the caller does not want the reply any more
    GOODBYE = 20  # the session ends here on purpose
    RETURN = 21  # leases of memory that was lent, by whoever borrowed it
    DECLINE = 22  # what was lent with the message of that call cannot be opened here: send bytes
    TELL = 23  # opens a call that needs no reply where it is accepted at once
    REPLY_ON_DEVICE = 24  # a REPLY some of whose buffers are tickets for memory of a device
    RETURN_ON_DEVICE = 25  # tickets that are used up, and memory that is not open any more
    DECLINE_ON_DEVICE = 26  # no such memory can be opened here


KINDS = {int(kind): kind for kind in Kind}
OPENING = (Kind.CALL, Kind.REPLY, Kind.TELL, Kind.REPLY_ON_DEVICE)


class OtherVersion(DecodeError):
    """A frame of another version of this protocol."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"the peer speaks protocol version {theirs}; this node speaks {PROTOCOL_VERSION}")


class Head(NamedTuple):
    """The fixed part of a frame. Sizes in bytes.

    Attributes:
        kind: what the frame is.
        call: the call's id, chosen by the caller, unique in its session; 0 where none is meant.
        header: size of the header, with the references to lent buffers in front of it.
        buffers: how many sizes of buffers stand before the header.
        body: how much of the payload this frame carries.
        payload: size of the whole payload of the message that this frame opens.
        meta: how much of that payload is meta.
    """

    kind: Kind
    call: int
    header: int = 0
    buffers: int = 0
    body: int = 0
    payload: int = 0
    meta: int = 0

    def pack(self, rest: bytes = b"") -> bytes:
        """The head, sealed, and the rest of what stands before the body."""
        return seal(HEAD.pack(MAGIC, PROTOCOL_VERSION, *self) + rest, len(rest))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts. Before the hello is done nothing but a small header."""

    header: int = MAX_HEADER_BYTES
    buffers: int = MAX_BUFFERS
    payload: int = 1 << 40


def unpack_head(data: memoryview, limits: Limits) -> Head:
    """Reads and bounds a head; knows nothing of what came before it."""
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
    if kind in OPENING:
        if body > min(payload, MAX_BODY_BYTES) or meta > payload:
            raise DecodeError(f"a frame with {body} bytes of body and {meta} of meta in a payload of {payload}")
    elif kind == Kind.CHUNK:
        if header or buffers or payload or meta or not 0 < body <= min(limits.payload, MAX_BODY_BYTES):
            raise DecodeError(f"a chunk of {body} bytes, or one with a header")
    elif buffers or body or payload or meta:
        raise DecodeError(f"a {Kind(kind).name} frame with a payload")
    return Head(KINDS[kind], call, header, buffers, body, payload, meta)


def seal(frame: bytes, rest_bytes: int) -> bytes:
    """The same frame with its digests; behind its head, so many bytes stand before its body."""
    head = frame[:_REST_DIGEST_AT] + xxh3_64_digest(frame[HEAD_BYTES : HEAD_BYTES + rest_bytes])
    return b"".join((head, xxh3_64_digest(head), frame[HEAD_BYTES:]))


def check_head(head: memoryview) -> None:
    """Raises DecodeError where it is not what was sealed. In other versions that is done in other ways."""
    if xxh3_64_digest(head[:_DIGEST_AT]) != head[_DIGEST_AT:] and head[:3] == _OURS:
        raise DecodeError("a frame with a head that was damaged on its way")


def check_rest(head: memoryview, rest: memoryview) -> None:
    """The same of the sizes and the header of a frame."""
    if xxh3_64_digest(rest) != head[_REST_DIGEST_AT:_DIGEST_AT]:
        raise DecodeError("a frame with a header that was damaged on its way")


def pack_frame(head: Head, sizes: Sequence[int] = (), header: bytes = b"") -> bytes:
    """Everything of a frame that stands before its body."""
    return head.pack(struct.pack(f"!{len(sizes)}Q", *sizes) + header)
