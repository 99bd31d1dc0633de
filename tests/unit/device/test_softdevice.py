"""The device in software shows the mistakes it is there to show. Each test makes one."""

from __future__ import annotations

import asyncio
import gc
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest

from taskgraph.testing import softdevice
from taskgraph.testing.softdevice import POISON, SoftArray, SoftDevice

POISONED = np.full(8, POISON, np.uint8).view("f8")[0]


def test_what_nobody_waited_for_is_not_there() -> None:
    device = SoftDevice()
    array = device.xp.arange(100.0)
    target = np.zeros(800, np.uint8)
    device.fetch(array, target)
    assert not target.any(), "read before the copy was made"
    device.wait(device.record(device.current()))
    assert np.array_equal(target.view("f8"), np.arange(100.0))


def test_an_event_is_of_what_was_queued_before_it() -> None:
    device = SoftDevice()
    array = device.xp.arange(100.0)
    event = device.record(device.current())
    array += 1
    device.wait(event)
    assert np.array_equal(array.elements, np.arange(100.0))
    assert array.get()[0] == 1


def test_digests_that_nobody_waited_for_are_none() -> None:
    device = SoftDevice()
    digests = device.digests(device.xp.arange(100.0), 1000)
    assert digests() == b"\xdd" * 16
    device.synchronize()
    assert digests() != b"\xdd" * 16


def test_another_stream_reads_what_is_not_there_yet() -> None:
    device = SoftDevice()
    array = device.xp.arange(100.0)
    device.use(device.stream())
    assert (array + 0.0).get()[0] == POISONED


def test_and_finds_it_where_it_follows() -> None:
    device = SoftDevice()
    array = device.xp.arange(100.0)
    event = device.record(device.current())
    device.use(other := device.stream())
    device.follow(other, event)
    assert (array + 0.0).get()[1] == 1


def reader_of(device: SoftDevice, *, event: bool) -> SoftArray:
    """Reads an array on another stream, whose memory is freed meanwhile and given to somebody else."""
    array = device.xp.arange(100.0)
    device.wait(device.record(device.default))
    device.use(other := device.stream())
    read = array + 0.0
    device.use(device.default)
    if event:
        device.follow(device.default, device.record(other))
    del array
    again = device.xp.full(100, 7.0)
    assert again.get()[0] == 7
    assert device.reused == 1
    device.use(other)
    return read


@pytest.mark.parametrize("races", [False, True])
def test_memory_that_another_stream_still_reads_is_somebody_elses(races: bool) -> None:
    assert reader_of(SoftDevice(races=races), event=False).get()[1] in (7, POISONED)


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_and_is_not_where_its_stream_follows_that(seed: int | None, races: bool) -> None:
    assert np.array_equal(reader_of(SoftDevice(seed, races=races), event=True).get(), np.arange(100.0))


def test_freed_memory_is_poisoned_at_once_where_streams_race() -> None:
    for races, wanted in ((False, 1.0), (True, POISONED)):
        device = SoftDevice(races=races)
        array = device.xp.arange(100.0)
        device.wait(device.record(device.default))
        device.use(device.stream())
        read = array + 0.0
        del array
        assert read.get()[1] == wanted


def test_memory_goes_back_to_its_stream_only() -> None:
    device = SoftDevice()
    device.xp.arange(100.0)
    device.use(device.stream())
    device.xp.arange(100.0)
    device.use(device.default)
    device.xp.arange(100.0)
    assert (device.taken_bytes, device.reused) == (1600, 1)


def test_a_stream_uses_its_own_freed_memory_in_order() -> None:
    """What is right with one stream stays right: temporaries go while what reads them is still queued."""
    for seed in range(20):
        device = SoftDevice(seed, races=seed % 2 == 0)
        array = device.xp.arange(1000.0)
        for _ in range(5):
            array = (array + 1.0) * 2.0 - array
        expected = np.arange(1000.0)
        for _ in range(5):
            expected = (expected + 1.0) * 2.0 - expected
        assert np.array_equal(array.get(), expected)
        assert device.reused


def test_with_a_seed_some_is_done_before_anybody_waits() -> None:
    done = set()
    for seed in range(10):
        device = SoftDevice(seed)
        for _ in range(5):
            device.xp.arange(10.0)
        done.add(device.default.done)
    assert len(done) > 2


def test_each_thread_has_its_current_stream() -> None:
    device = SoftDevice()
    device.use(stream := device.stream())
    seen = []
    thread = threading.Thread(target=lambda: seen.append(device.current()))
    thread.start()
    thread.join()
    assert seen == [device.default]
    assert device.current() is stream


