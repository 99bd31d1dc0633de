"""The control service and its client, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash

from taskgraph.errors import DecodeError, PeerGone, PeerLost, TaskGraphError, TransportError
from taskgraph.graph.values import decode, encode, verify
from taskgraph.network.tls import Tls
from taskgraph.node import control
from taskgraph.node.control import ControlServer
from taskgraph.observe import control_client
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.control_client import ControlClient, StillComputing, control_address
from taskgraph.observe.events import EventLog
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus, ReportRow, TaskResult
from taskgraph.observe.usage import Usage
from taskgraph.system import host
from taskgraph.transport.endpoints import host_key

_NO_LISTENER = r"^no node listens at \S+ \((connection refused|no such file or directory)\)$"
TOKEN = bytes(range(32))

STATUS = NodeStatus(
    node="n1-0badcafe",
    name="n1",
    host="here",
    pid=os.getpid(),
    paused=False,
    draining=True,
    stamp=(2, 7),
    revision=99,
    leader=True,
    replicas=(
        ReplicaStatus(0, "primary", 3, 7, "update", 0.5, ("update waits for 'grad' from task 1",), 2),
        ReplicaStatus(1, "setup", 1, None, "", 0.0, (), 0),
    ),
    waits=("task 1 computes",),
    usage=Usage(memory_bytes=93 << 20, files=20, threads=7, coroutines=30),
)


class StubNode:
    """What the service asks a node for, with answers of our choice."""

    def __init__(self) -> None:
        self.drains: list[str] = []
        self.found: list[TaskResult] = []
        self.results_wait = asyncio.Event()
        self.results_wait.set()

    def status(self) -> NodeStatus:
        return STATUS

    def drain(self, why: str) -> None:
        self.drains.append(why)

    async def results(self) -> list[TaskResult]:
        await self.results_wait.wait()
        return self.found


class Service:
    def __init__(self, server: ControlServer, node: StubNode, events: EventLog, control: str) -> None:
        self.server, self.node, self.events, self.control = server, node, events, control

    def client(self, token: bytes = TOKEN, tls: Tls | None = None) -> ControlClient:
        return ControlClient(control_address(self.control, host_key()), token, tls)


@contextlib.asynccontextmanager
async def serving(
    path: Path | None = None, tcp_host: str | None = None, attach: bool = True, tls: Tls | None = None
) -> AsyncIterator[Service]:
    events, node = EventLog("n1"), StubNode()
    server = ControlServer(events, TOKEN)
    control = await server.start(unix_path=path, tcp_host=tcp_host, tls=tls)
    if attach:
        server.attach(node)
    try:
        yield Service(server, node, events, control)
    finally:
        await server.stop()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path / "c") as found:
        yield found


async def test_status_travels(service: Service) -> None:
    async with service.client() as client:
        assert await client.status() == STATUS


async def test_socket_is_its_owners(tmp_path: Path) -> None:
    async with serving(tmp_path / "c") as service:
        assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o600
        assert service.control == f"unix:{host_key()}:{tmp_path / 'c'}"
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_status_over_tcp(host: str) -> None:
    try:
        async with serving(tcp_host=host) as service, service.client() as client:
            assert service.control.startswith("tcp:")
            assert (await client.status()).name == "n1"
    except TransportError:
        assert host == "::1", "only IPv6 may be missing here"


async def test_unusable_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot listen on"):
        await ControlServer(EventLog("n1"), TOKEN).start(unix_path=tmp_path / "no" / "folder")
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.9 port .any.: .*Cannot assign"):
        await ControlServer(EventLog("n1"), TOKEN).start(tcp_host="192.0.2.9", insecure=True)


@pytest.mark.parametrize("token", [b"", bytes(32), TOKEN[:-1], TOKEN + b"\0"])
async def test_wrong_token_is_refused(service: Service, token: bytes) -> None:
    async with service.client(token) as client:
        calls = (client.status(), client.kill(signal.SIGTERM), client.drain("why"), client.results(), client.clock())
        for call in calls:
            with pytest.raises(TaskGraphError, match="token is missing or wrong") as raised:
                await call
            assert TOKEN.hex() not in str(raised.value)
        with pytest.raises(TaskGraphError, match="token is missing or wrong"):
            async for _ in client.events(follow=True):
                raise AssertionError("an event without the token")
        with pytest.raises(TaskGraphError, match="token is missing or wrong"):
            async with client.trace() as tracing:
                await tracing.next()
    assert service.node.drains == []


async def test_trace_that_is_refused_while_it_is_sent_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listens, stop = threading.Event(), threading.Event()

    class LateRequest:
        def __init__(self, every: int) -> None: ...

        def SerializeToString(self) -> bytes:
            time.sleep(0.1)  # the service, in another thread, ends the call meanwhile
            return b""

    async def serve() -> None:
        async with serving(tmp_path / "c"):
            listens.set()
            await asyncio.to_thread(stop.wait, 20)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert await asyncio.to_thread(listens.wait, 10)
        monkeypatch.setattr(pb, "TraceRequest", LateRequest)
        client = ControlClient(control_address(f"unix:{host_key()}:{tmp_path / 'c'}", host_key()), bytes(32))
        with pytest.raises(TaskGraphError, match="token is missing or wrong"):
            async with client, client.trace() as tracing:
                await tracing.next()
    finally:
        stop.set()
        thread.join()


async def test_starting_node_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "c", attach=False) as service, service.client() as client:
        with pytest.raises(PeerLost, match="the node is starting"):
            await client.status()
        service.server.attach(service.node)
        assert await client.status() == STATUS


async def test_drain_has_a_reason(service: Service) -> None:
    async with service.client() as client:
        await client.drain("the host is needed")
    assert service.node.drains == ["the host is needed"]


async def test_kill_replies_before_the_signal(service: Service) -> None:
    came = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, came.set)
    try:
        async with service.client() as client, asyncio.timeout(30):
            await client.kill(signal.SIGUSR1)
            await came.wait()
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


async def test_signals_to_the_first_process_of_a_container(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops SIGKILL and SIGSTOP that such a process gets from within."""
    ended = asyncio.Queue[int]()
    monkeypatch.setattr(host, "is_first_process", lambda: True)
    monkeypatch.setattr(os, "_exit", ended.put_nowait)
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.put_nowait(-number))
    async with service.client() as client, asyncio.timeout(30):
        with pytest.raises(
            TaskGraphError, match=r"first process \(pid 1\) of its container, which SIGSTOP from within"
        ):
            await client.kill(signal.SIGSTOP)
        for number, how in ((signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, 137)):  # pytest handles the first
            await client.kill(number)
            assert await ended.get() == how


