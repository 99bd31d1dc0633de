"""Values that share memory with a value before."""

from __future__ import annotations

import numpy as np
import pytest

from taskgraph.errors import DecodeError
from taskgraph.graph.arrays import immutable_copy
from taskgraph.graph.changes import apply_changes, changes_since
from taskgraph.graph.values import decode, encode, verify
from taskgraph.protocol.messages import KeptBuffers

SIZE = 200_000


def block(fill: int, size: int = SIZE) -> np.ndarray:  # type: ignore[type-arg]
    return immutable_copy([np.full(size, fill, np.uint8)])


def test_only_new_memory_is_sent() -> None:
    blocks = [block(number) for number in range(10)]
    before = encode({"blocks": blocks, "own": np.zeros(SIZE)})
    after = encode({"blocks": [*blocks[3:], block(99)], "own": np.zeros(SIZE), "more": 1})
    changes = changes_since(after, before)
    assert changes is not None
    part, kept = changes
    assert part.size_bytes < 9 * SIZE + 2000 < after.size_bytes  # the new block, and the array that is copied each time
    assert verify(part), "the transport checks it"
    whole = apply_changes(part, kept, before)
    assert whole == after and verify(whole)
    assert [int(one[0]) for one in decode(whole)["blocks"]] == [*range(3, 10), 99]


def test_values_that_share_nothing_are_whole() -> None:
    one, other = encode([np.zeros(SIZE)]), encode([np.zeros(SIZE)])
    assert changes_since(one, other) is None
    assert changes_since(encode(3), other) is None
    assert changes_since(one, encode(3)) is None


def test_nothing_new_sends_no_buffer() -> None:
    blocks = [block(1), block(2)]
    before, after = encode(blocks), encode(blocks[::-1])
    changes = changes_since(after, before)
    assert changes is not None and changes[0].buffers == () and verify(changes[0])
    assert apply_changes(*changes, before) == after


@pytest.mark.parametrize("places", [(5, -1), (0, 0), (-1, -1, -1), (0, -2)])
def test_wrong_places_are_refused(places: tuple[int, ...]) -> None:
    kept = block(1)
    before, after = encode([kept]), encode([kept, block(2)])
    changes = changes_since(after, before)
    assert changes is not None
    with pytest.raises(DecodeError):
        apply_changes(changes[0], KeptBuffers(before.digest, places, after.digest), before)


@pytest.mark.parametrize("size", [1 << 20, 3_000_001, 70_000])
def test_known_digests_are_those_of_the_bytes(size: int) -> None:
    """A value with such memory has the digest that it would have with any other."""
    fresh = np.full(size, 7, np.uint8)
    assert encode([block(7, size), np.arange(90_000)]).digest == encode([fresh, np.arange(90_000)]).digest
    assert encode(block(7, size)).digest == encode(fresh).digest


def test_part_of_a_block_has_its_own_digest() -> None:
    whole = block(3)
    part = whole[: SIZE - 1]
    assert encode([part, block(1)]).digest == encode([part.copy(), block(1)]).digest
