"""Memory of the pool is page-locked once, used again and again, and unlocked before it goes: never while it is used."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

from taskgraph.device import pinning
from taskgraph.graph.arrays import empty
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.graph.values import copy_to_host, decode, encode
from taskgraph.protocol.messages import Encoded
from taskgraph.system.host import memory_bytes
from taskgraph.transport import segments
from taskgraph.transport.pages import huge_page_bytes
from taskgraph.transport.segments import Pool, SegmentUse

HOST = np.arange(200_000.0)
MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> Iterator[pinning._LockedMemory]:
    made = pinning._LockedMemory(64 * MIB)
    monkeypatch.setattr(pinning, "_locked", made)
    yield made

    def unlocked() -> bool:
        gc.collect()  # again, since another thread may have kept the last reference to garbage until now
        return made.nbytes == 0 and not soft.registered

    until(unlocked)
    assert not soft.misuses


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Iterator[Pool]:
    made = Pool(max_segments=8, max_idle_bytes=64 * MIB, clock=clock)
    yield made
    made.close()


def until(there: Callable[[], bool]) -> None:
    """Memory is unlocked in a thread, which tells nobody."""
    end = time.monotonic() + 5
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def put(soft: SoftDevice, host: np.ndarray = HOST) -> Encoded:
    return encode(soft.xp.asarray(host), stays=True)


def received(pool: Pool, host: np.ndarray = HOST) -> Encoded:
    """A value that was on another node's device, in memory of the pool, as a session receives it."""
    soft = SoftDevice()
    value = copy_to_host(put(soft, host))
    block = pool.allocate(value.buffers[0].nbytes)
    assert block is not None
    block[:] = value.buffers[0]
    return Encoded(value.meta, (block.data.toreadonly(),), value.digest)


def overwritten(pool: Pool, nbytes: int = HOST.nbytes) -> list[Block]:
    """Somebody takes all the memory that the pool gives away, and writes to it."""
    taken = [block for _ in range(3) if (block := pool.allocate(nbytes)) is not None]
    for block in taken:
        block.fill(7)
    return taken


# -- to the host -----------------------------------------------------------------------------------


def test_memory_is_locked_once(soft: SoftDevice, pool: Pool, locked: pinning._LockedMemory) -> None:
    for _ in range(5):
        value = copy_to_host(put(soft), allocate=pool.allocate)
        assert np.array_equal(decode(value), HOST)
        del value
    assert soft.registrations == 1 and len(pool) == 1
    pool.trim()
    assert locked.nbytes == pool._idle_bytes > 0


def test_other_memory_is_not_locked(soft: SoftDevice, pool: Pool) -> None:
    small = HOST[:1000]
    assert np.array_equal(decode(copy_to_host(put(soft), allocate=None)), HOST)
    assert np.array_equal(decode(copy_to_host(put(soft, small), allocate=pool.allocate)), small), "not worth a segment"
    assert soft.registrations == 0


def test_unlocked_before_freed(soft: SoftDevice, pool: Pool, clock: Clock) -> None:
    value = copy_to_host(put(soft), allocate=pool.allocate)
    pool.trim()
    assert len(soft.registered) == 1
    del value
    pool.trim()
    assert len(soft.registered) == 1, "it waits for another value"
    clock.now += segments._IDLE_S + 1
    pool.trim()
    until(lambda: not soft.registered)


@pytest.mark.skipif(not huge_page_bytes(), reason="each has memory of its own here")
def test_unlocked_pages_are_returned(soft: SoftDevice, pool: Pool, clock: Clock) -> None:
    kept = pool.allocate(100_000)
    value = copy_to_host(put(soft), allocate=pool.allocate)
    assert kept is not None and isinstance(kept.origin, SegmentUse) and len(soft.registered) == 1
    kept.fill(7)
    assert kept.origin.region is not None
    fd = kept.origin.region.fd
    del value
    clock.now += segments._IDLE_S + 1
    pool.trim()
    clock.now += segments._IDLE_S + 1
    pool.trim()
    until(lambda: os.fstat(fd).st_blocks * 512 <= 200_000)
    assert not soft.registered and (int(kept.min()), int(kept.max())) == (7, 7)


def test_closed_pool_stays_locked_for_views(soft: SoftDevice, pool: Pool) -> None:
    idle, used = copy_to_host(put(soft), allocate=pool.allocate), copy_to_host(put(soft), allocate=pool.allocate)
    view = decode(used)[5:10]
    del used, idle
    pool.close()
    until(lambda: len(soft.registered) == 1)
    time.sleep(0.05)
    assert len(soft.registered) == 1
    assert np.array_equal(view, HOST[5:10])
    del view
    pool.trim()
    until(lambda: not soft.registered)


