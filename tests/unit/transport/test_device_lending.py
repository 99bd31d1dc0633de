"""Memory of a device lent between nodes of one host: read where it is, and given back, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import JOB, TOKEN, Node, forget, nodes_of_a_host, pull, stream_of, turns_until

from taskgraph.device import shared
from taskgraph.device.shared import IDLE_PART, SharedMemory
from taskgraph.errors import DecodeError, PeerLost, Refused
from taskgraph.graph.values import decode, digesting, encode, staying, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.testing.softdevice import SoftArray, SoftDevice
from taskgraph.transport import devicelending, stream, wire
from taskgraph.transport.api import PendingReply
from taskgraph.transport.devicelending import TICKET_BYTES, DeviceBorrowing, DeviceLending, Ticket
from taskgraph.transport.frames import Kind
from taskgraph.transport.mappings import CannotBorrow
from taskgraph.transport.session import Session
from taskgraph.transport.sides import AcceptedSession, DialledSession
from taskgraph.transport.stream import StreamTransport

HOST = np.arange(300_000.0)
MIB = 1 << 20


@pytest.fixture
async def nodes(folder: Path) -> AsyncIterator[list[Node]]:
    async with nodes_of_a_host(folder, "producer", "consumer", "other") as made:
        yield made


async def on_device(soft: SoftDevice, host: np.ndarray = HOST, **more: Any) -> m.Encoded:
    """An item, put by a task of the producer."""
    return await asyncio.to_thread(lambda: encode({"x": soft.xp.asarray(host), **more}, stays=True, lendable=True))


def item(value: m.Encoded, call: m.Pull) -> m.Item:
    return m.Item(call.stamp, 1, call.tag, value)


def serves(node: Node, value: m.Encoded) -> None:
    node.at_once = lambda caller, call: item(value, call)  # type: ignore[arg-type]


async def pulled(node: Node, of: Node, tag: str = "x") -> m.Encoded:
    reply = await node.call(of, pull(tag))
    assert isinstance(reply, m.Item)
    return reply.value


async def x_of(value: m.Encoded, soft: SoftDevice) -> np.ndarray:
    array = decode(value, device=soft)["x"]
    assert type(array) is SoftArray
    return await asyncio.to_thread(array.get)


def lendings(node: Node) -> list[DeviceLending]:
    return [s._devices for s in stream_of(node)._connections if isinstance(s, AcceptedSession)]


async def test_it_arrives_on_the_device_and_never_was_on_the_host(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft, n=3)
    serves(producer, value)
    for node in (consumer, other):
        got = await pulled(node, producer)
        assert type(got) is m.EncodedOnDevice and (got.meta, got.digest) == (value.meta, value.digest)
        assert np.array_equal(await x_of(got, soft), HOST) and decode(got, device=soft)["n"] == 3
        assert staying(got)[0].segment is not None, "it can be lent on"
    assert memory.idle_bytes == 0 and len(memory) == 1, "nothing was copied"
    await turns_until(lambda: sum(map(len, lendings(producer))) == 1)  # the last one that was pulled is read
    del got
    gc.collect()
    assert [buffer.host_copies for buffer in staying(value)] == [0]
    assert not soft.waits_on_loops and not soft.calls_on_loops
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_the_host_sees_the_same_value(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    serves(producer, value)
    got = await pulled(consumer, producer)
    assert verify(m.Encoded(got.meta, tuple(b.host() for b in staying(got)), got.digest))
    assert np.array_equal(decode(got)["x"], HOST)


async def test_memory_is_opened_once(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, _ = nodes
    for number in range(5):
        value = await on_device(soft, HOST + number)
        serves(producer, value)
        assert np.array_equal(await x_of(await pulled(consumer, producer), soft), HOST + number)
        await turns_until(lambda: not any(map(len, lendings(producer))))
        del value
        producer.at_once = lambda caller, call: None
        producer.served.clear()
        gc.collect()
    assert soft.times_opened <= 2
    assert len(memory) <= 4


async def test_what_is_lent_is_relayed(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, other = nodes
    serves(producer, await on_device(soft))
    serves(consumer, await pulled(consumer, producer))
    producer.at_once = lambda caller, call: None
    assert np.array_equal(await x_of(await pulled(other, consumer), soft), HOST)


async def test_large_and_small_arrays_of_device_and_host_in_one_value(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, _ = nodes
    more = {
        "small": soft.xp.arange(10_000.0),  # its bulk is a buffer, but too small for memory that others open
        "tiny": soft.xp.arange(3.0),
        "there": np.arange(400_000.0),
        "text": "x" * 100_000,
        "y": soft.xp.arange(250_000.0),
    }
    value = await on_device(soft, **more)
    serves(producer, value)
    got = await pulled(consumer, producer)
    assert type(got) is m.EncodedOnDevice and got.digest == value.digest
    found = decode(got, device=soft)
    for key in ("x", "small", "tiny", "y"):
        assert type(found[key]) is SoftArray
    assert np.array_equal(found["x"].get(), HOST) and np.array_equal(found["y"].get(), np.arange(250_000.0))
    assert np.array_equal(found["small"].get(), np.arange(10_000.0)) and np.array_equal(found["there"], more["there"])
    assert found["text"] == more["text"]
    assert [buffer.host_copies for buffer in staying(value)] == [0, 1, 0], "only what is too small"


async def test_a_peer_with_another_device_says_so_once(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    tries = []
    monkeypatch.setattr(shared, "with_identity", lambda identity: tries.append(identity))
    for _ in range(3):
        got = await pulled(consumer, producer)
        assert type(got) is m.Encoded and np.array_equal(decode(got)["x"], HOST)
    assert len(tries) == 1
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_a_device_that_opens_nothing_gets_bytes(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    monkeypatch.setattr(soft, "open", lambda *_: 1 / 0)
    assert np.array_equal(decode(await pulled(consumer, producer))["x"], HOST)
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_of_a_reply_that_cannot_travel_nothing_is_lent(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    producer.at_once = lambda caller, call: m.Item(m.Stamp(1, 1 << 70), 1, "x", value)
    with pytest.raises(Refused, match="cannot travel"):
        await pulled(consumer, producer)
    (lending,) = lendings(producer)
    assert lending._last and not len(lending)


async def test_over_tcp_it_goes_by_the_host(soft: SoftDevice, memory: SharedMemory) -> None:
    made = [
        await Node(name, StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, digesting=digesting)).start()
        for name in ("producer", "consumer")
    ]
    value = await on_device(soft)
    serves(made[0], value)
    assert type(await pulled(made[1], made[0])) is m.Encoded
    for node in made:
        await node.transport.close()


class Gate:
    """Holds who opens memory of others, until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        real = soft.open

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return real(*args)

        monkeypatch.setattr(soft, "open", held)


