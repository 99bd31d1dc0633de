"""What is too much for a value's description, and too little for a buffer each, lies side by side in one buffer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import taskgraph as tg
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import DecodeError
from taskgraph.graph import arrays, encoding, values
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.graph.outline import outline
from taskgraph.graph.values import codec, decode, digest_of, encode, verify
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.softdevice import SoftArray, SoftDevice

KIB = 1 << 10
PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)


def layers(count: int = 20, size: int = 1001) -> dict[str, np.ndarray]:
    return {f"layer{n}": np.arange(size) * float(n) for n in range(count)}


def dirty(nbytes: int) -> Block:
    """Memory that other values were in."""
    block = Block((nbytes,), np.uint8, bytearray(b"\xaa" * nbytes))
    block.origin = object()  # type: ignore[assignment]
    return block


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_what_fits_is_in_the_description_and_the_rest_in_one_buffer() -> None:
    value = layers()
    encoded = encode(value)
    first = 64 * KIB // 8008
    assert 64 * KIB - 8008 <= len(encoded.meta) < 65 * KIB
    assert [buffer.nbytes for buffer in encoded.buffers] == [(20 - first) * 8064 - 56]
    assert same(decode(encoded), value)
    assert verify(encoded) and digest_of(encoded.meta, encoded.buffers) == encoded.digest
    assert encode(decode(encoded)) == encoded and encode(value, adopt=True) == encoded


def test_parts_begin_at_multiples_of_64_and_what_is_between_them_is_zero() -> None:
    value = layers()
    encoded = encode(value, allocate=dirty)
    assert encoded == encode(value)
    (buffer,) = encoded.buffers
    assert block_behind(buffer) is not None and buffer.readonly
    expected = b"".join(array.tobytes() + bytes(56) for array in list(value.values())[8:])
    assert bytes(buffer) == expected[:-56]


@pytest.mark.parametrize("large", [64 * KIB, 300 * KIB])
def test_what_is_large_has_a_buffer_of_its_own_in_the_order_of_the_value(large: int) -> None:
    own, another = np.ones(large, "u1"), np.zeros(large, "u1")
    value = {"own": own, **layers(), "another": another}
    encoded = encode(value)
    assert [buffer.nbytes for buffer in encoded.buffers] == [large, 12 * 8064 - 56, large]
    assert same(decode(encoded), value)
    assert [named.buffer for named in outline(encoded)] == [0, *[None] * 8, *[1] * 12, 2]


@tg.message
class Layer:
    weights: Any


class Coded:
    def __init__(self, weights: Any) -> None:
        self.weights = weights


codec(Coded, lambda coded: coded.weights, Coded, name="test.coded")


@pytest.mark.parametrize("kind", [Layer, Coded, lambda weights: [weights], lambda weights: {0: weights}])
def test_an_outline_names_the_arrays_of_as_many_values_as_there_are(kind: Callable[[Any], Any]) -> None:
    value = [kind(kind(np.full(n, n))) for n in range(300)]
    assert [named.shape for named in outline(encode(value))] == [(n,) for n in range(300)]
    steps = {len(named.path) for named in outline(encode(value))}
    assert steps == {1 if kind is Coded else 3}, "what a codec makes of a value has no step of its own"


def test_what_is_tiny_stays_in_the_description() -> None:
    value = [*(np.full(64, n) for n in range(500)), "x" * 512, b"y" * 512]
    encoded = encode(value)
    assert not encoded.buffers and len(encoded.meta) > 250 * KIB
    assert same(decode(encoded), value)


KINDS: dict[str, Callable[[int], Any]] = {
    "contiguous": lambda n: np.arange(n) + 0.5,
    "larger": lambda n: np.arange(4 * n) + 0.5,  # of which no copy is made before the pack's
    "strided": lambda n: np.arange(2 * n)[::2],
    "transposed": lambda n: np.arange(3 * n).reshape(3, n).T,
    "padded": lambda n: np.frombuffer(bytearray(b"\xaa" * (16 * n)), PADDED),
    "big endian": lambda n: np.arange(n, dtype=">f8"),
    "dates": lambda n: np.arange(n).astype("M8[s]"),
    "text": lambda n: "é\ud800" * n,
    "bytes": lambda n: b"b\0" * n,
    "numpy's text": lambda n: np.str_("t\0" * n),
    "numpy's bytes": lambda n: np.bytes_(b"t\0" * n),
    "adopted": lambda n: decode(encode([np.arange(n)]))[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind(kind: str) -> None:
    value = [np.zeros(8000), KINDS[kind](1000), KINDS[kind](1001), KINDS[kind](1002)]
    encoded = encode(value, allocate=dirty)
    assert len(encoded.buffers) == 1
    found = decode(encoded)
    if kind == "padded":
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(value[1:], found[1:], strict=True) for name in "ab")
        assert b"\xaa" * 7 not in bytes(encoded.buffers[0])[1:8]
    else:
        assert same(found, value)
    assert encode(found).digest == encoded.digest and verify(encoded)
    changed = decode(encoded, writable=True)
    assert encode(changed).digest == encoded.digest


def test_views_on_it_are_aligned_read_only_and_keep_it() -> None:
    found = decode(encode(layers(), allocate=dirty))
    last = found["layer19"]
    assert last.flags.aligned and not last.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        last.flags.writeable = True
    del found
    gc.collect()
    assert np.array_equal(last, np.arange(1001) * 19.0)
    fresh = decode(encode(layers()), writable=True)
    fresh["layer19"][:] = 7
    assert fresh["layer18"][1] == 18


def test_one_of_them_does_not_keep_all_of_them_when_it_is_passed_on() -> None:
    found = decode(encode(layers(size=8000, count=30)))
    again = encode([np.zeros(8000), found["layer29"], found["layer28"]])
    assert [buffer.nbytes for buffer in again.buffers] == [128_000]
    assert not np.shares_memory(np.frombuffer(again.buffers[0], "u1"), found["layer29"])


class Reused:
    """Whose codec gives the same memory each time."""

    memory = np.zeros(1500)

    def __init__(self, number: float) -> None:
        self.number = number

    def encoded(self) -> np.ndarray:
        self.memory[:] = self.number
        return self.memory


codec(Reused, Reused.encoded, lambda array: Reused(float(array[-1])), name="packed.Reused")


@tg.message
class Holder:
    weights: Any


@pytest.mark.parametrize("size", [1500, 4000])
def test_what_user_code_gives_is_taken_at_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reused, "memory", np.zeros(size))
    encoded = encode([np.zeros(8000), *(Holder(Reused(float(n))) for n in range(5))])
    assert len(encoded.buffers) == 1
    assert [holder.weights.number for holder in decode(encoded)[1:]] == [0, 1, 2, 3, 4]


def test_an_array_of_a_device_is_the_value_that_it_is_on_the_host() -> None:
    soft = SoftDevice()
    host = [np.zeros(8000), *layers().values(), np.arange(20_000.0)]
    there = [soft.xp.asarray(array) for array in host]
    copied, stayed = encode(host), encode(there, stays=True)
    assert (copied.digest, copied.meta[:-4]) == (stayed.digest, stayed.meta[: len(copied.meta) - 4])
    assert [isinstance(buffer, DeviceBuffer) for buffer in stayed.buffers] == [False, True]
    found = decode(stayed, device=soft)
    assert all(type(array) is SoftArray for array in found)
    assert same([array.get() for array in found], host)
    assert same(decode(stayed), host)


def packs(*changes: Callable[[bytes], Any]) -> Iterator[Encoded]:
    encoded = encode(layers())
    for change in changes:
        yield Encoded(encoded.meta, change(bytes(encoded.buffers[0])), encoded.digest)


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        (lambda data: (), "names buffer 0 and has 0"),
        (lambda data: (memoryview(data)[:-1],), "a part of 8008 bytes at 88704 of 96711"),
        (lambda data: (memoryview(data)[:8007],), "a part of 8008 bytes at 0 of 8007"),
        (lambda data: (memoryview(b""),), "a part of 8008 bytes at 0 of 0"),
        (lambda data: (memoryview(data + b"\0"),), "the parts of a buffer end at byte 96712 of 96713"),
        (lambda data: (memoryview(data), memoryview(b"")), "names 1 buffers and has 2"),
        (lambda data: (memoryview(data[: 12089 * 8]).cast("d"),), "parts of a buffer that is none"),
        (lambda data: (memoryview(data * 2)[::2],), "parts of a buffer that is none"),
    ],
)
def test_parts_that_are_not_there(buffers: Callable[[bytes], Any], said: str) -> None:
    for encoded in packs(buffers):
        with pytest.raises(DecodeError, match=said):
            decode(encoded)


def test_a_promise_of_much() -> None:
    """A part of 2^60 bytes."""
    meta = b"\x012" + (1 << 60).to_bytes(8, "little") + bytes(4)
    with pytest.raises(DecodeError, match="a part of 1152921504606846976 bytes at 0 of 5"):
        decode(Encoded(meta, (memoryview(b"12345"),), b""))


parts = st.integers(0, 400) | st.sampled_from([99, 100, 101, 499, 500, 501, 999, 1000, 1001, 1002])
leaves = (
    parts.map(lambda n: np.arange(n, dtype="u1"))
    | parts.map(lambda n: np.arange(n // 8, dtype="f8"))
    | parts.map(bytes)
    | parts.map(lambda n: "x" * n)
    | st.none()
)
trees = st.recursive(
    leaves, lambda v: st.lists(v, max_size=8) | st.dictionaries(st.text(max_size=3), v, max_size=8), max_leaves=30
)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_any_value_comes_back(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrays, encoding, values):
            patch.setattr(module, "INLINE_BYTES", 1000)
        patch.setattr(encoding, "SMALL_BYTES", 100)
        patch.setattr(arrays, "_COPIED_BYTES", 300)
        patch.setattr(values, "_starts", {})
        patch.setattr(values, "_lone", {})
        for _ in range(2):
            encoded = encode(value, allocate=dirty)
            assert verify(encoded)
            assert sum(buffer.nbytes < 1000 for buffer in encoded.buffers) <= 1
            assert same(decode(encoded), value) and same(decode(encoded, writable=True), value)
            assert encode(decode(encoded)) == encoded
