"""What only sockets can get wrong: strangers, impostors, damage, and peers that die or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transport_kit import (
    JOB,
    TOKEN,
    Cluster,
    Node,
    cluster_of,
    encoded,
    forget,
    item,
    pack_whole,
    pull,
    turns_until,
    verify,
)

from taskgraph.errors import PeerGone, PeerLost, Refused, TransportError
from taskgraph.graph.blocks import Allocate
from taskgraph.protocol import messages as m
from taskgraph.protocol.records import name_of
from taskgraph.protocol.sums import encode_sum
from taskgraph.settings import Settings
from taskgraph.transport import endpoints, incoming, outbox, sides, stream, wire
from taskgraph.transport.api import Peer, PendingReply
from taskgraph.transport.frames import (
    CHUNK_BYTES,
    HEAD_BYTES,
    PROTOCOL_VERSION,
    FrameKind,
    Head,
    add_digests,
    pack_frame,
)
from taskgraph.transport.stream import StreamTransport

SEAL = m.Seal(m.Stamp(1, 1), 1, 1)
PULL = (m.Stamp(1, 7), 3, 1, 5, "grad")
NO_STAMP = msgspec.msgpack.encode(["Seal", 1])


def sessions_of(transport: object) -> list[stream.Session]:
    assert isinstance(transport, StreamTransport)
    return list(transport._connections)


async def stranger(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = await endpoints.connect(peer.endpoints[0], Settings())
    return await asyncio.open_connection(sock=sock)


@contextlib.asynccontextmanager
async def hung_up(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_descriptor_of_a_dead_peer_is_closed_once(streams: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await streams.node(), await streams.node()
    connect, dialled = endpoints.connect, []

    async def connect_to_the_dying(endpoint: str, settings: Settings) -> socket.socket:
        family = socket.AF_UNIX if endpoint.startswith("unix:") else socket.AF_INET
        with tempfile.TemporaryDirectory(prefix="tg") as folder, socket.socket(family) as listener:
            listener.bind(f"{folder}/s" if family == socket.AF_UNIX else ("127.0.0.1", 0))
            listener.listen()
            sock = socket.socket(family)
            sock.connect(listener.getsockname())
        sock.setblocking(False)
        dialled.append(sock.fileno())
        return sock

    monkeypatch.setattr(endpoints, "connect", connect_to_the_dying)
    with pytest.raises(PeerLost):
        await a.call(b, SEAL)
    monkeypatch.setattr(endpoints, "connect", connect)
    pipes = [os.pipe() for _ in dialled]  # others have its number now
    try:
        assert set(dialled) & {end for pipe in pipes for end in pipe}
        gc.collect()
        for pipe in pipes:
            os.write(pipe[1], b"x")
            assert os.read(pipe[0], 1) == b"x"
    finally:
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.ENOTCONN])
async def test_dial_is_repeated_after_a_cut_off(streams: Cluster, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it accepts is gone, not only lost."""
    a, gone = await streams.node(), await streams.node()
    await gone.transport.close()
    resets = 0

    def reset_twice(connect: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def connect_to_the_dying(*where: object) -> object:
            nonlocal resets
            resets += 1
            if resets <= 2:
                raise OSError(number, "Connect call failed")
            return await connect(*where)

        return connect_to_the_dying

    for name in ("_connect_tcp", "_connect_unix"):
        monkeypatch.setattr(endpoints, name, reset_twice(getattr(endpoints, name)))
    with pytest.raises(PeerGone, match="refuses connections"):
        await a.call(gone, SEAL)
    assert resets == 3


async def test_session_may_end_while_dialled(streams: Cluster) -> None:
    """Cancelled by either side, or broken, in each of the first turns of the event loop."""
    a, b = await streams.node(), await streams.node()
    assert isinstance(a.transport, StreamTransport) and isinstance(b.transport, StreamTransport)
    for turns in range(14):
        for ends in ("caller", "callee", "call", "sockets"):
            forget(a, b.name)
            call = asyncio.ensure_future(a.call(b, SEAL))
            for _ in range(turns):
                await asyncio.sleep(0)
            if ends == "caller":
                forget(a, b.name)
            elif ends == "callee":
                forget(b, a.name)
            elif ends == "call":
                call.cancel()
            else:
                for session in sessions_of(b.transport):
                    session.abort()
            await asyncio.wait([call])
            if not call.cancelled() and (error := call.exception()) is not None:
                assert isinstance(error, PeerLost)
    forget(a, b.name)
    await turns_until(lambda: not sessions_of(a.transport) and not sessions_of(b.transport))
    assert await a.call(b, SEAL) == m.Accepted(1)


# Who may talk.


async def test_wrong_token_is_refused_and_logged_once(streams: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    a = await streams.node(token=b"another token, as long")
    b = await streams.node()
    for _ in range(3):
        with pytest.raises(PeerLost, match="wrong token"):
            await a.call(b, SEAL)
    with pytest.raises(PeerLost, match="wrong token"):
        await a.transport.probe(b.peer, timeout_s=5)
    assert len([record for record in caplog.records if "wrong token" in record.getMessage()]) == 1
    assert b.served == [] and a.lost.empty() and b.lost.empty()


async def test_listener_without_the_token_is_detected(streams: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await streams.node(), await streams.node(token=b"another token, as long")
    from taskgraph.transport import hello

    def gullible(self: hello.ListenerHello, kind: FrameKind, data: bytes) -> hello.Frames:
        if kind is FrameKind.HELLO_PROOF:
            self.done = True
            return [(FrameKind.HELLO_WELCOME, msgspec.msgpack.encode(hello.Proof(self._proof_of(b"listener"))))]
        return original(self, kind, data)

    original = hello.ListenerHello.on_frame
    monkeypatch.setattr(hello.ListenerHello, "on_frame", gullible)
    with pytest.raises(PeerLost, match="does not know this job's token"):
        await a.call(b, SEAL)
    assert b.served == []


async def test_another_job_is_refused(streams: Cluster) -> None:
    a, b = await streams.node(job="other"), await streams.node()
    with pytest.raises(PeerLost, match="another job"):
        await a.call(b, SEAL)


async def test_refusal_names_both_versions(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    reader, writer = await stranger(b.peer)
    async with hung_up(writer):
        data = bytearray(pack_frame(Head(FrameKind.HELLO_OPEN, 0)))
        data[2] = 9
        writer.write(data)
        answer = await reader.read()
    assert answer[:4] == b"TG" + bytes((PROTOCOL_VERSION, FrameKind.HELLO_REFUSE))
    assert b"version 9" in answer and b"speaks %d" % PROTOCOL_VERSION in answer  # what a dialler of version 9 can read

    async def of_version_9(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with hung_up(writer):
            await reader.read(10)
            writer.write(data)
            await writer.drain()

    server = await asyncio.start_server(of_version_9, "127.0.0.1", 0)
    async with server:
        peer = Peer("x", (endpoints.tcp_endpoint("127.0.0.1", server.sockets[0].getsockname()[1]),))
        with pytest.raises(PeerLost, match=f"version 9; this node speaks {PROTOCOL_VERSION}"):
            await a.call(peer, SEAL)


async def test_other_node_at_the_port_means_gone(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    impostor = Peer("node-of-yore", b.peer.endpoints)
    with pytest.raises(PeerGone, match=f"node {b.name} listens there now"):
        await a.call(impostor, SEAL)
    with pytest.raises(PeerGone):
        await a.transport.probe(impostor, timeout_s=5)
    await a.call(b, SEAL)
    assert a.lost.empty() and b.lost.empty()


async def test_recorded_hello_is_useless(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    recorded: list[bytes] = []
    original = stream.DialledSession._write

    def record(self: stream.DialledSession, data: bytes | memoryview) -> None:
        recorded.append(bytes(data))
        original(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.DialledSession, "_write", record)
        await a.call(b, SEAL)
    reader, writer = await stranger(b.peer)
    async with hung_up(writer):
        writer.write(b"".join(recorded))
        answer = await reader.read()
    assert b"wrong token" in answer
    assert len(b.served) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        pack_frame(Head(FrameKind.CALL, 1)),
        b"TG",
        add_digests(pack_whole(FrameKind.CALL, 1, wire.to_header(SEAL)), len(wire.to_header(SEAL))),
        add_digests(pack_whole(FrameKind.TELL, 1, wire.to_header(SEAL)), len(wire.to_header(SEAL))),
    ],
    ids=["http", "empty call", "cut", "call", "tell"],
)
async def test_strangers_are_disconnected(streams: Cluster, data: bytes) -> None:
    b = await streams.node(settings=Settings(connect_s=1.0))
    a = await streams.node()
    reader, writer = await stranger(b.peer)
    async with hung_up(writer):
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                await reader.read()
    await a.call(b, SEAL)
    assert b.served == [(a.name, SEAL)] and b.lost.empty()


async def test_silent_strangers_do_not_keep_others_out(streams: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_STRANGERS", 4)
    a, b = await streams.node(), await streams.node()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            _, writer = await stranger(b.peer)
            await stack.enter_async_context(hung_up(writer))
        await a.call(b, SEAL)
        assert isinstance(b.transport, StreamTransport)
        assert len(b.transport._strangers) <= 4


async def test_strangers_leave_no_receive_buffers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each kept 192 KiB until a full garbage collection."""
    caplog.set_level(logging.CRITICAL, "taskgraph.transport")
    hostile = (
        b"TG",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        pack_frame(Head(FrameKind.HELLO_OPEN, 0, header=4096)) + bytes(4000),
    )
    async with cluster_of("tcp", folder) as cluster:
        node = await cluster.node(settings=Settings(connect_s=60.0))  # none is hung up on for its silence
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(10):
                strangers = [await endpoints.connect(node.transport.endpoints[0], Settings()) for _ in range(100)]
                for number, sock in enumerate(strangers):
                    sock.send(hostile[number % len(hostile)])
                await turns_until(lambda: len(sessions_of(node.transport)) >= 67)  # HTTP is hung up on
                for sock in strangers:
                    sock.close()
                await turns_until(lambda: not sessions_of(node.transport))
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
    assert taken < 10 << 20


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_backpressure_stops_reading_calls(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting replies grew without a bound."""
    monkeypatch.setattr(outbox, "_FULL", 100)
    async with cluster_of(kind, folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        request, value = m.Request(m.Stamp(1, 7), 1, 2, 3, "push", 4, encoded(b"x")), encoded(bytes(5_000))
        heard = []
        b.at_once = lambda caller, call: (heard.append(call), m.Answer(m.Stamp(1, 7), 2, True, value))[1]
        await a.call(b, request)
        (calling,), (serving,) = sessions_of(a.transport), sessions_of(b.transport)
        assert calling._transport is not None
        calling._transport.pause_reading()
        replies = [a.transport.call_now(b.peer, request) for _ in range(10_000)]
        await turns_until(lambda: serving._outbox._is_full)
        await asyncio.sleep(0.1)
        assert len(heard) < 10_000
        at_a_time = (192 << 10) // HEAD_BYTES  # calls, at most, that were received with the last one that was heard
        assert len(serving._outbox._small) < 100 + at_a_time
        calling._transport.resume_reading()
        for reply in replies:
            assert reply is not None
            assert (await reply).value == value
        assert len(heard) == 10_001
        assert not serving._outbox._is_full


# Damage.


@pytest.mark.parametrize("kind", ["tcp", "tls"])
@pytest.mark.parametrize(("where", "what"), [(12, "head"), (HEAD_BYTES + 34, "header")])
async def test_damaged_header_on_tcp_ends_the_session(
    folder: Path, kind: str, where: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged flag of a report, or size of a header, was believed."""
    async with cluster_of(kind, folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        await a.call(b, SEAL)
        (session,) = sessions_of(a.transport)
        write = session._outbox.write

        def damaging(data: bytes) -> None:
            damaged = bytearray(data)
            damaged[where] ^= 1 << 1
            write(bytes(damaged))

        session._outbox.write = damaging
        with pytest.raises(PeerLost):
            await a.call(b, m.Report(m.Stamp(1, 7), 3, 1, True, 2, encode_sum(5), encode_sum(6)))
        assert f"a damaged frame {what}; closing it" in caplog.text
        assert [call for _, call in b.served] == [SEAL]
        await a.call(b, SEAL)


async def test_corrupted_call_ends_the_session(streams: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    a, b = await streams.node(), await streams.node()
    for meta, size in ((4, 10), (4, 300_000), (4, 5 << 20), (5 << 20, 5)):  # at once, as it comes, and in a thread
        good = encoded(bytes(meta), bytes(size))
        bad = m.Encoded(good.meta, (memoryview(bytes(size - 1) + b"\1"),), good.digest)
        with pytest.raises(PeerLost):
            await a.call(b, m.Flag(m.Stamp(1, 1), 1, 1, 1, bad))
        assert await asyncio.wait_for(b.lost.get(), 30) == a.name
        assert await asyncio.wait_for(a.lost.get(), 30) == b.name
    with pytest.raises(PeerLost):  # one that comes whole
        await a.call(b, m.Flag(m.Stamp(1, 1), 1, 1, 1, m.Encoded(b"meta", (), b"0" * 16)))
    assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    assert b.served == [] and "digest" in caplog.text


async def test_corrupted_reply_is_not_used(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()

    async def handler(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, m.Encoded(b"meta", (), b"0" * 16))

    b.handler = handler
    with pytest.raises(PeerLost, match="corrupted"):
        await a.call(b, pull())


async def test_end_inside_a_frame_is_a_loss(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    (session,) = sessions_of(a.transport)
    session._write(pack_frame(Head(FrameKind.CALL, 5, 100)))
    assert session._transport is not None
    session._transport.write_eof() if session._transport.can_write_eof() else session.abort()
    assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    assert await asyncio.wait_for(a.lost.get(), 30) == b.name
    await a.call(b, SEAL)


@pytest.mark.parametrize(
    "data",
    [
        pack_frame(Head(FrameKind.HELLO_OPEN, 0)),
        pack_frame(Head(FrameKind.REPLY, 1)),
        pack_frame(Head(FrameKind.CALL, 1, 3), (), b"\xff\xff\xff"),
        pack_frame(Head(FrameKind.CALL, 1, payload=1 << 62)),
        pack_whole(FrameKind.REPLY, 1, wire.to_header(m.Accepted(1))),
        pack_whole(FrameKind.CALL, 9, wire.to_header(m.Accepted(1))),
        pack_whole(FrameKind.CALL, 9, wire.to_header(pull()), b"a payload"),
        pack_frame(Head(FrameKind.CALL, 1, len(NO_STAMP)), (), NO_STAMP),
        pack_whole(FrameKind.CALL, 9, wire.to_header(pull())[:10]),
        pack_whole(FrameKind.CALL, 9, wire.to_header(pull())[:-1] + b"\xff"),
        pack_whole(FrameKind.CALL, 9, b"\0\xff"),
        pack_whole(FrameKind.CALL, 9, b""),
        pack_whole(FrameKind.CALL, 9, wire.to_header(m.Pull(*PULL, 0))),
        pack_whole(FrameKind.CALL, 9, wire.to_header(m.Pull(*PULL, sides.MAX_COUNT + 1))),
        bytes(56),
    ],
)
async def test_malformed_frame_ends_the_session(streams: Cluster, data: bytes) -> None:
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    (session,) = sessions_of(a.transport)
    session._write(data)
    assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    assert await asyncio.wait_for(a.lost.get(), 30) == b.name  # until it knows, a call may end with the old session
    await a.call(b, SEAL)


@pytest.mark.parametrize(("first", "count"), [(9, 1), (9, 3), (7, 3), (8, 3)])
async def test_duplicate_call_ends_the_session(
    streams: Cluster, caplog: pytest.LogCaptureFixture, first: int, count: int
) -> None:
    """Also in a frame with several calls."""
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    (session,) = sessions_of(a.transport)
    b.at_once = lambda caller, call: PendingReply()
    with caplog.at_level("ERROR"):
        for number, pulls in ((9, 1), (first, count)):
            session._write(pack_whole(FrameKind.CALL, number, wire.to_header(m.Pull(*PULL, pulls))))
        assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    assert "is made twice" in caplog.text


async def test_too_large_call_number_ends_the_session(streams: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Each call once logged an error, and got no reply."""
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    (session,) = sessions_of(a.transport)
    with caplog.at_level("ERROR"):
        session._write(pack_whole(FrameKind.CALL, (1 << 64) - 2, wire.to_header(m.Pull(*PULL, 3))))
        assert await asyncio.wait_for(b.lost.get(), 30) == a.name
    (said,) = caplog.records
    assert "numbers have 64 bits" in said.getMessage()


async def test_node_pulls_several_epochs_from_itself(streams: Cluster) -> None:
    a = await streams.node()
    several = m.Pull(*PULL, 3)
    assert a.transport.calls_now(a.peer, several) is None, "where they cannot be answered together"
    answers: list[m.Reply | PendingReply | None] = [
        item(several.each(0), encoded(b"0")),
        PendingReply(),
        PendingReply(),
    ]
    a.all_at_once = lambda caller, pull: answers
    begun = a.transport.calls_now(a.peer, several)
    assert begun is not None and [reply.done() for reply in begun] == [True, False, False]
    assert begun[0].result() is answers[0]
    begun[1].cancel()  # one of them, and no other
    assert answers[1].done and not answers[2].done  # type: ignore[union-attr]
    answers[2].settle(item(several.each(2), encoded(b"2")))  # type: ignore[union-attr]
    assert await begun[2] == answers[2].reply  # type: ignore[union-attr]


async def test_calls_of_a_session_are_bounded(streams: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    monkeypatch.setattr(sides, "MAX_CALLS", 3)
    waiting = [PendingReply() for _ in range(3)]
    b.at_once = lambda caller, call: waiting[0] if type(call) is m.Pull else None
    b.all_at_once = lambda caller, pull: waiting[: pull.count]
    refused = a.transport.calls_now(b.peer, m.Pull(*PULL, 4))
    three = a.transport.calls_now(b.peer, m.Pull(*PULL, 3))
    one = a.transport.call_now(b.peer, m.Pull(*PULL))
    assert refused is not None and three is not None and one is not None
    for reply in (*refused, one):
        with pytest.raises(Refused, match="3 calls of this session") as caught:
            await asyncio.wait_for(reply, 30)
        assert caught.value.reason == m.Reason.PAUSED
    for nth, coming in enumerate(waiting):
        coming.settle(item(m.Pull(*PULL).each(nth), encoded(b"x")))
        assert await asyncio.wait_for(three[nth], 30) == coming.reply
    assert await a.call(b, SEAL) == m.Accepted(1)


class Forgetful:
    """A session that records its calls."""

    def __init__(self) -> None:
        self.cancelled_calls: list[object] = []

    def on_cancelled(self, pending: object) -> None:
        self.cancelled_calls.append(pending)


async def test_reply_calls_its_listener_at_once() -> None:
    """Once per call."""
    heard: list[asyncio.Future[m.Reply]] = []

    def begun() -> sides._PendingCall:
        pending = sides._PendingCall(loop=asyncio.get_running_loop())
        pending.session = Forgetful()  # type: ignore[assignment]
        pending.listener = heard.append
        return pending

    replied, refused, lost, given_up = begun(), begun(), begun(), begun()
    replied.settle(m.Accepted(7))
    assert heard == [replied] and replied.result() == m.Accepted(7)
    refused.settle(m.Refusal(m.Reason.STALE, "behind"))
    lost.fail(PeerLost("gone"))
    assert given_up.cancel() and given_up.session.cancelled_calls == [given_up]  # type: ignore[attr-defined]
    for pending in (replied, refused, lost, given_up):
        pending.settle(m.Accepted(8))
        pending.fail(PeerLost("again"))
        pending.cancel()
    assert heard == [replied]
    await asyncio.sleep(0)
    assert heard == [replied, refused, lost, given_up]
    assert isinstance(refused.exception(), Refused) and isinstance(lost.exception(), PeerLost) and given_up.cancelled()
    await asyncio.sleep(0)
    assert len(heard) == 4


async def test_too_large_values_are_refused(streams: Cluster) -> None:
    settings = Settings(max_value_bytes=1000)
    a, b = await streams.node(settings=settings), await streams.node(settings=settings)

    async def handler(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, encoded(bytes(1001)))

    b.handler = handler
    for call in (pull(), m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(bytes(1001)))):
        with pytest.raises(Refused, match="max_value_bytes is 1000"):
            await a.call(b, call)
    assert a.lost.empty() and b.lost.empty()


async def test_lack_of_memory_is_a_refusal(streams: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await streams.node(), await streams.node()
    allocate = incoming._allocate

    def poor(size: int, pool: Allocate) -> memoryview:
        if size > 1 << 20:
            raise MemoryError
        return allocate(size, pool)

    async def handler(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, encoded(b"", bytes(3 << 20)))

    monkeypatch.setattr(incoming, "_allocate", poor)
    b.handler = handler
    flag = m.Flag(m.Stamp(1, 1), 1, 1, 1, encoded(b"", bytes(3 << 20)))
    for call, who, which in ((pull(), a, "reply"), (flag, b, "call")):
        with pytest.raises(Refused, match=f"^{name_of(who.name)} has no memory for a {which} of 31457"):
            await a.call(b, call)
    assert a.lost.empty() and b.lost.empty()


# Bulk.


@pytest.mark.slow
async def test_item_of_200_mib_arrives_intact(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    bulk = np.random.default_rng(0).integers(0, 2**63, (200 << 20) // 8, dtype=np.int64)
    value = encoded(b"meta", bulk.data)

    async def handler(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, value)

    b.handler = handler
    reply = await a.call(b, pull(), timeout_s=60)
    assert isinstance(reply, m.Item)
    assert np.array_equal(np.frombuffer(reply.value.buffers[0], np.int64), bulk)


async def test_session_survives_cancelling_a_large_value(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    large = encoded(b"", bytes(64 << 20))

    async def handler(caller: str, call: m.Call) -> m.Reply:
        return item(call, large) if isinstance(call, m.Pull) else m.Accepted(1)

    b.handler = handler
    await a.call(b, SEAL)
    (here,), (there,) = sessions_of(a.transport), sessions_of(b.transport)
    for call, sender in ((m.Flag(m.Stamp(1, 1), 1, 1, 1, large), here), (pull(), there)):
        waiting = asyncio.ensure_future(a.call(b, call))
        await turns_until(lambda sender=sender: sender._outbox._in_turn)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await a.call(b, SEAL) == m.Accepted(1)
        await turns_until(lambda sender=sender: sender._outbox.idle)
    assert not any(isinstance(call, m.Flag) for _, call in b.served)
    assert not there._reader.mid_frame
    assert sessions_of(a.transport) == [here] and a.lost.empty()


# Sockets.


async def test_concurrent_calls_share_a_session(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    await asyncio.gather(*(a.call(b, SEAL) for _ in range(50)))
    assert len(sessions_of(a.transport)) == len(sessions_of(b.transport)) == 1


async def test_silent_listener_is_lost_in_time(folder: Path) -> None:
    async with cluster_of("tcp", folder) as cluster:
        a = await cluster.node(settings=Settings(connect_s=0.1))
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            peer = Peer("x", (endpoints.tcp_endpoint("127.0.0.1", frozen.getsockname()[1]),))
            with pytest.raises(PeerLost, match=r"0\.1 s"):
                await a.call(peer, SEAL)
            with pytest.raises(PeerLost):
                await a.transport.probe(peer, timeout_s=0.05)
            waiting = asyncio.ensure_future(a.call(peer, SEAL))
            await asyncio.sleep(0)
            forget(a, "x")
            with pytest.raises(PeerLost, match="cancelled"):
                await waiting


async def test_usable_endpoints_are_tried_in_order(folder: Path) -> None:
    async with cluster_of("tcp", folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        (tcp,) = b.peer.endpoints
        nobody = f"unix:{endpoints.host_key()}:{folder}/nobody"
        await a.call(Peer(b.name, ("unix:another host:/x", nobody, tcp)), SEAL)
        with pytest.raises(PeerGone):
            await a.call(Peer("x", (nobody,)), SEAL)
        with pytest.raises(PeerLost, match="no endpoint that can be used"):
            await a.call(Peer("x", ("unix:another host:/x", "memory:")), SEAL)
        for wrong in ("tcp:", "tcp:host", "tcp:host:port"):
            with pytest.raises(PeerLost, match="not an endpoint"):
                await a.call(Peer("x", (wrong,)), SEAL)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    a, b = (StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, tcp_host="::1") for _ in "ab")

    async def serve(caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    await a.start("a", serve, lambda node: None)
    await b.start("b", serve, lambda node: None)
    assert b.endpoints[0].startswith("tcp:[::1]:")
    assert await a.call(Peer("b", b.endpoints), SEAL) == m.Accepted(1)
    await a.close()
    await b.close()


@contextlib.asynccontextmanager
async def two_at(*addresses: tuple[int, str], settings: Settings) -> AsyncIterator[tuple[StreamTransport, Peer, int]]:
    """A caller, and a peer with these addresses of its host. It listens at the last one."""
    a, b = (StreamTransport(settings, TOKEN, job=JOB, verify=verify) for _ in "ab")

    async def serve(caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    async def resolve(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
        return [(family, (address, port)) for family, address in addresses]

    await a.start("a", serve, lambda node: None)
    await b.start("b", serve, lambda node: None)
    port = int(b.endpoints[0].rpartition(":")[2])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(endpoints, "_addresses", resolve)
            yield a, Peer("b", (f"tcp:two.example:{port}",)), port
    finally:
        await a.close()
        await b.close()


async def test_silent_address_leaves_time_for_others() -> None:
    addresses = ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET, "127.0.0.1"))
    async with two_at(*addresses, settings=Settings(connect_s=2.0)) as (a, b, port):
        with contextlib.ExitStack() as sockets:
            silent = sockets.enter_context(socket.socket())
            silent.bind(("127.0.0.2", port))
            silent.listen(0)
            for _ in range(3):  # nobody accepts: once its backlog is full, the kernel drops what comes
                knocking = sockets.enter_context(socket.socket())
                knocking.setblocking(False)
                knocking.connect_ex(("127.0.0.2", port))
            assert await a.call(b, SEAL) == m.Accepted(1)


async def test_unix_sockets_are_private_with_short_paths(folder: Path) -> None:
    def transport(where: Path) -> StreamTransport:
        return StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, unix_dir=where, tcp_host=None)

    async def serve(caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    with pytest.raises(TransportError, match="shorter path"):
        await transport(folder / ("x" * 100)).start("a", serve, lambda node: None)
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(TransportError, match="0700"):
        await transport(shared).start("a", serve, lambda node: None)
    good = transport(folder / "private")
    await good.start("a", serve, lambda node: None)
    (path,) = (folder / "private").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    await good.close()
    assert not path.exists()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        StreamTransport(Settings(), b"short", job=JOB, verify=verify)
    with pytest.raises(ValueError, match="neither"):
        StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, tcp_host=None)
    with pytest.raises(ValueError, match="advertise"):
        StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, tcp_host="0.0.0.0")


# Processes.

PEER = """
import asyncio, sys
sys.path[:0] = [{here!r}]
from transport_kit import *
async def main():
    name, kind, folder = sys.argv[1:]
    cluster = Cluster(kind, Path(folder))
    node = Node(name, cluster.transport())
    async def hang(caller, call):
        print("serving", flush=True)
        await asyncio.Event().wait()
    node.handler = hang
    await node.start()
    print(node.peer.endpoints[0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def _noticed_s(a: Node, streams: Cluster, name: str) -> float:
    """Kills a process that serves a call. Returns the seconds until the caller knows that it is lost, and gone."""
    script = PEER.format(here=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, name, streams.kind, str(streams.folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        try:
            peer = Peer(name, ((await asyncio.to_thread(process.stdout.readline)).strip(),))
            waiting = asyncio.ensure_future(a.call(peer, pull()))
            assert await asyncio.to_thread(process.stdout.readline) == "serving\n"
            loop = asyncio.get_running_loop()
            at = loop.time()
            process.kill()
            with pytest.raises(PeerLost):
                await waiting
            assert await asyncio.wait_for(a.lost.get(), 30) == name
            with pytest.raises(PeerGone):
                await a.transport.probe(peer, timeout_s=5)
            with pytest.raises(PeerGone):
                await a.call(peer, pull())
            return loop.time() - at
        finally:
            process.kill()


@pytest.mark.slow
async def test_killed_process_is_gone_within_100_ms(streams: Cluster) -> None:
    """The fastest of several tries, since the machine may be busy."""
    a = await streams.node()
    took = []
    while len(took) < 10 and min(took, default=1.0) >= 0.1:
        took.append(await _noticed_s(a, streams, f"process{len(took)}"))
    assert min(took) < 0.1, took
    for left in streams.folder.iterdir():
        left.unlink()  # the dead leave their socket's file


@contextlib.asynccontextmanager
async def losing(to: Peer, *, calls: bool) -> AsyncIterator[tuple[Peer, asyncio.Event]]:
    """Another address of that node. Once the event is set the next large piece misses its last eight bytes, which the
    kernels of both ends never notice."""
    lose, passing = asyncio.Event(), set[asyncio.Task[None]]()
    host, _, port = to.endpoints[0].removeprefix("tcp:").rpartition(":")

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, lossy: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 18):
                if lossy and lose.is_set() and len(data) > 1000:
                    lose.clear()
                    data = data[:-8]
                sink.write(data)
        sink.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        passing.add(task)
        there, on = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, on, calls), pump(there, writer, not calls))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
        yield Peer(to.node, (endpoints.tcp_endpoint("127.0.0.1", server.sockets[0].getsockname()[1]),)), lose
        server.close()
        await asyncio.wait(passing)


QUICK = Settings(ping_s=1.0, ping_timeout_s=1.0)


@pytest.mark.parametrize("size", [3000, 1_000_000], ids=["in one frame", "in chunks"])
@pytest.mark.parametrize("calls", [True, False], ids=["of a call", "of a reply"])
async def test_lost_rest_of_a_frame_ends_the_session(
    calls: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TCP loses nothing; what stands in between may. The reader waited for eight bytes that nobody had, with a
    connection that was in order by all that the kernels know."""
    monkeypatch.setattr(stream, "_TRIM_S", 0.05)
    value = encoded(b"", bytes(size))

    async def answer(caller: str, call: m.Call) -> m.Reply:
        return m.Answer(m.Stamp(1, 1), 2, True, value) if not calls else m.Answer(m.Stamp(1, 1), 2, True, encoded())

    async with cluster_of("tcp", tmp_path) as cluster:
        a, b = await cluster.node(settings=QUICK), await cluster.node(settings=QUICK)
        b.handler = answer
        ask = m.Request(m.Stamp(1, 1), 1, 2, 3, "push", 4, value if calls else encoded())
        async with losing(b.peer, calls=calls) as (peer, lose):
            assert isinstance(await a.call(peer, ask), m.Answer)
            lose.set()
            with pytest.raises(PeerLost, match="its end closed the connection" if calls else "the rest of a frame"):
                await a.call(peer, ask)
            assert not lose.is_set()
            assert isinstance(await a.call(peer, ask), m.Answer)
            await a.transport.close()
    assert "the rest of a frame" in "\n".join(record.getMessage() for record in caplog.records)


async def test_unread_calls_are_bounded(streams: Cluster) -> None:
    a, b = await streams.node(), await streams.node()
    await a.call(b, SEAL)
    (here,), (there,) = sessions_of(a.transport), sessions_of(b.transport)
    assert here._transport is not None and there._transport is not None
    there._transport.pause_reading()
    flags = [m.Flag(m.Stamp(1, 1), 1, 1, task, encoded(b"", bytes(32 << 20))) for task in range(8)]
    waiting = [asyncio.ensure_future(a.call(b, flag, timeout_s=60)) for flag in flags]
    await turns_until(lambda: here._outbox._paused)
    for _ in range(100):
        await asyncio.sleep(0)
    assert here._transport.get_write_buffer_size() <= CHUNK_BYTES + (1 << 20)
    for task in waiting[4:]:
        task.cancel()
    await asyncio.wait(waiting[4:])
    there._transport.resume_reading()
    assert await asyncio.gather(*waiting[:4]) == [m.Accepted(1)] * 4
    assert sorted(call.task for _, call in b.served[1:]) == [0, 1, 2, 3]
