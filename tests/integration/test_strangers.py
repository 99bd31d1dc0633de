"""Whoever does not belong is refused, told of once, and costs the job nothing. Real nodes, real sockets.

Each kind of stranger knocks at a node of a job that stands still, where all of it can be looked at, and then at one
that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import re
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from test_node_process import Rig, calm, launched, same

from taskgraph.commands.certifying import make_certs
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.errors import PeerLost, TaskGraphError
from taskgraph.graph.values import verify
from taskgraph.launch.forkserver import ForkServer, NodeProcess
from taskgraph.launch.local import LocalNodes
from taskgraph.network.listening import Listening
from taskgraph.network.tls import CA, CERT, KEY, Tls, channel_binding
from taskgraph.node.config import NodeConfig
from taskgraph.observe.control_client import TOKEN_KEY, ControlClient, control_address, credential
from taskgraph.protocol import messages as m
from taskgraph.protocol.records import EpochRecord, PrimaryRecord
from taskgraph.settings import Settings
from taskgraph.transport import endpoints
from taskgraph.transport.api import Peer
from taskgraph.transport.frames import HEAD_BYTES, FrameKind, Head, pack_frame
from taskgraph.transport.hello import DiallerHello
from taskgraph.transport.refusals import _EVERY_S
from taskgraph.transport.stream import MAX_STRANGERS, StreamTransport

CONNECT_S = 2.0
"""`connect_s` of the job: what a stranger has to say who it is."""
SOON_S = 30.0
"""What takes a moment may take so long on a busy machine."""
REFUSED = re.compile(r"refused a connection from .*?: (.*)")


class OverTcp(LocalNodes):
    """Nodes that reach each other over TCP, as if each had a host of its own."""

    async def _spawn(self, server: ForkServer, config: NodeConfig, log_path: Path) -> NodeProcess:
        return await super()._spawn(server, dataclasses.replace(config, sockets=""), log_path)


class Door:
    """One node, as a stranger finds it."""

    def __init__(self, rig: Rig, name: str, tls: Tls | None) -> None:
        self.rig, self.name, self.tls = rig, name, tls
        self.endpoint = ""
        self.control = ""
        self.since = time.monotonic()

    async def find(self, kind: str) -> Door:
        record = await self.rig.record(self.name)
        self.endpoint = next(e for e in record.endpoints if e.startswith(f"{kind}:"))
        self.control = next((e for e in record.control.split("|") if e.startswith("tcp:")), "")
        return self

    @property
    def peer(self) -> Peer:
        return Peer(self.rig.id_of(self.name), (self.endpoint,))

    @contextlib.asynccontextmanager
    async def knock(self, *, raw: bool = False) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection; with TLS, and a certificate of the authority, unless it is a `raw` one."""
        sock = await endpoints.connect(self.endpoint, Settings())
        if self.tls is not None and not raw:
            context = self.tls.context(server=False)
            reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="")
        else:
            reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def says(self, reader: asyncio.StreamReader, limit_s: float = SOON_S) -> bytes:
        """All it says until it hangs up, which it does in time."""
        async with asyncio.timeout(limit_s):
            said = b""
            with contextlib.suppress(OSError):  # a reset is a way to hang up, too
                while data := await reader.read(1 << 16):
                    said += data
            return said

    @contextlib.asynccontextmanager
    async def visitor(self, *, token: bytes | None = None, job: str | None = None) -> AsyncIterator[StreamTransport]:
        """Another node, as far as its transport."""
        transport = StreamTransport(
            Settings(),
            self.rig.entry.token_bytes if token is None else token,
            job=job or self.rig.spec.name,
            verify=verify,
            tls=self.tls,
        )

        async def serve(caller: str, call: m.Call) -> m.Reply:
            return m.Accepted(0)

        await transport.start("visitor-1", serve, lambda lost: None)
        try:
            yield transport
        finally:
            await transport.close()

    async def lets_a_friend_in(self) -> None:
        async with self.visitor() as friend:
            await friend.probe(self.peer, timeout_s=SOON_S)

    def log(self) -> str:
        return self.rig.nodes.logs()[self.name].read_text()

    def refusals(self) -> list[str]:
        return REFUSED.findall(self.log())

    async def said(self, reason: str) -> list[str]:
        """What the log says of a stranger; it may hear that it is refused a moment before the log does."""
        deadline = time.monotonic() + SOON_S
        while not (found := [text for text in self.refusals() if reason in text]) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return found

    def most(self) -> int:
        """How often the log may say the same by now: once in a while that began with the first refusal."""
        return 1 + int((time.monotonic() - self.since) / _EVERY_S)

    @property
    def pid(self) -> int:
        return self.rig.nodes.pids()[self.name]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


