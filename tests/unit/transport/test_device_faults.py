"""What may go wrong with memory of a device, at the worst moment: nobody waits for ever, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import Node, nodes_of_a_host, pull, turns_until

from taskgraph.device import afterwards, shared, staging, virtual
from taskgraph.device import memory as memory_of_devices
from taskgraph.device.shared import SharedMemory
from taskgraph.device.staging import HostCopy
from taskgraph.graph.values import begin_hosted, decode, encode, hosted, staying
from taskgraph.protocol import messages as m
from taskgraph.testing.softdevice import SoftArray, SoftDevice
from taskgraph.transport import devicelending
from taskgraph.transport.segments import Pool
from taskgraph.transport.sides import AcceptedSession
from taskgraph.transport.stream import StreamTransport

HOST = np.arange(300_000.0)
MIB = 1 << 20


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Node]]:
    async with nodes_of_a_host(folder, "producer", "consumer") as made:
        yield made


def put(soft: SoftDevice, host: np.ndarray = HOST, **more: Any) -> m.Encoded:
    return encode({"x": soft.xp.asarray(host), **more}, stays=True, lendable=True)


def serves(node: Node, value: m.Encoded) -> None:
    node.at_once = lambda caller, call: m.Item(call.stamp, 1, call.tag, value)  # type: ignore[arg-type, union-attr]


async def pulled(consumer: Node, producer: Node) -> m.Encoded:
    async with asyncio.timeout(30):
        reply = await consumer.transport.call(producer.peer, pull("x"), timeout_s=None)
    assert isinstance(reply, m.Item)
    return reply.value


def lent(node: Node) -> int:
    assert isinstance(node.transport, StreamTransport)
    return sum(len(s._devices) for s in node.transport._connections if isinstance(s, AcceptedSession))


async def x_of(value: m.Encoded, soft: SoftDevice) -> np.ndarray:
    array = decode(value, device=soft)["x"]
    return await asyncio.to_thread(array.get) if type(array) is SoftArray else array


@pytest.mark.parametrize("error", [virtual.DriverError("cuMemCreate", 801), OSError("this driver has no cuMemCreate")])
def test_where_no_memory_can_be_shared_values_stay_in_other_memory(
    soft: SoftDevice,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Any,
) -> None:
    """A driver that is older, or a device of another kind: no reason for a put to fail, or its process to end."""
    tries = []

    def cannot(nbytes: int) -> None:
        tries.append(nbytes)
        raise error

    monkeypatch.setattr(soft, "allocate", cannot)
    for number in range(3):
        value = put(soft, HOST + number)
        assert type(value) is m.EncodedOnDevice and staying(value)[0].segment is None
        assert np.array_equal(decode(value)["x"], HOST + number)
    assert len(tries) == 1 and caplog.text.count("goes by the host") == 1


@pytest.mark.parametrize("what", ["identity", "a view", "the second view", "opening"])
async def test_a_call_is_answered_whatever_fails_where_its_reply_is_opened(
    nodes: list[Node],
    soft: SoftDevice,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    producer, consumer = nodes
    value = await asyncio.to_thread(lambda: put(soft, y=soft.xp.asarray(HOST + 1)))
    serves(producer, value)
    view, views = soft.view, []

    def fails(*args: Any) -> Any:
        raise ArithmeticError("cudaErrorIllegalAddress")

    def fails_at(*args: Any) -> Any:
        views.append(args)
        return view(*args) if len(views) != (1 if what == "a view" else 2) else fails()

    with monkeypatch.context() as patch:
        if what == "identity":
            patch.setattr(shared, "with_identity", fails)
        elif what == "opening":
            patch.setattr(soft, "open", fails)
        else:
            patch.setattr(soft, "view", fails_at)
        got = await pulled(consumer, producer)
    assert type(got) is m.Encoded and np.array_equal(await x_of(got, soft), HOST)
    await turns_until(lambda: gc.collect() >= 0 and not lent(producer))


async def test_what_a_value_needs_is_not_closed_for_the_rest_of_it(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicelending, "_MAX_OPEN", 4)
    producer, consumer = nodes
    large = await asyncio.to_thread(lambda: put(soft, **{f"y{n}": soft.xp.asarray(HOST + n) for n in range(4)}))
    small = await asyncio.to_thread(lambda: put(soft, HOST * 3))
    for value in (large, small, large):
        serves(producer, value)
        await pulled(consumer, producer)
        await turns_until(lambda: gc.collect() >= 0 and not lent(producer))
    assert soft.times_opened <= 11


def test_a_finalizer_that_is_short_of_memory_waits_for_no_lock_of_its_thread(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, asked = memory._collect, []

    class Users:
        def __del__(self) -> None:
            asked.extend([giver(MIB) for giver in tuple(memory_of_devices.givers)])

    def collects() -> Any:
        garbage: list[Any] = [Users()]
        garbage.append(garbage)
        del garbage
        gc.collect()
        return collect()

    monkeypatch.setattr(memory, "_collect", collects)
    thread = threading.Thread(target=memory.take, args=(2 * MIB,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and asked


def test_memory_that_goes_back_in_a_thread_is_there_for_who_is_short_of_it(
    soft: SoftDevice, memory: SharedMemory
) -> None:
    value = put(soft)
    gone = threading.Event()

    async def drop() -> None:
        nonlocal value
        busy = threading.Event()
        afterwards.soon(lambda: busy.set() or gone.wait(30))  # a driver that holds the thread up
        await asyncio.to_thread(busy.wait, 30)
        value = None  # type: ignore[assignment]
        gc.collect()

    asyncio.run(drop())
    assert len(memory) == 1
    for giver in tuple(memory_of_devices.givers):
        giver(1 << 40)
    assert not len(memory)
    gone.set()


def test_a_copy_that_could_not_begin_goes_without_a_word(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    def none(nbytes: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        HostCopy(soft, soft.empty(100), soft.default, none, keep=None)
    gc.collect()
    assert not raised


async def test_of_a_put_that_failed_nothing_goes_on_the_loop(
    soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, count = soft.fill, []

    def fails(*args: Any) -> Any:
        count.append(args)
        if len(count) == 2:
            raise ArithmeticError("out of memory")
        return fill(*args)

    monkeypatch.setattr(soft, "fill", fails)
    other = await asyncio.to_thread(soft.xp.asarray, HOST)
    with pytest.raises(ArithmeticError):
        await asyncio.to_thread(lambda: put(soft, y=other))
    count.clear()
    await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0.01)
    assert not soft.calls_on_loops


def test_who_takes_memory_follows_all_who_read_it_or_does_not_take_it(
    soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = memory.take(2 * MIB)
    assert segment is not None
    memory.give_back(segment, [soft.record(soft.stream()) for _ in range(3)])
    follow, count = soft.follow, []

    def fails(*args: Any) -> Any:
        count.append(args)
        if len(count) == 2:
            raise ArithmeticError("this stream cannot, just now")
        return follow(*args)

    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(soft, "follow", fails)
        memory.take(2 * MIB)
    followed = []
    monkeypatch.setattr(soft, "follow", lambda stream, event: followed.append(event))
    assert memory.take(2 * MIB) is segment
    assert len(followed) == 3


def test_copies_that_were_given_up_go_when_memory_is_short(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_queued", set())
    pool = Pool(max_segments=8, max_idle_bytes=64 * MIB)
    hosted(encode(soft.xp.asarray(HOST), stays=True), allocate=pool.allocate)  # locks memory
    gc.collect()
    given_up = encode(soft.xp.asarray(HOST), stays=True)
    begin_hosted(given_up, allocate=pool.allocate)
    assert len(staging._queued) == 1
    del given_up
    gc.collect()
    soft.synchronize()
    gave = [giver(MIB) for giver in tuple(memory_of_devices.givers)]
    assert any(gave)
    assert not staging._queued
    pool.close()
