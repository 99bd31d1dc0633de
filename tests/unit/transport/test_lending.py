"""Memory lent between nodes of one host: given back by every reader before it is written again, or never written."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import (
    Cluster,
    Node,
    cluster_of,
    digest_of,
    encoded,
    forget,
    item,
    pack_whole,
    pull,
    stream_of,
    turns_until,
)

from taskgraph.errors import DecodeError, PeerLost
from taskgraph.graph.blocks import Block, block_behind
from taskgraph.protocol import messages as m
from taskgraph.transport import lending, mappings
from taskgraph.transport.frames import LENT, MAX_LENT, FrameKind, Head, pack_frame
from taskgraph.transport.lending import Borrowing, Lending
from taskgraph.transport.mappings import CannotBorrow, Mappings, MemoryReference
from taskgraph.transport.segments import Pool
from taskgraph.transport.session import Session

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is lent on Linux only")


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of("unix", folder) as cluster:
        yield cluster


def sessions(node: Node) -> list[Session]:
    return list(stream_of(node)._connections)


def lent(node: Node) -> int:
    return sum(len(session._lending) for session in sessions(node))


def pool(node: Node) -> Pool:
    return stream_of(node)._pool


def pooled(node: Node, *sizes: int, fill: int = 1, meta: bytes = b"meta") -> m.Encoded:
    """Makes a value in the pool of a node."""
    views = []
    for size in sizes:
        block = node.transport.allocate(size)
        assert block is not None
        block[:] = fill
        views.append(block.data.toreadonly())
    buffers = tuple(views)
    return m.Encoded(meta, buffers, digest_of(meta, buffers))


class Holder:
    """Serves one value."""

    def __init__(self, node: Node, value: m.Encoded) -> None:
        self.values = [value]
        node.handler = self.serve

    async def serve(self, caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, self.values[0])

    def drop(self) -> None:
        self.values.clear()


async def pulled(node: Node, of: Node) -> m.Encoded:
    reply = await node.call(of, pull())
    assert isinstance(reply, m.Item)
    return reply.value


def place(buffer: memoryview) -> int:
    block = block_behind(buffer)
    assert block is not None and block.origin is not None
    origin: Any = block.origin
    return int(origin.region.ino << 40 | origin.offset)


def next_place(node: Node, size: int = MIB) -> int:
    return place(pooled(node, size).buffers[0])


async def test_lent_value_is_not_copied(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    value = pooled(a, MIB, 3 * MIB, fill=7)
    Holder(a, value)
    got = await pulled(b, a)
    assert got == value and got.size_bytes == value.size_bytes == 4 * MIB + len(value.meta)
    assert [place(buffer) for buffer in got.buffers] == [place(buffer) for buffer in value.buffers]
    assert all(buffer.readonly for buffer in got.buffers)
    assert lent(a) == 2
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(got.buffers[0], np.uint8)[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        np.frombuffer(got.buffers[0], np.uint8).flags.writeable = True


async def test_lent_message_may_overtake_a_large_one(host: Cluster) -> None:
    """Its leases have larger numbers, which once ended the session."""
    a, b = await host.node(), await host.node()
    some = pooled(a, MIB).buffers + encoded(b"", bytes(MIB)).buffers
    values = {
        "first": encoded(b"", bytes(8 * MIB)),  # more than the socket takes at once
        "mixed": m.Encoded(b"mixed", some, digest_of(b"mixed", some)),
        "lent": pooled(a, MIB, fill=2),
    }
    all_here, ready, order = asyncio.Event(), asyncio.Event(), []

    async def serve(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        order.append(call.tag)
        if len(order) == len(values):
            all_here.set()
        await ready.wait()
        return item(call, values[call.tag])

    a.handler = serve
    calls = [asyncio.create_task(b.call(a, pull(tag))) for tag in values]
    await all_here.wait()
    assert order == list(values)
    ready.set()
    for reply, value in zip(await asyncio.gather(*calls), values.values(), strict=True):
        assert isinstance(reply, m.Item) and reply.value == value
    assert len(sessions(a)) == 1 and a.lost.empty() and b.lost.empty()


def test_unsent_message_takes_back_its_leases() -> None:
    memory = Pool(max_segments=4, max_idle_bytes=MIB)
    blocks = [memory.allocate(MIB) for _ in range(3)]
    ours = Lending(lambda: 0.0)
    ours.start()
    for call, block in zip((1, 1, 2), blocks, strict=True):
        assert block is not None and ours.lend(call, block.data)
    ours.take_back(1)
    assert len(ours) == 1
    ours.take_returned(struct.pack("!Q", 3))
    assert len(ours) == 0
    del blocks, block
    memory.close()


async def test_call_lends_its_value(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    offer = m.Offer(m.Stamp(1, 7), 2, 3, True, False, 7, pooled(a, MIB, fill=9))
    await a.call(b, offer)
    assert b.served == [(a.name, offer)]
    assert lent(a) == 1
    b.served.clear()
    gc.collect()
    await turns_until(lambda: lent(a) == 0)


async def test_segment_waits_for_all_readers(host: Cluster) -> None:
    a, b, c = await host.node(), await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB, fill=1))
    first = place(holder.values[0].buffers[0])
    at_b, at_c = await pulled(b, a), await pulled(c, a)
    a.served.clear()
    holder.drop()
    view = np.frombuffer(at_b.buffers[0], np.uint8)[5:9]
    del at_b
    assert next_place(a) != first
    del at_c
    await turns_until(lambda: lent(a) == 1)
    assert next_place(a) != first, "a view of four bytes still reads it"
    assert list(view) == [1, 1, 1, 1]
    del view
    await turns_until(lambda: lent(a) == 0)
    found = [pooled(a, MIB) for _ in range(4)]
    assert first in [place(value.buffers[0]) for value in found]


@pytest.mark.parametrize("how", ["crash", "goodbye", "forget"])
async def test_memory_of_a_lost_reader_is_never_reused(host: Cluster, how: str) -> None:
    a, b = await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB, fill=5))
    first = place(holder.values[0].buffers[0])
    got = await pulled(b, a)
    if how == "crash":
        host.crash(b)
    elif how == "goodbye":
        await b.transport.close()
    else:
        forget(a, b.name)
    await turns_until(lambda: not sessions(a))
    holder.drop()
    a.served.clear()
    gc.collect()
    found = [pooled(a, MIB, fill=6) for _ in range(3)]
    assert first not in [place(value.buffers[0]) for value in found]
    assert bytes(got.buffers[0]) == bytes([5]) * MIB
    assert len(pool(a)) == 3
    del got


async def test_relayed_memory_is_returned_along_the_chain(host: Cluster) -> None:
    a, b, c = await host.node(), await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB, fill=3))
    first = place(holder.values[0].buffers[0])
    relay = Holder(b, await pulled(b, a))
    got = await pulled(c, b)
    assert place(got.buffers[0]) == first, "it is A's memory"
    holder.drop(), relay.drop()
    a.served.clear(), b.served.clear()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (lent(a), lent(b)) == (1, 1)
    assert next_place(a) != first
    del got
    await turns_until(lambda: (lent(a), lent(b)) == (0, 0))
    found = [pooled(a, MIB) for _ in range(3)]
    assert first in [place(value.buffers[0]) for value in found]


async def test_lost_reader_of_a_chain_spoils_its_segment(host: Cluster) -> None:
    a, b, c = await host.node(), await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB, fill=3))
    first = place(holder.values[0].buffers[0])
    relay = Holder(b, await pulled(b, a))
    got = await pulled(c, b)
    host.crash(c)
    await turns_until(lambda: lent(b) == 0)
    holder.drop(), relay.drop()
    a.served.clear(), b.served.clear()
    gc.collect()
    await turns_until(lambda: lent(a) == 0)
    found = [pooled(a, MIB) for _ in range(3)]
    assert first not in [place(value.buffers[0]) for value in found]
    assert bytes(got.buffers[0]) == bytes([3]) * MIB
    del got


async def test_cancelled_reply_returns_its_lease(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    value = pooled(a, MIB)
    go = asyncio.Event()

    async def serve(caller: str, call: m.Call) -> m.Reply:
        await go.wait()
        assert isinstance(call, m.Pull)
        return item(call, value)

    a.handler = serve
    waiting = asyncio.create_task(pulled(b, a))
    await turns_until(lambda: a.served)
    go.set()
    (session,) = (s for s in sessions(b))
    await turns_until(lambda: lent(a))  # the reply is on its way
    waiting.cancel()
    await asyncio.wait((waiting,))
    await turns_until(lambda: lent(a) == 0)
    assert session.open


async def test_tcp_lends_nothing(folder: Path) -> None:
    async with cluster_of("tcp", folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        Holder(a, value := pooled(a, MIB, fill=4))
        for _ in range(3):
            assert await pulled(b, a) == value
        assert lent(a) == 0
        pool(b).trim()
        assert 1 <= len(pool(b)) <= 2


# Memory that cannot be opened.


def hidden(pid: int, reference: MemoryReference) -> mappings._Mapping:
    raise CannotBorrow("hidden", for_good=True)


@pytest.mark.parametrize("direction", ["reply", "call"])
@pytest.mark.parametrize("for_good", [True, False])
async def test_unopenable_memory_is_sent_as_bytes(
    host: Cluster, monkeypatch: pytest.MonkeyPatch, direction: str, for_good: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await host.node(), await host.node()
    opened = []

    def refuse(pid: int, reference: MemoryReference) -> mappings._Mapping:
        opened.append(pid)
        raise CannotBorrow("hidden", for_good=for_good)

    monkeypatch.setattr(mappings, "_open", refuse)
    value = pooled(a, MIB, MIB, fill=8)
    Holder(a, value)
    offer = m.Offer(m.Stamp(1, 7), 2, 3, True, False, 7, value)
    for _ in range(3):
        if direction == "reply":
            assert await pulled(b, a) == value
        else:
            await a.call(b, offer)
            assert b.served.pop() == (a.name, offer)
    assert opened == [os.getpid()], "it is tried once"
    await turns_until(lambda: lent(a) == 0)
    assert b.lost.empty() and a.lost.empty()
    assert [r for r in caplog.records if "bytes are sent" in r.getMessage()]
    if not for_good:
        monkeypatch.undo()
        monkeypatch.setattr(lending, "_PAUSE_S", 0.0)
        for session in sessions(a):
            session._lending.stop(for_good=False)
        assert await pulled(b, a) == value if direction == "reply" else await a.call(b, offer)
        assert lent(a) == 2
        b.served.clear()


async def test_repeated_unopenable_lending_loses_the_peer(host: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await host.node(), await host.node()
    monkeypatch.setattr(mappings, "_open", hidden)
    monkeypatch.setattr(Lending, "stop", lambda self, *, for_good: None)
    Holder(a, pooled(a, MIB))
    with pytest.raises(PeerLost, match="keeps lending"):
        await b.call(a, pull())


def reference_to(fd: int, /, **changed: int) -> MemoryReference:
    found = os.fstat(fd)
    told = {"lease": 1, "fd": fd, "dev": found.st_dev, "ino": found.st_ino, "size": found.st_size, "offset": 0}
    return MemoryReference(**{"length": 10, **told, **changed})


def opened() -> set[tuple[str, str]]:
    """Descriptors and their files. Threads of other tests may open and close some."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_only_sealed_memory_is_opened(tmp_path: Path) -> None:
    mine = Pool(max_segments=4, max_idle_bytes=MIB)
    block = mine.allocate(MIB)
    assert block is not None
    region = block.origin.region  # type: ignore[union-attr]
    ours = Mappings(limit=4)
    back: list[mappings.Loan] = []
    good = reference_to(region.fd)
    refused: list[MemoryReference] = [
        reference_to(region.fd, ino=region.ino + 1),
        reference_to(region.fd, dev=region.dev + 1),
        reference_to(region.fd, size=region.size + 4096),
        reference_to(region.fd, fd=9999),
    ]
    (tmp_path / "file").write_bytes(bytes(MIB))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    reader, writer = os.pipe()
    unsealed, foreign = os.memfd_create("taskgraph"), os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB), os.ftruncate(foreign, MIB)
    files = (file, reader, writer, unsealed, foreign)
    refused += [reference_to(fd) for fd in files]
    before = opened()
    try:
        for reference in refused:
            with pytest.raises(CannotBorrow) as caught:
                ours.borrow(os.getpid(), reference, back.append)
            assert caught.value.for_good
        with pytest.raises(CannotBorrow, match="cannot be opened"):
            ours.borrow(2**30, good, back.append)
        assert len(ours) == 0 and back == [] and opened() <= before
        view = ours.borrow(os.getpid(), good, back.append)
        with pytest.raises(CannotBorrow, match="the reference says"):
            ours.borrow(os.getpid(), reference_to(region.fd, size=2 * MIB), back.append)
        assert not view.flags.writeable
        del view
        assert [(loan.lease, loan.length, loan.spoiled) for loan in back] == [(1, 10, False)]
    finally:
        for fd in files:
            os.close(fd)
    ours.close()
    del block
    mine.close()