# The strangers. Each returns what the log should say of it, once.


async def random_bytes(door: Door) -> str:
    for seed in range(5):
        async with door.knock() as (reader, writer):
            writer.write(random.Random(seed).randbytes(4096))
            assert await door.says(reader) == b""
    return "not a frame of ours"


async def wrong_token(door: Door) -> str:
    for _ in range(5):
        async with door.visitor(token=os.urandom(32)) as stranger:
            with pytest.raises(PeerLost, match="wrong token"):
                await stranger.probe(door.peer, timeout_s=SOON_S)
    return "wrong token"


async def another_job(door: Door) -> str:
    for name in ("other", door.rig.spec.name + "x"):
        async with door.visitor(job=name) as stranger:
            with pytest.raises(PeerLost, match="another job"):
                await stranger.call(door.peer, m.Seal(m.Stamp(1, 1), 0, 1), timeout_s=SOON_S)
    return "another job's nodes listen here"


async def replayed_hello(door: Door) -> str:
    """Everything that an honest node said when it got in, said again."""
    hello = DiallerHello(door.rig.entry.token_bytes, door.rig.spec.name, "visitor-1", probe=True)
    said = b""
    async with door.knock() as (reader, writer):
        hello.binding = channel_binding(writer.get_extra_info("ssl_object"))
        frames = hello.open()
        while not hello.done:
            for kind, data in frames:
                writer.write(frame := pack_frame(Head(kind, 0, header=len(data)), header=data))
                said += frame
            head = await reader.readexactly(HEAD_BYTES)
            frames = hello.on_frame(FrameKind(head[3]), await reader.readexactly(int.from_bytes(head[12:16], "big")))
    for _ in range(3):
        async with door.knock() as (reader, writer):
            writer.write(said)
            answer = await door.says(reader)
            assert b"wrong token" in answer and bytes([FrameKind.HELLO_WELCOME]) not in answer[3:4]
    return "wrong token"


async def oversized_head(door: Door) -> str:
    whole = {"header": 2**32 - 1}, {"header": 4097}
    for sizes in whole:
        async with door.knock() as (reader, writer):
            writer.write(Head(FrameKind.HELLO_OPEN, 0, **sizes).pack())
            assert await door.says(reader) == b""
    for sizes in {"payload": 2**63}, {"buffers": 2**32 - 1}, {"payload": 1, "meta": 1}:
        async with door.knock() as (reader, writer):
            writer.write(Head(FrameKind.CALL, 1, **sizes).pack())
            assert await door.says(reader) == b""
    async with door.knock() as (reader, writer):
        writer.write(Head(FrameKind.CHUNK, 1, body=1 << 20).pack())
        assert await door.says(reader) == b""
    return "a header of 4294967295 bytes; the limit is 4096"


async def truncated_frame(door: Door) -> str:
    for cut in (1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 3):
        async with door.knock() as (reader, writer):
            writer.write(pack_frame(Head(FrameKind.HELLO_OPEN, 0, header=60), header=bytes(60))[:cut])
            if writer.can_write_eof():
                writer.write_eof()
                assert await door.says(reader) == b""
            # else it is closed when the block ends, which is TLS's way
    return "its end closed the connection in the middle of a frame"


async def slowloris(door: Door) -> str:
    """Three that say nothing, and one that says it a byte at a time."""

    async def silent() -> float:
        async with door.knock() as (reader, _):
            began = time.monotonic()
            assert await door.says(reader, CONNECT_S + SOON_S) == b""
            return time.monotonic() - began

    async def drip() -> float:
        async with door.knock() as (reader, writer):
            began = time.monotonic()
            closed = asyncio.ensure_future(door.says(reader, CONNECT_S + SOON_S))
            for byte in pack_frame(Head(FrameKind.HELLO_OPEN, 0, header=4000)):
                if closed.done():
                    break
                with contextlib.suppress(OSError):
                    writer.write(bytes([byte]))
                await asyncio.wait([closed], timeout=0.25)
            await closed
            return time.monotonic() - began

    took_s = await asyncio.gather(silent(), silent(), silent(), drip())
    assert all(CONNECT_S - 0.5 < each < CONNECT_S + SOON_S for each in took_s)
    return f"no hello within {CONNECT_S:g} s"


