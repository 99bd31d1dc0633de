"""Memory of a device lent between nodes of one host: read where it is, and given back, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice
from transport_kit import JOB, TOKEN, Node, forget, nodes_of_a_host, pull, stream_of, turns_until

from taskgraph.device import shared
from taskgraph.device.shared import SharedMemory
from taskgraph.errors import DecodeError, PeerLost
from taskgraph.graph.values import begin_digest, decode, device_buffers, encode, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.transport import devicelending, wire
from taskgraph.transport.api import PendingReply
from taskgraph.transport.devicelending import TICKET_BYTES, DeviceBorrowing, DeviceLending, DeviceTicket
from taskgraph.transport.frames import FrameKind
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
    """Makes an item of the producer."""
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


async def test_lent_item_stays_on_the_device(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft, n=3)
    serves(producer, value)
    for node in (consumer, other):
        got = await pulled(node, producer)
        assert type(got) is m.EncodedOnDevice and (got.meta, got.digest) == (value.meta, value.digest)
        assert np.array_equal(await x_of(got, soft), HOST) and decode(got, device=soft)["n"] == 3
        assert device_buffers(got)[0].segment is not None, "it can be lent on"
    assert memory.idle_bytes == 0 and len(memory) == 1, "nothing was copied"
    await turns_until(lambda: sum(map(len, lendings(producer))) == 1)  # the last one that was pulled is read
    del got
    gc.collect()
    assert [buffer.host_copies for buffer in device_buffers(value)] == [0]
    assert not soft.waits_on_loops and not soft.calls_on_loops
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_host_reads_the_same_device_value(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    serves(producer, value)
    got = await pulled(consumer, producer)
    assert verify(m.Encoded(got.meta, tuple(b.copy_to_host() for b in device_buffers(got)), got.digest))
    assert np.array_equal(decode(got)["x"], HOST)


async def test_value_mixes_device_and_host_arrays(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
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
    assert [buffer.host_copies for buffer in device_buffers(value)] == [0, 1, 0], "only what is too small"


async def test_peer_with_another_device_declines_once(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    tries = []
    monkeypatch.setattr(shared, "memory_of_identity", lambda identity: tries.append(identity))
    for _ in range(3):
        got = await pulled(consumer, producer)
        assert type(got) is m.Encoded and np.array_equal(decode(got)["x"], HOST)
    assert len(tries) == 1
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_device_without_sharing_gets_bytes(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    monkeypatch.setattr(soft, "open", lambda *_: 1 / 0)
    assert np.array_equal(decode(await pulled(consumer, producer))["x"], HOST)
    await turns_until(lambda: not any(map(len, lendings(producer))))


async def test_tcp_sends_device_items_by_the_host(soft: SoftDevice, memory: SharedMemory) -> None:
    made = [
        await Node(name, StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, digesting=begin_digest)).start()
        for name in ("producer", "consumer")
    ]
    value = await on_device(soft)
    serves(made[0], value)
    assert type(await pulled(made[1], made[0])) is m.Encoded
    for node in made:
        await node.transport.close()


async def test_lender_keeps_device_memory_while_read(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    place = device_buffers(value)[0].segment
    serves(producer, value)
    got = await pulled(consumer, producer)
    producer.at_once = lambda caller, call: None
    producer.served.clear()
    del value
    gc.collect()

    async def is_given_to_others() -> bool:
        later = [await on_device(soft, HOST * 0) for _ in range(3)]
        return place in [device_buffers(one)[0].segment for one in later]

    assert not await is_given_to_others()
    reader, past, wait = soft.new_stream(), threading.Event(), soft.wait
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


async def test_lent_memory_outlives_the_lender(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    """As if the process was killed."""
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


async def test_ended_session_spoils_lent_device_memory(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    place = device_buffers(value)[0].segment
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
    assert place.spoiled and place not in [device_buffers(one)[0].segment for one in later]
    await turns_until(lambda: memory.trim() or len(memory) == 3)  # it went, as far as this process is concerned
    assert np.array_equal(await x_of(got, soft), HOST)
    del got
    gc.collect()
    await turns_until(lambda: not soft.opened)


async def test_device_memory_of_a_lost_chain_is_spoiled(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory
) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft)
    place = device_buffers(value)[0].segment
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
    assert place.spoiled and place not in [device_buffers(one)[0].segment for one in later]
    assert np.array_equal(await x_of(got, soft), HOST)


class Pair:
    """Both sides of a session. The test delivers their messages."""

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
        tickets = self.borrowing.read_tickets(lent, 1 << 40)
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
            self.lending.take_returned(data)


@pytest.fixture
async def pair(memory: SharedMemory) -> Pair:
    return Pair()


async def test_ticket_with_another_size_is_declined(soft: SoftDevice, pair: Pair) -> None:
    value = await on_device(soft)
    await pair.fetch(pair.lend(1, value))
    lent = pair.lend(2, value)
    assert lent is not None
    (buffer,) = lent.buffers
    ticket = DeviceTicket.read(buffer)._replace(size=1 << 30, length=1 << 29)
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
def test_invalid_tickets_are_refused(wrong: dict[str, int]) -> None:
    said = {"number": 1, "memory": 1, "size": 2 * MIB, "length": MIB, **wrong}
    data = devicelending._TICKET.pack(*said.values(), b"i" * 16, b"h" * 64)
    assert len(data) == TICKET_BYTES
    with pytest.raises(DecodeError):
        DeviceTicket.read(data)


def test_tickets_count_for_the_size_limit() -> None:
    data = devicelending._TICKET.pack(1, 1, 2 * MIB, MIB, b"i" * 16, b"h" * 64)
    value = m.Encoded(b"meta", (memoryview(data),), bytes(16))
    assert DeviceBorrowing.read_tickets(value, 2 * MIB)[0].length == MIB
    with pytest.raises(DecodeError, match="the limit is"):
        DeviceBorrowing.read_tickets(value, MIB)
    with pytest.raises(DecodeError):
        DeviceBorrowing.read_tickets(m.Encoded(b"meta", (), bytes(16)), MIB)


@pytest.mark.parametrize("data", [b"123", bytes(8), (5).to_bytes(8, "big")])
def test_returned_ticket_must_be_lent(data: bytes) -> None:
    with pytest.raises(DecodeError):
        DeviceLending().take_returned(data)


async def test_call_with_tickets_ends_the_session(nodes: list[Node], soft: SoftDevice, memory: SharedMemory) -> None:
    producer, consumer, _ = nodes
    serves(producer, await on_device(soft))
    await pulled(consumer, producer)
    session: Session
    (session,) = [s for s in stream_of(consumer)._connections if isinstance(s, DialledSession)]
    session._outbox.send(FrameKind.REPLY_ON_DEVICE, 99, b"")
    await turns_until(lambda: not session.open)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("valued", [False, True])
async def test_reply_without_its_tickets_ends_the_session(
    nodes: list[Node], soft: SoftDevice, memory: SharedMemory, cut: bool, valued: bool
) -> None:
    """The caller gets the error."""
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
        session._outbox.send(FrameKind.REPLY_ON_DEVICE, 1, wire.to_header(reply), wire.value_of(reply))
    (frame,) = written
    session._write(frame[:50] if cut else frame)
    await asyncio.sleep(0.02)
    session._write(frame[50:] if cut else b"")
    with pytest.raises(PeerLost, match=r"without tickets|0 tickets"):
        await call
