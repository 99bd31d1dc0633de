"""Frames: any cut of the stream gives the same messages; anything else is a DecodeError, before memory is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import EXCHANGES, encoded, pack_whole, pull

from taskgraph.errors import DecodeError
from taskgraph.graph import values
from taskgraph.protocol import messages as m
from taskgraph.protocol.sums import encode_sum
from taskgraph.transport import reader, wire
from taskgraph.transport.frames import (
    HEAD_BYTES,
    LENT,
    PROTOCOL_VERSION,
    FrameKind,
    Head,
    Limits,
    pack_frame,
    unpack_head,
)
from taskgraph.transport.incoming import IncomingMessage
from taskgraph.transport.outbox import Outbox
from taskgraph.transport.reader import FrameReader
from taskgraph.transport.session import split_buffers

_START = b"TG" + bytes((PROTOCOL_VERSION,))


class Reading:
    """A reader that records its messages."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.messages: list[tuple[int, m.Message]] = []
        self.controls: list[tuple[FrameKind, int, bytes]] = []
        self.skip: set[int] = set()
        self.reader = FrameReader(
            limits or Limits(),
            on_message_begin=self._open,
            on_complete=self._complete,
            on_whole=self._whole,
            on_control=self._control,
        )
        self.reader.whole = (FrameKind.CALL, FrameKind.REPLY)

    def _open(self, head: Head, sizes: tuple[int, ...], header: bytes) -> IncomingMessage | None:
        message = wire.from_header(header)
        if wire.value_of(message) is None and (head.payload or sizes):
            raise DecodeError("a payload where none belongs")
        return None if head.call in self.skip else IncomingMessage(head, sizes, message)

    def _complete(self, incoming: IncomingMessage) -> None:
        incoming.complete()
        self.messages.append((incoming.head.call, incoming.message))

    def _whole(
        self, kind: FrameKind, call: int, sizes: tuple[int, ...], header: bytes, meta: bytes, carried: bytes
    ) -> None:
        if sizes and sizes[0] >= LENT:
            raise DecodeError("nothing is lent here")
        message = wire.from_header(header)
        value = wire.value_of(message)
        if value is not None:
            value.complete(meta, split_buffers(carried, sizes))
        elif meta or sizes:
            raise DecodeError("a payload where none belongs")
        if call not in self.skip:
            self.messages.append((call, message))

    def _control(self, head: Head, header: bytes) -> None:
        self.controls.append((head.kind, head.call, header))

    def feed(self, data: bytes, cuts: Iterable[int] = ()) -> None:
        """Delivers `data` in pieces, as a socket would: never more than the reader has room for."""
        cuts = iter(cuts)
        view = memoryview(data)
        while view.nbytes:
            room = self.reader.buffer()
            count = min(room.nbytes, view.nbytes, next(cuts, view.nbytes))
            assert count
            room[:count] = view[:count]
            view = view[count:]
            self.reader.parse_received(count)


def nothing_lent(call: int, buffer: memoryview) -> bytes:
    return b""


def outbox_to(out: list[bytes], soon: Callable[[Callable[[], None]], object]) -> Outbox:
    return Outbox(lambda data: out.append(bytes(data)), soon, nothing_lent, on_backpressure=bool)


def written(*messages: tuple[int, FrameKind, m.Message]) -> bytes:
    out: list[bytes] = []
    callbacks = []
    outbox = outbox_to(out, callbacks.append)
    outbox.pause()
    for number, kind, message in messages:
        outbox.send(kind, number, wire.to_header(message), wire.value_of(message))
    outbox.resume()
    while callbacks:
        callbacks.pop()()
    assert outbox.idle
    return b"".join(out)


ALL = [(n, FrameKind.CALL, call) for n, (call, _) in enumerate(EXCHANGES, 1)] + [
    (n, FrameKind.REPLY, reply) for n, (_, reply) in enumerate(EXCHANGES, 101)
]
STREAM = written(*ALL)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 200_000), max_size=300))
def test_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    reading = Reading()
    reading.feed(STREAM, cuts)
    assert dict(reading.messages) == {number: message for number, _, message in ALL}
    assert len(reading.messages) == len(ALL)
    assert not reading.reader.mid_frame


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_garbage_stream_is_refused(data: bytes) -> None:
    for prefix in (b"", pack_frame(Head(FrameKind.GOODBYE, 0)), _START, _START + b"\x10"):
        with contextlib.suppress(DecodeError):
            Reading().feed(prefix + data)