async def a_crowd(door: Door) -> str:
    """More than the node has room for: the oldest go, and a friend still comes in."""
    async with contextlib.AsyncExitStack() as stack:
        before = await at_rest(door)
        readers, began = [], time.monotonic()
        for _ in range(MAX_STRANGERS + 40):
            reader, _ = await stack.enter_async_context(door.knock())
            readers.append(reader)
        await door.lets_a_friend_in()
        came_s = time.monotonic() - began
        assert door.descriptors() - before <= MAX_STRANGERS + 2
        for reader in readers[:30]:
            assert await door.says(reader) == b""
    crowded = "too many connections without a hello"
    if came_s > CONNECT_S / 2 and not await door.said(crowded):
        return f"no hello within {CONNECT_S:g} s"  # on a busy machine the first of them went for that before
    return crowded


async def without_tls(door: Door) -> str:
    async with door.knock(raw=True) as (reader, writer):
        writer.write(random.Random(1).randbytes(100))
        await door.says(reader)
    return "no TLS handshake"


async def without_a_certificate(door: Door) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sock = await endpoints.connect(door.endpoint, Settings())
    reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="")
    assert await door.says(reader) == b""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "peer did not return a certificate"


async def silent_before_tls(door: Door) -> str:
    async with door.knock(raw=True) as (reader, _):
        assert await door.says(reader, CONNECT_S + SOON_S) == b""
    return "SSL handshake is taking longer"


PLAIN = [
    random_bytes,
    wrong_token,
    replayed_hello,
    another_job,
    oversized_head,
    truncated_frame,
    a_crowd,
    slowloris,
]
INSIDE_TLS = [*PLAIN, without_tls, without_a_certificate, silent_before_tls]


async def at_rest(door: Door) -> int:
    """How many files the node has open once it opens no more of its own."""
    async with asyncio.timeout(20):
        known, since = door.descriptors(), time.monotonic()
        while time.monotonic() - since < 0.5:
            await asyncio.sleep(0.02)
            if (now := door.descriptors()) != known:
                known, since = now, time.monotonic()
        return known


async def settled(door: Door, before: int) -> None:
    """What strangers cost is given back. A few are the node's own: others dial it when they have to."""
    async with asyncio.timeout(SOON_S):
        while door.descriptors() > before + 4:  # noqa: ASYNC110 - a process tells nobody when it closes a file
            await asyncio.sleep(0.02)