async def test_unknown_signal_is_refused(service: Service) -> None:
    async with service.client() as client:
        with pytest.raises(TaskGraphError, match="400 is not a valid Signals"):
            await client.kill(400)


async def test_dead_node_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path / "c") as service:
        client = service.client()
    async with client:
        with pytest.raises(PeerGone, match=_NO_LISTENER):
            await client.status()
        with pytest.raises(PeerGone, match=_NO_LISTENER):
            await client.kill(signal.SIGKILL)
        with pytest.raises(PeerGone):
            async with client.trace() as tracing:
                await tracing.next()


async def test_silent_node_gives_no_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"{tmp_path}/c")
        stopped.listen()
        async with ControlClient(f"unix:{tmp_path}/c", TOKEN) as client:
            with pytest.raises(NoAnswer, match=r"/c did not answer Status within 0.1 s$") as caught:
                await client.status(timeout_s=0.1)
    assert caught.value.within_s == 0.1


async def test_large_results_arrive_whole(service: Service) -> None:
    big = {"rows": np.arange(700_000, dtype="f8"), "empty": np.zeros((0, 3)), "bytes": b"x" * 3_000_001, "text": "ok"}
    rows = tuple(ReportRow(e, t, {"loss": e / 3, f"of task {t}": 1.0}) for e in range(12_000) for t in range(3))
    log = (b"packed", b"y" * 5_000_001, b"", b"reports")
    service.node.found = [
        TaskResult(0, 12_000, 4, encode(big), rows, log, 12.5),
        TaskResult(2, 12_000, 4, encode(5), ()),
        TaskResult(1, 12_000, 4, None, (), log[::-1]),
    ]
    async with service.client() as client:
        found = await client.results()
    assert [(r.task, r.epoch, r.attempt) for r in found] == [(0, 12_000, 4), (2, 12_000, 4), (1, 12_000, 4)]
    assert found[0].reports == rows and found[1].reports == () and found[2].value is None
    assert [r.log for r in found] == [log, (), log[::-1]] and [r.lasted_s for r in found] == [12.5, 0.0, 0.0]
    assert found[0].value is not None and verify(found[0].value)
    value = decode(found[0].value)
    assert np.array_equal(value["rows"], big["rows"]) and value["rows"].flags.aligned
    assert value["empty"].shape == (0, 3) and value["bytes"] == big["bytes"] and value["text"] == "ok"
    assert found[1].value is not None and decode(found[1].value) == 5


