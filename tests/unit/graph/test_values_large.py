"""Values that are one large array: what is known of them from before is all that `Reader` would find out again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from taskgraph.errors import DecodeError
from taskgraph.graph import arrays, digests, encoding, values
from taskgraph.graph.values import codec, decode, digest_of, encode
from taskgraph.protocol.messages import Encoded

PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
ARRAYS = [
    np.arange(10_000.0),
    np.arange(10_000.0).reshape(100, 100),
    np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
    np.arange(10_000, dtype=">i4"),
    np.arange(10_000).astype("M8[s]"),
    np.arange(3000).astype("U8").reshape(3000, 1),
    np.array([(n % 99, n) for n in range(1000)], PADDED),
    np.arange(3000, dtype=np.longdouble),
    np.arange(5000).reshape(1, 5000, 1) % 3 == 0,
]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And arrays of 4 KiB are large."""
    for module in (arrays, encoding, values):
        monkeypatch.setattr(module, "INLINE_BYTES", 4096)
    monkeypatch.setattr(values, "_lone", {})
    monkeypatch.setattr(values, "_starts", {})
    return


def no_reader(*_: Any) -> Any:
    raise AssertionError("it was read again")


def received(array: np.ndarray) -> np.ndarray:
    found: np.ndarray = decode(encode(array))
    return found


GIVEN = {
    "own": np.copy,
    "view": lambda array: np.concatenate((array, array))[: len(array)],
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
    "transposed": lambda array: np.asfortranarray(array.copy()),
    "received": received,
    "a part of what was received": lambda array: received(np.concatenate((array, array)))[len(array) :],
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
}


@pytest.mark.parametrize("adopt", [False, True], ids=["", "adopt"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}-{array.shape}")
def test_it_is_described_once_and_then_known(
    array: np.ndarray, given: str, adopt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is encoded as the first one was, and takes memory over where that one did."""
    array = array.copy()
    first = GIVEN[given](array)
    values._starts.clear()
    one = encode(first, adopt=adopt)
    array.flat[0] = array.flat[-1]
    second = GIVEN[given](array)
    values._starts.clear()
    expected = encode(second.copy())
    with monkeypatch.context() as patched:
        if values._starts:
            patched.setattr(values, "Writer", no_reader)
        else:
            assert array.dtype.names or array.dtype.num == np.dtype(np.longdouble).num
        another = encode(second, adopt=adopt)
    assert another == expected and another.meta == one.meta and another.digest != one.digest
    assert digest_of(another.meta, another.buffers) == another.digest
    assert all(buffer.readonly for buffer in another.buffers)
    shared = [np.shares_memory(np.frombuffer(e.buffers[0], "u1"), a) for e, a in ((one, first), (another, second))]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}-{array.shape}")
def test_it_is_read_once_and_then_known(array: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(array)
    first = decode(encoded)
    changed = array.copy()
    changed.flat[0] = array.flat[-1]
    other = encode(changed)
    fresh = decode(other, writable=True)
    monkeypatch.setattr(values, "Reader", no_reader)
    for again, expected in ((decode(encoded), array), (decode(other), changed)):
        assert type(again) is np.ndarray and again.dtype == first.dtype and again.dtype.num == first.dtype.num
        assert again.shape == array.shape and again.strides == first.strides
        assert np.array_equal(again, expected) and again.flags.aligned
        with pytest.raises(ValueError, match="WRITEABLE"):
            again.flags.writeable = True
    assert fresh.flags.writeable and np.array_equal(fresh, changed)


def test_what_does_not_fit_is_refused_also_when_its_like_was_read() -> None:
    encoded = encode(np.arange(10_000.0))
    short, doubles = encoded.buffers[0][:-8], encoded.buffers[0].cast("d")
    every_other = memoryview(bytes(160_000))[::2]
    for _ in range(2):
        for buffers in ((short,), (doubles,), (every_other,), (), (encoded.buffers[0], short)):
            with pytest.raises(DecodeError):
                decode(Encoded(encoded.meta, buffers, encoded.digest))
        decode(encoded)


def test_memory_that_is_not_aligned_is_copied_also_then() -> None:
    encoded = encode(np.arange(10_000.0))
    shifted = memoryview(b"x" + bytes(encoded.buffers[0]))[1:]
    for _ in range(2):
        found = decode(Encoded(encoded.meta, (shifted,), encoded.digest))
        assert found.flags.aligned and not found.flags.writeable and np.array_equal(found, np.arange(10_000.0))


class Doubled:
    def __init__(self, half: np.ndarray) -> None:
        self.half = half


codec(Doubled, lambda doubled: doubled.half, lambda half: half * 2, name="tests.Doubled")


def test_an_array_that_a_codec_makes_is_made_each_time() -> None:
    encoded = encode(Doubled(np.arange(10_000.0)))
    for _ in range(3):
        assert np.array_equal(decode(encoded), 2 * np.arange(10_000.0))


def test_it_is_passed_on_with_the_digest_it_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(np.arange(10_000.0))
    for _ in range(2):
        found = decode(encoded)
        with monkeypatch.context() as patched:
            patched.setattr(digests, "digest", no_reader)
            assert encode(found) == encoded
        assert encode(found.reshape(100, 100)).digest == encode(np.arange(10_000.0).reshape(100, 100)).digest
        assert encode(found[1:]).digest == encode(np.arange(1.0, 10_000.0)).digest


def test_what_is_given_away_has_the_digest_of_what_is_in_it() -> None:
    for start in (0.0, 1.0):
        array = np.arange(start, start + 10_000)
        assert encode(array, adopt=True) == encode(np.arange(start, start + 10_000))
    received = decode(encode(np.arange(10_000.0)))
    assert encode(received, adopt=True) == encode(np.arange(10_000.0))


def test_that_an_array_was_decoded_is_known_as_long_as_it_lives() -> None:
    gc.collect()
    before = len(arrays._decoded)
    found = [decode(encode(np.arange(10_000.0) + n)) for n in range(3)]
    view = found[0][5:]
    assert len(arrays._decoded) == before + 3
    del found
    assert len(arrays._decoded) == before + 1, "a view of it lives"
    assert np.shares_memory(np.frombuffer(encode(view).buffers[0]), view)
    del view
    assert len(arrays._decoded) == before


def test_no_more_are_remembered_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_LONE_KEPT", 3)
    for size in range(5000, 5010):
        assert np.array_equal(decode(encode(np.arange(size))), np.arange(size))
        assert 0 < len(values._lone) <= 3
    many = np.dtype([(f"field {n}", "f8") for n in range(20)])
    decode(encode(np.zeros(1000, many)))
    assert all(len(meta) <= values._LONE_BYTES for meta in values._lone)
