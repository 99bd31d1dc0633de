"""Nodes, values and messages for the tests of the transports."""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import os
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trustme
import xxhash

from taskgraph.graph import values
from taskgraph.network.tls import CA, CERT, KEY, Tls
from taskgraph.protocol import messages as m
from taskgraph.protocol.sums import encode_sum
from taskgraph.settings import Settings
from taskgraph.testing.simulate.loop import Process
from taskgraph.testing.simulate.network import SimNetwork, SimTransport
from taskgraph.transport.api import Peer, PendingReply, ServeAll, ServeNow, Transport
from taskgraph.transport.frames import FrameKind, Head, pack_frame
from taskgraph.transport.memory import MemoryNetwork, MemoryTransport
from taskgraph.transport.stream import StreamTransport

TOKEN = b"0123456789abcdef"
JOB = "job"
STAMP = m.Stamp(1, 7)
KINDS = ("memory", "memory shuffled", "simulated", "unix", "tcp", "tls")


@functools.cache
def authority(name: str = "ours") -> trustme.CA:
    """Made once: keys take their time."""
    return trustme.CA(organization_name=name)


def certified(
    folder: Path, *, by: str = "ours", trusting: str = "ours", host: str = "127.0.0.1", valid_in_days: int = 0
) -> Tls:
    """Files of a node, in `folder`; valid from then on for a day, or as they usually are."""
    folder.mkdir(exist_ok=True)
    times = [datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=valid_in_days + n) for n in (0, 1)]
    limits = dict(zip(("not_before", "not_after"), times, strict=True)) if valid_in_days else {}
    issued = authority(by).issue_cert(host, **limits)
    authority(trusting).cert_pem.write_to_path(str(folder / CA))
    issued.cert_chain_pems[0].write_to_path(str(folder / CERT))
    issued.private_key_pem.write_to_path(str(folder / KEY))
    return Tls(folder / CA, folder / CERT, folder / KEY)


