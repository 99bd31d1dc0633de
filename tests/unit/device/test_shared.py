"""Memory of a device that other processes can open: when it takes another value, and when it is let go of."""

from __future__ import annotations

import numpy as np
import pytest
from softdevice import POISON, SoftDevice

from taskgraph.device import shared
from taskgraph.device.api import HANDLE_BYTES
from taskgraph.device.memory import givers
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


def test_offering_asks_nothing_of_the_device(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done on an event loop, and the first question makes CUDA's context."""
    with monkeypatch.context() as patch:
        for name in ("memory_bytes", "identity", "allocate", "share"):
            patch.setattr(SoftDevice, name, property(lambda self: 1 / 0), raising=False)
        memory = SharedMemory(soft)
    assert taken(memory).size == 2 * MIB
    assert memory._max_idle_bytes == soft.memory_bytes // 32


def test_what_is_small_gets_none(memory: SharedMemory) -> None:
    assert memory.take(LEAST_BYTES - 1) is None
    assert memory.take(LEAST_BYTES) is not None


@pytest.mark.parametrize("nbytes", [LEAST_BYTES, 2 * MIB, 2 * MIB + 1, 17 * MIB + 5, 100 * MIB, 200 * MIB + 1])
def test_segments_are_of_whole_pieces_and_little_is_lost(nbytes: int, soft: SoftDevice) -> None:
    segment = taken(SharedMemory(soft), nbytes)
    assert segment.size % (2 * MIB) == 0, "CUDA lets others open pieces of 2 MiB"
    assert segment.size - nbytes < max(2 * MIB, nbytes / 7)
    assert len(segment.handle) == HANDLE_BYTES


def test_it_takes_the_next_value(memory: SharedMemory) -> None:
    first = taken(memory)
    assert taken(memory) is not first, "it is in use"
    memory.give_back(first, [])
    assert taken(memory, 2 * MIB - 5) is first
    assert len(memory) == 2


@pytest.mark.parametrize("nbytes", [LEAST_BYTES, 2 * MIB + 1, 2_400_000, 3 * MIB, 17 * MIB + 5])
def test_one_that_was_made_for_a_size_takes_that_size_again(memory: SharedMemory, nbytes: int) -> None:
    first = taken(memory, nbytes)
    memory.give_back(first, [])
    assert taken(memory, nbytes) is first


def test_one_that_is_much_too_large_does_not(memory: SharedMemory) -> None:
    large = taken(memory, 12 * MIB)
    memory.give_back(large, [])
    assert taken(memory, 7 * MIB) is not large
    assert taken(memory, 8 * MIB) is large


def test_the_next_writer_follows_those_who_read_it(memory: SharedMemory, soft: SoftDevice) -> None:
    segment = taken(memory)
    reader, writer = soft.stream(), soft.stream()
    soft.fill(segment.array, soft.xp.full(2 * MIB // 8, 1.0), MIB)
    with soft.on(reader):
        soft.follow(reader, soft.record(soft.default))
        copy = soft.copy(segment.array)
        done = soft.record(reader)
    memory.give_back(segment, [done])
    with soft.on(writer):
        again = taken(memory)
        soft.fill(again.array, soft.xp.full(2 * MIB // 8, 2.0), MIB)
    assert again is segment
    soft.wait(soft.record(writer))
    assert reader.done == reader.queued, "it was read first"
    assert set(copy.elements[:8].tobytes()) == set(np.full(1, 1.0).tobytes())


def test_what_is_idle_for_long_is_freed(memory: SharedMemory, clock: Clock) -> None:
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


def test_more_than_may_be_idle_is_freed_the_oldest_first(memory: SharedMemory) -> None:
    segments = [taken(memory, 6 * MIB) for _ in range(4)]
    for segment in segments:
        memory.give_back(segment, [])
    taken(memory, 40 * MIB)
    assert memory.idle_bytes == 18 * MIB
    assert [taken(memory, 6 * MIB) for _ in range(3)] == [segments[3], segments[2], segments[1]]


def test_it_is_freed_behind_those_who_read_it(memory: SharedMemory, soft: SoftDevice, clock: Clock) -> None:
    segment = taken(memory)
    soft.fill(segment.array, soft.xp.full(2 * MIB // 8, 1.0), MIB)
    soft.synchronize()  # only the reading is still to be done
    reader = soft.stream()
    with soft.on(reader):
        copy = soft.copy(segment.array)
    memory.give_back(segment, [soft.record(reader)])
    del segment
    clock.now += 60
    memory.trim()
    soft.synchronize()
    assert set(copy.elements[:8].tobytes()) == set(np.full(1, 1.0).tobytes())


def test_what_somebody_may_read_for_ever_takes_nothing(memory: SharedMemory, soft: SoftDevice) -> None:
    segment = taken(memory)
    reader = soft.stream()
    segment.spoiled = True
    memory.give_back(segment, [soft.record(reader)])
    assert taken(memory) is not segment
    assert len(memory) == 1, "it went, behind who read it here"


def test_memory_that_is_short_is_freed_as_far_as_it_is_needed(memory: SharedMemory) -> None:
    segments = [taken(memory, 4 * MIB) for _ in range(3)]
    assert not memory.shrink(1)
    for segment in segments:
        memory.give_back(segment, [])
    assert memory.shrink(5 * MIB)
    assert memory.idle_bytes == 4 * MIB
    assert memory.shrink(1) and not memory.shrink(1)


def test_it_is_asked_before_the_process_is_out_of_memory(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_offered", {})
    memory = shared.offer(soft)
    segment = taken(memory)
    (give_back,) = [giver for giver in givers if giver.__module__ == shared.__name__]
    assert not give_back(MIB)
    memory.give_back(segment, [])
    assert give_back(MIB) and not len(memory)


def test_without_memory_values_go_elsewhere(
    memory: SharedMemory, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> object:
        raise MemoryError(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(soft, "allocate", none)
        assert memory.take(2 * MIB) is None
    assert len(memory) == 0
    taken(memory)


def test_where_nothing_can_be_shared_it_is_tried_once_and_said(
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


def test_memory_stays_for_who_has_it_open_and_the_device_in_software_spoils_what_nobody_has(soft: SoftDevice) -> None:
    array = soft.allocate(2 * MIB)
    soft.fill(array, soft.xp.full(2 * MIB // 8, 1.0), MIB)
    soft.synchronize()
    handle = soft.share(array)
    one, two = soft.open(handle, 2 * MIB), soft.open(handle, 2 * MIB)
    elements = one.elements
    assert elements[:8].view(float)[0] == 1.0
    del one
    assert set(elements[:8]) == {POISON}
    del array
    assert two.elements[:8].view(float)[0] == 1.0
    with pytest.raises(OSError):
        soft.open(handle, 2 * MIB)
    three = soft.open(soft.share(two), 2 * MIB)
    del two
    assert three.elements[:8].view(float)[0] == 1.0, "who has it open can lend it on"
    del three
    assert soft.opened == []
