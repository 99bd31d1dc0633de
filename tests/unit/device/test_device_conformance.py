"""What the framework asks of a device, of the one in software and, where there is one, of CUDA's."""

from __future__ import annotations

import contextlib
import gc
import mmap
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import xxhash
from cupy_kit import launch_on, stand_in, virtual_on
from softdevice import SoftDevice

from taskgraph.device import buffers, cuda, digest, pinning, virtual
from taskgraph.device.api import HANDLE_BYTES, IDENTITY_BYTES, Device
from taskgraph.device.cuda import array_module, device_count
from taskgraph.device.lookup import device_of
from taskgraph.errors import JobError
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.values import copy_to_host, decode, encode, verify
from taskgraph.protocol.messages import EncodedOnDevice
from taskgraph.transport.segments import Pool

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")])


@pytest.fixture(params=["soft", "what speaks CuPy", CUDA])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, Any]]:
    if request.param == "soft":
        soft = SoftDevice()
        yield soft, soft.xp
    elif request.param == "what speaks CuPy":
        soft = SoftDevice()
        cupy = stand_in(soft)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(digest, "launch_kernel", launch_on(soft))
        for name, function in virtual_on(soft, cupy).items():
            monkeypatch.setattr(virtual, name, function)
        cuda._first_device.cache_clear()
        yield array_module(1)[1], cupy  # type: ignore[misc]
        cuda._first_device.cache_clear()
    else:
        xp, device = array_module(1)
        assert device is not None
        yield device, xp


Found = tuple[Device, Any]


def fetched(device: Device, array: Any) -> np.ndarray[Any, Any]:
    target = np.zeros(array.nbytes, np.uint8)
    device.fetch(array, target)
    device.wait(device.record(device.current_stream()))
    return np.ndarray(array.shape, array.dtype, target.data)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 3, 4), (0, 2)])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i1", "?", "c8"])
def test_round_trip(found: Found, shape: tuple[int, ...], dtype: str) -> None:
    device, _ = found
    host = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    there = device.to_device(host)
    assert (there.shape, there.dtype, there.nbytes) == (host.shape, host.dtype, host.nbytes)
    assert device_of(there) is device and device.can_copy(there)
    back = device.to_host(there)
    assert back.dtype == host.dtype and back.shape == host.shape and back.flags.c_contiguous
    assert np.array_equal(back, host)


def test_device_of_host_array(found: Found) -> None:
    assert [device_of(value) for value in (np.zeros(3), 1.0, None, [1])] == [None] * 4


def test_to_host_in_c_order(found: Found) -> None:
    device, xp = found
    host = np.arange(200 * 300.0).reshape(200, 300)
    for one, wanted in ((xp.asarray(host).T, host.T), (xp.asarray(host)[:, ::3], host[:, ::3])):
        assert np.array_equal(device.to_host(one), wanted)
        assert np.array_equal(fetched(device, device.copy(one)), wanted)


def test_copy_is_independent(found: Found) -> None:
    device, xp = found
    array = xp.asarray(np.ones(10_000))
    copy = device.copy(array)
    array += 1
    assert device.to_host(copy).max() == 1


@pytest.mark.parametrize("dtype", ["?", "f2", "f4", "c8"])
def test_copy_has_every_bit(found: Found, dtype: str) -> None:
    """What numpy has no name for, too: bools that are neither 0 nor 1, and NaNs with something in them."""
    device, _ = found
    host = np.random.default_rng(3).integers(0, 256, 8192, np.uint8).view(dtype)
    raw = device.to_device(host.view(np.uint8))
    there = device.view(raw, np.dtype(dtype), host.shape, raw)
    assert bytes(fetched(device, device.copy(there)).view(np.uint8)) == bytes(host.view(np.uint8))


def test_source_may_change_after_to_device(found: Found) -> None:
    device, _ = found
    host = np.ones(1_000_000)
    there = device.to_device(host)
    host[:] = 7
    assert device.to_host(there).max() == 1