def over(loan: mappings.Loan) -> None:
    loan.loans.discard(loan)


# What a peer may say.

GOOD = {"lease": 1, "dev": 1, "ino": 1, "size": 4096, "offset": 0, "fd": 3}


def told(**changed: int) -> bytes:
    values = {**GOOD, **changed}
    return struct.pack("!QQQQQI", *(values[name] for name in ("lease", "dev", "ino", "size", "offset", "fd")))


async def borrowing() -> Borrowing:
    found = Borrowing(asyncio.get_running_loop(), lambda leases: None, lambda: None)
    found.start(os.getpid(), Mappings(limit=2))
    return found


@pytest.mark.parametrize(
    ("data", "lengths", "why"),
    [
        (told(), [4097], "4097 bytes at 0 of 4096"),
        (told(), [0], "0 bytes at 0"),
        (told(offset=1), [4096], "at 1 of 4096"),
        (told(offset=2**64 - 1), [4096], "of 4096"),
        (told(size=0), [1], "of 0"),
        (told(size=2**63), [1], "a reference to"),
        (told(lease=0), [1], "lease 0"),
        (told(lease=2**63), [1], "lease 9223372036854775808"),
        (told()[:-1], [1], "1 references in a header of 43"),
        (b"", [1] * (MAX_LENT + 1), "the limit is"),
    ],
)
async def test_invalid_references_are_refused(data: bytes, lengths: list[int], why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        (await borrowing()).read(data, lengths)


async def test_invisible_process_lends_nothing() -> None:
    """A process in another PID namespace may see this one, but not the other way round."""
    back: list[bytes] = []
    ours = Borrowing(asyncio.get_running_loop(), back.append, lambda: None)
    with pytest.raises(CannotBorrow, match="not visible") as caught:
        ours.take(ours.read(told() + told(lease=2), [1, 1])[0])
    assert caught.value.for_good
    await asyncio.sleep(0)
    assert back == [struct.pack("!QQ", 1, 2)]


def given(lease: int, length: int = 4096, spoiled: bool = False) -> mappings.Loan:
    """Makes an ended loan."""
    found = mappings.Loan(np.zeros(1, np.uint8).view(Block))
    found.lease, found.length, found.spoiled, found.loans = lease, length, spoiled, set()
    return found


def packed(*leases: int) -> bytes:
    return struct.pack(f"!{len(leases)}Q", *leases)


async def test_leases_are_returned_together_and_soon() -> None:
    """A message of theirs alone would wake the process of the lender up."""
    back: list[bytes] = []
    several: list[int] = []
    ours = Borrowing(asyncio.get_running_loop(), back.append, lambda: several.append(len(back)))
    for lease in (1, 2, 3):
        ours.give_back(given(lease))
    assert several == []
    ours.give_back(given(4, spoiled=True))
    assert several == [0] and back == []
    ours.flush()
    assert back == [packed(1, 2, 3, 4 | 1 << 63)]
    for lease in range(5, 14):
        ours.give_back(given(lease))
    assert several == [0, 1], "it is told once"
    await turns_until(lambda: len(back) == 2)
    assert back[1] == packed(*range(5, 14))
    ours.give_back(given(14))
    await turns_until(lambda: len(back) == 3)


async def test_goodbye_returns_leases(host: Cluster) -> None:
    """Otherwise the memory that the leaving node has read would be spoiled."""
    a, b = await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB))
    first = place(holder.values[0].buffers[0])
    got = await pulled(b, a)
    holder.drop()
    a.served.clear()
    del got
    gc.collect()
    (session,) = sessions(b)
    await turns_until(lambda: session._borrowing._to_return or not lent(a))
    session.goodbye()
    await turns_until(lambda: lent(a) == 0)
    found = [pooled(a, MIB) for _ in range(3)]
    assert first in [place(one.buffers[0]) for one in found]


