"""To another host a device's array is sent while it is copied: what is there goes, and the rest when it is there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_frames import PULL, Reading, nothing_lent, written
from transport_kit import JOB, TOKEN, Node, certified, item, pull, turns_until

from taskgraph.device import pinning, staging
from taskgraph.device.staging import PIECE_BYTES, EncodedInPart
from taskgraph.errors import PeerLost, Refused
from taskgraph.graph.values import decode, digesting, encode, hosted, in_part, staying, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.testing.softdevice import SoftDevice
from taskgraph.transport import sides, wire
from taskgraph.transport.frames import CHUNK_BYTES, Kind
from taskgraph.transport.outbox import Outbox
from taskgraph.transport.session import Session
from taskgraph.transport.stream import StreamTransport

MIB = 1 << 20
PIECES = 4
HOST = np.arange((PIECES - 1) * PIECE_BYTES / 8 + 1000)


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.fixture(autouse=True)
def kept_apart(monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> Iterator[None]:
    monkeypatch.setattr(pinning, "_locked", pinning._Locked(256 * MIB))
    monkeypatch.setattr(staging, "_queued", set())
    yield
    soft.synchronize()
    assert not soft.misuses


@pytest.fixture(params=["tcp", "tls"])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path, soft: SoftDevice) -> AsyncIterator[list[Node]]:
    tls = certified(tmp_path / "tls") if request.param == "tls" else None
    made = []
    for name in ("producer", "consumer", "other"):
        transport = StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, digesting=digesting, tls=tls)
        made.append(await Node(name, transport).start())
    yield made
    for node in made:
        await node.transport.close()
    assert not soft.misuses and not soft.waits_on_loops and not soft.calls_on_loops


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> Pieces:
    return Pieces(monkeypatch, soft)


class Pieces:
    """Pieces come only as far as the test lets them: each thread that waits for them stands still before the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._come: collections.Counter[str] = collections.Counter()
        self.error: Exception | None = None
        wait = soft.wait

        def held(event: Any) -> None:
            thread = threading.current_thread().name
            if thread.startswith("taskgraph-stage"):
                with self._changed:
                    assert self._changed.wait_for(lambda: self._come[thread] < self._allowed, 60)
                    self._come[thread] += 1
                if self.error is not None:
                    raise self.error
            wait(event)

        monkeypatch.setattr(soft, "wait", held)

    def come(self, count: int = 1000) -> None:
        """So many more, to each thread."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def fail(self) -> None:
        self.error = ArithmeticError("the device is gone")
        self.come()


async def on_device(soft: SoftDevice, host: np.ndarray = HOST) -> m.EncodedOnDevice:
    """An item, put by a task of the producer."""
    value = await asyncio.to_thread(lambda: encode({"x": soft.xp.asarray(host), "n": 3}, stays=True))
    assert isinstance(value, m.EncodedOnDevice)
    return value


def serving(node: Node, **values: m.Encoded) -> None:
    node.at_once = lambda caller, call: item(call, values[call.tag])  # type: ignore[union-attr]


def session_to(node: Node, peer: Node) -> Session:
    transport = node.transport
    assert isinstance(transport, StreamTransport)
    (found,) = transport._open[peer.name]
    return found


def received(node: Node, producer: Node) -> int:
    """How much of the one reply that it waits for a node has."""
    (incoming,) = session_to(node, producer)._reader._partial.values()
    return incoming.head.payload - incoming.missing


async def until_received(node: Node, producer: Node, nbytes: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ValueError, KeyError):  # nothing came yet
                if received(node, producer) >= nbytes:
                    return
            await asyncio.sleep(0.001)


async def test_what_is_there_is_sent_while_the_rest_is_not(nodes: list[Node], soft: SoftDevice, pieces: Pieces) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    serving(producer, x=value)
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    (buffer,) = staying(value)
    for number in range(1, PIECES):
        pieces.come(1)
        await until_received(consumer, producer, number * PIECE_BYTES)
        await asyncio.sleep(0.02)
        assert received(consumer, producer) == number * PIECE_BYTES, "in whole chunks"
        copy = buffer.copying()
        assert copy.ready == number * PIECE_BYTES and not any(copy.data[copy.ready :]), "nothing else is there"
    pieces.come()
    reply = await call
    assert isinstance(reply, m.Item) and type(reply.value) is m.Encoded and reply.value.digest == value.digest
    assert np.array_equal(decode(reply.value)["x"], HOST)
    assert buffer.host_copies == 1 and soft.registrations == 1


async def test_others_take_its_turns_meanwhile(nodes: list[Node], soft: SoftDevice, pieces: Pieces) -> None:
    producer, consumer, _ = nodes
    slow = {f"slow {number}": await on_device(soft, HOST + number) for number in range(2)}  # all staging threads
    serving(producer, small=encode(1), large=encode(np.arange(9e6)), **slow)
    calls = {tag: asyncio.ensure_future(consumer.call(producer, pull(tag))) for tag in slow}
    pieces.come(1)
    await turns_until(lambda: all(staying(value)[0].copying().ready for value in slow.values()))
    for _ in range(3):
        large = await consumer.call(producer, pull("large"))
        small = await consumer.call(producer, pull("small"))
        assert decode(large.value)[-1] == 9e6 - 1 and decode(small.value) == 1  # type: ignore[union-attr]
    assert not any(call.done() for call in calls.values())
    pieces.come()
    for number, call in enumerate(calls.values()):
        assert np.array_equal(decode((await call).value)["x"], HOST + number)  # type: ignore[union-attr]


async def test_all_who_ask_get_it_of_one_copy(nodes: list[Node], soft: SoftDevice, pieces: Pieces) -> None:
    producer, consumer, other = nodes
    value = await on_device(soft)
    serving(producer, x=value)
    first = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(1)
    await until_received(consumer, producer, PIECE_BYTES)
    second = asyncio.ensure_future(other.call(producer, pull("x")))
    await until_received(other, producer, 2 * PIECE_BYTES)
    await until_received(consumer, producer, 2 * PIECE_BYTES)
    pieces.come()
    for reply in await asyncio.gather(first, second, other.call(producer, pull("x"))):
        assert np.array_equal(decode(reply.value)["x"], HOST)  # type: ignore[union-attr]
    assert staying(value)[0].host_copies == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_a_device_that_fails_half_way_ends_the_session(
    nodes: list[Node], soft: SoftDevice, pieces: Pieces, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    producer, consumer, _ = nodes
    serving(producer, x=await on_device(soft), small=encode(1))
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(count)
    await until_received(consumer, producer, count * PIECE_BYTES)
    pieces.fail()
    with pytest.raises(PeerLost, match=r"closed the connection|the connection broke"):
        await call
    assert "cannot be copied to the host: ArithmeticError: the device is gone" in caplog.text
    pieces.error = None
    reply = await consumer.call(producer, pull("x"))
    assert np.array_equal(decode(reply.value)["x"], HOST), "who asks again has it copied again"  # type: ignore[union-attr]


async def test_and_before_anything_of_it_left_refuses_it(
    nodes: list[Node], soft: SoftDevice, pieces: Pieces, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer, _ = nodes
    serving(producer, x=await on_device(soft), small=encode(1))
    pieces.fail()
    with pytest.raises(Refused, match="cannot be copied to the host: ArithmeticError: the device is gone") as refused:
        await consumer.call(producer, pull("x"))
    assert refused.value.reason == m.Reason.NOT_COPIED
    before = session_to(consumer, producer)
    reply = await consumer.call(producer, pull("small"))
    assert decode(reply.value) == 1 and session_to(consumer, producer) is before  # type: ignore[union-attr]


async def test_also_where_its_first_array_is_there_already(
    nodes: list[Node], soft: SoftDevice, pieces: Pieces, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer, _ = nodes
    arrays = [HOST[:10_000], HOST]  # the first alone makes no chunk
    value = await asyncio.to_thread(lambda: encode([soft.xp.asarray(array) for array in arrays], stays=True))
    serving(producer, x=value, small=encode(1))
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(1)
    await turns_until(lambda: bool(producer.transport._open) and bool(session_to(producer, consumer)._outbox._aside))  # type: ignore[attr-defined]
    before = session_to(consumer, producer)
    pieces.fail()
    with pytest.raises(Refused, match="cannot be copied to the host: ArithmeticError: the device is gone"):
        await call
    assert "cannot be copied to the host: ArithmeticError" in caplog.text
    pieces.error = None
    reply = await consumer.call(producer, pull("x"))
    assert all(map(np.array_equal, decode(reply.value), arrays))  # type: ignore[union-attr]
    assert session_to(consumer, producer) is before


async def test_who_cancels_half_way_gets_no_more_of_it(nodes: list[Node], soft: SoftDevice, pieces: Pieces) -> None:
    producer, consumer, _ = nodes
    value = await on_device(soft)
    serving(producer, x=value, small=encode(1))
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(1)
    await until_received(consumer, producer, PIECE_BYTES)
    session = session_to(producer, consumer)
    assert session._outbox._aside
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await turns_until(lambda: session._outbox.idle)
    reply = await consumer.call(producer, pull("small"))
    assert decode(reply.value) == 1  # type: ignore[union-attr]
    pieces.come()
    again = await consumer.call(producer, pull("x"))
    assert np.array_equal(decode(again.value)["x"], HOST)  # type: ignore[union-attr]
    assert staying(value)[0].host_copies == 1 and session_to(producer, consumer) is session


async def test_who_goes_half_way_leaves_memory_that_nobody_gets_before_it_is_copied(
    nodes: list[Node], soft: SoftDevice, pieces: Pieces
) -> None:
    producer, consumer, _ = nodes
    serving(producer, x=await on_device(soft))
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(1)
    await until_received(consumer, producer, PIECE_BYTES)
    await consumer.transport.close()
    with pytest.raises(PeerLost):
        await call
    await turns_until(lambda: not producer.transport._open)  # type: ignore[attr-defined]
    serving(producer)  # its epoch is committed: nobody has the value any more
    block = producer.transport.allocate(HOST.nbytes)
    assert block is not None
    block.fill(7)
    pieces.come()
    await asyncio.to_thread(soft.synchronize)
    assert int(block.min()) == int(block.max()) == 7


async def test_a_transport_that_closes_half_way_waits_for_no_device(
    nodes: list[Node], soft: SoftDevice, pieces: Pieces
) -> None:
    producer, consumer, _ = nodes
    serving(producer, x=await on_device(soft))
    call = asyncio.ensure_future(consumer.call(producer, pull("x")))
    pieces.come(1)
    await until_received(consumer, producer, PIECE_BYTES)
    async with asyncio.timeout(30):
        await producer.transport.close()
    with pytest.raises(PeerLost):
        await call
    pieces.come()


async def test_what_is_one_piece_is_sent_when_it_is_there(
    nodes: list[Node], soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = nodes
    monkeypatch.setattr(StreamTransport, "in_part", lambda *_: 1 / 0)
    serving(producer, x=await on_device(soft, HOST[:100_000]))
    reply = await consumer.call(producer, pull("x"))
    assert np.array_equal(decode(reply.value)["x"], HOST[:100_000])  # type: ignore[union-attr]


async def test_on_one_host_it_is_lent_when_it_is_there(
    folder: Path, soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("shared memory is lent on Linux only")
    monkeypatch.setattr(StreamTransport, "in_part", lambda *_: 1 / 0)
    made = []
    for name in ("producer", "consumer"):
        transport = StreamTransport(
            Settings(), TOKEN, job=JOB, verify=verify, digesting=digesting, unix_dir=folder, tcp_host=None
        )
        made.append(await Node(name, transport).start())
    producer, consumer = made
    serving(producer, x=await on_device(soft))
    reply = await consumer.call(producer, pull("x"))
    assert np.array_equal(decode(reply.value)["x"], HOST)  # type: ignore[union-attr]
    for node in made:
        await node.transport.close()


# -- the outbox alone ------------------------------------------------------------------------------


class Sending:
    """An outbox, what it wrote, and what it was told to do later."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.later: list[Callable[[], object]] = []
        self.failed: list[tuple[int, bool, str]] = []
        self.outbox = Outbox(
            lambda data: self.out.append(bytes(data)),
            self.later.append,
            nothing_lent,
            wake=self.later.append,
            failed=lambda call, seen, error: self.failed.append((call, seen, str(error))),
            crowded=bool,
        )

    def go_on(self) -> None:
        while self.later:
            self.later.pop(0)()

    def send(self, call: int, value: m.Encoded) -> None:
        self.outbox.send(Kind.REPLY, call, header_of(value), value)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.out))


