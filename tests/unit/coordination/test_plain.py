"""gRPC's calls over HTTP/2 of our own: against a server that does what a test tells it, and a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.answers import End
from taskgraph.coordination.etcd.failures import Verdict, judge
from taskgraph.coordination.etcd.http2 import WINDOW, Http2Connection
from taskgraph.coordination.etcd.methods import RANGE, STATUS, TXN, WATCH
from taskgraph.coordination.etcd.plain import PlainChannel

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0x0, 0x1, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8, 0x9),
)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OK_HEADERS = bytes.fromhex("88") + b"\x00\x0ccontent-type\x10application/grpc"
OK_END = b"\x00\x0bgrpc-status\x010"

Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload


def told(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def answer(number: int, message: bytes) -> bytes:
    return (
        frame(HEADERS, END_HEADERS, number, OK_HEADERS)
        + frame(DATA, 0, number, told(message))
        + frame(HEADERS, END_HEADERS | END_STREAM, number, OK_END)
    )


STATUS_BYTES = v3.StatusResponse(version="3.5.1").SerializeToString()


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames: list[Frame] = []

    async def greet(self, *settings: tuple[int, int]) -> None:
        assert await self.reader.readexactly(len(PREFACE)) == PREFACE
        self.send(frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings)))

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def frame(self) -> Frame:
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        found = (head[3], head[4], int.from_bytes(head[5:], "big"), payload)
        self.frames.append(found)
        return found

    async def until(self, kind: int, flags: int = 0) -> Frame:
        """The next frame of that kind that has these flags."""
        while (found := await self.frame())[0] != kind or found[1] & flags != flags:
            pass
        return found

    async def request(self) -> int:
        """The number of the next stream whose request is complete."""
        return (await self.until(DATA, END_STREAM))[2]


Script = Callable[[Peer], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, script: Script) -> AsyncIterator[PlainChannel]:
    """A channel to a server that runs `script` for every connection, which ends with it."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await script(Peer(reader, writer))
        writer.close()

    path = tmp_path / "server"
    server = await asyncio.start_unix_server(serve, path)
    channel = PlainChannel(f"unix:{path}")
    try:
        yield channel
    finally:
        await channel.close()
        server.close()
        for task in running:
            task.cancel()
        wrong = [e for e in await asyncio.gather(*running, return_exceptions=True) if isinstance(e, AssertionError)]
        if wrong:
            raise wrong[0]


async def ask(channel: PlainChannel, timeout_s: float = 5.0) -> v3.StatusResponse:
    return await channel.call(STATUS, v3.StatusRequest(), timeout_s=timeout_s, metadata=())


async def failing(channel: PlainChannel, timeout_s: float = 5.0) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(channel, timeout_s)
    return raised.value


# -- calls ----------------------------------------------------------------------------------------