async def test_a_wait_that_stops_an_event_loop_is_noted() -> None:
    device = SoftDevice()
    await asyncio.to_thread(device.xp.arange(3.0).get)
    assert len(device.waits) == 1 and not device.waits_on_loops
    device.xp.arange(3.0).get()
    assert len(device.waits) == 2
    assert "test_a_wait_that_stops_an_event_loop_is_noted" in device.waits_on_loops[0]


# -- registered memory of the host -----------------------------------------------------------------


def mapped(nbytes: int = 800) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_registered_memory_is_read_when_the_stream_comes_to_it() -> None:
    device, memory = SoftDevice(), mapped()
    device.register(memory)
    host = np.ndarray((100,), float, memory.data)
    host[:] = 1
    array = device.upload(host)
    host[:] = 2
    assert array.get()[0] == 2, "it was changed too early"
    host[:] = 3
    assert array.get()[0] == 2
    device.unregister(memory)


def test_and_written_whoever_has_it_by_then() -> None:
    device, memory = SoftDevice(), mapped()
    device.register(memory)
    device.fetch(device.xp.full(50, 1.0), target := memory[:400])
    event = device.record(device.current())
    assert not device.done(event)
    del target
    other = np.ndarray((100,), float, memory.data)  # a new owner, who was given it too early
    other[:] = 5
    device.wait(event)
    assert device.done(event)
    assert list(other[[0, 49, 50, 99]]) == [1, 1, 5, 5]
    device.unregister(memory)


def test_a_part_of_an_array_is_fetched() -> None:
    device, target = SoftDevice(), np.zeros(80, np.uint8)
    device.fetch(device.xp.arange(100.0), target, 160)
    device.synchronize()
    assert np.array_equal(target.view("f8"), np.arange(20.0, 30.0))


def registered_twice(device: SoftDevice, memory: np.ndarray) -> None:
    device.register(memory)
    device.register(memory[100:200])


def unregistered_twice(device: SoftDevice, memory: np.ndarray) -> None:
    device.register(memory)
    device.unregister(memory)
    device.unregister(memory)


def unregistered_in_part(device: SoftDevice, memory: np.ndarray) -> None:
    device.register(memory)
    device.unregister(memory[:400])


def unregistered_too_early(device: SoftDevice, memory: np.ndarray) -> None:
    device.register(memory)
    device.fetch(device.xp.arange(100.0), memory)
    device.unregister(memory)


def copied_from_elsewhere(device: SoftDevice, memory: np.ndarray) -> None:
    device.register(memory)
    device.upload(np.arange(100.0))


@pytest.mark.parametrize(
    ("misuse", "how"),
    [
        (registered_twice, "registered twice"),
        (unregistered_twice, "not registered"),
        (unregistered_in_part, "not registered"),
        (unregistered_too_early, "while copies from or to it are queued"),
        (copied_from_elsewhere, "from memory that is not registered"),
    ],
)
def test_misuse_of_the_hosts_memory_fails_from_then_on(
    misuse: Callable[[SoftDevice, np.ndarray], None], how: str
) -> None:
    device, memory = SoftDevice(), mapped()
    with pytest.raises(AssertionError, match=how):
        misuse(device, memory)
    with pytest.raises(AssertionError, match=how):
        device.xp.arange(3.0)
    with pytest.raises(AssertionError, match=how):
        device.synchronize()


def test_a_copy_to_what_was_unregistered_meanwhile_is_not_made() -> None:
    device, memory = SoftDevice(), mapped()
    memory[:] = 1
    device.register(memory)
    device.fetch(device.xp.arange(100.0), memory)
    with pytest.raises(AssertionError, match="are queued"):
        device.unregister(memory)
    device.misuses.clear()
    with pytest.raises(AssertionError, match="unregistered meanwhile"):
        device.synchronize()
    assert set(memory) == {1}


def test_memory_may_be_unregistered_by_a_finalizer_of_garbage() -> None:
    """The collector tells of garbage before it runs finalizers."""

    class Holder:
        def __init__(self, memory: mmap.mmap) -> None:
            self.memory, self.itself = memory, self

        def __del__(self) -> None:
            left.append(self.memory)

    device, left = SoftDevice(), []
    holder = Holder(mmap.mmap(-1, 800))
    device.register(np.frombuffer(holder.memory, np.uint8))
    del holder
    gc.collect()
    device.synchronize()
    device.unregister(np.frombuffer(left.pop(), np.uint8))
    device.synchronize()
    assert not device.misuses


@pytest.mark.parametrize("allocate", [mapped, lambda: np.zeros(800, np.uint8)])
def test_memory_that_goes_while_it_is_registered_is_seen(
    allocate: Callable[[], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softdevice, "GONE_S", -1.0)
    device, memory = SoftDevice(), allocate()
    device.register(memory[:400])
    view = memory[5:10]
    del memory
    device.synchronize()
    del view
    with pytest.raises(AssertionError, match="went while it was registered"):
        device.synchronize()