SMALL = written(
    (1, FrameKind.CALL, pull()),
    (2, FrameKind.CALL, m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"meta", b"bulk" * 30, b""))),
)
WITH_META = written((3, FrameKind.CALL, m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"meta"))))


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_damaged_stream_is_read_or_refused(damage: list[tuple[int, int]], data: st.DataObject) -> None:
    stream = bytearray(SMALL)
    for place, byte in damage:
        stream[place] = byte
    end = data.draw(st.integers(0, len(stream)))
    limits = Limits(header=10_000, buffers=100, payload=100_000)
    with contextlib.suppress(DecodeError):
        Reading(limits).feed(bytes(stream[:end]))


PULL = wire.to_header(pull())
FLAG = wire.to_header(m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded()))


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("not a frame", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(40)),
        ("version 9", b"TG\x09" + bytes(53)),
        ("unknown kind", _START + b"\xff" + bytes(52)),
        ("header of 4294967295", pack_frame(Head(FrameKind.CALL, 1, header=2**32 - 1))),
        ("buffers", pack_frame(Head(FrameKind.CALL, 1, buffers=2**32 - 1))),
        ("value of 18446744073709551615", pack_frame(Head(FrameKind.CALL, 1, payload=2**64 - 1))),
        ("body", pack_frame(Head(FrameKind.CALL, 1, body=11, payload=10, meta=10))),
        ("meta", pack_frame(Head(FrameKind.CALL, 1, payload=10, meta=11))),
        ("sizes that make", pack_frame(Head(FrameKind.CALL, 1, len(FLAG), 1, 0, 10, 5), (6,), FLAG)),
        ("sizes that make", pack_frame(Head(FrameKind.CALL, 1, len(FLAG), 2, 0, 10, 5), (2**64 - 1, 6), FLAG)),
        ("chunk", pack_frame(Head(FrameKind.CHUNK, 1))),
        ("chunk", pack_frame(Head(FrameKind.CHUNK, 1, body=2**32 - 1))),
        ("chunk", pack_frame(Head(FrameKind.CHUNK, 1, header=1, body=1), (), b"x")),
        ("with a payload", pack_frame(Head(FrameKind.GOODBYE, 0, payload=1))),
        (
            "opened twice",
            pack_frame(Head(FrameKind.CALL, 1, len(FLAG), 0, 0, 10, 10), (), FLAG) * 2,
        ),
        (
            "opened twice",
            pack_frame(Head(FrameKind.CALL, 1, len(FLAG), 0, 0, 10, 10), (), FLAG)
            + pack_whole(FrameKind.CALL, 1, PULL),
        ),
        (
            "11 bytes where 10",
            pack_frame(Head(FrameKind.CALL, 1, len(FLAG), 0, 0, 10, 10), (), FLAG)
            + pack_frame(Head(FrameKind.CHUNK, 1, body=11)),
        ),
    ],
)
def test_invalid_frames_are_refused(what: str, data: bytes) -> None:
    with pytest.raises(DecodeError, match=what):
        Reading().feed(data)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=3), st.data())
def test_fast_path_equals_slow_path(damage: list[tuple[int, int]], data: st.DataObject) -> None:
    """The fast path accepts and refuses the same frames as the slow path."""
    stream = bytearray(WITH_META + SMALL * 2)
    for place, byte in damage:
        stream[place] = byte
    end = data.draw(st.integers(0, len(stream)))
    limits = Limits(header=data.draw(st.sampled_from([45, 10_000])), payload=data.draw(st.sampled_from([3, 100_000])))
    found = []
    for cuts, whole in (([], 192 << 10), ([1] * end, 192 << 10), ([1] * end, 0)):
        reading, refused = Reading(limits), False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "_WHOLE_BYTES", whole)
            try:
                reading.feed(bytes(stream[:end]), cuts)
            except DecodeError:
                refused = True
        found.append((reading.messages, reading.controls, refused, refused or reading.reader.mid_frame))
    assert found[0] == found[1]
    waits = found[0][3] and not found[0][2]  # for the rest of a frame, which may not be right
    assert found[0][:2] == found[2][:2] and (waits or found[0] == found[2])