def digest_of(meta: bytes, buffers: tuple[memoryview, ...]) -> bytes:
    state = xxhash.xxh3_128(meta)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def digesting(meta: bytes, sizes: Sequence[int]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(meta)


def verify(value: m.Encoded) -> bool:
    return digest_of(value.meta, value.buffers) == value.digest


def encoded(meta: bytes = b"meta", *buffers: bytes | bytearray | memoryview) -> m.Encoded:
    views = tuple(memoryview(buffer).toreadonly().cast("B") for buffer in buffers)
    return m.Encoded(meta, views, digest_of(meta, views))


def pull(tag: str = "grad") -> m.Pull:
    return m.Pull(STAMP, 3, 1, 5, tag)


def item(call: m.Pull, value: m.Encoded) -> m.Item:
    return m.Item(call.stamp, 1, call.tag, value)


#: One of each call, with the reply it gets.
EXCHANGES: list[tuple[m.Call, m.Reply]] = [
    (pull(), m.Item(STAMP, 4, "grad", encoded(b"x", b"", b"12345678", bytes(100_000)))),
    (m.Flag(STAMP, 1, 2, 3, encoded(b"flag")), m.Accepted(9)),
    (
        m.Request(STAMP, 1, 2, 3, "push", 4, encoded(b"", b"abc")),
        m.Answer(STAMP, 2, True, encoded(b"y", bytes(3_000_000))),
    ),
    (m.Offer(STAMP, 2**62, 3, True, False, 7, encoded(bytes(200_000), b"z")), m.Accepted()),
    (
        m.Offer(
            STAMP, 1, 3, False, False, 7, encoded(b"m", bytes(90_000)), m.KeptBuffers(b"b" * 16, (3, -1, 0), b"w" * 16)
        ),
        m.Accepted(),
    ),
    (m.Offers(STAMP, 4, 3, 7, ((9, 0, bytes(16)), (10, 2**31, b"d" * 16)), encoded(bytes(3000))), m.Accepted(4)),
    (m.Release(3, 2**62, 7, 9), m.Accepted()),
    (
        m.WrittenFiles((m.WrittenFile(m.Stamp(2, 40), 3, 2**40, "0f" * 16), m.WrittenFile(m.Stamp(2, 50), 3, 0, ""))),
        m.Accepted(),
    ),
    (
        m.Report(STAMP, 3, 1, True, 2, encode_sum(2**128 - 1), encode_sum(0), True, {"b": 0.1, "a": -0.0}, {}),
        m.Accepted(1),
    ),
    (m.Report(m.Stamp(0, 0), 0, 0, False, 0, encode_sum(0), encode_sum(5)), m.Accepted(1)),
    (
        m.Reports(
            (
                m.Report(STAMP, 3, 1, True, 0, encode_sum(5), encode_sum(5)),
                m.Report(STAMP, 3, 1, True, 0, encode_sum(0), encode_sum(2**127)),
            )
        ),
        m.Accepted(1),
    ),
    (m.Seal(STAMP, 3, 11), m.Accepted(2)),
    (m.RequestRestart(STAMP, 3, "why not? \N{SNOWMAN}"), m.Accepted(0)),
    (m.HandOver(STAMP, 3, 1), m.Accepted(0)),
    (
        m.Audit(STAMP, 3),
        m.LedgerPage(
            2, (m.LedgerEntry(True, "item", 3, 1, "grad", b"d" * 16), m.LedgerEntry(False, "", 0, -1, "", b""))
        ),
    ),
    (m.Waits(STAMP, 3), m.WaitsPage(2, (m.Wait("update", "item", 3, "grad", 0.25, (("a", 1), ("b", 2))),))),
    (m.WorkerReport(4, 0, (("n1-a", 0), ("n2-b", 3)), 9, True, ((0, 4), (5, 6)), (7,)), m.Accepted(0)),
    (m.PartSums(4, 9, ((0, 4), (5, 6)), b"tag", encoded(b"sums", bytes(100_000))), m.Accepted(0)),
    (m.PartSums(4, 9, ((0, 4),), b"tag", encoded(b"slice", bytes(100_000)), apart=True), m.Accepted(0)),
    (m.SliceSum(4, 9, encoded(b"sum of a slice", bytes(100_000))), m.Accepted(0)),
    (m.Totals(4, 8, encoded(b"totals", bytes(9))), m.Accepted(0)),
    (m.HoldsTotals(4, 9), m.Accepted(0)),
    (m.ComparedPart(4, 9, b"tag", 2, b"digest"), m.Accepted(0)),
    (m.GroupKey(4, "rank_1", b"address"), m.Accepted(0)),
    (m.FetchShared(m.Stamp(1, 4), 2), m.SharedState(m.Stamp(1, 4), 3, encoded(b"shared", bytes(100_000)))),
    (m.DescribeShared(m.Stamp(1, 4), 2, True), m.SharedDigests(3, (("theta", bytes(16)),))),
    (m.CopyState(), m.StateCopy(3, 9, b"tag", encoded(b"state", bytes(100_000)), (b"reports",))),
    (m.DescribeState(), m.StateDigests(3, (("w", b"d" * 16), ("opt.0.lr", b"e" * 16)))),
    (m.DescribeValue(), m.ValueDigest(b"d" * 16)),
    (m.FollowTotals(9, True), m.TotalsPage(7, 2, 11, encoded(b"totals"))),
]


class Node:
    """A transport, what it serves, and what it was told."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.transport = transport
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.served: list[tuple[str, m.Call]] = []
        self.handler: Callable[[str, m.Call], Awaitable[m.Reply]] = self._accept
        self.at_once: ServeNow = lambda caller, call: None
        self.all_at_once: ServeAll = lambda caller, pull: None

    async def _accept(self, caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    def answer_now(self, caller: str, call: m.Call) -> m.Reply | PendingReply | None:
        return self.at_once(caller, call)

    def answer_all_now(self, caller: str, pull: m.Pull) -> list[m.Reply | PendingReply | None] | None:
        return self.all_at_once(caller, pull)

    async def __call__(self, caller: str, call: m.Call) -> m.Reply:
        self.served.append((caller, call))
        return await self.handler(caller, call)

    async def start(self) -> Node:
        await self.transport.start(self.name, self, self.lost.put_nowait)
        return self

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.transport.endpoints)

    async def call(self, to: Node | Peer, message: m.Call, *, timeout_s: float | None = 10.0) -> m.Reply:
        peer = to.peer if isinstance(to, Node) else to
        return await self.transport.call(peer, message, timeout_s=timeout_s)


class Cluster:
    """Nodes of one job over one kind of transport."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.network = MemoryNetwork(random.Random(5) if kind == "memory shuffled" else None)
        self.simulated = SimNetwork(
            random.Random(5),
            Settings(),
            delay_s=0.0005,
            in_order=0.5,
            on_message=lambda *_: None,
            on_call=lambda *_: None,
        )
        self.nodes: list[Node] = []
        self.tls = certified(folder / "tls") if kind == "tls" else None
        self._names = (f"node-{number}" for number in itertools.count())

    def transport(
        self, *, token: bytes = TOKEN, job: str = JOB, settings: Settings | None = None, tls: Tls | None = None
    ) -> Transport:
        if self.kind.startswith("memory"):
            return MemoryTransport(self.network)
        if self.kind == "simulated":
            return SimTransport(self.simulated, Process("node"))
        return StreamTransport(
            settings or Settings(),
            token,
            job=job,
            verify=verify,
            digesting=digesting,
            unix_dir=self.folder if self.kind == "unix" else None,
            tcp_host="127.0.0.1" if self.kind in ("tcp", "tls") else None,
            tls=tls or self.tls,
        )

    async def node(
        self, *, token: bytes = TOKEN, job: str = JOB, settings: Settings | None = None, tls: Tls | None = None
    ) -> Node:
        transport = self.transport(token=token, job=job, settings=settings, tls=tls)
        node = await Node(next(self._names), transport).start()
        self.nodes.append(node)
        return node

    def crash(self, node: Node) -> None:
        """As a kill -9 does it: sockets close without a word, nobody listens any more."""
        if isinstance(node.transport, MemoryTransport):
            self.network.crash(node.name)
            return
        if isinstance(node.transport, SimTransport):
            self.simulated.crash(node.name, host=False)
            return
        transport = node.transport
        assert isinstance(transport, StreamTransport)
        for server in transport._servers:
            server.close()
        for session in list(transport._connections):
            session.clean = True  # the dead are told nothing
            session.abort()


@asynccontextmanager
async def cluster_of(kind: str, folder: Path) -> AsyncIterator[Cluster]:
    """A cluster that leaves nothing behind."""
    cluster = Cluster(kind, folder)
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            await node.transport.close()
    mine = asyncio.current_task()
    await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks() if task is not mine} == set()
    shutil.rmtree(folder / "tls", ignore_errors=True)
    assert os.listdir(folder) == []


