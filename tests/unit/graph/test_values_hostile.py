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
from msgspec.msgpack import Ext
from msgspec.msgpack import encode as pack

from taskgraph.errors import DecodeError
from taskgraph.graph import layout
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
        [1, -(1 << 70), 2.5, 1j, "text\ud800", b"bytes", (), {"k": [None, True]}, {(1, 2): "x"}],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.zeros(2, [("a", "i1"), (("title", "b"), "f8", (2, 2)), ("c", [("d", "M8[25s]")])]),
        np.zeros((3, 10_000)),
        [np.zeros(700), b"b" * 70_000, np.str_("s"), np.bytes_(b"y" * 5000), np.longdouble(3), np.void(b"ab")],
        [np.zeros(7000), np.zeros(7000)],
        Hostile(a=HostileCoded([timestamp_pb2.Timestamp(seconds=3)])),
        np.zeros(2, [("f", "S0")])["f"],
    )
]
SAMPLES.append(encode(np.zeros((2, 3)).T, ordered=True))


def attack(meta: bytes, buffers: tuple[memoryview, ...] = ()) -> None:
    """Decodes: a value or a DecodeError, and little memory."""
    encoded = Encoded(meta, buffers, b"")
    verify(encoded)
    digest_of(meta, buffers)
    size = encoded.size_bytes
    tracemalloc.start()  # only here: it slows what draws examples down
    try:
        for read in (lambda: decode(encoded, writable=True), lambda: outline(encoded)):
            try:
                read()
            except DecodeError as error:
                assert len(str(error)) < 2000
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 200 * size
    finally:
        tracemalloc.stop()


codes = st.integers(-3, 15)
atoms = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3) | st.binary(max_size=9)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(lambda code, tree: Ext(code, pack(tree)), codes, inner)
        | st.builds(Ext, codes, st.binary(max_size=20))
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from([layout.PLAIN, layout.TREE, layout.ARRAY, layout.LARGE_ARRAY]), st.binary(max_size=200))
def test_random_bytes(kind: bytes, data: bytes) -> None:
    attack(data)
    attack(kind + data + bytes(4))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(trees)
def test_random_trees(tree: Any) -> None:
    attack(layout.PLAIN + pack(tree) + bytes(4), (memoryview(b"x" * 8),))
    attack(layout.TREE_HEAD.pack(layout.TREE, 8, 0) + bytes(8) + pack(tree) + bytes(4))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_values(sample: Encoded, data: st.DataObject) -> None:
    meta = bytearray(sample.meta)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(meta) - 1))
        kind = data.draw(st.sampled_from(["byte", "huge", "cut", "double"]))
        if kind == "byte":
            meta[at] = data.draw(st.integers(0, 255))
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
def test_every_truncation(sample: Encoded) -> None:
    for size in range(len(sample.meta)):
        attack(sample.meta[:size], sample.buffers)
        cut = Encoded(sample.meta[:size], sample.buffers, sample.digest)
        if verify(cut):  # the value is whole, and its trailer is gone
            with pytest.raises(DecodeError):
                decode(cut)


def test_digest_notices_every_changed_byte() -> None:
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


def test_digest_notices_bytes_moved_between_buffers() -> None:
    one, other = (memoryview(b"a" * 3), memoryview(b"a")), (memoryview(b"a" * 2), memoryview(b"aa"))
    assert digest_of(b"m", one) != digest_of(b"m", other)


def array(dtype: Any, shape: list[int], buffer: int = 0, at: int = 0, order: bytes = b"") -> Ext:
    described = dtype if isinstance(dtype, bytes) else pack(dtype)
    return Ext(layout.ARRAY_EXT, pack([0, buffer, at, described, shape, order]))


def ext(code: int, tree: Any) -> Ext:
    return Ext(code, pack(tree))


def nested(code: int, tree: Any, times: int) -> Any:
    for _ in range(times):
        tree = Ext(code, pack(["HostileCoded", tree] if code == layout.CODEC_EXT else [tree]))
    return tree


