"""What the transport in memory adds for tests and simulations: seeds, cuts, crashes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from transport_kit import Node, cluster_of, pull

from taskgraph.errors import PeerGone, PeerLost, TransportError
from taskgraph.protocol import messages as m
from taskgraph.transport.memory import MemoryNetwork, MemoryTransport


async def order_of(seed: int | None) -> list[int]:
    network = MemoryNetwork(random.Random(seed) if seed is not None else None)
    a, b = [await Node(name, MemoryTransport(network)).start() for name in "ab"]
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(a.call(b, m.Seal(m.Stamp(1, 1), number, 1)))
    await a.transport.close()
    await b.transport.close()
    return [call.task for _, call in b.served]


async def test_seed_decides_the_order() -> None:
    assert await order_of(None) == list(range(20))
    assert await order_of(1) == await order_of(1) != list(range(20))
    assert await order_of(1) != await order_of(2)


async def test_cut_link_loses_calls_until_healed(folder: Path) -> None:
    async with cluster_of("memory shuffled", folder) as cluster:
        a, b, c = [await cluster.node() for _ in range(3)]
        entered = asyncio.Event()
        ended = asyncio.Event()

        async def waits(caller: str, call: m.Call) -> m.Reply:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        b.handler = waits
        waiting = asyncio.ensure_future(a.call(b, pull()))
        await entered.wait()
        cluster.network.cut(a.name, b.name)
        with pytest.raises(PeerLost, match="cut"):
            await waiting
        await ended.wait()
        assert await a.lost.get() == b.name and await b.lost.get() == a.name
        with pytest.raises(PeerLost):
            await a.call(b, pull())
        with pytest.raises(PeerLost):
            await b.transport.probe(a.peer, timeout_s=1)
        b.handler = b._accept
        assert await c.call(b, m.Seal(m.Stamp(1, 1), 1, 1)) == m.Accepted(1)
        cluster.network.heal(a.name, b.name)
        assert await a.call(b, m.Seal(m.Stamp(1, 1), 1, 1)) == m.Accepted(1)


async def test_crashed_node_makes_no_calls(folder: Path) -> None:
    async with cluster_of("memory", folder) as cluster:
        a, b = await cluster.node(), await cluster.node()
        cluster.network.crash(a.name)
        cluster.network.crash(a.name)
        for target in (a, b):
            with pytest.raises(PeerLost, match="crashed"):
                await a.call(target, pull())
        with pytest.raises(PeerGone):
            await b.call(a, pull())
        assert b.lost.empty()  # they never spoke


async def test_node_name_is_unique(folder: Path) -> None:
    async with cluster_of("memory", folder) as cluster:
        a = await cluster.node()
        with pytest.raises(TransportError, match="exists"):
            await MemoryTransport(cluster.network).start(a.name, a, print)
        with pytest.raises(RuntimeError, match="already"):
            await a.transport.start("other", a, print)
