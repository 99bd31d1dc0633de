"""Memory lent between nodes of one host: given back by every reader before it is written again, or never written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
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
from taskgraph.settings import Settings
from taskgraph.transport import lending, mappings, outbox
from taskgraph.transport.frames import LENT, MAX_LENT, Head, Kind, pack_frame
from taskgraph.transport.lending import Borrowing, Lending
from taskgraph.transport.mappings import CannotBorrow, Mappings, Reference
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
    """A value in the node's pool."""
    views = []
    for size in sizes:
        block = node.transport.allocate(size)
        assert block is not None
        block[:] = fill
        views.append(block.data.toreadonly())
    buffers = tuple(views)
    return m.Encoded(meta, buffers, digest_of(meta, buffers))


class Holder:
    """Serves one value, as long as it has it."""

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


async def test_what_lies_in_the_pool_is_read_where_it_lies(host: Cluster) -> None:
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


async def test_what_is_lent_may_overtake_a_message_of_which_some_is_lent_and_some_travels(host: Cluster) -> None:
    """Its leases have larger numbers: that broke the session, as often as it came to that."""
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


async def test_a_part_of_a_block_is_lent_and_lent_on_as_that_part(host: Cluster) -> None:
    """From where it begins in the memory: also where it is all of what was borrowed."""
    a, b, c = await host.node(), await host.node(), await host.node()
    whole = pooled(a, MIB)
    block = block_behind(whole.buffers[0])
    assert block is not None
    block[:] = np.arange(MIB) % 251
    part = whole.buffers[0][300_000:800_000]
    Holder(a, m.Encoded(b"", (part,), digest_of(b"", (part,))))
    at_b = await pulled(b, a)
    Holder(b, at_b)
    at_c = await pulled(c, b)
    assert bytes(at_b.buffers[0]) == bytes(at_c.buffers[0]) == bytes(part)
    smaller = at_b.buffers[0][100_000:300_000]
    Holder(b, m.Encoded(b"", (smaller,), digest_of(b"", (smaller,))))
    assert bytes((await pulled(c, b)).buffers[0]) == bytes(part[100_000:300_000])
    assert place(at_c.buffers[0]) == place(whole.buffers[0]) + 300_000


