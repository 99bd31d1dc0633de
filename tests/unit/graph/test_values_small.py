"""A value that is one small array takes a shorter way: to the same bytes, and with the same errors."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from taskgraph.errors import DecodeError
from taskgraph.graph import arrays, values
from taskgraph.graph.values import decode, digest_of, encode, verify
from taskgraph.protocol.messages import Encoded

dtypes = st.one_of(
    npst.scalar_dtypes(),
    npst.byte_string_dtypes(endianness="?"),
    npst.unicode_string_dtypes(endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    st.sampled_from([np.dtype(t) for t in ("g", "G", "q", "l", "S0", "U0", "i1,>f8")]),
)
small = npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def at_length(value: Any) -> Encoded:
    """As it is encoded where nothing like it was encoded before."""
    values._starts.clear()
    return encode(value)


def read(encoded: Encoded, *, writable: bool = False) -> Any:
    """What comes of it: an array's parts, or what an error says."""
    try:
        found = decode(encoded, writable=writable)
    except DecodeError as error:
        return str(error)
    if type(found) is not np.ndarray:
        return repr(found)
    return found.dtype, found.dtype.num, found.shape, found.strides, found.tobytes(), str(found.flags)


def read_at_length(encoded: Encoded, **how: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "small_array", lambda meta: None)
        return read(encoded, **how)


@settings(max_examples=300)
@given(small, st.booleans())
def test_both_ways_give_the_same(array: np.ndarray[Any, Any], transposed: bool) -> None:
    array = array.T if transposed else array
    first = at_length(array)
    later = encode(array.copy("A"))
    assert (first.meta, first.digest, first.buffers) == (later.meta, later.digest, later.buffers)
    assert digest_of(later.meta, later.buffers) == later.digest and verify(later)
    for writable in (False, True):
        assert read(later, writable=writable) == read_at_length(later, writable=writable)


def test_the_shorter_way_is_taken() -> None:
    array = np.arange(6.0).reshape(2, 3)
    first = at_length(array)
    assert values._starts == {(array.dtype, array.dtype.num, (2, 3)): first.meta[:-52]}
    decode(first)  # which learns the dtype, if nothing of it was read before
    found = values.small_array(first.meta)
    assert found is not None and np.array_equal(found, array) and found.base is first.meta


@pytest.mark.parametrize("array", [np.zeros(2, "i1,i8"), np.zeros(3, np.longdouble), np.zeros(513, "i1,i8")])
def test_what_has_padding_is_not_encoded_in_the_shorter_way(array: np.ndarray[Any, Any]) -> None:
    at_length(array)
    assert not values._starts


def test_later_changes_of_the_original_do_not_arrive_and_what_arrives_is_read_only() -> None:
    array = np.zeros(3)
    encode(array)
    encoded = encode(array)
    array[:] = 1
    found = decode(encoded)
    assert list(found) == [0, 0, 0]
    with pytest.raises(ValueError, match="WRITEABLE"):
        found.flags.writeable = True
    own = decode(encoded, writable=True)
    own[:] = 2
    assert list(decode(encoded)) == [0, 0, 0]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_STARTS_KEPT", 3)
    monkeypatch.setattr(values, "_SHAPES_KEPT", 3)
    values._starts.clear()
    values._shapes.clear()
    for size in range(6):
        assert decode(encode(np.arange(size))).tolist() == list(range(size))
        assert len(values._starts) <= 3 and len(values._shapes) <= 3
    assert values._shapes


def test_arrays_of_equal_length_and_other_kinds_take_turns() -> None:
    shapes, dtypes = [(2, 3), (3, 2)], ["<f8", ">f8", "<i8"]
    kinds = [np.arange(6.0).reshape(shape).astype(dtype) for shape in shapes for dtype in dtypes]
    encoded = [encode(array) for array in kinds]
    assert len({len(one.meta) for one in encoded}) == 1
    for _ in range(3):
        for one, array in zip(encoded, kinds, strict=True):
            assert read(one) == read_at_length(one)
            assert np.array_equal(decode(one), array) and decode(one).dtype == array.dtype


def test_what_begins_like_the_last_one_is_refused_where_its_trailer_is_another() -> None:
    encoded = encode(np.arange(3.0))
    decode(encoded)
    damaged = Encoded(encoded.meta[:-4] + b"\1\0\0\0", (), encoded.digest)
    assert values.small_array(damaged.meta) is None
    assert read(damaged) == read_at_length(damaged)


@settings(max_examples=600)
@given(small, st.data())
def test_damaged_arrays_are_told_alike(array: np.ndarray[Any, Any], data: st.DataObject) -> None:
    meta = bytearray(encode(array).meta)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(meta) - 1) | st.integers(1, min(len(meta) - 1, 24)))
        kind = data.draw(st.sampled_from(["byte", "huge", "cut", "more"]))
        if kind == "byte":
            meta[at] = data.draw(st.integers(0, 255) | st.sampled_from([*b"AaNf", 3, 64, 65]))
        elif kind == "huge":
            meta[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1 << 31, (1 << 63) - 1, 1 << 63])))
        elif kind == "cut":
            del meta[at : at + data.draw(st.integers(1, 20))]
        else:
            meta[at:at] = meta[at : at + data.draw(st.integers(1, 20))]
    for trailer in (b"", bytes(4)):
        for buffers in ((), (memoryview(b"x" * 8),)):
            damaged = Encoded(bytes(meta) + trailer, buffers, b"")
            assert read(damaged) == read_at_length(damaged)
            assert verify(Encoded(damaged.meta, buffers, digest_of(damaged.meta, buffers)))


@pytest.mark.parametrize("size", range(60))
def test_every_truncation_is_told_alike(size: int) -> None:
    whole = encode(np.arange(6.0).reshape(2, 3)).meta
    for trailer in (b"", bytes(4)):
        cut = Encoded(whole[:size] + trailer, (), b"")
        assert read(cut) == read_at_length(cut)


@pytest.mark.parametrize(
    "dtype",
    [float, int, bool, np.float32, np.void, np.str_, "f8", np.dtype(">i2"), [("a", "i1"), ("b", "f8")]],
)
@pytest.mark.parametrize("shape", [3, (2, 5), (), 0])
def test_an_array_to_fill_is_numpys_also_when_its_like_was_made(dtype: Any, shape: Any) -> None:
    asked: list[int] = []
    for _ in range(2):
        found = arrays.empty(shape, dtype, lambda nbytes: asked.append(nbytes))
        expected = np.empty(shape, dtype)
        assert found.dtype == expected.dtype and found.shape == expected.shape and found.flags.writeable
    assert not asked  # they are small
    size = arrays.INLINE_BYTES // 8
    for _ in range(2):
        arrays.empty(size, dtype, lambda nbytes: asked.append(nbytes))
    itemsize = np.dtype(dtype).itemsize
    large = size * itemsize >= arrays.INLINE_BYTES
    assert asked == ([size * itemsize] * 2 if large else [])
