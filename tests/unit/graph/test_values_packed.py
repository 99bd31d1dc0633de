"""Small arrays lie side by side, in meta or in one buffer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import DecodeError
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.graph.outline import outline
from taskgraph.graph.values import codec, decode, digest_of, encode, verify
from taskgraph.protocol.messages import Encoded

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


def test_few_small_arrays_are_in_meta() -> None:
    value = layers(8)
    encoded = encode(value)
    assert not encoded.buffers and len(encoded.meta) < 65 * KIB
    assert same(decode(encoded), value)


def test_many_small_arrays_share_a_buffer() -> None:
    value = layers(20)
    encoded = encode(value, allocate=dirty)
    assert encoded == encode(value) == encode(value, adopt=True)
    (buffer,) = encoded.buffers
    assert block_behind(buffer) is not None and buffer.readonly
    assert bytes(buffer) == b"".join(array.tobytes() + bytes(8) for array in value.values())[:-8]
    assert same(decode(encoded), value)
    assert verify(encoded) and digest_of(encoded.meta, encoded.buffers) == encoded.digest
    assert encode(decode(encoded)) == encoded


@pytest.mark.parametrize("large", [64 * KIB, 300 * KIB])
def test_large_arrays_have_own_buffers(large: int) -> None:
    own, another = np.ones(large, "u1"), np.zeros(large, "u1")
    value = {"own": own, **layers(), "another": another}
    encoded = encode(value)
    assert [buffer.nbytes for buffer in encoded.buffers] == [large, large, 20 * 8016 - 8]
    assert same(decode(encoded), value)
    found = outline(encoded)
    assert [named.path for named in found] == [(key,) for key in value]
    assert [named.buffer is None for named in found] == [False, *[True] * 20, False]


@tg.message
class Layer:
    weights: Any


class Coded:
    def __init__(self, weights: Any) -> None:
        self.weights = weights


codec(Coded, lambda coded: coded.weights, Coded, name="test.coded")


@pytest.mark.parametrize("kind", [Layer, Coded, lambda weights: [weights], lambda weights: {0: weights}])
def test_outline_within_user_types(kind: Callable[[Any], Any]) -> None:
    value = [kind(kind(np.full(n, n))) for n in range(300)]
    assert [named.shape for named in outline(encode(value))] == [(n,) for n in range(300)]
    steps = {len(named.path) for named in outline(encode(value))}
    assert steps == {1 if kind is Coded else 3}, "what a codec makes of a value has no step of its own"


KINDS: dict[str, Callable[[int], Any]] = {
    "contiguous": lambda n: np.arange(n) + 0.5,
    "larger": lambda n: np.arange(4 * n) + 0.5,  # of which no copy is made before the pack's
    "strided": lambda n: np.arange(2 * n)[::2],
    "transposed": lambda n: np.arange(3 * n).reshape(3, n).T,
    "padded": lambda n: np.frombuffer(bytearray(b"\xaa" * (16 * n)), PADDED),
    "big endian": lambda n: np.arange(n, dtype=">f8"),
    "dates": lambda n: np.arange(n).astype("M8[s]"),
    "adopted": lambda n: decode(encode([np.arange(n)]))[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_small_arrays(kind: str) -> None:
    value = [np.zeros(8000), KINDS[kind](1000), KINDS[kind](1001), KINDS[kind](1002)]
    encoded = encode(value, allocate=dirty)
    assert len(encoded.buffers) == 1
    found = decode(encoded)
    if kind == "padded":
        assert all(np.array_equal(a[name], b[name]) for a, b in zip(value[1:], found[1:], strict=True) for name in "ab")
        assert bytes(encoded.buffers[0])[64_001:64_008] == bytes(7)
    else:
        assert same(found, value)
    assert encode(found).digest == encoded.digest and verify(encoded)
    changed = decode(encoded, writable=True)
    assert encode(changed).digest == encoded.digest


def test_views_are_read_only_and_keep_memory() -> None:
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


def test_part_does_not_keep_whole_when_passed_on() -> None:
    found = decode(encode(layers(size=8000, count=30)))
    again = encode([np.zeros(8000), found["layer29"], found["layer28"]])
    assert [buffer.nbytes for buffer in again.buffers] == [192_000]
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
def test_codec_that_reuses_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reused, "memory", np.zeros(size))
    encoded = encode([np.zeros(8000), *(Holder(Reused(float(n))) for n in range(5))])
    assert len(encoded.buffers) == 1
    assert [holder.weights.number for holder in decode(encoded)[1:]] == [0, 1, 2, 3, 4]


def test_device_and_host_arrays_are_equal() -> None:
    soft = SoftDevice()
    host = [np.zeros(8000), *layers().values(), np.arange(20_000.0)]
    there = [soft.xp.asarray(array) for array in host]
    copied, stayed = encode(host), encode(there, stays=True)
    assert (copied.digest, copied.meta[:-4]) == (stayed.digest, stayed.meta[: len(copied.meta) - 4])
    assert [isinstance(buffer, DeviceBuffer) for buffer in stayed.buffers] == [True, False]
    found = decode(stayed, device=soft)
    assert all(type(array) is SoftArray for array in found)
    assert same([array.get() for array in found], host)
    assert same(decode(stayed), host)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:100], lambda data: b""])
def test_shared_buffer_too_short(change: Callable[[bytes], bytes]) -> None:
    encoded = encode(layers())
    with pytest.raises(DecodeError, match="in memory of"):
        decode(Encoded(encoded.meta, (memoryview(change(bytes(encoded.buffers[0]))),), encoded.digest))
    for buffers in ((), (memoryview(bytes(encoded.buffers[0])).cast("d"),)):
        with pytest.raises(DecodeError):
            decode(Encoded(encoded.meta, buffers, encoded.digest))


sizes = st.integers(0, 400) | st.sampled_from([8000, 8191, 8192, 8193, 20_000])
leaves = sizes.map(lambda n: np.arange(n, dtype="f8")) | sizes.map(lambda n: bytes(8 * n)) | st.none()
trees = st.recursive(
    leaves, lambda v: st.lists(v, max_size=8) | st.dictionaries(st.text(max_size=3), v, max_size=8), max_leaves=30
)


@settings(deadline=None, max_examples=100)
@given(trees)
def test_arrays_of_all_sizes(value: Any) -> None:
    encoded = encode(value, allocate=dirty)
    assert verify(encoded) and all(buffer.nbytes >= 64 * KIB for buffer in encoded.buffers)
    assert same(decode(encoded), value) and same(decode(encoded, writable=True), value)
    assert encode(decode(encoded)) == encoded