async def test_a_call_is_one_write_and_says_where_it_goes(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        number = await peer.request()
        peer.send(answer(number, STATUS_BYTES))
        peer.send(answer(await peer.request(), STATUS_BYTES))
        heads = [head for head in peer.frames if head[0] == HEADERS]
        assert [head[2] for head in heads] == [1, 3]
        assert all(STATUS.path.encode() in head[3] and b"application/grpc" in head[3] for head in heads)

    async with serving(tmp_path, script) as channel:
        assert not channel.ready
        assert (await ask(channel)).version == "3.5.1"
        assert channel.ready
        assert (await ask(channel)).version == "3.5.1"


async def test_frames_may_come_in_any_pieces(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        for byte in answer(await peer.request(), STATUS_BYTES):
            peer.send(bytes([byte]))
            await asyncio.sleep(0)

    async with serving(tmp_path, script) as channel:
        assert (await ask(channel)).version == "3.5.1"


async def test_padding_priorities_continued_headers_and_unknown_frames_are_understood(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        number = await peer.request()
        message = told(STATUS_BYTES)
        peer.send(
            frame(HEADERS, PADDED | PRIORITY, number, b"\x03" + bytes(5) + OK_HEADERS[:4] + bytes(3)),
            frame(CONTINUATION, 0, number, OK_HEADERS[4:9]),
            frame(CONTINUATION, END_HEADERS, number, OK_HEADERS[9:]),
            frame(0x42, 0xFF, number, b"of a later version"),
            frame(DATA, PADDED, number, b"\x07" + message[:6] + bytes(7)),
            frame(DATA, 0, number, b""),
            frame(DATA, PADDED, number, b"\x00" + message[6:]),
            frame(HEADERS, END_HEADERS | END_STREAM, number, OK_END),
        )

    async with serving(tmp_path, script) as channel:
        assert (await ask(channel)).version == "3.5.1"


@pytest.mark.parametrize(
    ("ends", "code", "details"),
    [
        (b"\x00\x0bgrpc-status\x0214\x00\x0cgrpc-message\x17etcdserver: no%20leader", "UNAVAILABLE", "no leader"),
        (b"\x00\x0bgrpc-status\x02xx", "UNKNOWN", ""),
        (b"\x00\x0bgrpc-status\x0299", "UNKNOWN", ""),
        (b"\x00\x07:status\x03503", "UNAVAILABLE", "no answer of gRPC: 503"),
        (b"\x00\x07:status\x03418", "UNKNOWN", "no answer of gRPC: 418"),
        (OK_END, "INTERNAL", "not one answer"),
    ],
)
async def test_a_call_that_ends_without_an_answer_says_why(
    tmp_path: Path, ends: bytes, code: str, details: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, await peer.request(), ends))

    async with serving(tmp_path, script) as channel:
        error = await failing(channel)
        assert error.code().name == code and details in (error.details() or "")


async def test_a_call_that_takes_too_long_or_is_cancelled_is_ended_at_the_server_too(tmp_path: Path) -> None:
    resets: asyncio.Queue[int] = asyncio.Queue()

    async def script(peer: Peer) -> None:
        await peer.greet()
        while True:
            resets.put_nowait((await peer.until(RST_STREAM))[2])

    async with serving(tmp_path, script) as channel:
        error = await failing(channel, 0.05)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert judge(error.code(), error.details() or "") is Verdict.UNKNOWN
        assert await resets.get() == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(channel)
        assert await resets.get() == 3


# -- connections ----------------------------------------------------------------------------------


async def test_where_nothing_listens_nothing_was_done(tmp_path: Path) -> None:
    channel = PlainChannel(f"unix:{tmp_path / 'nobody'}")
    error = await failing(channel)
    assert judge(error.code(), error.details() or "") is Verdict.NOT_EXECUTED
    assert "No such file" in (error.details() or "")
    await channel.close()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(PING, 0, 0, bytes(8))])
async def test_who_does_not_speak_http2_is_nobody(tmp_path: Path, says: bytes) -> None:
    async def script(peer: Peer) -> None:
        peer.send(says)

    async with serving(tmp_path, script) as channel:
        error = await failing(channel)
        assert judge(error.code(), error.details() or "") is Verdict.NOT_EXECUTED


