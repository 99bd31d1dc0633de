"""The digest of values with buffers: what it is, however it is taken."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import taskgraph as tg
from taskgraph.graph import arrays, digests, encoding, values, worksharing
from taskgraph.graph.values import begin_digest, decode, digest_of, encode, verify
from taskgraph.protocol.messages import Encoded

INLINE_BYTES = 64 << 10
MIB = 1 << 20
SMALL = 512


def plain(meta: bytes, buffers: Sequence[bytes | memoryview], block: int = MIB) -> bytes:
    """The definition, once more, of a value that has nothing on a device."""
    value = meta[:-4]
    text = value + struct.pack("<Q", len(value))
    for buffer in buffers:
        text += struct.pack("<Q", len(buffer))
    for buffer in buffers:
        data = bytes(buffer)
        while data:
            text += xxhash.xxh3_128(data[:block]).digest()
            data = data[block:]
    return xxhash.xxh3_128(text).digest()


def noise(size: int, seed: int = 0) -> bytes:
    return (
        ((np.arange(size, dtype=np.uint64) + np.uint64(seed)) * np.uint64(2654435761) >> np.uint64(11))
        .astype("u1")
        .tobytes()
    )


@pytest.fixture(params=[1, 4], ids=["alone", "shared"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(worksharing, "_team", worksharing._HelperThreads())
    monkeypatch.setattr(worksharing, "_IDLE_S", 0.05)
    monkeypatch.setattr(worksharing, "cores", lambda: request.param)
    monkeypatch.setattr(worksharing, "idle_cores", lambda: 9)
    yield request.param
    deadline = time.monotonic() + 20
    while worksharing._team._helpers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worksharing._team._helpers


@pytest.fixture
def small(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 512 bytes, all of them shared; arrays of 4 KiB have buffers of their own."""
    for module in (arrays, encoding, values):
        monkeypatch.setattr(module, "INLINE_BYTES", 4096)
    monkeypatch.setattr(digests, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(arrays, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 200)
    monkeypatch.setattr(worksharing, "LEAST_BYTES", 1)


SIZES = [
    (INLINE_BYTES,),
    (MIB - 1,),
    (MIB,),
    (MIB + 1,),
    (2 * MIB,),
    (16 * MIB - 1,),
    (16 * MIB,),
    (17 * MIB + 5,),
    (100_000, 3 * MIB, 13 * MIB + 7, MIB),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_definition(cores: int, sizes: tuple[int, ...]) -> None:
    given_bytes = [noise(size, seed) for seed, size in enumerate(sizes)]
    copied = encode([np.frombuffer(bytearray(data), "u1") for data in given_bytes])
    assert [bytes(buffer) for buffer in copied.buffers] == given_bytes
    assert copied.digest == plain(copied.meta, given_bytes)
    assert copied.digest == digest_of(copied.meta, copied.buffers)
    shared = encode([np.frombuffer(data, "u1") for data in given_bytes])
    assert shared == copied
    hasher = begin_digest(copied.meta, sizes)
    for buffer in copied.buffers:
        hasher.update(buffer)
    assert hasher.digest() == copied.digest
    damaged = bytearray(given_bytes[-1])
    damaged[-1] ^= 1
    assert not verify(Encoded(copied.meta, (*copied.buffers[:-1], memoryview(damaged)), copied.digest))


PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)


@tg.message
class Pair:
    first: Any
    second: Any


def same(value: Any, found: Any) -> bool:
    if isinstance(value, list):
        return all(same(one, other) for one, other in zip(value, found, strict=True))
    if isinstance(value, Pair):
        return same([value.first, value.second], [found.first, found.second])
    return bool((value == found).all()) if isinstance(value, np.ndarray) else bool(value == found)


ARRAYS = {
    "contiguous": lambda n: np.frombuffer(bytearray(noise(8 * n)), "<u8"),
    "strided": lambda n: np.frombuffer(bytearray(noise(16 * n)), "<u8")[::2],
    "transposed": lambda n: np.frombuffer(bytearray(noise(16 * n)), "<u8").reshape(2, n).T,
    "reversed": lambda n: np.frombuffer(bytearray(noise(8 * n)), "<u8")[::-1],
    "padded": lambda n: np.frombuffer(bytearray(noise(16 * n)), PADDED),
    "big endian": lambda n: np.arange(n, dtype=">u4"),
    "dates": lambda n: np.arange(n).astype("M8[s]"),
    "bytes": lambda n: noise(8 * n),
    "in a message": lambda n: Pair(np.arange(n), [np.arange(n)[::-1], 5]),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", list(ARRAYS))
@pytest.mark.parametrize("count", [520, 1023, 1024, 1025, 3000])
def test_whatever_is_encoded(kind: str, count: int) -> None:
    value = [ARRAYS[kind](count), np.zeros(5000, "u1"), ARRAYS[kind](count + 1)]
    encoded = encode(value)
    assert len(encoded.buffers) >= 1
    assert encoded.digest == plain(encoded.meta, encoded.buffers, SMALL)
    assert verify(encoded)
    found = decode(encoded)
    assert same(value, found)
    assert encode(found).digest == encoded.digest
    assert encode(value, adopt=True) == encoded


@pytest.mark.usefixtures("small")
def test_padding_of_large_array() -> None:
    one, other = np.zeros(3000, PADDED), np.frombuffer(bytearray(b"\xff" * 3000 * PADDED.itemsize), PADDED).copy()
    for name in ("a", "b"):
        other[name] = 0
    assert one.tobytes() != other.tobytes()
    assert encode(one) == encode(other)


@pytest.mark.parametrize("count", [1023, 1024, 1025])
def test_a_copy_in_a_message_is_made_whole(count: int, small: None) -> None:
    """It is made at once, and digested later."""
    array = np.frombuffer(bytearray(noise(8 * count)), "<u8").copy()
    encoded = encode(Pair(array, None))
    array[:] = 0
    assert bytes(encoded.buffers[0]) == noise(8 * count)
    assert verify(encoded)


def views(buffers: list[bytes]) -> tuple[memoryview, ...]:
    return tuple(memoryview(buffer) for buffer in buffers)


BUFFERS = st.lists(
    st.binary(max_size=40) | (st.integers(0, 2100) | st.sampled_from([511, 512, 513, 1024])).map(noise),
    min_size=1,
    max_size=5,
)


@given(meta=st.binary(max_size=60), buffers=BUFFERS, cuts=st.lists(st.integers(0, 700)))
def test_cut_anywhere(meta: bytes, buffers: list[bytes], cuts: list[int]) -> None:
    meta += bytes(4)  # nothing was on a device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", SMALL)
        expected = plain(meta, buffers, SMALL)
        assert digest_of(meta, views(buffers)) == expected
        patch.setattr(worksharing, "LEAST_BYTES", 0)
        patch.setattr(worksharing, "cores", lambda: 1)
        assert digest_of(meta, views(buffers)) == expected
        hasher = begin_digest(meta, [len(buffer) for buffer in buffers])
        rest = memoryview(b"".join(buffers))
        for cut in cuts:
            hasher.update(rest[:cut])
            rest = rest[cut:]
        hasher.update(rest)
        assert hasher.digest() == expected
        with pytest.raises(ValueError, match="3 bytes more"):
            hasher.update(memoryview(b"xyz"))


@given(buffers=BUFFERS, data=st.data())
def test_every_change_changes_digest(buffers: list[bytes], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", SMALL)
        meta = b"meta" + bytes(4)
        known = digest_of(meta, views(buffers))
        other = list(buffers)
        which = data.draw(st.integers(0, len(buffers) - 1))
        change = data.draw(st.sampled_from(["flip", "cut", "swap", "join", "empty"]))
        if change == "flip" and buffers[which]:
            at = data.draw(st.integers(0, len(buffers[which]) - 1))
            flipped = bytearray(buffers[which])
            flipped[at] ^= 1 << data.draw(st.integers(0, 7))
            other[which] = bytes(flipped)
        elif change == "cut":
            other[which] = buffers[which][:-1]
        elif change == "swap":  # blocks
            blocks = [buffers[which][at : at + SMALL] for at in range(0, len(buffers[which]), SMALL)]
            other[which] = b"".join(blocks[::-1])
        elif change == "join":
            other[which : which + 2] = [b"".join(buffers[which : which + 2])]
        elif change == "empty":
            other.insert(which, b"")
        assert (digest_of(meta, views(other)) == known) == (other == buffers)


@pytest.mark.parametrize("where", [0, 5, 16])
def test_error_in_a_block(where: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = arrays.PendingCopy.digest

    def failing(self: arrays.PendingCopy, begin: int, end: int) -> bytes:
        if begin == where * MIB:
            raise MemoryError("no room")
        return real(self, begin, end)

    monkeypatch.setattr(arrays.PendingCopy, "digest", failing)
    with pytest.raises(MemoryError, match="no room"):
        encode(np.zeros(17 * MIB, "u1"))
