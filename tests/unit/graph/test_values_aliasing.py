"""Nobody reaches what was encoded: not by the original, not by what was decoded. And nothing is copied twice."""

from __future__ import annotations

import numpy as np
import pytest

from taskgraph.graph.values import decode, encode, verify

SIZES = pytest.mark.parametrize("size", [3, 10_000], ids=["inline", "buffered"])


@SIZES
def test_later_changes_do_not_arrive(size: int) -> None:
    array = np.zeros(size)
    value = {"a": [array, array[1:], array[::2], np.asfortranarray(array.reshape(1, -1)).T]}
    encoded = encode(value)
    array[:] = 7
    value["a"].append(3)
    found = decode(encoded)["a"]
    assert len(found) == 4
    assert not any(part.any() for part in found)
    assert verify(encoded)


@SIZES
def test_read_only_view_of_writable_memory_is_copied(size: int) -> None:
    array = np.zeros(size)
    locked = array.view()
    locked.flags.writeable = False
    raw = bytearray(8 * size)
    over_bytearray = np.frombuffer(memoryview(raw).toreadonly())
    own = np.zeros(size)
    own.flags.writeable = False
    encoded = [encode(a) for a in (locked, over_bytearray, own)]
    array[:] = 7
    raw[:8] = b"12345678"
    own.flags.writeable = True  # allowed by numpy: the memory is its own
    own[:] = 7
    assert not any(decode(e).any() for e in encoded)


@SIZES
def test_what_arrives_is_read_only_for_good(size: int) -> None:
    found = decode(encode(np.zeros(size)))
    for view in (found, found[1:], found.view("u1"), found.reshape(-1, 1)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        found += 1


@SIZES
def test_writable_arrays_are_fresh(size: int) -> None:
    encoded = encode([np.zeros(size), np.zeros(1, [("a", "f8")])[0], np.zeros((0, 2)), np.array(3.0)])
    found, record, empty, single = decode(encoded, writable=True)
    found += 1
    record["a"] = 5
    single[...] = 2
    assert found.flags.owndata
    assert empty.flags.writeable
    again = decode(encoded, writable=True)
    assert not again[0].any()
    assert again[1]["a"] == 0
    assert again[3] == 3


def test_decoding_copies_nothing_large() -> None:
    encoded = encode(np.zeros(10_000))
    assert np.shares_memory(decode(encoded), np.frombuffer(encoded.buffers[0]))
    assert decode(encoded) is not decode(encoded)


def test_small_part_is_copied() -> None:
    found = decode(encode(np.arange(100_000.0)))
    part = encode(found[:10_000])
    assert not np.shares_memory(np.frombuffer(part.buffers[0], "u1"), found)
    assert np.array_equal(decode(part), found[:10_000])


def test_received_padding_is_cleared() -> None:
    noise = decode(encode(np.full(3000, 0xAA, "u1")))
    padded = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    view = noise[: 180 * padded.itemsize].view(padded)
    assert encode(view).digest == encode(view.copy()).digest
    assert bytes(encode(view).meta).count(b"\xaa" * 3) == bytes(encode(view.copy()).meta).count(b"\xaa" * 3)


def test_bytes_are_shared() -> None:
    data = b"z" * 100_000
    encoded = encode(data)
    assert encoded.buffers[0].obj is data
    assert decode(encoded) is data
    array = np.frombuffer(data, "u1")
    assert encode(array).buffers[0].nbytes == 100_000
    assert np.shares_memory(np.frombuffer(encode(array).buffers[0], "u1"), array)


def test_bytes_of_network_buffer() -> None:
    encoded = encode(b"z" * 10_000)
    received = type(encoded)(
        encoded.meta, tuple(memoryview(bytearray(b)).toreadonly() for b in encoded.buffers), encoded.digest
    )
    assert verify(received)
    assert decode(received) == b"z" * 10_000
    assert type(decode(received)) is bytes


def test_an_array_given_away_is_not_copied() -> None:
    array = np.zeros(10_000)
    encoded = encode({"a": array}, adopt=True)
    assert np.shares_memory(decode(encoded)["a"], array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_adopt_takes_owned_memory_only() -> None:
    array = np.zeros(20_000)
    encoded = encode([array[:10_000], array[::2]], adopt=True)
    array[:] = 7
    assert not any(part.any() for part in decode(encoded))


@pytest.mark.slow
def test_more_than_four_gigabytes() -> None:
    """Memory that was never written costs nothing, so sizes beyond 32 bits are tried for real."""
    size = (4 << 30) + 16
    array = np.frombuffer(bytes(size), "u1")
    encoded = encode({"big": array})
    assert encoded.size_bytes > size
    found = decode(encoded)["big"]
    assert found.shape == (size,)
    assert np.shares_memory(found[-1:], array[-1:])