async def test_who_accepts_and_says_nothing_is_waited_for_as_long_as_the_call_may_take(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(GOAWAY)

    async with serving(tmp_path, script) as channel:
        started = time.monotonic()
        errors = await asyncio.gather(failing(channel, 0.1), failing(channel, 0.2))
        assert time.monotonic() - started < 2.0
        assert {judge(error.code(), error.details() or "") for error in errors} == {Verdict.NOT_EXECUTED}


@pytest.mark.parametrize(
    "says",
    [
        None,  # it ends
        lambda n: frame(RST_STREAM, 0, n, bytes(4)),
        lambda n: frame(GOAWAY, 0, 0, bytes(8)),  # "I took none of them"
        lambda n: frame(HEADERS, END_HEADERS, n, b"\xff"),
        lambda n: frame(HEADERS, 0, n, OK_HEADERS) + frame(DATA, 0, n),
        lambda n: frame(CONTINUATION, 0, n, OK_HEADERS),
        lambda n: frame(HEADERS, 0, n, OK_HEADERS) + 5 * frame(CONTINUATION, 0, n, bytes(16_384)),
        lambda n: frame(PUSH_PROMISE, 0, n, bytes(8)),
        lambda n: frame(DATA, 0, n, bytes(16_385)),
        lambda n: frame(DATA, PADDED, n),
        lambda n: frame(SETTINGS, 0, 0, bytes(5)),
        lambda n: frame(HEADERS, END_HEADERS, n, OK_HEADERS) + frame(DATA, 0, n, b"\1" + told(b"")[1:]),
    ],
)
async def test_what_was_sent_when_the_server_failed_may_have_happened_and_the_next_call_connects_anew(
    tmp_path: Path, says: Callable[[int], bytes] | None
) -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet()
        number = await peer.request()
        if connections == 1:
            if says is None:
                return
            peer.send(says(number))
        else:
            peer.send(answer(number, STATUS_BYTES))
        while True:
            peer.send(answer(await peer.request(), STATUS_BYTES))

    async with serving(tmp_path, script) as channel:
        error = await failing(channel)
        assert judge(error.code(), error.details() or "") is Verdict.UNKNOWN
        assert (await ask(channel)).version == "3.5.1"


async def test_a_server_that_goes_away_finishes_what_it_took(tmp_path: Path) -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.greet()
        number = await peer.request()
        if connections == 1:
            peer.send(frame(GOAWAY, 0, 0, number.to_bytes(4, "big") + bytes(4)))
            await asyncio.sleep(0.05)
        peer.send(answer(number, STATUS_BYTES))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await peer.until(GOAWAY)

    async with serving(tmp_path, script) as channel:
        first = asyncio.ensure_future(ask(channel))
        await asyncio.sleep(0.02)
        assert not channel.ready and not first.done()
        assert (await ask(channel)).version == (await first).version == "3.5.1"
        assert connections == 2


async def test_closing_ends_calls_streams_and_those_who_wait_for_a_connection(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until(GOAWAY)

    async with serving(tmp_path, script) as channel:
        stream = await channel.open(WATCH, v3.WatchRequest(), timeout_s=5.0, metadata=())
        call, messages = asyncio.ensure_future(ask(channel)), asyncio.ensure_future(anext(stream.messages()))
        await asyncio.sleep(0.01)
        await channel.close()
        for ended in (call, messages):
            with pytest.raises(grpc.aio.AioRpcError):
                await ended
        with pytest.raises(grpc.aio.UsageError):
            await ask(channel)
    silent = PlainChannel("127.0.0.1:1")
    await silent.close()
    with pytest.raises(grpc.aio.UsageError):
        await ask(silent)


async def test_pings_are_answered_in_time(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.send(frame(PING, 0, 0, b"question"))
        assert (await peer.until(PING, ACK))[3] == b"question"
        answered.set()

    async with serving(tmp_path, script) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await ask(channel, 2.0)
        assert answered.is_set()


async def test_a_silent_server_is_pinged_and_then_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.coordination.etcd.http2._LOOK_S", 0.02)
    pings = 0

    async def script(peer: Peer) -> None:
        nonlocal pings
        await peer.greet()
        while pings < 4:  # it answers three times
            ping = await peer.until(PING)
            pings += 1
            if pings < 4:
                peer.send(frame(PING, ACK, 0, ping[3]))
        await asyncio.sleep(60)

    async with serving(tmp_path, script) as channel:
        error = await failing(channel)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "silent" in (error.details() or "")
        assert pings == 4
        assert not channel.ready


async def _read(pieces: list[bytes]) -> int:
    """How often the call of a connection that these bytes come on is told an end."""
    connection = Http2Connection()
    connection.data_received(frame(SETTINGS, 0, 0))
    end = End(connection, v3.StatusResponse)
    ends = 0

    def finished(_: asyncio.Future[None]) -> None:
        nonlocal ends
        ends += 1

    end.begin(b"", v3.StatusRequest(), last=True)
    reading = asyncio.ensure_future(_drained(end))
    reading.add_done_callback(finished)
    for piece in pieces:
        connection.data_received(piece)
    connection.close("that was all")
    await asyncio.wait([reading])
    await asyncio.sleep(0)
    return ends


async def _drained(end: End[v3.StatusResponse]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await end.next() is not None:
            pass


any_frame = st.builds(
    frame,
    st.integers(0, 10),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3, 2**31]),
    st.one_of(st.binary(max_size=40), st.sampled_from([OK_HEADERS, OK_END, told(STATUS_BYTES), bytes(16_385)])),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(any_frame, max_size=8), st.lists(st.integers(1, 60), max_size=30))
def test_whatever_comes_the_call_ends_once_and_nothing_is_raised(frames: list[bytes], cuts: list[int]) -> None:
    data, pieces = b"".join(frames), []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    assert asyncio.run(_read([*pieces, data])) == 1


# -- windows --------------------------------------------------------------------------------------


async def test_a_large_request_waits_for_the_servers_windows(tmp_path: Path) -> None:
    size = 200_000
    request = v3.TxnRequest(success=[v3.RequestOp(request_put=v3.PutRequest(key=b"k", value=bytes(size)))])
    length = len(request.SerializeToString()) + 5

    async def script(peer: Peer) -> None:
        await peer.greet((0x4, 50_000), (0x5, 20_000))  # a stream's window, a frame's size
        received, window, number = 0, 50_000, 0
        while received < length:
            kind, flags, number, payload = await peer.frame()
            if kind != DATA:
                continue
            received += len(payload)
            assert len(payload) <= 20_000 and received <= window
            assert bool(flags & END_STREAM) == (received == length)
            if received == window:  # all that it may send: of the stream first, then of the connection
                window += 30_000
                peer.send(frame(WINDOW_UPDATE, 0, number, (30_000).to_bytes(4, "big")))
                peer.send(frame(WINDOW_UPDATE, 0, 0, (30_000).to_bytes(4, "big")))
        peer.send(answer(number, v3.TxnResponse(succeeded=True).SerializeToString()))
        await peer.until(GOAWAY)

    async with serving(tmp_path, script) as channel:
        reply = await channel.call(TXN, request, timeout_s=5.0, metadata=())
        assert reply.succeeded


async def test_what_nobody_reads_is_bounded_and_comes_once_it_is_read(tmp_path: Path) -> None:
    message = told(v3.WatchResponse(cancel_reason="x" * 10_000).SerializeToString())
    count = 4 * WINDOW // len(message)
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.greet()
        window = WINDOW
        number = (await peer.until(DATA))[2]
        peer.send(frame(HEADERS, END_HEADERS, number, OK_HEADERS))
        while sent < count:
            while window < len(message):
                kind, _, at, payload = await peer.frame()
                window += int.from_bytes(payload, "big") if kind == WINDOW_UPDATE and at == number else 0
            peer.send(frame(DATA, 0, number, message))
            window -= len(message)
            sent += 1
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, number, OK_END))

    async with serving(tmp_path, script) as channel:
        stream = await channel.open(WATCH, v3.WatchRequest(), timeout_s=5.0, metadata=())
        await asyncio.sleep(0.3)
        assert sent * len(message) <= 2.5 * WINDOW  # nobody takes any
        assert len([told async for told in stream.messages()]) == count


@pytest.mark.slow
async def test_large_answers_and_requests_pass_through_a_real_etcd(embedded_etcd) -> None:
    channel = PlainChannel(embedded_etcd.endpoint)
    try:
        values = [bytes([i]) * 1_000_000 for i in range(5)]
        for i, value in enumerate(values):
            put = v3.RequestOp(request_put=v3.PutRequest(key=b"/plain/%d" % i, value=value))
            await channel.call(TXN, v3.TxnRequest(success=[put]), timeout_s=5.0, metadata=())
        listing = v3.RangeRequest(key=b"/plain/", range_end=b"/plain0")
        answers = await asyncio.gather(*(channel.call(RANGE, listing, timeout_s=10, metadata=()) for _ in range(3)))
        assert all([kv.value for kv in answer.kvs] == values for answer in answers)
    finally:
        await channel.close()