def test_unknown_lease_is_refused() -> None:
    ours = Lending(lambda: 0.0)
    for data in (bytes(7), struct.pack("!Q", 1), struct.pack("!Q", 1 << 63)):
        with pytest.raises(DecodeError):
            ours.take_returned(data)


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Head(FrameKind.RETURN, 0, 8), (), struct.pack("!Q", 77)),
        pack_whole(FrameKind.RETURN, 0, b"", b"a payload"),
        pack_frame(Head(FrameKind.RETURN, 0, 0, 1), (LENT | 5000,), b""),
        pack_frame(Head(FrameKind.REPLY, 1, 44, 1), (LENT | 5000,), told(size=4096)),
        pack_frame(Head(FrameKind.REPLY, 1, 44, 1), (LENT,), told(size=4096)),
        pack_frame(Head(FrameKind.REPLY, 1, 4, 1), (LENT | 5000,), bytes(4)),
        pack_frame(Head(FrameKind.REPLY, 1, 44, 1, 0, 5000, 0), (LENT | 5000,), told(size=8192)),
    ],
)
async def test_bad_references_end_the_session(host: Cluster, frame: bytes) -> None:
    a, b = await host.node(), await host.node()
    stuck = asyncio.Event()

    async def never(caller: str, call: m.Call) -> m.Reply:
        await stuck.wait()
        raise AssertionError

    a.handler = never
    waiting = asyncio.create_task(b.call(a, pull()))
    await turns_until(lambda: a.served)
    (session,) = sessions(a)
    session._write(frame)
    with pytest.raises(PeerLost):
        await waiting
    assert len(stream_of(b).mappings) == 0


async def test_closed_transport_frees_all_mappings(folder: Path) -> None:
    def traces() -> tuple[int, int]:
        files = Path("/proc/self/fd")
        shown = [os.readlink(files / name) for name in os.listdir(files) if (files / name).is_symlink()]
        maps = Path("/proc/self/maps").read_text()
        return sum("memfd:taskgraph" in name for name in shown), maps.count("memfd:taskgraph")

    gc.collect()
    before = traces()
    async with cluster_of("unix", folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        Holder(a, pooled(a, MIB, 2 * MIB))
        for _ in range(3):
            await pulled(b, a)
        assert traces() > before
        assert not [name for name in os.listdir("/dev/shm") if "taskgraph" in name]
        a.handler = b.handler
    cluster.nodes.clear()
    del a, b
    gc.collect()
    assert traces() == before
