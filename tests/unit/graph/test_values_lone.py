"""Values that are one array, and nothing else: they take a shorter way to the same bytes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from taskgraph.errors import DecodeError
from taskgraph.graph import arrays
from taskgraph.graph.encoding import write
from taskgraph.graph.values import codec, decode, digest_of, encode, verify
from taskgraph.protocol.messages import Encoded

PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
LARGE = [
    np.arange(10_000.0),
    np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
    np.arange(20_000, dtype=">i4"),
    np.arange(10_000).astype("M8[s]"),
    np.arange(3000).astype("U8").reshape(3000, 1),
    np.array([(n % 99, n) for n in range(5000)], PADDED),
    np.arange(5000, dtype=np.longdouble),
    np.arange(80_000).reshape(1, 80_000, 1) % 3 == 0,
]

dtypes = st.one_of(
    npst.scalar_dtypes(),
    npst.byte_string_dtypes(endianness="?"),
    npst.unicode_string_dtypes(endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    st.sampled_from([np.dtype(t) for t in ("g", "G", "q", "l", "S0", "U0", "i1,>f8")]),
)
small = npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def check(array: np.ndarray, **how: Any) -> Encoded:
    """Encodes by both ways, and decodes."""
    encoded = encode(array, **how)
    _, meta = write(array, False, None, False, False, False)
    assert encoded.meta == meta + bytes(4) and verify(encoded)
    assert encoded.digest == digest_of(encoded.meta, encoded.buffers)
    for writable in (False, True):
        found = decode(encoded, writable=writable)
        assert type(found) is np.ndarray and found.dtype == array.dtype and found.dtype.num == array.dtype.num
        assert found.shape == array.shape and found.flags.aligned and found.flags.writeable is writable
        assert found.tolist() == array.tolist() or found.dtype.kind in "fcgGmM"
        if not writable and array.size and array.itemsize:
            with pytest.raises(ValueError, match="WRITEABLE"):
                found.flags.writeable = True
    return encoded


@settings(max_examples=300, deadline=None)
@given(small, st.booleans())
def test_small_arrays(array: np.ndarray, transposed: bool) -> None:
    for _ in range(2):
        check(array.T if transposed else array)


@pytest.mark.parametrize("adopt", [False, True], ids=["", "adopt"])
@pytest.mark.parametrize("array", LARGE, ids=lambda array: f"{array.dtype.str}-{array.shape}")
def test_large_arrays(array: np.ndarray, adopt: bool) -> None:
    one = check(array.copy("K"), adopt=adopt)
    changed = array.copy("K")
    changed.flat[0] = array.flat[-1]
    other = check(changed, adopt=adopt)
    assert other.meta == one.meta and other.digest != one.digest
    assert all(buffer.readonly for buffer in other.buffers)
    assert np.array_equal(decode(other), changed)


def test_arrays_of_equal_length_take_turns() -> None:
    kinds = [np.arange(6.0).reshape(s).astype(d) for s in [(2, 3), (3, 2)] for d in ["<f8", ">f8", "<i8"]]
    encoded = [encode(array) for array in kinds]
    assert len({len(one.meta) for one in encoded}) == 1
    for _ in range(3):
        for one, array in zip(encoded, kinds, strict=True):
            assert np.array_equal(decode(one), array) and decode(one).dtype == array.dtype
            with pytest.raises(DecodeError):
                decode(Encoded(one.meta[:-4] + b"\1\0\0\0", (), one.digest))


def test_many_shapes() -> None:
    for size in range(3000):
        assert len(decode(encode(np.zeros(size, "u1")))) == size


def test_unaligned_buffers_are_copied() -> None:
    encoded = encode(np.arange(10_000.0))
    shifted = memoryview(b"x" + bytes(encoded.buffers[0]))[1:]
    for _ in range(2):
        found = decode(Encoded(encoded.meta, (shifted,), encoded.digest))
        assert found.flags.aligned and not found.flags.writeable and np.array_equal(found, np.arange(10_000.0))


class Doubled:
    def __init__(self, half: np.ndarray) -> None:
        self.half = half


codec(Doubled, lambda doubled: doubled.half, lambda half: half * 2, name="tests.Doubled")


def test_array_of_a_codec() -> None:
    encoded = encode(Doubled(np.arange(10_000.0)))
    for _ in range(3):
        assert np.array_equal(decode(encoded), 2 * np.arange(10_000.0))


def test_received_array_is_passed_on() -> None:
    encoded = encode(np.arange(10_000.0))
    for _ in range(2):
        found = decode(encoded)
        again = encode(found)
        assert again == encoded and np.shares_memory(np.frombuffer(again.buffers[0]), found)
        assert encode(found.reshape(100, 100)).digest == encode(np.arange(10_000.0).reshape(100, 100)).digest
        assert encode(found[1:]).digest == encode(np.arange(1.0, 10_000.0)).digest
        view = found[5:]
        del found
        gc.collect()
        assert np.shares_memory(np.frombuffer(encode(view).buffers[0]), view), "a view keeps its memory immutable"


@pytest.mark.parametrize(
    "dtype",
    [float, int, bool, np.float32, np.void, np.str_, "f8", np.dtype(">i2"), [("a", "i1"), ("b", "f8")]],
)
@pytest.mark.parametrize("shape", [3, (2, 5), (), 0])
def test_empty_makes_numpys_arrays(dtype: Any, shape: Any) -> None:
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
