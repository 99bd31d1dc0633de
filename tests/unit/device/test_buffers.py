"""Values whose bulk stays on the device: private copies, views, and memory that goes back when nobody reads it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice, SoftStream

from taskgraph.device import afterwards, shared
from taskgraph.device import buffers as buffers_module
from taskgraph.device.afterwards import call_soon
from taskgraph.device.buffers import PrivateCopy
from taskgraph.device.shared import Segment, SharedMemory
from taskgraph.graph.blocks import Block
from taskgraph.graph.values import copy_to_host, decode, device_buffers, device_buffers_intact, encode, verify
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

HOST = np.arange(10_000.0)


@pytest.fixture(params=[(None, False), (None, True), (1, False), (2, True)], ids=["late", "races", "1", "2, races"])
def soft(request: pytest.FixtureRequest) -> Iterator[SoftDevice]:
    yield SoftDevice(request.param[0], races=request.param[1])


class On:
    """What is queued within is so on this stream."""

    def __init__(self, device: SoftDevice, stream: SoftStream | None = None) -> None:
        self.device, self.stream = device, stream or device.new_stream()

    def __enter__(self) -> SoftStream:
        self.before = self.device.use(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        self.device.use(self.before)


def put(device: SoftDevice, host: np.ndarray = HOST) -> Encoded:
    return encode(device.xp.asarray(host), stays=True)


@pytest.mark.parametrize(
    "host",
    [
        HOST,
        HOST.astype("f8").reshape(100, 100),
        (np.tile(HOST, 9) > 5),
        np.zeros((3, 1 << 20), "i1"),
        HOST.astype("c16"),
    ],
)
def test_equals_value_on_host(soft: SoftDevice, host: np.ndarray) -> None:
    stayed, copied = put(soft, host), encode(soft.xp.asarray(host))
    assert type(stayed) is EncodedOnDevice and type(copied) is Encoded
    assert (stayed.meta, stayed.digest, stayed.size_bytes) == (copied.meta, copied.digest, copied.size_bytes)
    there = decode(stayed, device=soft)
    assert (there.shape, there.dtype) == (host.shape, host.dtype)
    assert np.array_equal(there.get(), host)
    assert np.array_equal(decode(stayed), host)


def test_several_arrays(soft: SoftDevice) -> None:
    value = {
        "a": soft.xp.asarray(HOST),
        "b": [HOST, soft.xp.asarray(HOST + 1), soft.xp.asarray(HOST[:5])],
        "c": "x" * 9000,
    }
    stayed, copied = encode(value, stays=True), encode(value)
    assert stayed.digest == copied.digest and stayed.meta == copied.meta
    assert len(device_buffers(stayed)) == 2, "what is small is in meta"
    back = decode(stayed, device=soft)
    assert [type(array) for array in (back["a"], *back["b"])] == [SoftArray, np.ndarray, SoftArray, SoftArray]
    assert np.array_equal(back["b"][1].get(), HOST + 1) and np.array_equal(back["b"][2].get(), HOST[:5])
    assert not [buffer for buffer in copy_to_host(stayed).buffers if not isinstance(buffer, memoryview)]
    assert copy_to_host(stayed).digest == stayed.digest and verify(copy_to_host(stayed))


def test_decode_without_device(soft: SoftDevice) -> None:
    assert type(encode(soft.xp.asarray(HOST))) is Encoded
    assert type(encode(HOST, stays=True)) is Encoded
    assert type(encode(soft.xp.asarray(HOST[:512]), stays=True)) is Encoded


def test_array_of_another_device(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoftDevice, "can_copy", lambda device, array: False)
    stayed = put(soft)
    assert type(stayed) is Encoded
    assert np.array_equal(decode(stayed, device=soft).get(), HOST)


def test_earlier_work_is_included(soft: SoftDevice) -> None:
    array = soft.xp.asarray(HOST)
    array += 1
    encoded = encode({"x": array.reshape(100, 100).T}, stays=True)
    array += 1
    assert np.array_equal(decode(encoded, device=soft)["x"].get(), (HOST + 1).reshape(100, 100).T)
    assert encoded.digest == encode({"x": (HOST + 1).reshape(100, 100).T}).digest


def test_waits_once_to_put(soft: SoftDevice) -> None:
    encoded = put(soft)
    assert len(soft.waits) == 1
    with On(soft):
        there = decode(encoded, device=soft)
        assert np.shares_memory(there.elements, device_buffers(encoded)[0]._memory.array.elements)
        assert len(soft.waits) == 1
        assert np.array_equal(there.get(), HOST), "it is there, on any stream"


def test_writable_copy(soft: SoftDevice) -> None:
    encoded = put(soft)
    mine = decode(encoded, device=soft, writable=True)
    mine += 1
    assert np.array_equal(mine.get(), HOST + 1)
    assert device_buffers_intact(encoded)
    assert not device_buffers(encoded)[0].is_viewed


def test_untouched_finds_writes(soft: SoftDevice) -> None:
    encoded = put(soft)
    with On(soft):
        there = decode(encoded, device=soft)
        assert device_buffers_intact(encoded)
        there += 1
        assert not device_buffers_intact(encoded), "on the stream of who wrote"


# -- memory ----------------------------------------------------------------------------------------


def settle_calls() -> None:
    """What was left to a thread is done, as far as it can be."""
    done = threading.Event()
    call_soon(done.set)
    assert done.wait(30)


def settle(memory: object = None) -> None:
    """What nobody has any more goes back now; or this does."""
    end = time.monotonic() + 10
    settle_calls()
    while not all(kept.uses and kept is not memory for kept in buffers_module._kept):
        assert time.monotonic() < end, "it does not go back"
        time.sleep(0.001)


def fill(device: SoftDevice, stream: SoftStream) -> None:
    """Somebody takes all the memory that was freed on a stream, and writes to it."""
    settle()
    with On(device, stream):
        kept = [device.xp.full(HOST.size, 7.0) for _ in range(3)]
        for array in kept:
            assert array.get()[0] == 7


def test_memory_waits_for_readers(soft: SoftDevice) -> None:
    with On(soft) as owner:
        encoded = put(soft)
    found = []
    for _ in range(3):
        with On(soft) as reader:
            found.append((reader, decode(encoded, device=soft) + 1.0))  # the view is gone, its reading is queued
    reused = soft.reused
    del encoded
    fill(soft, owner)
    assert soft.reused > reused, "it did go back"
    for reader, array in found:
        with On(soft, reader):
            assert np.array_equal(array.get(), HOST + 1)


def test_view_outlives_value(soft: SoftDevice) -> None:
    with On(soft) as owner:
        encoded = put(soft)
    with On(soft) as reader:
        part = decode(encoded, device=soft)[5:10]
    del encoded
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(part.get(), HOST[5:10])
        late = part + 1.0
    del part
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(late.get(), HOST[5:10] + 1)


def test_memory_waits_for_second_read(soft: SoftDevice) -> None:
    with On(soft) as owner:
        encoded = put(soft)
    with On(soft) as reader:
        first = decode(encoded, device=soft) + 1.0
        second = decode(encoded, device=soft) + 2.0
    del encoded
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(second.get(), HOST + 2) and np.array_equal(first.get(), HOST + 1)


def test_memory_waits_for_writable_copy(soft: SoftDevice) -> None:
    with On(soft) as owner:
        encoded = put(soft)
    with On(soft) as reader:
        mine = decode(encoded, device=soft, writable=True)
    del encoded
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(mine.get(), HOST)


def test_only_own_thread_waits(soft: SoftDevice) -> None:
    encoded = put(soft)
    before = len(soft.waits)
    with On(soft):
        view = decode(encoded, device=soft)
        read = view + 1.0
    del encoded, view
    gc.collect()
    settle()
    assert set(soft.waits[before:]) <= {"_wait_for_events"}
    del read


def test_no_work_on_capturing_streams(soft: SoftDevice) -> None:
    """The owner's was told to follow who read, and the reader's got an event: either spoiled its graph."""
    with On(soft) as owner:
        encoded = put(soft)
    held = device_buffers(encoded)[0]._memory
    with On(soft) as reader:
        first, second = (decode(encoded, device=soft) for _ in range(2))
        read = [first + 1.0, second + 2.0]
        with soft.captures():
            del first
            with On(soft):
                del second
            del encoded
            settle_calls()
            assert held in buffers_module._kept, "it stays until the reader's stream can be asked"
    with On(soft, owner), soft.captures():
        settle(held)
    del held
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(read[0].get(), HOST + 1) and np.array_equal(read[1].get(), HOST + 2)
    assert not soft.misuses


def test_two_views_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = SoftDevice()
    with On(soft) as owner:
        encoded = put(soft)
    with On(soft) as reader:
        views, read, record = [decode(encoded, device=soft) for _ in range(2)], [], soft.record

        def interrupted(stream: SoftStream) -> object:
            """Before the event of the first view's end is kept, another thread reads the second, and lets go of it."""
            event = record(stream)
            if len(views) == 1:
                read.append(views.pop() + 1.0)
            return event

        monkeypatch.setattr(soft, "record", interrupted)
        del views[0]
        del encoded
    fill(soft, owner)
    with On(soft, reader):
        assert np.array_equal(read[0].get(), HOST + 1)


