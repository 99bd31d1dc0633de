"""Bytes that are no value: DecodeError, never another error, a crash, a hang, or memory out of proportion."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf import timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraph.errors import DecodeError
from taskgraph.graph.outline import outline
from taskgraph.graph.values import codec, decode, digest_of, encode, message, verify
from taskgraph.protocol.messages import Encoded


@message
class Hostile:
    a: Any
    b: int = 0


class HostileCoded:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


codec(HostileCoded, lambda c: c.inner, HostileCoded)

SAMPLES = [
    encode(value)
    for value in (
        None,
        [1, -(1 << 70), 2.5, 1j, "text", b"bytes", (), {"k": [None, True]}, {(1, 2): "x"}],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.zeros(2, [("a", "i1"), (("title", "b"), "f8", (2, 2)), ("c", [("d", "M8[25s]")])]),
        np.zeros((3, 1000)),
        [np.zeros(700), b"b" * 5000, "s" * 5000, np.bytes_(b"y" * 5000), np.longdouble(3), np.void(b"ab")],
        Hostile(a=HostileCoded([timestamp_pb2.Timestamp(seconds=3)])),
        np.zeros(2, [("f", "S0")])["f"],
        [[0.5] * 20, [7] * 20, [True, False] * 10, ["a", "bc"] * 10, {i: str(i) for i in range(20)}],
        {"floats": [0.5] * 2000, "texts": tuple(["text", ""] * 500)},
    )
]
TAGS = b"NTFiIfcSsBbLURDKAaGXxYyMCP12340"


def attack(meta: bytes, buffers: tuple[memoryview, ...] = ()) -> None:
    """Decodes it: a value, or a DecodeError, and little memory."""
    encoded = Encoded(meta, buffers, b"")
    verify(encoded)
    digest_of(meta, buffers)
    size = encoded.size_bytes
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for read in (lambda: decode(encoded, writable=True), lambda: outline(encoded)):
        try:
            read()
        except DecodeError as error:
            assert len(str(error)) < 2000
    assert tracemalloc.get_traced_memory()[1] - before < 200_000 + 200 * size


@pytest.fixture(autouse=True, scope="module")
def traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    attack(data)
    attack(b"\x01" + data + b"\0\0\0\0")


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([bytes((t,)) for t in TAGS]) | st.binary(max_size=9) | st.integers(0, 9), max_size=20))
def test_sentences_of_tags(parts: list[bytes | int]) -> None:
    words = [p if isinstance(p, bytes) else struct.pack("<Q", p) for p in parts]
    attack(b"\x01" + b"".join(words) + b"\0\0\0\0", (memoryview(b"x" * 8),))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_values(sample: Encoded, data: st.DataObject) -> None:
    meta = bytearray(sample.meta)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(meta) - 1))
        kind = data.draw(st.sampled_from(["byte", "tag", "huge", "cut", "double"]))
        if kind == "byte":
            meta[at] = data.draw(st.integers(0, 255))
        elif kind == "tag":
            meta[at] = data.draw(st.sampled_from(TAGS))
        elif kind == "huge":
            meta[at : at + 8] = struct.pack(
                "<Q", data.draw(st.sampled_from([1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63]))
            )
        elif kind == "cut":
            del meta[at : at + data.draw(st.integers(1, 20))]
        else:
            meta[at:at] = meta[at : at + 20]
        if not meta:
            return
    buffers = sample.buffers
    if data.draw(st.booleans()):
        buffers = buffers[1:]
    attack(bytes(meta), buffers)


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_every_truncation_is_noticed(sample: Encoded) -> None:
    for size in range(len(sample.meta)):
        attack(sample.meta[:size], sample.buffers)
        cut = Encoded(sample.meta[:size], sample.buffers, sample.digest)
        if verify(cut):  # the value is whole, and its trailer is gone
            with pytest.raises(DecodeError):
                decode(cut)


def test_every_changed_byte_is_noticed_by_the_digest() -> None:
    for sample in SAMPLES:
        assert verify(sample)
        for at in range(len(sample.meta) - 4):
            changed = bytearray(sample.meta)
            changed[at] ^= 0x40
            assert not verify(Encoded(bytes(changed), sample.buffers, sample.digest))
        for number, buffer in enumerate(sample.buffers):
            damaged = bytearray(buffer)
            damaged[-1] ^= 1
            buffers = [*sample.buffers]
            buffers[number] = memoryview(damaged).toreadonly()
            assert not verify(Encoded(sample.meta, tuple(buffers), sample.digest))


def test_bytes_moved_from_one_buffer_to_the_next_are_noticed() -> None:
    one, other = (memoryview(b"a" * 3), memoryview(b"a")), (memoryview(b"a" * 2), memoryview(b"aa"))
    assert digest_of(b"m", one) != digest_of(b"m", other)


U64 = struct.Struct("<Q").pack


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not an encoded value"),
        (b"?", "begins with byte 63"),
        (b"NN", "ends at byte 2 of 3"),
        (b"L" + U64(1 << 60), "announces"),
        (b"L" + U64(3) + b"N", "announces 3 parts"),
        (b"S" + U64(1) + b"\xff", "not a text"),
        (b"S" + U64(1 << 63), "announces"),
        (b"I" + U64(1 << 62), "announces"),
        (b"D" + U64(2) + b"TNTN", "2 keys has 1 different"),
        (b"D" + U64(1) + b"L" + U64(0) + b"N", "a key that is none"),
        ((b"L" + U64(1)) * 1000 + b"N", "nested more than 100 deep"),
        ((b"C" + U64(12) + b"HostileCoded") * 1000 + b"N", "nested more than 100 deep"),
        (b"b" + U64(1), "names buffer 0"),
        (b"A\x02|O\x00", "dtype"),
        (b"A\x05f8,f8\x00", "not a dtype"),
        (b"A\x03<i8\x01" + U64(1 << 61), "announces"),
        (b"A\x03<i8\x41" + U64(0) * 65, "within itself"),
        (b"A\x03<i8\x28" + U64(1 << 30) * 39 + U64(0) + bytes(9), "not an array"),
        (b"A\x0b|V999999999\x01" + U64(1), "announces"),
        (b"A\x04|V 8\x00", "not a dtype"),
        (b"A\x03f16\x00", "not a dtype"),
        (b"A\x03>a4\x00", "not a dtype"),  # an old name, of which numpy warns
        (b"A\x04<f16\x00", "another kind of machine"),
        (b"A\xfe\x00" + U64(0) + b"\xff\xff\xff\xff", "announces 4294967295 fields"),
        (b"A\xfe\x00" + U64(1 << 62) + b"\0\0\0\0\x00", "dtype"),
        (b"A" + b"\xff\x01" + U64(1) + b"\x03<i8\x00", "its shape says so"),
        (b"A" + (b"\xff\x01" + U64(1)) * 100 + b"\x03<i8\x00", "nested more than 32"),
        (b"G\x03|S1a", "a scalar of dtype"),
        (b"M" + U64(4) + b"None\0\0\0\0", "no @tg.message is called 'None'"),
        (b"P" + U64(1) + b"xN", "without its bytes"),
        (b"P" + U64(3) + b"\xed\xa0\x80B" + U64(0), r"no protobuf message is called '\ud800' here"),
        (b"P" + U64(25) + b"google.protobuf.Timestamp" + b"B" + U64(1) + b"\xff", "not a protobuf message"),
    ],
    ids=range(32),
)
def test_what_is_said_of_it(body: bytes, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Encoded(b"\x01" + body + b"\0\0\0\0", (), b""))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (b"", "not an encoded value"),
        (b"\x02N\0\0\0\0", "format 1 is known here"),
        (b"\x01N\xff\xff\xff\xff", "no trailer"),
        (b"\x01N\0\0\0\0\x01\0\0\0", "0 arrays has others on a device"),
    ],
)
def test_frames_of_a_value(meta: bytes, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        decode(Encoded(meta, (), b""))


def test_a_buffer_nobody_names() -> None:
    with pytest.raises(DecodeError, match="names 0 buffers and has 1"):
        decode(Encoded(encode(1).meta, (memoryview(b"x"),), b""))


def test_a_buffer_of_another_size() -> None:
    sample = encode(np.zeros(10_000))
    with pytest.raises(DecodeError, match="80000 bytes, and has one of 79999"):
        decode(Encoded(sample.meta, (sample.buffers[0][1:],), b""))


def test_a_field_beyond_its_dtype_is_refused() -> None:
    """Its offset and size made numpy's 32 bits wrap around: reading the array read beyond it, and crashed."""
    inner = b"\xfe" + struct.pack("<BQI", 0, 0x54000008, 1) + struct.pack("<I", 2) + b"d" + struct.pack("<IQ", 0, 0)
    inner += b"\x03<i8"
    for offset in (0x50000021, 0x7FFFFFF0, 2**31, 2**32, 2**63, 2**64 - 1, 9):
        record = b"\xfe" + struct.pack("<BQI", 0, 41, 1) + struct.pack("<I", 2) + b"c" + struct.pack("<IQ", 0, offset)
        meta = b"\x01A" + record + inner + b"\x01" + struct.pack("<Q", 1) + bytes(200) + b"\0\0\0\0"
        attack(meta)
        with pytest.raises(DecodeError):
            decode(Encoded(meta, (), b""))