@pytest.mark.parametrize(
    "damaged",
    [
        pb.ReportRow(numbers=[0.1]).SerializeToString(),
        pb.ReportRow(names=["loss"]).SerializeToString(),
        pb.ReportRow(epoch=77).SerializeToString(),
        pb.ResultHead(epoch=78).SerializeToString(),
        pb.ResultHead(attempt=5).SerializeToString(),
        b"a text",
    ],
    ids=["a number", "its name", "its epoch", "the result's epoch", "the attempt", "the value"],
)
async def test_flipped_bit_in_results_is_found(damaged: bytes) -> None:
    said = [TaskResult(0, 78, 5, encode("a text"), (ReportRow(77, 0, {"loss": 0.1}),)), TaskResult(1, 78, 5, None, ())]
    async with serving(tcp_host="127.0.0.1") as service:
        service.node.found = said
        port = int(service.control.rpartition(":")[2])
        async with between(port, damaged) as (address, _), ControlClient(address, TOKEN) as client:
            with pytest.raises(DecodeError, match="damaged on their way"):
                await client.results()
            assert await client.results() == said


async def test_caller_of_results_may_leave(service: Service) -> None:
    service.node.results_wait.clear()
    async with service.client() as client:
        with pytest.raises(StillComputing, match=r"sent nothing of Results for 0\.05 s"):
            await client.results(silent_s=0.05)
        waiting = asyncio.ensure_future(client.results())
        service.node.found = [TaskResult(0, 1, 1, encode(1), ())]
        service.node.results_wait.set()
        assert [r.task for r in await waiting] == [0]