def test_limit_of_locked_memory(
    soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert 0 < memory_bytes() // pinning.PART < 1 << 50
    monkeypatch.setattr(pinning, "_locked", little := pinning._LockedMemory(2 * HOST.nbytes + MIB))
    values = [copy_to_host(put(soft), allocate=pool.allocate) for _ in range(4)]
    assert soft.registrations == 2 and little.nbytes <= 2 * HOST.nbytes + MIB
    assert all(np.array_equal(decode(value), HOST) for value in values)
    assert not caplog.records


def test_copy_without_lock(
    soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(memory: np.ndarray) -> None:
        asked.append(memory.nbytes)
        raise MemoryError("cudaErrorMemoryAllocation")

    first = copy_to_host(put(soft), allocate=pool.allocate)
    with monkeypatch.context() as patch:
        patch.setattr(soft, "register", refuse)
        values = [copy_to_host(put(soft), allocate=pool.allocate) for _ in range(4)]
        assert all(np.array_equal(decode(value), HOST) for value in values)
        assert all(np.array_equal(decode(value, device=soft).get(), HOST) for value in values)
        assert len(asked) == 1, "nor is it tried again"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "cudaErrorMemoryAllocation" in record.getMessage()
        del first
        pool.trim()
        del values
        pool.trim()


def test_two_threads_lock_once(soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    value, register = received(pool), soft.register
    together = threading.Barrier(2)

    def slow(memory: np.ndarray) -> None:
        time.sleep(0.05)
        register(memory)

    monkeypatch.setattr(soft, "register", slow)
    found: list[Any] = []

    def look() -> None:
        together.wait()
        found.append(decode(value, device=soft).get())

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert soft.registrations == 1
    assert all(np.array_equal(array, HOST) for array in found)


def test_user_code_gets_no_locked_memory(soft: SoftDevice, pool: Pool) -> None:
    """CuPy copies from such memory after the call: a write right behind it would reach the copy."""
    before = empty(HOST.shape, HOST.dtype, pool.allocate)
    assert block_behind(before) is not None
    value = copy_to_host(put(soft), allocate=pool.allocate)
    first = value.buffers[0].obj.ctypes.data  # type: ignore[attr-defined]
    del value
    after = empty(HOST.shape, HOST.dtype, pool.allocate)
    assert block_behind(after) is None and after.flags.writeable
    block = pool.allocate(HOST.nbytes)
    assert block is not None and block.ctypes.data == first, "what the framework writes itself may lie there"


# -- to the device ---------------------------------------------------------------------------------


def test_upload_from_received_memory(soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft, "to_device", lambda host: 1 / 0)
    for _ in range(3):
        value = received(pool)
        assert np.array_equal(decode(value, device=soft).get(), HOST)
        del value
    assert soft.registrations == 1


@pytest.mark.parametrize("waits", [False, True])
def test_memory_waits_for_device(soft: SoftDevice, pool: Pool, waits: bool) -> None:
    """On a device that comes to nothing before it has to; nobody holds the value meanwhile."""
    made = []
    for _ in range(3):
        value = received(pool)
        made.append(decode(value, device=soft))
        del value
    if waits:
        soft.wait(soft.record(soft.current_stream()))
    taken = overwritten(pool)
    assert len(pool) == (3 if waits else 6), "and is, once it was read"
    for array in made:
        assert np.array_equal(array.get(), HOST)
    del taken


def test_not_unlocked_while_device_reads(soft: SoftDevice, pool: Pool, clock: Clock) -> None:
    value = received(pool)
    array = decode(value, device=soft)
    del value
    pool.trim()
    clock.now += segments._IDLE_S + 1
    pool.trim()
    assert len(pool) == 0
    until(lambda: not soft.registered)  # by a thread that waited for the copy
    assert np.array_equal(array.get(), HOST)


def test_memory_waits_for_each_task(soft: SoftDevice, pool: Pool) -> None:
    value, made = received(pool), []
    streams = [soft.new_stream() for _ in range(3)]
    for stream in streams:
        with soft.on(stream):
            made.append(decode(value, device=soft))
    del value
    for stream in streams[1:]:
        soft.wait(soft.record(stream))
    overwritten(pool)
    for stream, array in zip(streams, made, strict=True):
        with soft.on(stream):
            assert np.array_equal(array.get(), HOST)


def test_lost_device_keeps_locked_memory(
    soft: SoftDevice, pool: Pool, locked: pinning._LockedMemory, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    value, array = received(pool), None
    with monkeypatch.context() as patch:
        patch.setattr(soft, "record", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            array = decode(value, device=soft)
        del value
    assert all(block.ctypes.data != soft.registered[0].begin for block in overwritten(pool))
    pool.trim()
    clock.now += segments._IDLE_S + 1
    pool.trim()
    until(lambda: len(locked._left) == 1)
    assert len(soft.registered) == 1 and array is None
    soft.synchronize()
    soft.unregister(np.frombuffer(locked._left.pop(), np.uint8))
    locked.nbytes = 0


async def test_event_loop_does_not_lock(soft: SoftDevice, pool: Pool) -> None:
    value = received(pool)
    one = decode(value, device=soft)
    assert soft.registrations == 0
    other = await asyncio.to_thread(decode, value, device=soft)
    assert soft.registrations == 1
    third = decode(value, device=soft)
    for array in (one, other, third):
        assert isinstance(array, SoftArray)
        assert np.array_equal(await asyncio.to_thread(array.get), HOST)
    assert soft.registrations == 1