def header_of(value: m.Encoded) -> bytes:
    return wire.to_header(item(pull(), value))


def part_of(soft: SoftDevice, host: Any) -> EncodedInPart:
    value = encode(host, stays=True)
    assert isinstance(value, m.EncodedOnDevice)
    return in_part(value)


def mixed(soft: SoftDevice) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    sizes = [700, 3 * MIB, 90_000, 100, 2 * MIB + 123_456, 5000]
    arrays = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    return {str(n): soft.xp.asarray(array) if n % 2 else array for n, array in enumerate(arrays)}


@pytest.mark.parametrize("seed", range(6))
def test_the_frames_are_those_of_the_value_on_the_host(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever the pieces are, and in which order they come."""
    rng = random.Random(seed)
    monkeypatch.setattr(staging, "PIECE_BYTES", rng.choice([64 << 10, 300_000, 4 * MIB]))
    value = encode(mixed(soft), stays=True)
    whole = hosted(encode(mixed(soft), stays=True))
    part = in_part(value)  # type: ignore[arg-type]
    sending = Sending()
    sending.send(1, part)
    copies = [copy for copy in part.copies if copy is not None]
    while left := [copy for copy in copies if copy.ready < copy.data.nbytes]:
        copy = rng.choice(left)
        copy.finish(copy.ready + 1)
        if rng.random() < 0.5:
            sending.go_on()
    sending.go_on()
    assert sending.outbox.idle
    assert b"".join(sending.out) == written((1, Kind.REPLY, item(pull(), whole)))


def test_a_chunk_is_sent_when_it_is_whole(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 300_000)
    sending, part = Sending(), part_of(soft, soft.xp.arange(400_000.0))
    (copy,) = part.copies
    assert copy is not None
    sending.send(1, part)
    for ready in range(300_000, 3_200_000, 300_000):
        copy.finish(ready)
        sending.go_on()
        chunks = min((ready + len(part.meta)) // CHUNK_BYTES, 3)
        assert chunks * CHUNK_BYTES <= sending.nbytes < chunks * CHUNK_BYTES + 2000
        sending.send(2, encode(1))  # small messages go at once
    copy.finish()
    sending.go_on()
    assert sending.outbox.idle and sending.nbytes > 3_200_000


def test_those_set_aside_take_no_turns(soft: SoftDevice) -> None:
    sending = Sending()
    parts = [part_of(soft, soft.xp.full(1_000_000, float(number))) for number in range(6)]
    for number, part in enumerate(parts):
        sending.send(number + 1, part)
    assert len(sending.outbox._aside) == 6 and sending.nbytes == 0, "nothing of them is there"
    large = encode(np.arange(1e6))
    sending.send(9, large)
    sending.go_on()
    assert sending.nbytes > 8e6 and len(sending.outbox._aside) == 6
    for part in reversed(parts):
        part.finish()
    sending.go_on()
    assert sending.outbox.idle
    reading = Reading()
    reading.reader.whole = ()
    reading.feed(b"".join(sending.out))
    assert reading.messages[0][0] == 9
    for number, message in reading.messages[1:]:
        assert decode(wire.value_of(message))[0] == number - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("seen", [False, True])
def test_a_failure_is_told_once_with_what_the_peer_has_seen(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    sending, part = Sending(), part_of(soft, soft.xp.arange(1e6))
    if seen:
        part.begin()
    sending.send(1, part)
    wrote = sending.nbytes
    assert bool(wrote) == seen and len(sending.outbox._aside) == 1
    monkeypatch.setattr(soft, "wait", lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part.finish()
    sending.go_on()
    assert sending.failed == [(1, seen, "division by zero")]
    assert sending.outbox.idle and sending.nbytes == wrote


def test_one_that_failed_before_it_was_sent_is_told_later(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    sending, part = Sending(), part_of(soft, soft.xp.arange(1e6))
    monkeypatch.setattr(soft, "wait", lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part.finish()
    sending.send(1, part)
    assert not sending.failed, "not within the caller's call"
    sending.go_on()
    assert sending.failed == [(1, False, "division by zero")]


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_what_is_given_up_is_not_heard_of_again(soft: SoftDevice, how: str, seen: bool) -> None:
    sending, part = Sending(), part_of(soft, soft.xp.arange(1e6))
    if seen:
        part.begin()
    sending.send(1, part)
    wrote = sending.nbytes
    if how == "dropped":
        assert sending.outbox.drop(1) == seen
    else:
        sending.outbox.close()
    assert sending.outbox.idle
    part.finish()
    sending.go_on()
    assert sending.nbytes == wrote and not sending.failed


def test_a_full_socket_holds_what_is_there(soft: SoftDevice) -> None:
    sending, part = Sending(), part_of(soft, soft.xp.arange(1e6))
    sending.send(1, part)
    sending.outbox.pause()
    part.finish()
    sending.go_on()
    assert sending.nbytes == 0 and not sending.outbox.idle
    sending.outbox.resume()
    sending.go_on()
    assert sending.nbytes > 8e6 and sending.outbox.idle


def test_values_of_the_host_wait_for_nothing(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from taskgraph.transport import outbox

    monkeypatch.setattr(outbox._Large, "awaited", lambda large: 1 / 0)
    monkeypatch.setattr(Outbox, "_put_aside", lambda self, large: 1 / 0)
    sending = Sending()
    sending.send(1, encode(np.arange(1e6)))
    sending.outbox.send(Kind.CALL, 2, PULL)
    assert sending.nbytes > 8e6 and sending.outbox.idle
    assert sides.PIECE_BYTES == PIECE_BYTES
