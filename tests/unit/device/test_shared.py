"""Memory of a device that other processes can open: when it takes another value, and when it is let go of."""

from __future__ import annotations

import numpy as np
import pytest
from softdevice import SoftDevice

from taskgraph.device import shared
from taskgraph.device.api import HANDLE_BYTES
from taskgraph.device.memory import reclaimers
from taskgraph.device.shared import LEAST_BYTES, Segment, SharedMemory

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(soft: SoftDevice, clock: Clock) -> SharedMemory:
    return SharedMemory(soft, max_idle_bytes=20 * MIB, clock=clock)


def taken(memory: SharedMemory, nbytes: int = 2 * MIB) -> Segment:
    segment = memory.take(nbytes)
    assert segment is not None and segment.size >= nbytes
    return segment


def test_small_values_get_no_segment(memory: SharedMemory) -> None:
    assert memory.take(LEAST_BYTES - 1) is None
    assert memory.take(LEAST_BYTES) is not None


@pytest.mark.parametrize("nbytes", [LEAST_BYTES, 2 * MIB, 2 * MIB + 1, 17 * MIB + 5, 100 * MIB, 200 * MIB + 1])
def test_sizes_of_segments(nbytes: int, soft: SoftDevice) -> None:
    segment = taken(SharedMemory(soft), nbytes)
    assert segment.size % (2 * MIB) == 0, "CUDA lets others open pieces of 2 MiB"
    assert segment.size - nbytes < max(2 * MIB, nbytes / 7)
    assert len(segment.handle) == HANDLE_BYTES


def test_segment_is_reused(memory: SharedMemory) -> None:
    first = taken(memory)
    assert taken(memory) is not first, "it is in use"
    memory.give_back(first, [])
    assert taken(memory, 2 * MIB - 5) is first
    assert len(memory) == 2


def test_too_large_segment_is_not_reused(memory: SharedMemory) -> None:
    large = taken(memory, 12 * MIB)
    memory.give_back(large, [])
    assert taken(memory, 7 * MIB) is not large
    assert taken(memory, 8 * MIB) is large


def test_writer_follows_readers(memory: SharedMemory, soft: SoftDevice) -> None:
    segment = taken(memory)
    reader, writer = soft.new_stream(), soft.new_stream()
    soft.fill_and_digest(segment.array, soft.xp.full(2 * MIB // 8, 1.0), MIB)
    with soft.on(reader):
        soft.follow(reader, soft.record(soft.default))
        copy = soft.copy(segment.array)
        done = soft.record(reader)
    memory.give_back(segment, [done])
    with soft.on(writer):
        again = taken(memory)
        soft.fill_and_digest(again.array, soft.xp.full(2 * MIB // 8, 2.0), MIB)
    assert again is segment
    soft.wait(soft.record(writer))
    assert reader.done == reader.queued, "it was read first"
    assert set(copy.elements[:8].tobytes()) == set(np.full(1, 1.0).tobytes())


def test_idle_segments_are_freed(memory: SharedMemory, clock: Clock) -> None:
    first, second = taken(memory), taken(memory, 4 * MIB)
    memory.give_back(first, [])
    memory.trim()
    clock.now += 8
    memory.give_back(second, [])
    memory.trim()
    assert len(memory) == 2
    clock.now += 4
    memory.trim()
    assert len(memory) == 1 and taken(memory, 4 * MIB) is second


def test_oldest_idle_is_freed_first(memory: SharedMemory) -> None:
    segments = [taken(memory, 6 * MIB) for _ in range(4)]
    for segment in segments:
        memory.give_back(segment, [])
    taken(memory, 40 * MIB)
    assert memory.idle_bytes == 18 * MIB
    assert [taken(memory, 6 * MIB) for _ in range(3)] == [segments[3], segments[2], segments[1]]


def test_freed_after_readers(memory: SharedMemory, soft: SoftDevice, clock: Clock) -> None:
    segment = taken(memory)
    soft.fill_and_digest(segment.array, soft.xp.full(2 * MIB // 8, 1.0), MIB)
    soft.synchronize()  # only the reading is still to be done
    reader = soft.new_stream()
    with soft.on(reader):
        copy = soft.copy(segment.array)
    memory.give_back(segment, [soft.record(reader)])
    del segment
    clock.now += 60
    memory.trim()
    soft.synchronize()
    assert set(copy.elements[:8].tobytes()) == set(np.full(1, 1.0).tobytes())


def test_spoiled_segment_at_the_limit_is_freed_after_readers(
    memory: SharedMemory, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, other = taken(memory), taken(memory)
    monkeypatch.setattr(shared, "_MAX_SEGMENTS", 1)
    segment.spoiled = True
    memory.give_back(segment, [soft.record(soft.new_stream())])
    before = len(soft.waits)
    assert memory.take(other.size) is None
    assert len(memory) == 1 and soft.waits[before:] == ["SharedMemory._wait_until_unused"]


def test_spoiled_segment_is_not_reused(memory: SharedMemory, soft: SoftDevice) -> None:
    segment = taken(memory)
    reader = soft.new_stream()
    segment.spoiled = True
    memory.give_back(segment, [soft.record(reader)])
    assert taken(memory) is not segment
    assert len(memory) == 1, "it went, behind who read it here"


def test_short_memory_frees_idle(memory: SharedMemory) -> None:
    segments = [taken(memory, 4 * MIB) for _ in range(3)]
    assert not memory.shrink(1)
    for segment in segments:
        memory.give_back(segment, [])
    assert memory.shrink(5 * MIB)
    assert memory.idle_bytes == 4 * MIB
    assert memory.shrink(1) and not memory.shrink(1)


def test_asked_before_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_offered", {})
    both = [shared.offer_memory(SoftDevice()) for _ in range(2)]  # the reclaimer is not told which of them is short
    segments = [taken(memory) for memory in both]
    (give_back,) = [reclaimer for reclaimer in reclaimers if reclaimer.__module__ == shared.__name__]
    assert not give_back(MIB)
    for memory, segment in zip(both, segments, strict=True):
        memory.give_back(segment, [])
    assert give_back(MIB) and not any(map(len, both))


def test_take_without_memory(memory: SharedMemory, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> object:
        raise MemoryError(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(soft, "allocate", none)
        assert memory.take(2 * MIB) is None
    assert len(memory) == 0
    taken(memory)


def test_sharing_is_tried_once(
    memory: SharedMemory, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def no(array: object) -> bytes:
        tries.append(array)
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(soft, "share", no)
    assert memory.take(2 * MIB) is None and memory.take(2 * MIB) is None
    assert len(tries) == 1 and len(memory) == 0
    assert caplog.text.count("operation not supported") == 1