async def test_the_lender_keeps_it_until_nobody_reads_it(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    place = staying(value)[0].segment
    serves(producer, value)
    got = await pulled(consumer, producer)
    producer.at_once = lambda caller, call: None
    producer.served.clear()
    del value
    gc.collect()

    async def is_given_to_others() -> bool:
        later = [await on_device(soft, HOST * 0) for _ in range(3)]
        return place in [staying(one)[0].segment for one in later]

    assert not await is_given_to_others()
    reader, past, wait = soft.stream(), threading.Event(), soft.wait
    with soft.on(reader):
        read = decode(got, device=soft)["x"] + 1.0  # it is queued: the device has not come there yet

    def waits(event: Any) -> None:
        assert event.stream is not reader or past.wait(60)
        wait(event)

    monkeypatch.setattr(soft, "wait", waits)
    del got
    gc.collect()
    await asyncio.sleep(0.02)
    assert not await is_given_to_others()
    past.set()
    await turns_until(lambda: not any(map(len, lendings(producer))))
    gc.collect()
    async with asyncio.timeout(30):
        while not await is_given_to_others():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.001)
    with soft.on(reader):
        assert np.array_equal(await asyncio.to_thread(read.get), HOST + 1)


async def test_it_stays_where_the_lender_let_go_of_all_its_memory(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    """As where it was killed."""
    producer, consumer, other = nodes
    serves(producer, await on_device(soft))
    got = await pulled(consumer, producer)
    serves(consumer, got)
    producer.at_once = lambda caller, call: None
    producer.served.clear()
    await producer.transport.close()
    gc.collect()
    await turns_until(lambda: memory.shrink(1 << 40) or not len(memory))
    await turns_until(lambda: not len(memory))
    assert np.array_equal(await x_of(got, soft), HOST)
    assert np.array_equal(await x_of(await pulled(other, consumer), soft), HOST), "and can be lent on"


async def test_who_cancels_a_call_that_was_answered_has_nothing(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    serves(producer, await on_device(soft, HOST[:1000]))
    await pulled(consumer, producer)  # there is a session
    (session,) = [s for s in stream_of(consumer)._connections if isinstance(s, DialledSession)]
    serves(producer, value)
    call = asyncio.ensure_future(pulled(consumer, producer))
    await asyncio.sleep(0)
    admits = session._admits

    def cancelled_first(number: int, cls: type) -> bool:
        session._pending[number].cancel()
        return admits(number, cls)

    monkeypatch.setattr(session, "_admits", cancelled_first)
    (lending,) = lendings(producer)
    await turns_until(lambda: call.cancelled() and not len(lending) and lending._last)


async def test_who_cancels_while_it_is_opened_gives_it_back_afterwards(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    gate = Gate(monkeypatch, soft)
    serves(producer, await on_device(soft))
    call = asyncio.ensure_future(pulled(consumer, producer))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0.02)
    (lending,) = lendings(producer)
    assert len(lending) == 1, "it is opened still"
    gate.open.set()
    await turns_until(lambda: not len(lending))


async def test_a_call_that_was_cancelled_is_not_made_again_by_the_host(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    reached, go_on = threading.Event(), threading.Event()
    asked: list[m.Call] = []
    value = await on_device(soft)
    producer.at_once = lambda caller, call: asked.append(call) or item(value, call)  # type: ignore[func-returns-value, arg-type]

    def opens_nothing(*_: Any) -> None:
        reached.set()
        assert go_on.wait(30)
        raise OSError

    monkeypatch.setattr(soft, "open", opens_nothing)
    call = asyncio.ensure_future(pulled(consumer, producer))
    assert await asyncio.to_thread(reached.wait, 30)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    go_on.set()
    await turns_until(lambda: not any(map(len, lendings(producer))))
    await pulled(consumer, producer, "y")
    assert [one.tag for one in asked if isinstance(one, m.Pull)] == ["x", "y"]


async def test_what_cannot_be_lent_on_goes_by_the_host(
    nodes: list[Node],
    soft: SoftDevice,
    memory: SharedMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    producer, consumer, other = nodes
    serves(producer, await on_device(soft, y=soft.xp.asarray(HOST + 1)))

    def full(*_: Any) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(soft, "share", full)
    serves(consumer, await pulled(consumer, producer))
    got = await pulled(other, consumer)
    assert type(got) is m.Encoded and np.array_equal(decode(got)["y"], HOST + 1)
    assert not any(map(len, lendings(consumer))) and caplog.text.count("no descriptors") == 1


async def test_little_is_open_that_nobody_reads(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may have freed it, and it stays as long as it is open."""
    producer, consumer, _ = nodes
    monkeypatch.setattr(SoftDevice, "memory_bytes", 5 * MIB * IDLE_PART)
    for number in range(6):
        value = await on_device(soft, HOST + number)  # it takes 4 MiB
        serves(producer, value)
        assert np.array_equal(await x_of(await pulled(consumer, producer, f"{number}"), soft), HOST + number)
        await turns_until(lambda: not any(map(len, lendings(producer))))
        await turns_until(lambda: len(soft.opened) == 1)


@pytest.mark.parametrize("error", [MemoryError(), CannotBorrow("no descriptors", for_good=False)])
async def test_tickets_beside_what_cannot_be_received_come_back(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Of one value part is on the device, and part in memory of the host."""
    producer, consumer, _ = nodes
    value = await asyncio.to_thread(
        lambda: encode(
            {"x": soft.xp.asarray(HOST), "there": HOST},
            stays=True,
            lendable=True,
            allocate=stream_of(producer).allocate,
        )
    )
    serves(producer, await on_device(soft))
    await pulled(consumer, producer)
    serves(producer, value)
    session = next(s for s in stream_of(consumer)._connections if isinstance(s, DialledSession))
    failed: list[object] = []

    def fails(*_: Any) -> Any:
        failed.append(_)
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(session._borrowing, "take", fails)
    if isinstance(error, MemoryError):
        with pytest.raises(Refused, match="no memory"):
            await pulled(consumer, producer)
    else:
        got = await pulled(consumer, producer)
        assert np.array_equal(await x_of(got, soft), HOST) and np.array_equal(decode(got)["there"], HOST)
        del got
    gc.collect()
    assert failed
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_a_session_that_ends_leaves_what_it_lent_alone(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    place = staying(value)[0].segment
    assert place is not None
    serves(producer, value)
    got = await pulled(consumer, producer)
    forget(producer, "consumer")
    producer.at_once = lambda caller, call: None
    producer.served.clear()
    del value
    gc.collect()
    await turns_until(lambda: not lendings(producer))
    later = [await on_device(soft, HOST * 0) for _ in range(3)]
    assert place.spoiled and place not in [staying(one)[0].segment for one in later]
    await turns_until(lambda: memory.trim() or len(memory) == 3)  # it went, as far as this process is concerned
    assert np.array_equal(await x_of(got, soft), HOST)
    del got
    gc.collect()
    await turns_until(lambda: not soft.opened)


async def test_what_a_lost_reader_at_the_end_of_a_chain_has_is_given_to_nobody(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft)
    place = staying(value)[0].segment
    assert place is not None
    serves(producer, value)
    serves(consumer, await pulled(consumer, producer))
    got = await pulled(other, consumer)
    forget(consumer, "other")
    await turns_until(lambda: not lendings(consumer))
    consumer.at_once = producer.at_once = lambda caller, call: None
    consumer.served.clear()
    producer.served.clear()
    del value
    gc.collect()
    await turns_until(lambda: not any(map(len, lendings(producer))))
    later = [await on_device(soft, HOST * 0) for _ in range(3)]
    assert place.spoiled and place not in [staying(one)[0].segment for one in later]
    assert np.array_equal(await x_of(got, soft), HOST)


async def test_what_is_idle_is_closed_and_freed(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    got = await pulled(consumer, producer)
    monkeypatch.setattr(devicelending, "_IDLE_S", -1.0)
    monkeypatch.setattr(shared, "_IDLE_S", -1.0)
    monkeypatch.setattr(stream, "_TRIM_S", 3600.0)  # by the test alone, however long it takes
    for node in (producer, consumer):
        stream_of(node)._trimming.cancel()
    stream_of(consumer)._trim()
    await asyncio.sleep(0.02)
    assert len(soft.opened) == 1 and np.array_equal(await x_of(got, soft), HOST), "it is read"
    del got
    gc.collect()
    await turns_until(lambda: not any(map(len, lendings(producer))))
    assert len(soft.opened) == 1, "for the next ticket"
    stream_of(consumer)._trim()
    await turns_until(lambda: not soft.opened)
    producer.at_once = lambda caller, call: None
    producer.served.clear()
    gc.collect()
    stream_of(producer)._trim()
    await turns_until(lambda: not len(memory))


class Pair:
    """Both sides of a session; what one tells the other waits until the test has it read."""

    def __init__(self) -> None:
        self.lending = DeviceLending()
        self.lending.start()
        self.told: list[bytes] = []
        self.now = 0.0
        self.loop = asyncio.get_running_loop()
        self.borrowing = DeviceBorrowing(self.told.append, self.wake, clock=lambda: self.now)

    def wake(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the test is over
            self.loop.call_soon_threadsafe(function)

    def lend(self, call: int, value: m.Encoded) -> m.Encoded | None:
        assert isinstance(value, m.EncodedOnDevice)
        return self.lending.lend(call, value)

    async def fetch(self, lent: m.Encoded | None) -> m.Encoded:
        assert lent is not None
        tickets = self.borrowing.tickets(lent, 1 << 40)
        if unopened := self.borrowing.unopened(tickets):
            self.borrowing.keep(await asyncio.to_thread(self.borrowing.open, unopened), tickets)
        return self.borrowing.take(lent, tickets)

    def close_idle(self) -> None:
        self.now += 100.0
        self.borrowing.trim()

    async def read(self, tickets: int) -> None:
        """What was told so far, and until so many tickets came back."""
        await turns_until(lambda: len(self.told) >= tickets)
        told, self.told[:] = self.told[:], []
        for data in told:
            self.lending.returned(data)


async def declined(work: Awaitable[object], why: str) -> None:
    """And of what was raised nothing is kept: neither by this frame, nor by what the loop does just now."""
    with pytest.raises(CannotBorrow, match=why):
        await work
    await asyncio.sleep(0)


@pytest.fixture
async def pair(memory: SharedMemory) -> Pair:
    return Pair()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
async def test_tickets_that_are_taken_back_in_any_order(soft: SoftDevice, pair: Pair, order: tuple[int, int]) -> None:
    value = await on_device(soft)
    for call in (1, 2):
        pair.lend(call, value)
    for left, call in enumerate(order):
        assert len(pair.lending) == 2 - left
        pair.lending.take_back(call)
    assert not len(pair.lending)


async def test_tickets_for_the_same_memory_are_given_back_each_by_itself(soft: SoftDevice, pair: Pair) -> None:
    value = await on_device(soft)
    one, other = await pair.fetch(pair.lend(1, value)), await pair.fetch(pair.lend(2, value))
    assert soft.times_opened == 1
    del one
    await pair.read(1)
    assert len(pair.lending) == 1
    pair.close_idle()
    assert len(soft.opened) == 1 and np.array_equal(await x_of(other, soft), HOST)
    del other
    await pair.read(1)
    assert not len(pair.lending)
    pair.close_idle()
    await turns_until(lambda: not soft.opened)  # the thread that told of it may have it a moment longer


async def test_two_replies_may_open_the_same_memory(soft: SoftDevice, pair: Pair) -> None:
    value = await on_device(soft)
    lent = [pair.lend(call, value) for call in (1, 2)]
    tickets = [pair.borrowing.tickets(one, 1 << 40) for one in lent if one is not None]
    found = [pair.borrowing.open(pair.borrowing.unopened(some)) for some in tickets]
    for opened in found:
        pair.borrowing.keep(opened, [])
    assert len(pair.borrowing) == 1
    found.clear()
    del opened
    assert len(soft.opened) == 1
    for one, some in zip(lent, tickets, strict=True):
        assert one is not None and np.array_equal(await x_of(pair.borrowing.take(one, some), soft), HOST)


async def test_what_is_opened_and_cannot_be_kept_is_closed(
    soft: SoftDevice, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = await on_device(soft)
    monkeypatch.setattr(soft, "keeps", lambda array: False)
    await declined(pair.fetch(pair.lend(1, value)), "do not stay")
    gc.collect()
    assert not soft.opened and not len(pair.borrowing)


async def test_a_call_that_is_cancelled_after_its_tickets_came_back(soft: SoftDevice, pair: Pair) -> None:
    """A peer may say so; nobody of ours does."""
    value = await on_device(soft)
    await pair.fetch(pair.lend(1, value))
    await pair.read(1)
    pair.lending.take_back(1)
    assert not len(pair.lending)


async def test_of_a_session_that_is_over_nothing_is_kept(soft: SoftDevice, pair: Pair) -> None:
    held = await pair.fetch(pair.lend(1, await on_device(soft)))
    lent = pair.lend(2, await on_device(soft, HOST + 1))
    pair.borrowing.end()
    await declined(pair.fetch(lent), "ended")
    gc.collect()
    assert len(soft.opened) == 1 and np.array_equal(await x_of(held, soft), HOST), "what is read is"
    del held
    await turns_until(lambda: not soft.opened)
    assert not pair.told


def test_devices_do_not_share_numbers_of_memory(soft: SoftDevice) -> None:
    found = [SharedMemory(device).take(MIB) for device in (soft, SoftDevice())]
    assert found[0] is not None and found[1] is not None and found[0].number != found[1].number


async def test_at_most_so_much_is_open_and_lent(
    soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicelending, "_MAX_OPEN", 2)
    monkeypatch.setattr(devicelending, "_MAX_LENT", 3)
    pair = Pair()
    values = [await on_device(soft, HOST + number) for number in range(4)]
    for number, value in enumerate(values):
        lent = pair.lend(number, value)
        if number == 3:
            assert lent is None
            break
        assert np.array_equal(await x_of(await pair.fetch(lent), soft), HOST + number)
        await turns_until(lambda told=number + 1: len(pair.told) == told)
    assert len(pair.borrowing) == 2 == len(soft.opened)


async def test_a_value_of_more_buffers_than_may_be_open(
    soft: SoftDevice, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicelending, "_MAX_OPEN", 2)
    value = await on_device(soft, y=soft.xp.asarray(HOST + 1), z=soft.xp.asarray(HOST + 2))
    got = await pair.fetch(pair.lend(1, value))
    assert np.array_equal(await x_of(got, soft), HOST)
    assert len(soft.opened) == 3
    del got
    await pair.read(3)
    await pair.fetch(pair.lend(2, await on_device(soft)))
    assert len(soft.opened) == 2


async def test_memory_that_changes_its_size_is_not_read(soft: SoftDevice, pair: Pair) -> None:
    value = await on_device(soft)
    await pair.fetch(pair.lend(1, value))
    lent = pair.lend(2, value)
    assert lent is not None
    (buffer,) = lent.buffers
    ticket = Ticket.read(buffer)._replace(size=1 << 30, length=1 << 29)
    lying = m.Encoded(lent.meta, (memoryview(devicelending._TICKET.pack(*ticket)),), lent.digest)
    with pytest.raises(CannotBorrow, match="the ticket says"):
        await pair.fetch(lying)


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0},
        {"number": 1 << 63},
        {"memory": 0},
        {"memory": 1 << 63},
        {"length": MIB - 1},
        {"length": 2 * MIB + 1},
        {"size": 1 << 63},
    ],
)
def test_tickets_that_say_nonsense(wrong: dict[str, int]) -> None:
    said = {"number": 1, "memory": 1, "size": 2 * MIB, "length": MIB, **wrong}
    data = devicelending._TICKET.pack(*said.values(), b"i" * 16, b"h" * 64)
    assert len(data) == TICKET_BYTES
    with pytest.raises(DecodeError):
        Ticket.read(data)


def test_a_value_that_is_too_large_by_its_tickets() -> None:
    data = devicelending._TICKET.pack(1, 1, 2 * MIB, MIB, b"i" * 16, b"h" * 64)
    value = m.Encoded(b"meta", (memoryview(data),), bytes(16))
    assert DeviceBorrowing.tickets(value, 2 * MIB)[0].length == MIB
    with pytest.raises(DecodeError, match="the limit is"):
        DeviceBorrowing.tickets(value, MIB)
    with pytest.raises(DecodeError):
        DeviceBorrowing.tickets(m.Encoded(b"meta", (), bytes(16)), MIB)


@pytest.mark.parametrize("data", [b"123", bytes(8), (5).to_bytes(8, "big")])
def test_giving_back_what_was_not_lent(data: bytes) -> None:
    with pytest.raises(DecodeError):
        DeviceLending().returned(data)


async def test_who_calls_with_tickets_is_not_heard(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    await pulled(consumer, producer)
    session: Session
    (session,) = [s for s in stream_of(consumer)._connections if isinstance(s, DialledSession)]
    session._outbox.send(Kind.REPLY_ON_DEVICE, 99, b"")
    await turns_until(lambda: not session.open)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("valued", [False, True])
async def test_replies_with_tickets_that_have_none_end_the_session(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, cut: bool, valued: bool
) -> None:
    """And whoever made the call hears of it."""
    producer, consumer, _ = nodes
    asked: list[m.Call] = []
    producer.at_once = lambda caller, call: asked.append(call) or PendingReply()  # type: ignore[func-returns-value]
    call = asyncio.ensure_future(pulled(consumer, producer))
    await turns_until(lambda: asked)
    (session,) = [s for s in stream_of(producer)._connections if isinstance(s, AcceptedSession)]
    reply = item(encode(3), pull()) if valued else m.Refusal(m.Reason.PAUSED)
    written: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._outbox, "write", written.append)
        session._outbox.send(Kind.REPLY_ON_DEVICE, 1, wire.to_header(reply), wire.value_of(reply))
    (frame,) = written
    session._write(frame[:50] if cut else frame)
    await asyncio.sleep(0.02)
    session._write(frame[50:] if cut else b"")
    with pytest.raises(PeerLost, match=r"without tickets|0 tickets"):
        await call