async def test_results_may_take_long() -> None:
    """A slow network may deliver one byte at a time."""

    async def slowly(request: bytes, context: object) -> AsyncIterator[pb.ResultChunk]:
        whole = xxhash.xxh3_128()
        head = pb.ResultHead(task=3, epoch=1, attempt=1, has_value=True, meta_bytes=8)
        for chunk in (pb.ResultChunk(head=head), *(pb.ResultChunk(data=bytes((part,))) for part in b"slowpart")):
            whole.update(chunk.SerializeToString())
            await asyncio.sleep(0.25)
            yield chunk
        yield pb.ResultChunk(digest=whole.digest())

    class Slow(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, pb.ResultChunk]:
            return grpc.unary_stream_rpc_method_handler(slowly, response_serializer=pb.ResultChunk.SerializeToString)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Slow(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with ControlClient(f"127.0.0.1:{port}", TOKEN) as client:
            (found,) = await client.results(silent_s=2.0)
    finally:
        await server.stop(0)
    assert found.task == 3 and found.value is not None and found.value.meta == b"slowpart"


async def test_past_and_coming_events(service: Service) -> None:
    service.events.emit("restart", "before", epoch=1)
    async with service.client() as client:
        assert [(e.text, lost) async for e, lost in client.events(follow=False)] == [("before", 0)]
        async with asyncio.timeout(30), contextlib.aclosing(client.events(follow=True)) as following:
            assert (await anext(following))[0].text == "before"
            service.events.emit("commit", "after", epoch=2, transient=True, fields={"loss": 0.5})
            event, lost = await anext(following)
            assert (event.text, event.epoch, event.fields, lost) == ("after", 2, {"loss": 0.5}, 0)


async def test_follower_gets_the_last_event(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CLOSE_S", 30.0)
    async with service.client() as client:
        following = client.events(follow=True)
        service.events.emit("drain", "first")
        assert (await anext(following))[0].text == "first"
        service.events.emit("left", "last")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await service.server.stop()
        assert loop.time() - began < 20, "nobody waits for a follower that has heard everything"
        assert [event.text async for event, _ in following] == ["last"]


async def test_slow_follower_loses_the_oldest_events(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.node.control._QUEUE", 100)
    text = "x" * 10_000  # gRPC itself buffers some; the rest waits in the queue
    async with service.client() as client, contextlib.aclosing(client.events(follow=True)) as following:
        service.events.emit("commit", "first")
        assert (await anext(following))[0].text == "first"
        for number in range(300):
            service.events.emit("commit", text, epoch=number)
        epochs, left_out = [], 0
        async with asyncio.timeout(30):
            while left_out + len(epochs) < 300:
                event, lost = await anext(following)
                left_out += lost
                epochs.append(event.epoch)
    assert left_out == 200 and epochs == list(range(200, 300))


@contextlib.asynccontextmanager
async def between(port: int, *flip: bytes) -> AsyncIterator[tuple[str, list[asyncio.Event]]]:
    """Yields an address that leads to that port, and an event per connection: once it is set, nothing passes.

    Args:
        flip: the first time that each of these passes, a bit of its last byte is flipped.
    """
    flips = list(flip)
    cut: list[asyncio.Event] = []
    ways: list[asyncio.Future[None]] = []
    ends: list[asyncio.StreamWriter] = []

    async def way(source: asyncio.StreamReader, target: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                for sign in [sign for sign in flips if sign in data]:
                    flips.remove(sign)
                    data = data.replace(sign, sign[:-1] + bytes([sign[-1] ^ 1]), 1)
                if not gone.is_set():
                    target.write(data)

    async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        cut.append(gone := asyncio.Event())
        ends.extend((writer, back))
        ways.extend(asyncio.ensure_future(way(*pair, gone)) for pair in ((reader, back), (there, writer)))

    async with await asyncio.start_server(passing, "127.0.0.1") as server:
        try:
            yield "127.0.0.1:{}".format(*server.sockets[0].getsockname()[1:]), cut
        finally:
            for end in ends:
                end.transport.abort()
            await asyncio.gather(*ways)


async def test_half_open_connection_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "_PING_S", 0.1)
    monkeypatch.setattr(control_client, "_UNANSWERED_S", 1.0)
    async with serving(tcp_host="127.0.0.1") as service, between(int(service.control.rpartition(":")[2])) as (to, cut):
        async with ControlClient(to, TOKEN) as listening, ControlClient(to, TOKEN) as collecting, asyncio.timeout(30):
            service.events.emit("commit", "first")
            following = listening.events(follow=True)
            await anext(following)
            service.node.found = [TaskResult(0, 1, 1, None, ())]
            cut[0].set()
            assert [result.task for result in await collecting.results()] == [0]
            with pytest.raises(PeerLost):
                await anext(following)
        assert len(cut) == 2


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Makes a frame of HTTP/2."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def head(fields: dict[str, str]) -> bytes:
    """Encodes the headers of a call in HPACK, without compression."""
    texts = [text.encode() for pair in fields.items() for text in pair]
    return b"".join(bytes([0][at % 2 :]) + bytes([len(text)]) + text for at, text in enumerate(texts))


SILENT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
"""How a client of HTTP/2 begins."""
STATUS_CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/taskgraph.v1.Control/Status",
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}
HALF_A_CALL = SILENT + frame(1, 4, 1, head(STATUS_CALL))


@pytest.mark.parametrize("said", [SILENT, HALF_A_CALL], ids=["nothing", "half a call"])
async def test_silent_strangers_block_no_client(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CONNECTIONS", 8)
    monkeypatch.setattr(control, "_SILENT_MS", 1000)
    async with serving(tcp_host="127.0.0.1") as service, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(service.client())
        following = await stack.enter_async_context(contextlib.aclosing(client.events(follow=True)))
        service.events.emit("commit", "first")
        await anext(following)
        host, port = service.control.removeprefix("tcp:").rsplit(":", 1)
        strangers = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(said)
            strangers.append(reader)
        async with asyncio.timeout(30):
            turned_away = 0
            for reader in strangers:
                found = b""
                with contextlib.suppress(ConnectionError):
                    found = await reader.read()  # until it ends
                turned_away += not found
        assert turned_away >= 20 - 8, "more than so many at a time are not let in"
        service.events.emit("commit", "still followed")
        async with asyncio.timeout(30):
            assert (await anext(following))[0].text == "still followed"
            assert await client.status() == STATUS


KNOCKED = """
import asyncio, contextlib, struct, sys
from taskgraph import cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
    cli.main(["--version"])
from taskgraph.node.control import ControlServer
from taskgraph.observe.events import EventLog

def frame(kind, flags, stream, payload):
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload

async def knock():
    server = ControlServer(EventLog("n1"), bytes(32))
    host, port = (await server.start(tcp_host="127.0.0.1")).removeprefix("tcp:").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    bad_status = b"\\x08\\x01x"
    writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + frame(4, 0, 0, b""))
    writer.write(b"".join(frame(1, 5, 2 * n + 1, bad_status) for n in range(50)))
    writer.write(frame(6, 0, 0, bytes(8)))
    said = b""
    while frame(6, 1, 0, bytes(8)) not in said:  # the ping's answer: all before it was read
        assert (data := await reader.read(1 << 16))
        said += data
    writer.close()
    await server.stop()

asyncio.run(knock())
"""


@pytest.mark.parametrize("asked", [None, "ERROR"])
async def test_strangers_do_not_fill_the_log(asked: str | None) -> None:
    """Nodes get the same environment from their launcher (`test_forkserver.py`)."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KNOCKED),
        stderr=asyncio.subprocess.PIPE,
        env=env | ({"GRPC_VERBOSITY": asked} if asked else {}),
    )
    _, said = await process.communicate()
    assert (process.returncode, said.count(b":status")) == (0, 50 if asked else 0), said


async def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def most() -> int:
        return dict(control._server_options())["grpc.max_allowed_incoming_connections"]

    for files, found in ((1024, 256), (65_536, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert most() == found


class Damaging(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def once(request: bytes, context: object) -> bytes:
            return b"\xff damaged"

        async def several(request: object, context: object) -> AsyncIterator[bytes]:
            if isinstance(request, AsyncIterator):
                await anext(request)  # else the call may be over while that is being sent: lost, and for another reason
            yield b"\xff damaged"

        method = details.method.rpartition("/")[2]
        if method == "Trace":
            return grpc.stream_stream_rpc_method_handler(several)
        if method in ("Results", "Events"):
            return grpc.unary_stream_rpc_method_handler(several)
        return grpc.unary_unary_rpc_method_handler(once)


async def test_damaged_answer_is_lost(tmp_path: Path) -> None:
    """gRPC returns None for such an answer."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Damaging(),))
    server.add_insecure_port(f"unix:{tmp_path}/c")
    await server.start()
    try:
        async with ControlClient(f"unix:{tmp_path}/c", TOKEN) as client:
            for call in (client.status(), client.clock(), client.drain("why"), client.results()):
                with pytest.raises(PeerLost, match="that cannot be read"):
                    await call
            with pytest.raises(PeerLost, match="an answer to Events that cannot be read"):
                await anext(client.events(follow=True))
            async with client.trace() as tracing:
                with pytest.raises(PeerLost, match="an answer to Trace that cannot be read"):
                    await tracing.next()
    finally:
        await server.stop(0)


def test_unreachable_address_says_what_to_do() -> None:
    assert control_address(f"unix:{host_key()}:/run/x/c|tcp:h:12", host_key()) == "unix:/run/x/c"
    assert control_address("unix:elsewhere:/run/x/c|tcp:[::1]:12", host_key()) == "[::1]:12"
    assert control_address("unix:here.1:/run/x/c|tcp:h:12", "here.2") == "h:12"
    assert control_address("unix:here.1:/run/x/c", "here.2") == "unix:/run/x/c"  # root may
    for said in ("", "unix:elsewhere:/run/x/c"):
        with pytest.raises(TaskGraphError, match="--listen HOST"):
            control_address(said, host_key())
