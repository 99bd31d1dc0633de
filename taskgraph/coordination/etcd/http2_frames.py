"""HTTP/2's frames (RFC 9113): their kinds, flags and settings, as numbers."""

from __future__ import annotations

import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0x0, 0x1, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8, 0x9),
)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW, MAX_FRAME = 0x1, 0x2, 0x4, 0x5
CANCEL = 0x8
"""An error's code: the stream is not wanted any more."""

HEAD = struct.Struct(">IBI")
"""Length and kind in one number, flags, stream."""
SETTING = struct.Struct(">HI")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65_535
MOST = 2**31 - 1
"""The largest window and the last stream; the bit above it counts for nothing."""
FRAME = 16_384
"""What a frame may hold where nobody says anything."""


class Broken(Exception):
    """What the peer sent is no HTTP/2, or not what we allowed it to send."""


def frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    """A frame of stream `number`; 0 is the connection."""
    return HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def unpadded(flags: int, payload: bytes) -> bytes:
    """What is in a payload that may have been filled up."""
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