def test_received_message_does_not_change() -> None:
    reading = Reading()
    values = encoded(b"first"), encoded(b"later"), encoded(b"meta", b"one", b"", b"two"), encoded(b"text", b"x", b"y")
    for value in values:
        reading.feed(written((1, FrameKind.CALL, m.Flag(m.Stamp(1, 1), 1, 1, 1, value))))
    found = [wire.value_of(message) for _, message in reading.messages]
    assert found == [*values] and all(buffer.readonly for value in found if value for buffer in value.buffers)


def sealed(kind: FrameKind, message: m.Message) -> bytes:
    """The frame of a message on TCP."""
    out: list[bytes] = []
    outbox = outbox_to(out, lambda callback: callback())
    outbox.with_digests = True
    outbox.send(kind, 7, wire.to_header(message), wire.value_of(message))
    return b"".join(out)


LARGE = m.Flag(m.Stamp(1, 1), 1, 2, 3, encoded(b"meta", bytes(300_000)))
SEALED = {
    **{kind.name: pack_frame(Head(kind, 0, header=60), header=bytes(60)) for kind in list(FrameKind)[:5]},
    "pull": sealed(FrameKind.CALL, pull()),
    "several pulls": sealed(FrameKind.CALL, m.Pull(m.Stamp(1, 7), 3, 1, 5, "grad", 64)),
    "report": sealed(
        FrameKind.TELL, m.Report(m.Stamp(1, 7), 3, 1, True, 2, encode_sum(5), encode_sum(6), False, {"loss": 0.5})
    ),
    "item": sealed(FrameKind.REPLY, m.Item(m.Stamp(1, 7), 4, "grad", encoded(b"small"))),
    "array": sealed(FrameKind.REPLY, m.Item(m.Stamp(1, 7), 4, "grad", encoded(b"x", b"", bytes(500)))),
    "protobuf": sealed(FrameKind.CALL, m.Seal(m.Stamp(1, 7), 3, 11)),
    "large": sealed(FrameKind.CALL, LARGE)[: -300_004 - HEAD_BYTES],
    "CHUNK": Head(FrameKind.CHUNK, 7, body=40).pack() + bytes(40),
    **{kind.name: Head(kind, 7).pack() for kind in (FrameKind.CANCEL, FrameKind.GOODBYE, FrameKind.DECLINE)},
    "RETURN": pack_frame(Head(FrameKind.RETURN, 0, 16), header=bytes(16)),
}


@pytest.mark.parametrize("cut", [1_000_000, 60])
@pytest.mark.parametrize("name", SEALED)
def test_every_damaged_bit_of_a_header_is_noticed(name: str, cut: int) -> None:
    """A damaged report ended a job early; a damaged size made a session wait for ever."""
    frame = SEALED[name]
    head = unpack_head(memoryview(frame), Limits())
    before = HEAD_BYTES + 8 * head.buffers + head.header

    def read(data: bytes) -> None:
        reading = Reading()
        reading.reader.whole = (FrameKind.CALL, FrameKind.TELL, FrameKind.REPLY)
        reading.reader.checked = True
        reading.feed(data, [cut] * (1 + len(data) // cut))

    read(frame)
    for bit in range(8 * before):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DecodeError):
            read(bytes(damaged))
            pytest.fail(f"bit {bit % 8} of byte {bit // 8}")


def test_tcp_frames_have_digests() -> None:
    out: list[bytes] = []
    outbox = outbox_to(out, lambda callback: callback())
    outbox.with_digests = True
    for number, (call, _) in enumerate(EXCHANGES, 1):
        outbox.send(FrameKind.CALL, number, wire.to_header(call), wire.value_of(call))
    outbox.send(FrameKind.CALL, 100, wire.to_header(LARGE), LARGE.value)
    outbox.send_several(FrameKind.CALL, 200, wire.to_header(pull()))
    reading = Reading()
    reading.reader.checked = True
    reading.feed(b"".join(out))
    expected = [*enumerate([call for call, _ in EXCHANGES], 1), (100, LARGE), (200, pull())]
    assert sorted(reading.messages, key=itemgetter(0)) == expected


def test_full_socket_keeps_the_order_of_frames() -> None:
    out: list[bytes] = []
    outbox = outbox_to(out, lambda callback: None)
    outbox.send(FrameKind.CALL, 1, PULL)
    assert len(out) == 1  # at once
    outbox.pause()
    outbox.send(FrameKind.CALL, 2, PULL)
    outbox.send(FrameKind.CALL, 3, FLAG, encoded(b"meta"))
    assert len(out) == 1
    outbox.resume()
    outbox.send(FrameKind.CALL, 4, PULL)
    outbox.close()
    outbox.send(FrameKind.CALL, 5, PULL)
    reading = Reading()
    reading.feed(b"".join(out))
    assert [number for number, _ in reading.messages] == [1, 2, 3, 4]


def test_unwanted_payload_is_skipped() -> None:
    large = m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"meta", bytes(3 << 20)))
    reading = Reading()
    reading.skip = {1}
    reading.feed(written((1, FrameKind.CALL, large), (2, FrameKind.CALL, pull()), (3, FrameKind.CALL, large)))
    assert [number for number, _ in reading.messages] == [2, 3]
    assert not reading.reader.mid_frame, "nothing of it is kept"


