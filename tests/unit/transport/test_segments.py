"""The pool of segments: memory is used again when nobody reads it, and never otherwise."""

from __future__ import annotations

import errno
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest

from taskgraph.graph.blocks import Block, block_behind
from taskgraph.graph.values import decode, encode
from taskgraph.transport import segments
from taskgraph.transport.pages import huge_page_bytes
from taskgraph.transport.segments import LEAST_BYTES, Pool, SegmentUse

MIB = 1 << 20
needs_huge_pages = pytest.mark.skipif(not huge_page_bytes(), reason="this kernel has none, or they are switched off")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(**kwargs: int) -> tuple[Pool, Clock]:
    clock = Clock()
    return Pool(**{"max_segments": 8, "max_idle_bytes": 64 * MIB, **kwargs}, clock=clock), clock


def given(pool: Pool, nbytes: int) -> Block:
    block = pool.allocate(nbytes)
    assert block is not None and block.nbytes == nbytes
    return block


def used_bytes(pool: Pool) -> int:
    """Bytes of used segments."""
    return sum(use.segment.size for use in list(pool._used))


def place(block: Block) -> int:
    address: int = block.__array_interface__["data"][0]
    return address


def open_files() -> int:
    """Number of open descriptors of shared memory."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:taskgraph" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the folder's own
            continue
    return found


def test_segment_is_used_again_after_the_last_view() -> None:
    mine, _ = pool()
    block = given(mine, MIB)
    first, view = place(block), np.ndarray((10,), float, buffer=block)[2:5]
    del block
    other = given(mine, MIB)
    assert place(other) != first, "the view still reads it"
    del view
    assert place(given(mine, MIB)) == first
    assert len(mine) == 2
    del other


def test_garbage_may_be_collected_inside_allocate() -> None:
    """The collector may run inside `allocate`, with its lock held, and must not deadlock."""
    held: list[Block] = []

    def now() -> float:
        held.clear()
        return 100.0

    mine = Pool(max_segments=8, max_idle_bytes=64 * MIB, clock=now)
    first, second = given(mine, MIB), given(mine, MIB)
    places = {place(first), place(second)}
    held.append(second)
    del first, second  # the first one is collected by `allocate`, which asks for the time: then the second one goes
    found = [given(mine, MIB), given(mine, MIB)]
    assert held == [] and {place(block) for block in found} == places and len(mine) == 2


def test_view_keeps_the_segment_of_a_value() -> None:
    mine, _ = pool()
    value = encode(np.arange(MIB / 8), allocate=mine.allocate)
    first = place(_block_of_value(value))
    kept = decode(value)[7:9]
    del value
    assert place(given(mine, MIB)) != first
    assert list(kept) == [7.0, 8.0]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        kept.flags.writeable = True
    del kept
    assert first in {place(given(mine, MIB)), place(given(mine, MIB))}


def _block_of_value(value: object) -> Block:
    block = block_behind(value.buffers[0])  # type: ignore[attr-defined]
    assert block is not None
    return block


def test_relayed_value_keeps_memory_and_digest() -> None:
    mine, _ = pool()
    value = encode(np.arange(MIB / 8), allocate=mine.allocate)
    relayed = encode(decode(value), allocate=mine.allocate)
    assert relayed.digest == value.digest == encode(np.arange(MIB / 8)).digest
    assert _block_of_value(relayed) is _block_of_value(value)
    half = encode(decode(value)[: MIB // 16 + 1], allocate=mine.allocate)
    assert _block_of_value(half) is _block_of_value(value)
    assert half.digest == encode(np.arange(MIB / 16 + 1)).digest
    assert encode(decode(value).reshape(2, -1)).digest == encode(np.arange(MIB / 8).reshape(2, -1)).digest
    assert encode(decode(value)[::-1]).digest == encode(np.arange(MIB / 8)[::-1]).digest
    square = encode(np.arange(MIB / 8).reshape(512, 256).astype("f8")[:256])
    assert encode(decode(square).T).digest == encode(decode(square).T.copy()).digest != square.digest


def test_digest_does_not_depend_on_memory() -> None:
    mine, _ = pool()
    grid = np.arange(300_000.0).reshape(300, 1000)
    padded = np.zeros(20_000, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    given(mine, padded.nbytes).fill(7)  # padding must not show what was there before
    for value in (grid, grid.T, grid[::2], padded, {"a": grid, "b": [grid[1:], "text"]}, (grid, grid)):
        there, here = encode(value, allocate=mine.allocate), encode(value)
        assert there.digest == here.digest
        assert [bytes(b) for b in there.buffers] == [bytes(b) for b in here.buffers]


def test_spoiled_segment_is_never_used_again() -> None:
    mine, _ = pool()
    block = given(mine, MIB)
    segment = block.origin.segment  # type: ignore[union-attr]
    assert isinstance(block.origin, SegmentUse)
    block.origin.spoil()
    del block
    other = given(mine, MIB)
    assert other.origin.segment is not segment  # type: ignore[union-attr]
    assert len(mine) == 1


def arena(block: Block) -> Any:
    origin: Any = block.origin
    return origin.segment.arena


def pages_of(block: Block) -> int:
    """Bytes of kernel memory behind the arena of a block."""
    return os.fstat(arena(block).region.fd).st_blocks * 512


@needs_huge_pages
def test_small_segments_share_an_arena() -> None:
    mine, _ = pool(max_segments=100)
    huge = huge_page_bytes()
    blocks = [given(mine, nbytes) for nbytes in (LEAST_BYTES, 100_000, 70_000)]
    assert len({arena(block) for block in blocks}) == 1
    for number, block in enumerate(blocks):
        block.fill(number)
    assert [(int(block.min()), int(block.max())) for block in blocks] == [(0, 0), (1, 1), (2, 2)]
    large = given(mine, huge), given(mine, huge), given(mine, 3 * huge + 5)
    assert len({arena(block) for block in (*blocks, *large)}) == 4
    assert pages_of(blocks[0]) <= huge, "what is not cut takes no memory"
    many = [given(mine, huge // 2) for _ in range(40)]
    assert len({arena(block) for block in many}) <= 2 + 40 // (2 * segments._PAGES)


@needs_huge_pages
def test_idle_part_of_an_arena_is_freed() -> None:
    mine, clock = pool()
    huge = huge_page_bytes()
    kept, gone = given(mine, huge // 4), given(mine, huge // 4)
    assert arena(kept) is arena(gone)
    kept.fill(7), gone.fill(8)
    before = pages_of(kept)
    assert before >= huge // 2
    del gone
    mine.trim()
    assert pages_of(kept) == before and len(mine) == 2
    clock.now += segments._IDLE_S + 1
    mine.trim()
    assert pages_of(kept) == huge // 4 and len(mine) == 1, "nor has what was never cut any pages"
    assert (int(kept.min()), int(kept.max())) == (7, 7)
    assert arena(given(mine, huge // 4)) is not arena(kept)


@needs_huge_pages
def test_spoiled_segment_retires_its_arena() -> None:
    mine, clock = pool(max_segments=100)
    huge = huge_page_bytes()
    kept, spoiled, other = (given(mine, huge // 4) for _ in range(3))
    reader = np.frombuffer(arena(kept).memory, np.uint8)[huge // 4 : huge // 2]
    spoiled.fill(8), kept.fill(7)
    one = arena(kept)
    spoiled.origin.spoil()  # type: ignore[union-attr]
    del spoiled, other
    clock.now += segments._IDLE_S + 1
    mine.trim()
    assert len(mine) == 1 and (int(reader.min()), int(reader.max())) == (8, 8)
    assert pages_of(kept) == huge // 2, "the other one's pages are gone"
    assert arena(given(mine, huge // 4)) is not one
    fd = one.region.fd
    del kept, reader, one
    mine.trim()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_leaves_the_pool_alone() -> None:
    mine, _ = pool(max_idle_bytes=0)
    kept, dropped = given(mine, MIB), given(mine, MIB)
    kept.fill(7), dropped.fill(8)
    held = [dropped]
    del dropped
    child = os.fork()
    if not child:
        held.clear()  # in the parent it is read still
        os._exit(0 if mine.allocate(MIB) is None and mine.allocate(3 * MIB) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (int(kept.min()), int(held[0].min())) == (7, 8)
    assert given(mine, MIB) is not None


def test_without_huge_pages_segments_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "huge_page_bytes", lambda: 0)
    mine, _ = pool()
    blocks = [given(mine, MIB) for _ in range(3)]
    assert len({arena(block) for block in blocks}) == 3
    assert {arena(block).size for block in blocks} == {MIB}


def test_small_values_get_no_segment() -> None:
    mine, _ = pool()
    assert mine.allocate(LEAST_BYTES - 1) is None
    assert len(mine) == 0


def test_number_of_segments_is_bounded() -> None:
    mine, _ = pool(max_segments=2)
    one, two = given(mine, MIB), given(mine, MIB)
    assert mine.allocate(MIB) is None
    del two
    assert mine.allocate(16 * MIB) is not None, "an idle one made room"
    assert one is not None and len(mine) <= 2


def test_idle_memory_is_bounded_and_freed() -> None:
    mine, clock = pool(max_idle_bytes=2 * MIB)
    before = open_files()
    blocks = [given(mine, MIB) for _ in range(4)]
    assert used_bytes(mine) == 4 * MIB
    del blocks
    mine.trim()
    assert mine._idle_bytes == 2 * MIB and used_bytes(mine) == 0
    clock.now += segments._IDLE_S + 1
    mine.trim()
    assert len(mine) == 0 and open_files() == before


def test_small_value_takes_no_large_segment() -> None:
    mine, _ = pool()
    block = given(mine, 8 * MIB)
    del block
    assert given(mine, MIB).nbytes == MIB
    assert len(mine) == 2


def test_closed_pool_keeps_views_valid() -> None:
    before = open_files()
    mine, _ = pool()
    idle = given(mine, MIB)
    del idle
    value = encode(np.full(MIB, 3, np.uint8), allocate=mine.allocate)
    used = block_behind(value.buffers[0])
    mine.close()
    assert used is not None and used.origin.region.fd < 0, "nobody opens it any more"  # type: ignore[union-attr]
    view = decode(value)
    del value, used
    assert mine.allocate(MIB) is None
    assert view.sum() == 3 * MIB
    del view
    gc.collect()
    mine.trim()
    assert open_files() == before and len(mine) == 0


def test_private_memory_is_reused_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no such thing")

    monkeypatch.setattr(os, "memfd_create", refuse)
    mine, _ = pool()
    assert mine.allocate(MIB) is None and not mine._shared
    block = given(mine, MIB)
    assert block.origin.region is None  # type: ignore[union-attr]
    first = place(block)
    del block
    assert place(given(mine, MIB)) == first


def test_too_large_value_leaves_the_pool_usable(caplog: pytest.LogCaptureFixture) -> None:
    """Such a first value once made the node send all values as bytes."""
    mine, _ = pool()
    for _ in range(3):
        assert mine.allocate(1 << 48) is None and mine._shared
    assert [f"no shared memory for a value of {1 << 48} bytes" in said for said in caplog.messages] == [True]
    assert given(mine, MIB).origin.region is not None  # type: ignore[union-attr]


def test_threads_may_allocate_concurrently() -> None:
    mine, _ = pool(max_segments=64)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            block = given(mine, LEAST_BYTES)
            block.fill(number)
            if int(block.min()) != number or int(block.max()) != number:
                wrong.append(number)
            del block

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    mine.trim()
    assert used_bytes(mine) == 0 and len(mine) <= 4