def test_memory_is_kept_after_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, left = SoftDevice(), set()
    monkeypatch.setattr(buffers_module, "_kept", left)
    monkeypatch.setattr(afterwards, "_lost", [])
    with On(soft) as owner:
        encoded = put(soft)
    with On(soft):
        view = decode(encoded, device=soft)
        with monkeypatch.context() as lost:
            lost.setattr(soft, "record", lambda stream: 1 / 0)
            del view
    del encoded
    (memory,) = left
    fill(soft, owner)
    assert np.array_equal(soft.to_host(memory.array).view(float), HOST)

    with On(soft):
        encoded = put(soft)
    with On(soft):
        decode(encoded, device=soft)
    monkeypatch.setattr(soft, "has_passed", lambda event: 1 / 0)
    monkeypatch.setattr(soft, "wait", lambda event: 1 / 0)
    del encoded
    settle_calls()
    assert len(left) == 2


LARGE = np.arange(300_000.0)


def put_for_others(device: SoftDevice) -> tuple[EncodedOnDevice, Segment]:
    value = encode(device.xp.asarray(LARGE), stays=True, lendable=True)
    (buffer,) = device_buffers(value)
    assert isinstance(value, EncodedOnDevice) and buffer.segment is not None
    return value, buffer.segment


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    yield shared.offer_memory(SoftDevice())
    shared._offered.clear()