def test_message_can_be_dropped_half_way() -> None:
    large = m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"meta", bytes(3 << 20)))
    data = written((1, FrameKind.CALL, large))
    reading = Reading()
    reading.feed(data[:1_500_000])
    assert reading.reader.mid_frame
    reading.reader.drop(1)
    reading.feed(data[1_500_000:] + written((2, FrameKind.CALL, pull())))
    assert [number for number, _ in reading.messages] == [2]
    assert not reading.reader.mid_frame


def test_small_messages_overtake_large_ones() -> None:
    out: list[bytes] = []
    callbacks = []
    outbox = outbox_to(out, callbacks.append)
    outbox.pause()
    large = m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"", bytes(32 << 20)))
    outbox.send(FrameKind.CALL, 1, wire.to_header(large), large.value)
    outbox.resume()
    (more,) = callbacks  # it lets the event loop breathe
    assert sum(map(len, out)) < 10 << 20
    outbox.send(FrameKind.CALL, 2, PULL)
    more()
    while len(callbacks) > 1:
        callbacks.pop()()
    reading = Reading()
    for data in out:
        reading.feed(data)
    assert reading.messages[0][0] == 2


def test_drop_tells_if_the_peer_saw_the_message() -> None:
    out: list[bytes] = []
    outbox = outbox_to(out, lambda callback: None)
    large = encoded(b"", bytes(32 << 20))
    outbox.send(FrameKind.CALL, 1, FLAG, large)  # partly written
    outbox.pause()
    outbox.send(FrameKind.CALL, 2, PULL)
    for number in range(3, 8):
        outbox.send(FrameKind.CALL, number, FLAG, large)
    assert outbox.drop(1)
    assert not outbox.drop(2)
    assert not any(outbox.drop(number) for number in range(3, 8))
    assert outbox.idle
    assert outbox.drop(9)  # written long ago


@given(st.lists(st.integers(1, 400_000), max_size=12), st.integers(0, 3))
def test_digest_on_the_way_equals_the_whole_one(cuts: list[int], small: int) -> None:
    """In any pieces, in place or through the receive buffer."""
    value = values.encode([np.arange(20_000.0), *[np.arange(600.0)] * small, b"x" * 200_000])
    sizes = [buffer.nbytes for buffer in value.buffers]
    payload = b"".join((value.meta, *value.buffers))
    head = Head(FrameKind.CALL, 1, 0, len(sizes), 0, len(payload), len(value.meta))
    flag = m.Flag(m.Stamp(1, 1), 1, 1, 1, value)
    incoming = IncomingMessage(head, sizes, flag, digesting=values.begin_digest)
    at = 0
    for count in (*cuts, len(payload)):
        incoming.take(memoryview(payload)[at : at + count])
        at += count
    assert incoming.missing == 0
    assert incoming.digest() == value.digest == values.digest_of(incoming.meta(), incoming.value_buffers())
    assert IncomingMessage(head, sizes, flag).digest() is None
