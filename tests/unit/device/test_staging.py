"""Copies to the host, piece by piece: what is there is known, and nobody waits for more than it needs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from softdevice import SoftDevice

from taskgraph.device import pinning, staging
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.graph.values import copy_to_host, decode, device_buffers, encode, verify
from taskgraph.transport.segments import Pool

PIECE = 64 << 10
HOST = np.arange(30_000.0)  # three pieces and a part of one
BYTES = HOST.view(np.uint8)


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_BLOCKING_PIECE_BYTES", PIECE)
    monkeypatch.setattr(staging, "_QUEUED_PIECE_BYTES", PIECE)
    monkeypatch.setattr(staging, "_queued", set())
    monkeypatch.setattr(pinning, "_locked", pinning._LockedMemory(64 << 20))


@pytest.fixture
def pool(soft: SoftDevice) -> Iterator[Pool]:
    made = Pool(max_segments=8, max_idle_bytes=64 << 20)
    yield made
    made.close()
    assert not soft.misuses


def buffer(soft: SoftDevice, host: np.ndarray = HOST) -> DeviceBuffer:
    (found,) = device_buffers(encode(soft.xp.asarray(host), stays=True))
    return found


@pytest.mark.parametrize("pinned", [False, True])
def test_locked_memory_queues_all_pieces(soft: SoftDevice, pool: Pool, pinned: bool) -> None:
    found, queued, fetch = buffer(soft), [], soft.fetch

    def count(array: Any, target: np.ndarray, begin: int = 0) -> None:
        queued.append((begin, target.nbytes))
        fetch(array, target, begin)

    soft.fetch = count  # type: ignore[method-assign]
    copy = found.begin_host_copy(pool.allocate if pinned else None)
    assert len(soft.registered) == pinned
    assert len(queued) == (4 if pinned else 0), "CUDA copies to other memory while it is called"
    assert copy.data != BYTES.data
    copy.finish()
    assert copy.data == BYTES.data
    assert queued == [(begin, min(PIECE, HOST.nbytes - begin)) for begin in range(0, HOST.nbytes, PIECE)]


def test_one_copy_for_many_callers(soft: SoftDevice, pool: Pool) -> None:
    value = encode({"a": soft.xp.asarray(HOST), "b": [HOST[::-1].copy(), soft.xp.asarray(HOST + 1)]}, stays=True)
    together, found = threading.Barrier(6), []

    def whole() -> None:
        together.wait()
        found.append(copy_to_host(value, allocate=pool.allocate))

    threads = [threading.Thread(target=whole) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(verify(one) for one in found)
    assert [one.host_copies for one in device_buffers(value)] == [1, 1]
    assert np.array_equal(decode(found[0])["b"][1], HOST + 1)
    assert soft.registrations == 2


class Fails:
    """What the device does fails at one of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: SoftDevice, name: str, at: int) -> None:
        call, self.count = getattr(soft, name), 0

        def failing(*args: Any) -> Any:
            self.count += 1
            if self.count == at:
                raise ArithmeticError(f"{name} fails")
            return call(*args)

        monkeypatch.setattr(soft, name, failing)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("name", "at"), [("wait", 1), ("fetch", 1), ("fetch", 3), ("record", 1)])
def test_failed_copy(
    soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch, name: str, at: int, pinned: bool
) -> None:
    found = buffer(soft)
    with monkeypatch.context() as patch:
        Fails(patch, soft, name, at)
        copy = found.begin_host_copy(pool.allocate if pinned else None)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match=f"{name} fails"):
                copy.finish()
    assert isinstance(copy.error, ArithmeticError)
    assert np.array_equal(decode_array(found.copy_to_host()), HOST), "the next call copies again"
    assert found.host_copies == 2


def decode_array(data: memoryview) -> np.ndarray:
    return np.frombuffer(data, np.float64)


def test_memory_is_kept_while_device_may_write(soft: SoftDevice, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = buffer(soft)
    with monkeypatch.context() as patch:
        Fails(patch, soft, "wait", 1)
        with pytest.raises(ArithmeticError):
            found.copy_to_host(pool.allocate)
    del found
    gc.collect()
    others = [pool.allocate(HOST.nbytes) for _ in range(3)]
    for other in others:
        assert other is not None
        other.fill(7)
    soft.synchronize()  # the rest of the copy
    for other in others:
        assert other is not None and set(other) == {7}
    (left,) = staging._queued
    assert np.array_equal(left.target, BYTES) and left.keep is not None
    staging._queued.clear()


def test_value_dropped_during_copy(soft: SoftDevice, pool: Pool) -> None:
    """Its consumer is gone, its epoch committed: only the thread that copies has it."""
    owner = soft.new_stream()
    with soft.on(owner):
        found = buffer(soft)
    copy = found.begin_host_copy(pool.allocate)
    del found
    gc.collect()
    with soft.on(owner):
        kept = [soft.xp.full(HOST.size, 7.0) for _ in range(3)]
        assert all(array.get()[0] == 7 for array in kept)
    blocks = [pool.allocate(HOST.nbytes) for _ in range(3)]
    for block in blocks:
        assert block is not None
        block.fill(9)
    copy.finish()
    assert copy.data == BYTES.data


def test_finished_copy_frees_device_memory(soft: SoftDevice) -> None:
    found = buffer(soft)
    copy = found.begin_host_copy()
    copy.finish()
    del found
    gc.collect()
    reused = soft.reused
    taken = [soft.xp.full(HOST.size, 7.0) for _ in range(3)]
    assert soft.reused == reused + 2, "that of what was put, and of its copy"
    del taken
    assert copy.data == BYTES.data
