"""The etcd client while etcd is killed, stopped, restarted, or not there at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from etcd_kit import following
from kept_kit import KeptEtcd
from processes_kit import becomes, free_port, kill, stopped

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.launch.submit import submit
from taskgraph.protocol.kv import Compare, Delete, Get, Put, Txn

_LATE = 10.0
"""What ends at a limit may take so many times as long on a busy machine."""


def put(key: str, value: bytes = b"", lease: int = 0) -> Txn:
    return Txn(success=(Put(key, value, lease),))


@pytest.mark.smoke
async def test_etcd_restart_loses_no_event(tmp_path: Path) -> None:
    port = free_port()
    etcd = KeptEtcd(tmp_path / "data", port=port)
    await etcd.start()
    async with await EtcdCoordinator.connect(etcd.endpoint, timeout_s=10) as node:
        lease = await node.lease(5.0, stall_limit_s=60.0)
        start = (await node.txn(put("/leased", b"", lease.id))).revision
        revisions = [start]
        async with following(node, "/", start) as follower:
            for round_ in range(2):
                revisions += [(await node.txn(put(f"/{round_}/{number}"))).revision for number in range(20)]
                await kill(etcd.pid)
                await etcd.stop()
                await asyncio.sleep(0.5)  # long enough for a renewal and a reconnection to fail
                etcd = KeptEtcd(tmp_path / "data", port=port)
                await etcd.start()
                # What happens before the watch is back must reach it, too. Reads tell when the client is back.
                await node.get("/leased")
                revisions.append((await node.txn(put("/after", b"%d" % round_))).revision)
            await follower.until(revisions[-1])
            assert follower.revisions == revisions
        await becomes(lambda: lease.valid_until() - node.now() > 3.5)  # answered again
        assert not lease.lost() and await node.get("/leased") is not None
        await lease.close(revoke=True)
        assert await node.get("/leased") is None
    await etcd.stop()


async def test_an_etcd_that_comes_back_without_its_data_is_told_by_a_watch_and_a_listing(tmp_path: Path) -> None:
    """Who only lists, as `status --watch`, saw what it had seen before, for ever."""
    port, seen = free_port(), [0]
    etcd = KeptEtcd(tmp_path / "data", port=port)
    await etcd.start()
    async with await EtcdCoordinator.connect(etcd.endpoint, timeout_s=10) as node:

        async def watch() -> None:
            async for batch in node.watch("/", 1):
                seen[0] = batch.revision

        watching = asyncio.ensure_future(watch())
        for number in range(20):
            last = (await node.txn(put(f"/{number}"))).revision
        await becomes(lambda: seen[0] == last)
        await kill(etcd.pid)
        await etcd.stop()
        async with KeptEtcd(tmp_path / "other", port=port), asyncio.timeout(60):
            with pytest.raises(CoordinationError, match=f"lost what it had acknowledged: it was at revision {last}"):
                await watching
            with pytest.raises(CoordinationError, match=f"lost what it had acknowledged: it was at revision {last}"):
                await node.list("/")


async def test_an_etcd_whose_space_is_used_up_is_told_with_the_way_out() -> None:
    quota = ("--quota-backend-bytes", str(8 << 20))
    spec = JobSpec.local(tg.Job(tasks=1, epochs=1, builder=tg.Task, name="full"))
    async with (
        KeptEtcd(arguments=quota) as etcd,
        await EtcdCoordinator.connect(etcd.endpoint) as node,
    ):
        # etcd looks at the size of its file, which it brings up to date ten times a second: where writes are quick,
        # any number of them fits in between.
        async with asyncio.timeout(60):
            told = ""
            while "space exceeded" not in told:
                try:
                    await node.txn(put("/filler", os.urandom(1 << 20)))
                except OutcomeUnknown as error:
                    told = str(error)
        async with asyncio.timeout(60):
            with pytest.raises(OutcomeUnknown, match=r"it accepts no writes .*alarm disarm.*`taskgraph forget JOB`"):
                await submit(node, spec)


def has_unread(endpoint: str, count: int) -> bool:
    """Whether as many bytes have come to a connection of this server, and it has not read them."""
    here = f":{int(endpoint.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(here) and row[3] == "01" and int(row[4].partition(":")[2], 16) >= count for row in rows)


async def test_a_write_cut_off_in_the_middle_is_unknown_and_one_that_cannot_leave_is_unavailable(
    tmp_path: Path,
) -> None:
    etcd = KeptEtcd(tmp_path / "data")
    await etcd.start()
    async with await EtcdCoordinator.connect(etcd.endpoint, timeout_s=2) as node:
        await node.txn(put("/a"))
        with stopped(etcd.pid):
            writing = asyncio.create_task(node.txn(put("/b", bytes(20_000))))
            # Sent into the socket of a process that does not read it. The connection's own frames are some bytes.
            await becomes(lambda: has_unread(etcd.endpoint, 10_000))
            await kill(etcd.pid)
        with pytest.raises(OutcomeUnknown, match="transaction on /b"):
            await writing
        # A read first: gRPC may take a moment to know that the connection is gone, and a write that is sent into it
        # until then is unknown, too.
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: node.get("/a"),
            lambda: node.txn(put("/c")),
            lambda: node.txn(Txn(success=(Get("/a"),))),
        ]
        for call in calls:
            started = time.monotonic()
            with pytest.raises(Unavailable, match="no usable answer"):
                await call()
            assert 1.5 < time.monotonic() - started < 2 * _LATE
    await etcd.stop()


async def test_an_etcd_that_stops_answering_makes_writes_unknown_and_reads_unavailable(tmp_path: Path) -> None:
    async with (
        EmbeddedEtcd() as etcd,
        await EtcdCoordinator.connect(etcd.endpoint, timeout_s=1) as node,
    ):
        await node.txn(put("/a"))
        with stopped(etcd.pid):
            with pytest.raises(OutcomeUnknown):
                await node.txn(put("/b"))
            with pytest.raises(Unavailable):
                await node.get("/a")


async def test_nothing_listening_is_said_within_seconds_and_how_to_start_an_etcd() -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(Unavailable) as raised:
        await EtcdCoordinator.connect(f"127.0.0.1:{port}", timeout_s=0.6)
    assert time.monotonic() - started < 0.6 * _LATE
    for part in (f"127.0.0.1:{port}", "refused", "start one (`etcd`)", "leave --etcd out"):
        assert part in str(raised.value)


async def test_unknown_host_of_etcd_is_named_in_short() -> None:
    with pytest.raises(Unavailable, match=r"^No etcd answers at a\.\.b:2379 \(no host has that name\): start one"):
        await EtcdCoordinator.connect("a..b:2379", timeout_s=0.6)


async def test_something_that_accepts_and_stays_silent_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="no usable answer"):
            await EtcdCoordinator.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.8)
        assert time.monotonic() - started < 0.8 * _LATE


@contextlib.contextmanager
def silent_endpoint() -> Iterator[str]:
    """Its kernel takes connections, and nobody ever says anything."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"127.0.0.1:{silent.getsockname()[1]}"