async def control_refuses(door: Door) -> None:
    if not door.control:
        return
    address = control_address(door.control, "another host")
    async with ControlClient(address, os.urandom(32), door.tls) as stranger:
        for _ in range(5):
            with pytest.raises(TaskGraphError, match="token is missing or wrong"):
                await stranger.kill(9, SOON_S)
    host, port = address.rsplit(":", 1)
    for seed in range(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(random.Random(seed).randbytes(2000))
        await door.says(reader, CONNECT_S + SOON_S)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert 1 <= door.refusals().count("a call with a wrong token") <= door.most()


def secrets_are_kept(rig: Rig) -> None:
    """The token is in no log, in no command line, and in no environment."""
    token = rig.entry.token
    for path in rig.nodes.logs().values():
        assert token not in path.read_text()
    for pid in rig.nodes.pids().values():
        assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended
            assert token.encode() not in path.read_bytes()


async def disturbances(rig: Rig) -> int:
    """How often a task was taken over from a node that failed, and how often an epoch began anew."""
    kv = await rig.etcd.get(rig.keys.epoch)
    assert kv is not None
    found = EpochRecord.from_bytes(kv.value).attempt - 1
    for task in range(rig.spec.tasks):
        kv = await rig.etcd.get(rig.keys.primary(task))
        assert kv is not None
        found += PrimaryRecord.from_bytes(kv.value).failovers
    return found


@pytest.mark.parametrize("kind", ["unix", "tls"])
@pytest.mark.timeout(240)
async def test_strangers_are_refused(kind: str, embedded_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    files: dict[str, str] = {}
    if kind == "tls":
        make_certs(tmp_path / "certs", force=False)
        files = {n: str(tmp_path / "certs" / f) for n, f in (("ca", CA), ("cert", CERT), ("key", KEY))}
    async with launched(
        embedded_etcd,
        3,
        epochs=300,
        connect_s=CONNECT_S,
        lease_ttl_s=20.0,  # it is no stranger's doing where the machine lets a node stand still for a while
        listening=Listening(host="" if kind == "unix" else "127.0.0.1"),
        node_tls=files,
        launcher=LocalNodes if kind == "unix" else OverTcp,
    ) as rig:
        rig.hold(3)
        await rig.nodes.start(3)
        await rig.committed(2)
        door = await Door(rig, "n2", Tls.of(files)).find("unix" if kind == "unix" else "tcp")
        await door.lets_a_friend_in()
        before = await at_rest(door)
        strangers = INSIDE_TLS if kind == "tls" else PLAIN
        for stranger in strangers:
            reason = await stranger(door)
            await settled(door, before)
            assert 1 <= len(await door.said(reason)) <= door.most(), f"{stranger.__name__}: {door.refusals()}"
            await door.lets_a_friend_in()
        await control_refuses(door)
        assert len(door.refusals()) <= 20 * door.most()
        assert "Traceback" not in door.log()
        secrets_are_kept(rig)

        # And once more, while the job computes.
        rig.release(3)
        quick = [s for s in strangers if s not in (slowloris, silent_before_tls, a_crowd)]
        for stranger in quick:
            await stranger(door)
        assert same(await rig.results(), await calm(epochs=300))
        assert await disturbances(rig) == 0
        await rig.nodes.wait(30)
        assert set(rig.nodes.codes().values()) == {0}
        assert not [line for line in door.log().splitlines() if "ERROR" in line]


async def test_the_control_service_lets_few_strangers_wait(embedded_etcd: EmbeddedEtcd) -> None:
    """gRPC's own limits: silent connections end, and a request is small."""
    async with launched(embedded_etcd, 1, listening=Listening(host="127.0.0.1")) as rig:
        rig.hold(0)
        await rig.nodes.start(1)
        door = await Door(rig, "n1", None).find("tcp")
        address = control_address(door.control, "another host")
        host, port = address.rsplit(":", 1)
        before = await at_rest(door)
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for _ in range(300):
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                readers.append(reader)
            async with asyncio.timeout(SOON_S):
                while door.descriptors() < before + 100:  # noqa: ASYNC110 - until it has accepted them
                    await asyncio.sleep(0.02)
            async with await rig.client("n1") as client:  # over the unix socket
                assert (await client.status(SOON_S)).name == "n1"
            for reader in readers:
                await door.says(reader, CONNECT_S + SOON_S)
        await settled(door, before)
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/taskgraph.v1.Control/Status")
            for token, refusal in (
                (rig.entry.token_bytes, grpc.StatusCode.RESOURCE_EXHAUSTED),
                (bytes(32), grpc.StatusCode.UNAUTHENTICATED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(bytes(1 << 20), timeout=SOON_S, metadata=((TOKEN_KEY, credential(token)),))
                assert raised.value.code() == refusal
        rig.release(0)
        assert same(await rig.results(), await calm())


@pytest.mark.smoke
async def test_sockets_and_folders_are_private(embedded_etcd: EmbeddedEtcd) -> None:
    """Whatever the umask of whoever starts nodes."""
    old = os.umask(0)
    try:
        async with launched(embedded_etcd, 1) as rig:
            rig.hold(0)
            await rig.nodes.start(1)
            await rig.record("n1")
            runtime = rig.nodes.logs()["n1"].parent.parent.parent
            seen = 0
            for path in [runtime, *runtime.rglob("*")]:
                mode = path.lstat().st_mode
                if path.is_dir() or path.is_socket() or path.suffix == ".json":
                    assert mode & 0o077 == 0, f"{path} has mode {mode:o}"
                    seen += path.is_socket()
                assert mode & 0o022 == 0, f"{path} can be written by others"
            assert seen == 2
            rig.release(0)
            assert same(await rig.results(), await calm())
    finally:
        os.umask(old)