@pytest.mark.parametrize("shape", [(2**31,), (2**16, 2**16), (2**32, 2**32), (2**63, 2), (2**40, 0)])
def test_a_subarray_larger_than_a_dtype_may_be_is_refused(shape: tuple[int, ...]) -> None:
    described = b"\xff" + struct.pack(f"<B{len(shape)}Q", len(shape), *shape) + b"\x03<i8"
    record = b"\xfe" + struct.pack("<BQI", 0, 8, 1) + struct.pack("<I", 2) + b"c" + struct.pack("<IQ", 0, 0) + described
    attack(b"\x01A" + record + b"\x01" + struct.pack("<Q", 1) + bytes(200) + b"\0\0\0\0")


def test_a_shape_of_many_huge_sides_and_one_of_none() -> None:
    """An outline multiplied its sides as floating-point numbers, and came to no number."""
    sides = (2**64 - 1,) * 33 + (1, 0)
    attack(b"\x01A\x03<f8" + bytes([len(sides)]) + struct.pack(f"<{len(sides)}Q", *sides) + bytes(64))


def test_a_key_of_thousands_of_digits_has_a_name_in_an_outline() -> None:
    """It was written out in decimal, which Python refuses: a state with such a key had no checkpoint."""
    for key, name in ((10**5000, "key0"), (-(10**5000), "key0"), (7, "7"), (True, "True")):
        (found,) = outline(encode({key: np.zeros(3)}))
        assert found.path == (name,)