@asynccontextmanager
async def nodes_of_a_host(folder: Path, *names: str) -> AsyncIterator[list[Node]]:
    """Nodes that reach each other by unix sockets, with values as the framework has them."""
    made = []
    try:
        for name in names:
            transport = StreamTransport(
                Settings(),
                TOKEN,
                job=JOB,
                verify=values.verify,
                digesting=values.begin_digest,
                unix_dir=folder,
                tcp_host=None,
            )
            made.append(await Node(name, transport).start())
        yield made
    finally:
        for node in made:
            await node.transport.close()


def pack_whole(kind: FrameKind, call: int, header: bytes, meta: bytes = b"") -> bytes:
    """A frame that is all of its message: no value, or one of nothing but meta."""
    size = len(meta)
    return pack_frame(Head(kind, call, len(header), 0, size, size, size), (), header) + meta


async def turns_until(condition: Callable[[], object], what: str = "it") -> None:
    """Turns of the event loop until something holds that nobody announces."""
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


def stream_of(node: Node) -> StreamTransport:
    assert isinstance(node.transport, StreamTransport)
    return node.transport


def forget(node: Node, other: str) -> None:
    """Ends what `node` has open to another one, or dials: only the other side sees a loss."""
    transport = stream_of(node)
    if (dial := transport._dials.get(other)) is not None:
        dial.cancel()
    for session in transport._open.pop(other, set()):
        session.clean = True
        session.abort()
