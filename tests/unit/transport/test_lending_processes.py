"""Memory lent between real processes: what one still reads stays as it is, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_kit import JOB, TOKEN, turns_until

from taskgraph.errors import TransportError
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.values import decode, encode, verify
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.transport.api import Peer
from taskgraph.transport.stream import StreamTransport

MIB = 1 << 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is lent on Linux only"),
]


@asynccontextmanager
async def child(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Peer]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("lending_node.py")),
        str(folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        endpoint = (await process.stdout.readline()).decode().strip()
        yield process, Peer("child", (endpoint,))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport = process._transport  # type: ignore[attr-defined]
        transport.close()


@asynccontextmanager
async def node(folder: Path, name: str = "me") -> AsyncIterator[StreamTransport]:
    async def serve(caller: str, call: m.Call) -> m.Reply:
        raise AssertionError

    transport = StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, unix_dir=folder, tcp_host=None)
    await transport.start(name, serve, lambda node: None)
    try:
        yield transport
    finally:
        await transport.close()


async def pull(transport: StreamTransport, peer: Peer, epoch: int, tag: str) -> m.Encoded:
    reply = await transport.call(peer, m.Pull(m.Stamp(1, epoch), 0, 1, 1, tag), timeout_s=20)
    assert isinstance(reply, m.Item)
    return reply.value


def place(value: m.Encoded) -> int:
    block = block_behind(value.buffers[0])
    assert block is not None, "it travelled as bytes"
    origin: Any = block.origin
    return int(origin.region.ino << 40 | origin.offset)


async def test_processes_reuse_segments(folder: Path) -> None:
    """Returned memory is reused and kept memory is not, in 60 epochs."""
    async with child(folder) as (_, peer), node(folder) as me:
        places: list[int] = []
        kept: dict[int, np.ndarray] = {}
        for epoch in range(60):
            value = await pull(me, peer, epoch, str(3 * MIB))
            array = decode(value)
            assert int(array.min()) == int(array.max()) == epoch
            places.append(place(value))
            if epoch % 10 == 0:
                kept[epoch] = array
            del value, array
        assert len(set(places)) <= 10
        assert all(int(array.min()) == int(array.max()) == epoch for epoch, array in kept.items())


async def test_memory_of_a_killed_lender_stays_readable(folder: Path) -> None:
    async with child(folder) as (process, peer), node(folder) as me:
        value = await pull(me, peer, 7, str(4 * MIB))
        assert place(value)
        view = decode(value)[::4096]
        del value
        process.send_signal(signal.SIGKILL)
        await process.wait()
        with pytest.raises(TransportError):
            await pull(me, peer, 8, "1")
        assert set(view.tolist()) == {7}


async def test_memory_of_a_killed_borrower_is_not_reused(folder: Path) -> None:
    async with node(folder) as me:
        async with child(folder) as (process, peer):
            value = encode(np.full(MIB, 9, np.uint8), allocate=me.allocate)
            first = place(value)
            await me.call(peer, m.Offer(m.Stamp(1, 1), 1, 1, True, False, 1, value), timeout_s=20)
            (session,) = me._connections
            assert len(session._lending) == 1
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await turns_until(lambda: not me._connections)
        del value
        found = [encode(np.zeros(MIB, np.uint8), allocate=me.allocate) for _ in range(4)]
        assert first not in [place(value) for value in found]


async def test_frozen_reader_keeps_its_memory(folder: Path) -> None:
    """A stopped process returns nothing, and sees unchanged bytes when it continues."""
    async with node(folder) as me, child(folder) as (process, peer):
        value = encode(np.full(MIB, 9, np.uint8), allocate=me.allocate)
        first = place(value)
        await me.call(peer, m.Offer(m.Stamp(1, 1), 1, 1, True, False, 1, value), timeout_s=20)
        process.send_signal(signal.SIGSTOP)
        del value
        found = [encode(np.zeros(MIB, np.uint8), allocate=me.allocate) for _ in range(4)]
        assert first not in [place(value) for value in found]
        process.send_signal(signal.SIGCONT)
        await pull(me, peer, 1, "1")  # it drops what it kept
        (session,) = me._connections
        await turns_until(lambda: not len(session._lending))


@pytest.mark.parametrize("pid", [0, 1 << 29])
async def test_invisible_process_gets_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """The kernel refuses to open the descriptors of the other process."""
    from taskgraph.transport import endpoints

    async with child(folder) as (_, peer):
        monkeypatch.setattr("taskgraph.transport.session.peer_pid", lambda sock: pid)
        assert endpoints.peer_pid(None) == 0
        async with node(folder) as me:
            value = await pull(me, peer, 3, str(MIB))
            assert int(decode(value).sum()) == 3 * MIB
            assert len(me.mappings) == 0
            value = await pull(me, peer, 4, str(MIB))
            assert int(decode(value).sum()) == 4 * MIB


async def test_killed_process_leaves_nothing_on_the_host(folder: Path) -> None:
    async with child(folder) as (process, peer), node(folder) as me:
        for epoch in range(4):
            await pull(me, peer, epoch, str(2 * MIB))
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert not [name for name in os.listdir("/dev/shm") if "taskgraph" in name]