@contextlib.asynccontextmanager
async def far_away(endpoint: str, connecting_s: float) -> AsyncIterator[str]:
    """A way to `endpoint` on which a connection takes so long, as many round trips of TLS do behind a slow link."""
    host, _, port = endpoint.rpartition(":")

    async def pipe(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                to.write(data)
        to.close()

    async def serve(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.closing(to):
            await asyncio.sleep(connecting_s)
            there_source, there = await asyncio.open_connection(host, int(port))
            with contextlib.closing(there):
                await asyncio.gather(pipe(source, there), pipe(there_source, to))

    async with asyncio.TaskGroup() as group:
        served: list[asyncio.Task[None]] = []
        server = await asyncio.start_server(lambda *ends: served.append(group.create_task(serve(*ends))), "127.0.0.1")
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for each in served:
            each.cancel()


@pytest.mark.parametrize("several", [False, True])
async def test_an_etcd_to_which_a_connection_takes_longer_than_a_second_can_be_used(
    embedded_etcd, several: bool
) -> None:
    """Each attempt was given up after one, whatever the link; with several the other one is asked meanwhile."""
    async with (
        far_away(embedded_etcd.endpoint, 1.2) as far,
        far_away(embedded_etcd.endpoint, 1.2) as other,
        await EtcdCoordinator.connect([far, other] if several else far) as node,
    ):
        start = (await node.txn(put("/far/a"))).revision
        async with following(node, "/far/", start) as follower:
            await follower.until(start)


async def test_a_client_moves_to_the_other_endpoint_when_its_own_dies(tmp_path: Path) -> None:
    # Two clusters stand in for two members: the client cannot tell, as long as the keys agree. Their ids do: they are
    # made of the addresses for peers.
    first, second = (KeptEtcd(tmp_path / name, private=True) for name in "12")
    await first.start()
    await second.start()
    async with (
        await EtcdCoordinator.connect(second.endpoint) as direct,
        await EtcdCoordinator.connect([first.endpoint, second.endpoint]) as node,
    ):
        start = (await node.txn(put("/a"))).revision
        assert (await direct.txn(put("/a"))).revision == start
        async with following(node, "/", start) as follower:
            await follower.until(start)
            await kill(first.pid)
            # A write sent before the client hears of the death would be of unknown outcome; a read just moves on.
            assert await node.get("/a") is not None
            revision = (await node.txn(Txn((Compare("/a", start),), (Delete("/a"),)))).revision
            await follower.until(revision)
            assert follower.revisions == [start, revision]
    await first.stop()
    await second.stop()


async def test_a_member_that_freezes_is_left_by_writes_reads_and_watches(tmp_path: Path) -> None:
    # Two clusters stand in for two members, as above. The kernel of a frozen one keeps its connections.
    async with (
        EmbeddedEtcd(private=True) as first,
        EmbeddedEtcd(private=True) as second,
        await EtcdCoordinator.connect(second.endpoint) as direct,
        await EtcdCoordinator.connect([first.endpoint, second.endpoint], timeout_s=12) as node,
    ):
        start = (await node.txn(put("/a"))).revision
        assert (await direct.txn(put("/a"))).revision == start
        async with following(node, "/", start) as follower:
            await follower.until(start)
            with stopped(first.pid):
                began = time.monotonic()
                with pytest.raises(OutcomeUnknown):
                    await node.txn(put("/b"))
                revision = (await node.txn(put("/c"))).revision
                await follower.until(revision)
                assert time.monotonic() - began < 12.0, "the other member is asked long before all time is over"
                assert follower.revisions == [start, revision]


async def test_a_lease_is_closed_in_time_when_etcd_is_silent(tmp_path: Path) -> None:
    async with EmbeddedEtcd() as etcd, await EtcdCoordinator.connect(etcd.endpoint, timeout_s=1) as node:
        lease = await node.lease(2.0, stall_limit_s=60.0)
        with stopped(etcd.pid):
            started = time.monotonic()
            await lease.close(revoke=True)
            assert time.monotonic() - started < 1 * _LATE


async def test_busy_main_loop_keeps_its_lease(embedded_etcd) -> None:
    async with await EtcdCoordinator.connect(embedded_etcd.endpoint) as node:
        lease = await node.lease(4.0, stall_limit_s=60.0)
        await node.txn(put("/busy", b"", lease.id))
        granted_until = lease.valid_until()
        while node.now() < granted_until + 0.5:  # the loop does nothing else: that is the point
            time.sleep(0.1)  # noqa: ASYNC251
        assert lease.valid_until() > node.now() and not lease.lost()
        assert await node.get("/busy") is not None
        await lease.close(revoke=True)


async def test_listing_is_of_one_revision(embedded_etcd) -> None:
    """A listing of many keys is read in several pages, while others write."""
    keys = [f"/pages/{number:04}" for number in range(1000)]
    async with await EtcdCoordinator.connect(embedded_etcd.endpoint) as node:
        for begin in range(0, len(keys), 100):
            await node.txn(Txn(success=tuple(Put(key, b"0") for key in keys[begin : begin + 100])))
        ended = False

        async def write() -> None:
            number = 0
            while not ended:
                number += 1
                await node.txn(Txn(success=tuple(Put(key, b"%d" % number) for key in (keys[0], keys[-1]))))

        writing = asyncio.create_task(write())
        for _ in range(20):
            listing = await node.list("/pages/")
            assert [kv.key for kv in listing.items] == keys
            assert listing.items[0].value == listing.items[-1].value
        ended = True
        await writing