def mapped(nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_registered_memory(found: Found) -> None:
    device, _ = found
    memory = mapped(1 << 20)
    device.register(memory)
    host = np.ndarray((1000, 100), np.float64, memory.data)
    host[:] = np.arange(100_000.0).reshape(1000, 100)
    host.flags.writeable = False  # as what came from elsewhere is
    there = device.upload(host)
    event = device.record(device.current_stream())
    device.wait(event)
    assert device.has_passed(event)
    memory[:] = 0
    assert (there.shape, there.dtype) == (host.shape, host.dtype)
    assert device_of(there) is device and device.can_copy(there)
    device.fetch(there, memory[: there.nbytes])
    device.wait(device.record(device.current_stream()))
    assert np.array_equal(np.ndarray((100_000,), np.float64, memory.data), np.arange(100_000.0))
    device.unregister(memory)


@pytest.mark.parametrize("registered", [False, True])
def test_fetch_in_parts(found: Found, registered: bool) -> None:
    device, _ = found
    array = device.to_device(np.arange(30_000.0).reshape(300, 100))
    memory = mapped(240_000)
    if registered:
        device.register(memory)
    events = []
    for begin in range(0, 240_000, 70_000):
        device.fetch(array, memory[begin : begin + 70_000], begin)
        events.append(device.record(device.current_stream()))
    for number, event in enumerate(events):
        device.wait(event)
        assert device.has_passed(event)
        end = min((number + 1) * 70_000, 240_000)
        assert np.array_equal(memory[:end], np.arange(30_000.0).view(np.uint8)[:end])
    if registered:
        device.unregister(memory)


def test_values_use_page_locked_memory(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    device, xp = found
    monkeypatch.setattr(pinning, "_locked", locked := pinning._LockedMemory(1 << 30))
    pool = Pool(max_segments=4, max_idle_bytes=1 << 30)
    host = np.arange((8 << 20) / 8 + 1000)
    for number in range(5):
        value = encode({"a": xp.asarray(host + number)}, stays=True)
        assert isinstance(value, EncodedOnDevice)
        away = copy_to_host(value, allocate=pool.allocate)
        assert verify(away) and np.array_equal(decode(away)["a"], host + number)
        block = block_behind(away.buffers[0])
        assert block is not None and block.origin is not None
        assert block.origin.pin(device) is not None, "the log says why it cannot be locked"
        back = decode(away, device=device)["a"]
        del away, value, block
        other = pool.allocate(host.nbytes)
        assert other is not None
        other.fill(7)  # where the copy to the device may not be under way any more
        del other
        assert np.array_equal(device.to_host(back), host + number)
    pool.close()
    del pool
    gc.collect()
    end = time.monotonic() + 10
    while locked.nbytes and time.monotonic() < end:
        time.sleep(0.001)
    assert not locked.nbytes, "it was all unlocked"


def test_digests(found: Found) -> None:
    device, _ = found
    host = np.random.default_rng(2).integers(0, 256, 10_000, np.uint8)
    digests = device.queue_digests(device.to_device(host), 4096)
    device.wait(device.record(device.current_stream()))
    assert digests() == digests_of(host, 4096)


def digests_of(host: np.ndarray[Any, Any], block_bytes: int) -> bytes:
    raw = host.tobytes()
    return b"".join(xxhash.xxh3_128_digest(raw[at : at + block_bytes]) for at in range(0, len(raw), block_bytes))


def test_view_keeps_owner(found: Found) -> None:
    class Owner:
        pass

    device, _ = found
    array = device.to_device(np.arange(12.0))
    owner = Owner()
    alive = weakref.ref(owner)
    view = device.view(array, np.dtype("f8"), (3, 4), owner)
    del owner
    part = view[1]
    del view
    assert alive() is not None
    array += 1
    assert np.array_equal(device.to_host(part), np.arange(4.0, 8.0) + 1)
    del part
    assert alive() is None


def test_stream_is_current_per_thread(found: Found) -> None:
    device, _ = found
    stream, other, before = device.new_stream(), device.new_stream(), device.current_stream()
    assert len({stream, other, before}) == 3
    with device.on(stream):
        assert device.current_stream() == stream
        with device.on(other):
            assert device.current_stream() == other
        assert device.current_stream() == stream
        with pytest.raises(StopIteration), device.on(other):
            raise StopIteration(1)
        assert device.current_stream() == stream
    assert device.current_stream() == before


def test_stream_switch_over_await(found: Found) -> None:
    """Two coroutines in turns, each step on its task's stream, each with a `with` that begins in one and ends later."""
    device, xp = found
    if not hasattr(xp, "cuda"):
        pytest.skip("it is CuPy that has some")
    streams, switches = [device.new_stream(), device.new_stream()], [xp.cuda.Stream(), xp.cuda.Stream()]
    before = device.current_stream()
    for stream, switch in zip(streams, switches, strict=True):
        with device.on(stream):
            switch.__enter__()
            assert device.current_stream() == switch
        assert device.current_stream() == before
    for stream, switch in zip(streams, switches, strict=True):
        with device.on(stream):
            switch.__exit__(None, None, None)
            assert device.current_stream() == stream
        assert device.current_stream() == before


def test_thread_is_restored_after_switches(found: Found) -> None:
    device, xp = found
    if not hasattr(xp, "cuda"):
        pytest.skip("it is CuPy that has some")
    outer, inner, before = device.new_stream(), device.new_stream(), device.current_stream()
    with device.on(outer):
        with device.on(inner):
            for _ in range(3):
                xp.cuda.Stream().__exit__(None, None, None)
        assert device.current_stream() == outer
        with device.on(inner):
            for _ in range(3):
                xp.cuda.Stream().__enter__()
        assert device.current_stream() == outer
    assert device.current_stream() == before


def test_stream_follows_event(found: Found) -> None:
    device, _ = found
    one, other = device.new_stream(), device.new_stream()
    with device.on(one):
        array = device.to_device(np.arange(100_000.0))
        array += 1
        event = device.record(one)
    with device.on(other):
        device.follow(other, event)
        assert np.array_equal(device.to_host(device.copy(array)), np.arange(100_000.0) + 1)


def test_no_event_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = SoftDevice()
    cupy = stand_in(soft)
    device = cuda.CudaDevice(cupy, 0)
    stream = device.new_stream()
    event = device.try_record(stream)
    assert event is not None and device.has_passed(event)
    with device.on(stream), soft.captures():
        assert device.try_record(stream) is None
    answers = iter([False, False])
    monkeypatch.setattr(type(stream), "is_capturing", lambda stream: next(answers))
    with device.on(stream), soft.captures(), device.on(device.new_stream()):
        assert device.try_record(stream) is None, "it begins in between, and is over soon: the event tells"
    for raised, way in (
        (RuntimeError("the stream was capturing, but an error has invalidated the capture sequence"), None),
        (cupy_error(906), None),
        (cupy_error(700), RuntimeError),
    ):
        monkeypatch.setattr(type(stream), "is_capturing", MagicMock(side_effect=raised))
        with pytest.raises(way) if way else contextlib.nullcontext():
            assert device.try_record(stream) is None


def cupy_error(status: int) -> RuntimeError:
    error = type("CUDARuntimeError", (RuntimeError,), {"status": status})
    return error(str(status))


@pytest.mark.parametrize(("told", "devices", "way"), [("1", 1, "unset it"), ("1", 0, ""), ("0", 2, ""), ("", 1, "")])
def test_per_thread_default_streams_are_refused(
    monkeypatch: pytest.MonkeyPatch, told: str, devices: int, way: str
) -> None:
    """What children of a coroutine computed was in no order with its task: the numbers were wrong."""
    cupy = stand_in(SoftDevice())
    cupy.cuda.runtime.getDeviceCount = lambda: devices
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: cupy)
    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", told)
    if not way:
        assert device_count() == devices
        return
    with pytest.raises(JobError, match=way):
        device_count()


def test_event_recorded_again(found: Found) -> None:
    device, _ = found
    one, other = device.new_stream(), device.new_stream()
    for number in range(20):
        with device.on(one):
            array = device.to_device(np.full(100_000, 1.0 * number))
            array += 1
            event = device.record(one)
        device.follow(other, event)
        device.recycle(event)
        with device.on(one):
            array_of_later = device.to_device(np.arange(10.0))
            again = device.record(one)
        with device.on(other):
            assert np.array_equal(device.to_host(device.copy(array)), np.full(100_000, number + 1.0))
        device.wait(again)
        assert device.has_passed(again)
        device.recycle(again)
        del array_of_later


def filled(device: Device, host: np.ndarray[Any, Any], xp: Any) -> Any:
    """Memory that other processes can open, with these elements."""
    memory = device.allocate(2 << 20)
    part = device.view(memory, np.dtype(np.uint8), (host.nbytes,), None)
    device.fill_and_digest(part, xp.asarray(host), 4096)
    device.wait(device.record(device.current_stream()))
    return memory


def test_fill_shared_memory(found: Found) -> None:
    device, xp = found
    host = np.arange(200 * 300.0).reshape(200, 300)
    memory = device.allocate(2 << 20)
    assert memory.nbytes == 2 << 20 and device.can_copy(memory)
    for one, wanted in (
        (xp.asarray(host), host),
        (xp.asarray(host).T, host.T),
        (xp.asarray(host)[:, ::3], host[:, ::3]),
        (xp.asarray(host).reshape(-1)[1:], host.reshape(-1)[1:]),  # in C order, and not aligned to 16 bytes
        (xp.asarray(host).reshape(-1)[2:3], host.reshape(-1)[2:3]),
    ):
        part = device.view(memory, np.dtype(np.uint8), (wanted.nbytes,), None)
        digests = device.fill_and_digest(part, one, 65536)
        there = device.view(part, wanted.dtype, wanted.shape, None)
        assert np.array_equal(fetched(device, there), wanted)
        assert digests() == digests_of(wanted, 65536)


def test_garbage_in_any_order(found: Found) -> None:
    """CuPy's streams and events are destroyed by finalizers, and the collector runs them in an order of its own."""
    device, xp = found
    host = np.arange(100_000.0)
    kept = len(buffers._kept)
    for after in (False, True):
        owner, reader = device.new_stream(), device.new_stream()
        with device.on(owner):
            encoded = encode(xp.asarray(host), stays=True)
        with device.on(reader):
            view = decode(encoded, device=device)
            read = view + 1.0
        cycle: list[Any] = [encoded, view, owner, reader]
        cycle = [*reversed(cycle), cycle] if after else [*cycle, cycle]
        cycle.append(cycle)
        del encoded, view, owner, reader, cycle
        gc.collect()
        end = time.monotonic() + 10
        while len(buffers._kept) != kept:
            assert time.monotonic() < end, "it does not go back"
            time.sleep(0.001)
        device.wait(device.record(device.current_stream()))
        with device.on(device.new_stream()):
            assert device.to_host(read).shape == host.shape


def test_identity_and_memory(found: Found) -> None:
    device, _ = found
    assert len(device.identity) == IDENTITY_BYTES
    assert device.memory_bytes > 1 << 20


@pytest.mark.parametrize("uuid", [b"GPU\x00" * 4, bytes(16), b"0123456789abcdef"])
def test_identity_with_zeros(uuid: bytes) -> None:
    """CuPy gives what precedes the first one."""
    one, other = (cuda.CudaDevice(stand_in(SoftDevice(identity=uuid)), 0) for _ in range(2))
    assert len(one.identity) == IDENTITY_BYTES and one.identity == other.identity
    assert one.identity != cuda.CudaDevice(stand_in(SoftDevice(identity=b"another" + uuid[7:])), 0).identity
    elsewhere = stand_in(SoftDevice(identity=uuid))
    elsewhere.cuda.runtime.deviceGetPCIBusId = lambda number: "0000:66:00.0"
    assert cuda.CudaDevice(elsewhere, 0).identity != one.identity


def test_out_of_memory(found: Found) -> None:
    with pytest.raises(MemoryError):
        found[0].allocate(1 << 50)
    found[0].allocate(2 << 20)


READS = """
import sys
from taskgraph.device.cuda import array_module
import numpy as np

xp, device = array_module(1)
handle, size, again = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(again):
    opened = device.open(handle, 2 << 20)
    there = device.view(opened, np.dtype(float), (size // 8,), None)
    print(float(there.sum()), float(there[-1]))
"""


@pytest.mark.parametrize("times", [1, 3])
def test_open_in_another_process(found: Found, times: int, request: pytest.FixtureRequest) -> None:
    device, xp = found
    host = np.arange(1000.0)
    memory = filled(device, host, xp)
    handle = device.share(memory)
    assert len(handle) == HANDLE_BYTES == len(device.share(memory))
    if isinstance(device, cuda.CudaDevice) and "cuda" in request.node.callspec.id:
        arguments = [sys.executable, "-c", READS, handle.hex(), str(host.nbytes), str(times)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{host.sum()} 999.0"] * times
        return
    for _ in range(times):
        opened = device.open(handle, 2 << 20)
        there = device.view(opened, host.dtype, host.shape, None)
        assert np.array_equal(fetched(device, there), host)
        again = device.share(opened)  # by this process, from now on
    del memory
    assert np.array_equal(fetched(device, there), host), "it stays as long as it is open"
    third = device.open(again, 2 << 20)
    del opened
    assert np.array_equal(fetched(device, device.view(third, host.dtype, host.shape, None)), host)