async def test_a_value_of_all_kinds_of_buffers_arrives_in_order(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    first, second = pooled(a, MIB, fill=1), pooled(a, 2 * MIB, fill=2)
    views = (*first.buffers, *encoded(b"", bytes(100), os.urandom(200_000)).buffers, *second.buffers)
    value = m.Encoded(b"x" * 70_000, views, digest_of(b"x" * 70_000, views))
    Holder(a, value)
    assert await pulled(b, a) == value
    assert lent(a) == 2


async def test_an_empty_buffer_beside_a_lent_one_is_neither_lent_nor_missing(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    large = pooled(a, MIB, fill=7)
    buffers = (*large.buffers, memoryview(b""))
    value = m.Encoded(large.meta, buffers, digest_of(large.meta, buffers))
    Holder(a, value)
    got = await pulled(b, a)
    assert got == value and got.size_bytes == value.size_bytes and lent(a) == 1
    assert place(got.buffers[0]) == place(large.buffers[0])


@pytest.mark.parametrize("limit", ["MAX_LENT", "_MAX_LEASES"])
async def test_what_is_over_a_limit_is_sent(host: Cluster, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(outbox if limit == "MAX_LENT" else lending, limit, 2)
    a, b = await host.node(), await host.node()
    value = pooled(a, *[MIB] * 4, fill=7)
    Holder(a, value)
    got = await pulled(b, a)
    assert got == value and lent(a) == 2
    assert [place(buffer) for buffer in got.buffers[:2]] == [place(buffer) for buffer in value.buffers[:2]]


def test_what_was_never_sent_is_taken_back_with_all_its_buffers() -> None:
    memory = Pool(max_segments=4, max_idle_bytes=MIB)
    blocks = [memory.allocate(MIB) for _ in range(3)]
    ours = Lending(lambda: 0.0)
    ours.start()
    for call, block in zip((1, 1, 2), blocks, strict=True):
        assert block is not None and ours.lend(call, block.data)
    ours.take_back(1)
    assert len(ours) == 1
    ours.returned(struct.pack("!Q", 3))
    assert len(ours) == 0
    del blocks, block
    memory.close()


async def test_a_call_lends_what_it_carries(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    offer = m.Offer(m.Stamp(1, 7), 2, 3, True, False, 7, pooled(a, MIB, fill=9))
    await a.call(b, offer)
    assert b.served == [(a.name, offer)]
    assert lent(a) == 1
    b.served.clear()
    gc.collect()
    await turns_until(lambda: lent(a) == 0)


async def test_a_segment_takes_the_next_value_only_when_every_reader_gave_it_back(host: Cluster) -> None:
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
async def test_what_a_lost_reader_did_not_give_back_is_never_written_again(host: Cluster, how: str) -> None:
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


async def test_a_lent_value_beyond_the_readers_limit_ends_the_session(host: Cluster) -> None:
    a, b = await host.node(), await host.node(settings=Settings(max_value_bytes=MIB - 1))
    Holder(a, pooled(a, MIB))
    with pytest.raises(PeerLost):
        await b.call(a, pull())
    small = pooled(a, MIB // 2)
    Holder(a, small)
    assert await pulled(b, a) == small, "over the next session"


async def test_what_is_lent_on_goes_back_the_way_it_came(host: Cluster) -> None:
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


async def test_a_lost_reader_at_the_end_of_a_chain_spoils_the_segment_at_its_beginning(host: Cluster) -> None:
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


async def test_a_reply_nobody_waits_for_any_more_gives_its_memory_back(host: Cluster) -> None:
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


async def test_over_tcp_nothing_is_lent_and_what_arrives_lies_in_reused_memory(folder: Path) -> None:
    async with cluster_of("tcp", folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        Holder(a, value := pooled(a, MIB, fill=4))
        for _ in range(3):
            assert await pulled(b, a) == value
        assert lent(a) == 0
        pool(b).trim()
        assert 1 <= len(pool(b)) <= 2


# Memory that cannot be opened.


def hidden(pid: int, reference: Reference) -> mappings._Mapping:
    raise CannotBorrow("hidden", for_good=True)


@pytest.mark.parametrize("direction", ["reply", "call"])
@pytest.mark.parametrize("for_good", [True, False])
async def test_what_cannot_be_opened_travels_as_bytes(
    host: Cluster, monkeypatch: pytest.MonkeyPatch, direction: str, for_good: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await host.node(), await host.node()
    opened = []

    def refuse(pid: int, reference: Reference) -> mappings._Mapping:
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


async def test_of_pulls_in_one_frame_each_is_made_again_by_itself_where_its_item_cannot_be_opened(
    host: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again as the frame it came in, it would take the numbers of other calls."""
    a, b = await host.node(), await host.node()
    monkeypatch.setattr(mappings, "_open", hidden)
    Holder(a, encoded(b"small"))
    await pulled(b, a)  # a session is open now
    value = pooled(a, MIB, fill=8)
    Holder(a, value)
    several = msgspec.structs.replace(pull(), count=3)
    begun = b.transport.calls_now(a.peer, several)
    assert begun is not None
    a.served.clear()
    assert await asyncio.gather(*begun) == [item(several.each(number), value) for number in range(3)]
    assert {call.count for _, call in a.served if isinstance(call, m.Pull)} == {1}
    assert await pulled(b, a) == value, "later calls have numbers of their own"
    assert b.lost.empty() and a.lost.empty()


async def test_a_peer_that_goes_on_lending_what_cannot_be_opened_is_given_up(
    host: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await host.node(), await host.node()
    monkeypatch.setattr(mappings, "_open", hidden)
    monkeypatch.setattr(Lending, "stop", lambda self, *, for_good: None)
    Holder(a, pooled(a, MIB))
    with pytest.raises(PeerLost, match="keeps lending"):
        await b.call(a, pull())


def reference_to(fd: int, /, **changed: int) -> Reference:
    found = os.fstat(fd)
    told = {"lease": 1, "fd": fd, "dev": found.st_dev, "ino": found.st_ino, "size": found.st_size, "offset": 0}
    return Reference(**{"length": 10, **told, **changed})


def opened() -> set[tuple[str, str]]:
    """Number and file. What other tests left here, as threads of gRPC, may open and close some meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_nothing_but_sealed_anonymous_memory_of_ours_is_opened(tmp_path: Path) -> None:
    mine = Pool(max_segments=4, max_idle_bytes=MIB)
    block = mine.allocate(MIB)
    assert block is not None
    region = block.origin.region  # type: ignore[union-attr]
    ours = Mappings(limit=4)
    back: list[mappings.Loan] = []
    good = reference_to(region.fd)
    refused: list[Reference] = [
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


def test_no_more_mappings_than_allowed_and_idle_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Pool(max_segments=4, max_idle_bytes=8 * MIB)
    now = [100.0]
    ours = Mappings(limit=2, clock=lambda: now[0])
    blocks = [mine.allocate(2 * MIB) for _ in range(3)]  # each in memory of its own
    one, two, three = (reference_to(block.origin.region.fd) for block in blocks)  # type: ignore[union-attr]
    views = [ours.borrow(os.getpid(), reference, over) for reference in (one, two)]
    with pytest.raises(CannotBorrow) as caught:
        ours.borrow(os.getpid(), three, over)
    assert not caught.value.for_good
    del views[0]
    views.append(ours.borrow(os.getpid(), three, over))
    assert len(ours) == 2
    views.clear()
    ours.trim()
    assert len(ours) == 2, "they wait for the next loan"
    now[0] += mappings._IDLE_S + 1
    ours.trim()
    assert len(ours) == 0

    def too_many(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "open", too_many)
    with pytest.raises(CannotBorrow) as caught:
        ours.borrow(os.getpid(), one, over)
    assert not caught.value.for_good
    monkeypatch.undo()
    ours.close(), mine.close()


def test_a_mapping_that_was_read_for_long_waits_for_the_next_loan_all_the_same() -> None:
    mine = Pool(max_segments=4, max_idle_bytes=8 * MIB)
    now = [100.0]
    ours = Mappings(limit=2, clock=lambda: now[0])
    block = mine.allocate(MIB)
    assert block is not None
    view = ours.borrow(os.getpid(), reference_to(block.origin.region.fd), over)  # type: ignore[union-attr]
    for _ in range(3):
        now[0] += mappings._IDLE_S
        ours.trim()
    assert len(ours) == 1
    del view
    now[0] += mappings._IDLE_S - 1
    ours.trim()
    assert len(ours) == 1, "a moment ago somebody read it"
    now[0] += 2
    ours.trim()
    assert len(ours) == 0
    mine.close()


def test_the_mapping_that_was_lent_last_stays_where_one_must_go() -> None:
    mine = Pool(max_segments=4, max_idle_bytes=8 * MIB)
    now = [100.0]
    ours = Mappings(limit=2, clock=lambda: now[0])
    blocks = [mine.allocate(2 * MIB) for _ in range(3)]  # each in memory of its own
    one, two, three = (reference_to(block.origin.region.fd) for block in blocks)  # type: ignore[union-attr]
    for reference in (one, two, one, three):
        now[0] += 1
        del (view := [ours.borrow(os.getpid(), reference, over)])[:]
    assert set(ours._known) == {(one.dev, one.ino), (three.dev, three.ino)} and not view
    ours.close(), mine.close()


def test_what_is_borrowed_goes_back_also_when_nothing_is_mapped_any_more() -> None:
    mine, ours = Pool(max_segments=4, max_idle_bytes=8 * MIB), Mappings(limit=2)
    block = mine.allocate(MIB)
    assert block is not None
    block.fill(5)
    back: list[mappings.Loan] = []
    view = ours.borrow(os.getpid(), reference_to(block.origin.region.fd, lease=8), back.append)  # type: ignore[union-attr]
    ours.close()
    gc.collect()
    assert list(view[:2]) == [5, 5] and back == []
    del view
    assert [loan.lease for loan in back] == [8]
    mine.close()


async def test_a_mapping_is_idle_when_all_of_it_was_given_back(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB))
    first, second = await pulled(b, a), await pulled(b, a)
    ((_, mapping),) = stream_of(b).mappings._known.items()
    assert len(mapping.loans) == 2, "one for each time"
    holder.drop()
    a.served.clear()
    del first
    await turns_until(lambda: lent(a) == 1)
    assert len(mapping.loans) == 1
    del second
    assert not mapping.loans
    await turns_until(lambda: lent(a) == 0)


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
async def test_references_that_are_refused(data: bytes, lengths: list[int], why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        (await borrowing()).read(data, lengths)


async def test_references_stand_before_the_header() -> None:
    found, rest = (await borrowing()).read(told() + told(lease=2, offset=95) + b"header", [4096, 4001])
    assert rest == b"header"
    same = {"dev": 1, "ino": 1, "size": 4096, "fd": 3}
    assert found == [
        Reference(lease=1, offset=0, length=4096, **same),
        Reference(lease=2, offset=95, length=4001, **same),
    ]


async def test_a_process_that_cannot_be_seen_lends_nothing() -> None:
    """In another PID namespace it may see us, and we not it; and between hosts there is nothing to see."""
    back: list[bytes] = []
    ours = Borrowing(asyncio.get_running_loop(), back.append, lambda: None)
    with pytest.raises(CannotBorrow, match="not visible") as caught:
        ours.take(ours.read(told() + told(lease=2), [1, 1])[0])
    assert caught.value.for_good
    await asyncio.sleep(0)
    assert back == [struct.pack("!QQ", 1, 2)]


def given(lease: int, length: int = 4096, spoiled: bool = False) -> mappings.Loan:
    """A loan that is over."""
    found = mappings.Loan(np.zeros(1, np.uint8).view(Block))
    found.lease, found.length, found.spoiled, found.loans = lease, length, spoiled, set()
    return found


def packed(*leases: int) -> bytes:
    return struct.pack(f"!{len(leases)}Q", *leases)


async def test_some_are_given_back_together_and_none_waits_for_long() -> None:
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


async def test_several_go_back_with_the_next_reply_to_their_lender(
    host: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply wakes the other process up anyway."""
    monkeypatch.setattr(lending, "_LATE_S", 1000.0)
    a, b = await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB))
    Holder(b, pooled(b, MIB))
    for count in range(1, 4):
        await pulled(b, a)
        gc.collect()
        await turns_until(lambda count=count: sum(len(s._borrowing._back) for s in sessions(b)) == count)
    await pulled(a, b)
    assert lent(a) == 3, "not enough of them to be worth a message"
    await pulled(b, a)
    gc.collect()
    await turns_until(lambda: stream_of(b).returning)
    assert lent(a) == 4
    await pulled(a, b)
    await turns_until(lambda: lent(a) == 0)
    assert not stream_of(b).returning
    for _ in range(4):
        await pulled(b, a)
    gc.collect()
    await turns_until(lambda: stream_of(b).returning)
    holder.drop()
    await a.transport.close()
    await turns_until(lambda: not stream_of(b).returning)


async def test_who_is_never_asked_gives_several_back_by_itself(host: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call lent: no reply goes the same way as its leases, and nobody waits for another one."""
    monkeypatch.setattr(lending, "_LATE_S", 1000.0)
    a, b = await host.node(), await host.node()
    for epoch in range(4):
        await a.call(b, m.Offer(m.Stamp(1, epoch), 2, 3, True, False, 7, pooled(a, MIB)))
    assert lent(a) == 4
    b.served.clear()
    gc.collect()
    await turns_until(lambda: lent(a) == 0)


async def test_large_ones_are_given_back_at_once() -> None:
    back: list[bytes] = []
    ours = Borrowing(asyncio.get_running_loop(), back.append, lambda: None)
    ours.give_back(given(1))
    ours.give_back(given(2, 8 * MIB))
    await asyncio.sleep(0)
    assert back == [packed(1, 2)]
    ours.give_back(given(3))
    await asyncio.sleep(0)
    assert back == [packed(1, 2)], "it is counted anew"


async def test_what_another_thread_gives_back_does_not_wait() -> None:
    back: list[bytes] = []
    ours = Borrowing(asyncio.get_running_loop(), back.append, lambda: None)
    await asyncio.to_thread(ours.give_back, given(1))
    await turns_until(lambda: back)
    assert back == [packed(1)]


async def test_a_goodbye_gives_back_what_waits(host: Cluster) -> None:
    """Else what the one who leaves does not read any more would never be written again."""
    a, b = await host.node(), await host.node()
    holder = Holder(a, pooled(a, MIB))
    first = place(holder.values[0].buffers[0])
    got = await pulled(b, a)
    holder.drop()
    a.served.clear()
    del got
    gc.collect()
    (session,) = sessions(b)
    await turns_until(lambda: session._borrowing._back or not lent(a))
    session.goodbye()
    await turns_until(lambda: lent(a) == 0)
    found = [pooled(a, MIB) for _ in range(3)]
    assert first in [place(one.buffers[0]) for one in found]


def test_leases_that_were_never_lent_are_refused() -> None:
    ours = Lending(lambda: 0.0)
    for data in (bytes(7), struct.pack("!Q", 1), struct.pack("!Q", 1 << 63)):
        with pytest.raises(DecodeError):
            ours.returned(data)


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Head(Kind.RETURN, 0, 8), (), struct.pack("!Q", 77)),
        pack_whole(Kind.RETURN, 0, b"", b"a payload"),
        pack_frame(Head(Kind.RETURN, 0, 0, 1), (LENT | 5000,), b""),
        pack_frame(Head(Kind.REPLY, 1, 44, 1), (LENT | 5000,), told(size=4096)),
        pack_frame(Head(Kind.REPLY, 1, 44, 1), (LENT,), told(size=4096)),
        pack_frame(Head(Kind.REPLY, 1, 4, 1), (LENT | 5000,), bytes(4)),
        pack_frame(Head(Kind.REPLY, 1, 44, 1, 0, 5000, 0), (LENT | 5000,), told(size=8192)),
    ],
)
async def test_a_peer_that_says_nonsense_loses_its_session_and_nothing_is_mapped(host: Cluster, frame: bytes) -> None:
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


async def test_nothing_is_left_open_or_mapped(folder: Path) -> None:
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


async def test_garbage_that_another_thread_finds_just_as_the_loop_is_closed_is_nobodys_error() -> None:
    """A finalizer has nobody to tell: what it raises is printed in the middle of anything."""

    class Closing:
        is_closed = staticmethod(lambda: False)

        def call_soon_threadsafe(self, *_: object) -> None:
            raise RuntimeError("Event loop is closed")

    borrowing = Borrowing(cast(asyncio.AbstractEventLoop, Closing()), lambda leases: None, lambda: None)
    await asyncio.to_thread(borrowing.give_back, given(1))


async def test_leases_come_back_also_where_there_are_more_than_the_receive_buffer_holds(host: Cluster) -> None:
    a, b = await host.node(), await host.node()
    Holder(a, pooled(a, MIB))
    await pulled(b, a)
    (lends,), (borrows,) = sessions(a), sessions(b)
    leases = range(1 << 20, (1 << 20) + 30_000)
    block: Any = SimpleNamespace(origin=None)
    lends._lending._lent.update(dict.fromkeys(leases, (block, 0)))
    borrows._return(b"".join(struct.pack("!Q", lease) for lease in leases))
    await turns_until(lambda: lent(a) < 2)