@pytest.mark.parametrize("reads_on", ["another stream", "the owner's"])
def test_segment_waits_for_readers(memory: SharedMemory, reads_on: str) -> None:
    soft = memory.device
    assert isinstance(soft, SoftDevice)
    with On(soft) as owner:
        encoded, segment = put_for_others(soft)
    with On(soft, owner if reads_on == "the owner's" else None) as reader:
        read = decode(encoded, device=soft) + 1.0  # the view is gone, its reading is queued
    del encoded
    with On(soft):
        later = encode(soft.xp.full(LARGE.size, 7.0), stays=True, lendable=True)
    assert device_buffers(later)[0].segment is segment
    with On(soft, reader):
        assert np.array_equal(read.get(), LARGE + 1)


@pytest.mark.parametrize("reads_on", ["another stream", "the owner's"])
def test_no_work_on_capturing_streams_for_segment(memory: SharedMemory, reads_on: str) -> None:
    soft = memory.device
    assert isinstance(soft, SoftDevice)
    with On(soft) as owner:
        encoded, segment = put_for_others(soft)
    held = device_buffers(encoded)[0]._memory
    with On(soft, owner if reads_on == "the owner's" else None):
        view = decode(encoded, device=soft)
        read = view + 1.0
        with soft.captures():
            del view, encoded
            settle_calls()
        settle(held)
        with On(soft):
            later = encode(soft.xp.full(LARGE.size, 7.0), stays=True, lendable=True)
        assert device_buffers(later)[0].segment is segment
        assert np.array_equal(read.get(), LARGE + 1)
    assert not soft.misuses


def test_segment_of_unawaited_value(memory: SharedMemory) -> None:
    soft = memory.device
    assert isinstance(soft, SoftDevice)
    with On(soft):
        PrivateCopy(soft, soft.xp.asarray(LARGE), 1 << 20, memory)
    with On(soft):
        later = encode(soft.xp.full(LARGE.size, 7.0), stays=True, lendable=True)
        assert len(memory) == 1
        soft.synchronize()
        assert decode(later, device=soft).get()[0] == 7


def test_segment_is_kept_after_device_error(monkeypatch: pytest.MonkeyPatch, memory: SharedMemory) -> None:
    soft = memory.device
    assert isinstance(soft, SoftDevice)
    encoded, segment = put_for_others(soft)
    array = soft.xp.asarray(LARGE)
    decode(encoded, device=soft)
    del encoded
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(soft, "follow", lambda stream, event: 1 / 0)
        encode(array, stays=True, lendable=True)
    assert len(memory) == 1
    assert put_for_others(soft)[1] is segment


# -- on the host -----------------------------------------------------------------------------------


def test_one_copy_to_host(soft: SoftDevice) -> None:
    encoded = put(soft)
    allocated: list[Block] = []

    def allocate(nbytes: int) -> Block:
        allocated.append(Block(nbytes, np.uint8, bytearray(nbytes)))
        return allocated[-1]

    found: list[Encoded] = []
    threads = [
        threading.Thread(target=lambda: found.append(copy_to_host(encoded, allocate=allocate))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allocated) == 1 and device_buffers(encoded)[0].host_copies == 1
    for one in found:
        assert type(one) is Encoded and (one.meta, one.digest) == (encoded.meta, encoded.digest)
        assert one.buffers[0].readonly
        assert np.shares_memory(np.frombuffer(one.buffers[0], np.uint8), allocated[0])
        assert np.array_equal(decode(one), HOST)
        assert np.array_equal(decode(one, device=soft).get(), HOST)


def test_copy_to_host_waits_for_no_task(soft: SoftDevice) -> None:
    soft = SoftDevice()
    encoded = put(soft)
    with On(soft) as busy:
        array = soft.xp.asarray(HOST) + 1.0
        copy_to_host(encoded)
        assert soft.current_stream() is busy
    assert busy.done == 0
    del array


def test_hosted_of_host_value() -> None:
    encoded = encode(HOST)
    assert copy_to_host(encoded) is encoded
