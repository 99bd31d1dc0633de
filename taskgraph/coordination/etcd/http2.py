"""One HTTP/2 connection to a server of gRPC calls (RFC 9113): frames, windows, pings, and what streams get of them.

It knows nothing of gRPC's messages and statuses: those are `plain.py`'s. Everything happens on the event loop, where
bytes come in: no thread and no lock is passed on the way.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Protocol, cast

from taskgraph.coordination.etcd import http2_frames as h2
from taskgraph.coordination.etcd.hpack import HeadersError, unpack
from taskgraph.coordination.etcd.http2_frames import Broken, frame, unpadded

__all__ = ["WINDOW", "Http2Connection", "StreamEnd"]

#: What of one stream may be under way to us, or wait for whoever reads it.
WINDOW = 1 << 20
#: All headers of one answer together.
_HEADERS_BYTES = 1 << 16
#: A server that vanished without a word, or is frozen, says nothing: it is pinged at the third look at a silent
#: connection, and given up at the fifth, 12.5 s after its last word at most. etcd refuses clients that ping more
#: often than every 5 s, or while they call nothing.
_LOOK_S = 2.5
_PING_AFTER = 3
_GIVE_UP_AFTER = 5
#: How long the answer to a ping may wait for something to travel with. Servers wait for 20 s and longer.
_LATER_S = 0.5
_LATER_BYTES = 1024


class StreamEnd(Protocol):
    """Our end of one stream. It is told what comes, at once and in order, and last either of `on_end` and `on_lost`."""

    def on_headers(self, headers: dict[str, str]) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, why: str) -> None: ...


class _Stream:
    """What the connection keeps of an open stream."""

    __slots__ = ("end", "unsent", "window")

    def __init__(self, end: StreamEnd, window: int) -> None:
        self.end = end
        self.window = window  # what we may still send
        self.unsent: deque[tuple[memoryview, bool]] = deque()


class Http2Connection(asyncio.Protocol):
    """Made by a loop's `create_connection`.

    Attributes:
        ready: a future: the server's first settings came. Fails where they never will.
        lost: why there is no connection any more; "" while there is.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.lost = ""
        self._leaving = False
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._next = 1
        self._streams: dict[int, _Stream] = {}
        self._block: tuple[int, int, bytearray] | None = None  # headers that are not complete: stream, flags, bytes
        self._window = h2.DEFAULT_WINDOW  # what we may still send, on all streams together
        self._stream_window = h2.DEFAULT_WINDOW
        self._frame = h2.FRAME
        self._received = 0  # since the peer was told last
        self._silent = 0  # looks since something came, while something was called
        self._timer: asyncio.TimerHandle | None = None
        self._later = b""
        self._flush: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether streams may be opened."""
        return not self.lost and not self._leaving and self._next < h2.MOST and self.ready.done()

    # -- what others call -------------------------------------------------------------------------

    def open(self, end: StreamEnd, headers: bytes, data: bytes, *, last: bool) -> int:
        """Opens a stream with a packed block of headers and what is to follow. Returns its number.

        Where the connection is not `usable`, the stream is lost at once.
        """
        if not self.usable:
            end.on_lost(self.lost or "the connection takes no more calls")
            return 0
        number, self._next = self._next, self._next + 2
        stream = self._streams[number] = _Stream(end, self._stream_window)
        begin = frame(h2.HEADERS, h2.END_HEADERS, number, headers)
        if len(data) <= min(self._window, stream.window, self._frame):  # one write: it wakes the server once
            self._window -= len(data)
            stream.window -= len(data)
            self._write(begin + frame(h2.DATA, h2.END_STREAM if last else 0, number, data))
        else:
            self._write(begin)
            stream.unsent.append((memoryview(data), last))
            self._send_more()
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        return number

    def grant(self, number: int, size: int) -> None:
        """`size` more bytes may come on a stream."""
        if number in self._streams:
            self._grant(number, size)

    def reset(self, number: int) -> None:
        """Ends a stream from our side. Its end is told nothing."""
        if self._streams.pop(number, None) is not None:
            self._write(frame(h2.RST_STREAM, 0, number, h2.CANCEL.to_bytes(4, "big")))
            self._maybe_over()

    def leave(self) -> None:
        """No more streams; it is closed once those that are open have ended."""
        self._leaving = True
        self._maybe_over()

    def close(self, why: str) -> None:
        """Ends it, and all streams of it."""
        if self._transport is not None:
            self._transport.abort()
        self._over(why)

    # -- what asyncio calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = b"".join(
            h2.SETTING.pack(what, value)
            for what, value in ((h2.TABLE_SIZE, 0), (h2.ENABLE_PUSH, 0), (h2.INITIAL_WINDOW, WINDOW))
        )
        self._write(h2.PREFACE + frame(h2.SETTINGS, 0, 0, settings))
        self._grant(0, h2.MOST - h2.DEFAULT_WINDOW)  # streams have windows; all together need no other

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(f"the connection broke: {exc}" if exc else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        try:
            while size - at >= 9:
                length, flags, number = h2.HEAD.unpack_from(buffer, at)
                kind, length = length & 0xFF, length >> 8
                if length > h2.FRAME or (kind != h2.SETTINGS and not self.ready.done()):
                    raise Broken("that is not HTTP/2" if not self.ready.done() else f"a frame of {length} bytes")
                end = at + 9 + length
                if end > size:
                    break
                self._take(kind, flags, number & h2.MOST, buffer[at + 9 : end])
                at = end
        except (Broken, HeadersError, struct.error, IndexError) as error:
            self.close(f"the server broke the rules: {error}")
        self._buffer = buffer[at:] if not self.lost else b""

    # -- frames that come -------------------------------------------------------------------------

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != h2.CONTINUATION or number != self._block[0]):
            raise Broken("headers that are not continued")
        if kind == h2.DATA:
            self._data(flags, number, payload)
        elif kind == h2.HEADERS:
            payload = unpadded(flags, payload)
            block = payload[5:] if flags & h2.PRIORITY else payload
            if flags & h2.END_HEADERS:
                self._headers(flags, number, block)
            else:
                self._block = (number, flags, bytearray(block))
        elif kind == h2.CONTINUATION:
            if self._block is None:
                raise Broken("headers that nothing began")
            self._block[2].extend(payload)
            if len(self._block[2]) > _HEADERS_BYTES:
                raise Broken(f"more than {_HEADERS_BYTES} bytes of headers")
            if flags & h2.END_HEADERS:
                (_, flags, whole), self._block = self._block, None
                self._headers(flags, number, bytes(whole))
        elif kind == h2.RST_STREAM:
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.end.on_lost(f"the server reset the stream (code {int.from_bytes(payload, 'big')})")
                self._maybe_over()
        elif kind == h2.SETTINGS:
            if not flags & h2.ACK:
                self._settings(payload)
        elif kind == h2.PING:
            if not flags & h2.ACK:
                self._write_later(frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.GOAWAY:
            self._goaway(int.from_bytes(payload[:4], "big") & h2.MOST)
        elif kind == h2.WINDOW_UPDATE:
            self._more(number, int.from_bytes(payload, "big") & h2.MOST)
        elif kind == h2.PUSH_PROMISE:
            raise Broken("a push, which was not allowed")
        # All other kinds are to be ignored.

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received >= h2.MOST // 2:
            self._grant(0, self._received)
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            return  # we had reset it
        if flags & h2.PADDED:
            self._grant(number, payload[0] + 1)
            payload = unpadded(flags, payload)
        stream.end.on_data(payload)
        if flags & h2.END_STREAM:
            self._ended(number)

    def _headers(self, flags: int, number: int, block: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.end.on_headers(unpack(block))
        if flags & h2.END_STREAM:
            self._ended(number)

    def _ended(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            if stream.unsent:  # the server does not want to read it
                self._write(frame(h2.RST_STREAM, 0, number, h2.CANCEL.to_bytes(4, "big")))
            stream.end.on_end()
            self._maybe_over()

    def _settings(self, payload: bytes) -> None:
        for what, value in h2.SETTING.iter_unpack(payload):
            if what == h2.INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif what == h2.MAX_FRAME:
                self._frame = value
        self._write(frame(h2.SETTINGS, h2.ACK, 0, b""))
        if not self.ready.done():
            self.ready.set_result(None)
        self._send_more()

    def _goaway(self, last: int) -> None:
        """The server is to end: what it did not begin it will not do."""
        self._leaving = True
        for number in [number for number in self._streams if number > last]:
            self._streams.pop(number).end.on_lost("the server goes away")
        self._maybe_over()

    def _more(self, number: int, size: int) -> None:
        if number == 0:
            self._window += size
        elif (stream := self._streams.get(number)) is not None:
            stream.window += size
        self._send_more()

    # -- frames that go ---------------------------------------------------------------------------

    def _send_more(self) -> None:
        for number, stream in self._streams.items():
            while stream.unsent:
                data, last = stream.unsent[0]
                size = min(len(data), self._window, stream.window, self._frame)
                if size <= 0 and len(data):
                    break
                self._window -= size
                stream.window -= size
                rest = data[size:]
                self._write(frame(h2.DATA, h2.END_STREAM if last and not rest else 0, number, bytes(data[:size])))
                if rest:
                    stream.unsent[0] = (rest, last)
                else:
                    stream.unsent.popleft()

    def _grant(self, number: int, size: int) -> None:
        self._write(frame(h2.WINDOW_UPDATE, 0, number, size.to_bytes(4, "big")))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.lost:
            if self._later:
                data, self._later = self._later + data, b""
            self._transport.write(data)

    def _write_later(self, data: bytes) -> None:
        """With what is written next, or soon: servers of gRPC ping at every request, and each answer wakes them."""
        self._later += data
        if len(self._later) >= _LATER_BYTES:
            self._write(b"")
        elif self._flush is None:
            self._flush = self._loop.call_later(_LATER_S, self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        if self._later:
            self._write(b"")

    # -- its life ---------------------------------------------------------------------------------

    def _look(self) -> None:
        self._timer = None
        if self.lost or not self._streams:
            return  # the next stream looks again
        self._silent += 1
        if self._silent >= _GIVE_UP_AFTER:
            self.close(f"the server was silent for {_GIVE_UP_AFTER * _LOOK_S:g} s")
            return
        if self._silent == _PING_AFTER:
            self._write(frame(h2.PING, 0, 0, b"taskgrph"))
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _maybe_over(self) -> None:
        if self._leaving and not self._streams:
            self.close("the server goes away")

    def _over(self, why: str) -> None:
        if self.lost:
            return
        self.lost = why
        for timer in (self._timer, self._flush):
            if timer is not None:
                timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
            self.ready.exception()  # it was told, whoever asks
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end.on_lost(why)