def nested_dtype(times: int) -> Any:
    described: Any = "<i8"
    for _ in range(times):
        described = ["a", [1], described]
    return described


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (Ext(99, b""), "unknown kind 99"),
        (ext(layout.TUPLE_EXT, 3), "a tuple of int"),
        (nested(layout.TUPLE_EXT, 0, 200), "nested more than 100 deep"),
        (nested(layout.CODEC_EXT, 0, 200), "nested more than 100 deep"),
        (ext(layout.ITEMS_EXT, [pack([1, True]), pack([1, 2])]), "2 keys has 1 different"),
        (ext(layout.ITEMS_EXT, [pack([[]]), pack([1])]), "a key that cannot be one"),
        (ext(layout.ITEMS_EXT, [pack([1]), pack([])]), "as many values as keys"),
        (Ext(layout.COMPLEX_EXT, b"123"), "complex number of 3 bytes"),
        (Ext(layout.STR_EXT, b"\xff"), "not a value"),
        (ext(layout.BYTES_EXT, 7), "names buffer 7 and has 0"),
        (ext(layout.BYTES_EXT, "x"), "in place of a buffer's number"),
        (array(b"|O", [1]), "dtype"),
        (array(b"<f8,f8", [1]), "not a dtype"),
        (array(b"|V 8", [1]), "not a dtype"),
        (array(b">a4", [1]), "not a dtype"),  # an old name, of which numpy warns
        (array(b"<f16", [1]), "another kind of machine"),
        (array(b"<i8", [1 << 61]), "in memory of"),
        (array(b"<i8", [-1]), "not a value"),
        (array(b"<i8", [0] * 65), "length <= 64"),
        (array(b"<i8", [1], buffer=3), "names buffer 3 and has 0"),
        (array(b"<i8", [1], at=1 << 62), "in memory of"),
        (array(b"<f8", [(1 << 63) - 1] * 33 + [1, 0]), "not an array"),
        (array(["r", False, False, 1 << 62, []], [1]), "not a dtype"),
        (array(["a", [1], "<i8"], [0]), "its shape says so"),
        (array(nested_dtype(100), [0]), "nested more than 32"),
        (array(["a", [1 << 31], "<i8"], [0]), "not a dtype"),
        (array(["a", [1 << 16, 1 << 16], "<i8"], [0]), "a dtype of"),
        (array(b"<i8", [0, 2], order=b"\x40\1"), "gaps in an array of no bytes"),
        (array(b"<i8", [1, 0], order=b"\1\2"), "in the order"),
        (ext(layout.SCALAR_EXT, [b"|S1", b"a"]), "a scalar of"),
        (ext(layout.SCALAR_EXT, [b"<i8", b"a"]), "a scalar of 1 bytes"),
        (ext(layout.MESSAGE_EXT, ["None", {}]), "no @tg.message is called 'None'"),
        (ext(layout.MESSAGE_EXT, ["Hostile", {"b": 1, "a": 2}]), "came with ['b', 'a']"),
        (ext(layout.MESSAGE_EXT, ["Hostile", 3]), "came with"),
        (ext(layout.CODEC_EXT, ["None", 3]), "no codec is called 'None'"),
        (ext(layout.PROTOBUF_EXT, ["x", None]), "without its bytes"),
        (ext(layout.PROTOBUF_EXT, ["x", b""]), "no protobuf message is called 'x' here"),
        (ext(layout.PROTOBUF_EXT, ["google.protobuf.Timestamp", b"\xff"]), "not a protobuf message"),
    ],
    ids=range(38),
)
def test_refusal_says_why(tree: Any, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Encoded(layout.PLAIN + pack([tree]) + bytes(4), (), b""))
    assert said in str(caught.value)


def test_field_beyond_its_dtype() -> None:
    """Its offset and size made numpy's 32 bits wrap around: reading the array read beyond it, and crashed."""
    inner = ["r", False, False, 0x54000008, [[b"d", None, 0, "<i8"]]]
    for offset in (0x50000021, 0x7FFFFFF0, 2**31, 2**32, 2**63, 9):
        with pytest.raises(DecodeError, match="dtype"):
            tree = array(["r", False, False, 41, [[b"c", None, offset, inner]]], [1])
            decode(Encoded(layout.TREE_HEAD.pack(layout.TREE, 200, 0) + bytes(200) + pack(tree) + bytes(4), (), b""))


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (b"", "no trailer|not an encoded value"),
        (b"\x01N\0\0\0\0", "not an encoded value"),
        (layout.PLAIN + b"\xc0\xff\xff\xff\xff", "no trailer"),
        (layout.PLAIN + b"\xc0\xc0\0\0\0\0", "not a value"),
        (layout.TREE + bytes(8), "not an encoded value"),
        (layout.TREE_HEAD.pack(layout.TREE, 1 << 31, 0) + bytes(4), "announces"),
        (layout.TREE_HEAD.pack(layout.TREE, 0, 5) + bytes(4), "names buffer 5"),
        (layout.PLAIN + b"\xdd\xff\xff\xff\xff\0\0\0\0", "truncated"),
        (layout.PLAIN + b"\x91" * 10_000 + b"\0\0\0\0", "stack"),
    ],
)
def test_damaged_meta(meta: bytes, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        decode(Encoded(meta, (), b""))


def test_buffer_of_another_size() -> None:
    sample = encode(np.zeros(10_000))
    for buffers in (
        (),
        (sample.buffers[0][1:],),
        (*sample.buffers, memoryview(b"x")),
        (memoryview(bytes(160_000))[::2],),
    ):
        for _ in range(2):
            with pytest.raises(DecodeError):
                decode(Encoded(sample.meta, buffers, b""))
        decode(sample)


def test_outline_of_huge_key() -> None:
    """It was written out in decimal, which Python refuses: a state with such a key had no checkpoint."""
    for key, name in ((10**5000, "key0"), (-(10**5000), "key0"), (7, "7"), (True, "True")):
        (found,) = outline(encode({key: np.zeros(3)}))
        assert found.path == (name,)


@pytest.mark.parametrize("axes", [65, 2_000])
def test_shape_of_too_many_axes(axes: int) -> None:
    head = layout.to_bytes((0, 0, 0, b"<f8", (2**63 - 1,) * axes))
    tree = layout.to_bytes(layout.Ext(layout.ARRAY_EXT, head))
    with pytest.raises(DecodeError, match="64"):
        decode(Encoded(layout.TREE_HEAD.pack(layout.TREE, 0, 0) + tree + bytes(4), (), b""))
