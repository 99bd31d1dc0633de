"""Connections that are reset, stalled and slow: between nodes and etcd, and between nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from chaos_kit import LIMIT_S, chaos, kill
from etcds_kit import etcds
from proxy_kit import proxy_to, switchboard

from taskgraph.transport.frames import HEAD_BYTES, MAGIC, PROTOCOL_VERSION, FrameKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FRAME = MAGIC + bytes((PROTOCOL_VERSION,))
SUM = b"\xc4\x10"
"""How MessagePack begins 16 bytes."""
FALSE, TRUE = 0xC2, 0xC3


async def test_connections_to_etcd_are_reset_slow_and_stalled_for_longer_than_a_lease(tmp_path: Path) -> None:
    async with (
        etcds(tmp_path) as etcd,
        proxy_to(etcd.endpoints) as proxy,
        chaos("--nodes", "3", etcd=proxy.endpoint, seen_etcd=etcd.endpoints) as job,
    ):
        await job.began()
        for _ in range(3):
            await proxy.until(8)  # three nodes and their launcher: calls, watches and leases
            proxy.reset()
            await job.until_epoch(job.epoch + 2)
        proxy.delay_s = 0.03
        await job.until_epoch(job.epoch + 5)
        proxy.delay_s = 0.0
        with proxy.stalled():
            await asyncio.sleep(4.0)  # two TTLs: every node pauses, every lease ends
        await job.until_epoch(job.epoch + 5)
        await job.finishes()


async def test_connections_between_nodes_are_reset_slow_and_stalled() -> None:
    async with (
        switchboard() as board,
        chaos("--nodes", "4", "--listen", "127.0.0.1", env=board.environment, ballast=20_000) as job,
    ):
        await job.began()
        async with asyncio.timeout(LIMIT_S):  # all that nodes say to each other passes here
            while len(between := [proxy for proxy in board.proxies if proxy.passed > 300_000]) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(5):
            assert sum(proxy.reset() for proxy in between) > 0
            await job.until_epoch(job.epoch + 3)
        for proxy in between[:2]:
            proxy.delay_s = 0.01
        await job.until_epoch(job.epoch + 5)
        with between[0].stalled(), between[2].stalled():
            await asyncio.sleep(2.5)  # longer than a TTL: who is silent and renews its lease is not dead
        await job.until_epoch(job.epoch + 5)
        kill(job.primary(0))
        await job.settled(nodes=3)
        await job.finishes(failovers=1)


async def test_bits_of_heads_and_headers_are_damaged_on_their_way() -> None:
    """A report's flag that ends the job, and a size that has its reader wait for 16 MiB that never come."""
    damaged: list[str] = []

    def damage(what: str, chunk: bytes) -> bytes:
        found = bytearray(chunk)
        at = chunk.find(FRAME)
        while at >= 0 and what not in damaged:
            header = at + HEAD_BYTES
            if what == "size" and chunk[at + 3] in (FrameKind.CALL, FrameKind.REPLY):
                found[at + 12] ^= 1
                damaged.append(what)
            elif what == "finish" and (report := chunk.find(b"Report", header, header + 16)) >= 0:
                finish = chunk.find(SUM, report) + 2 * (len(SUM) + 16)  # after the two sums
                if finish < len(chunk) and chunk[finish] in (FALSE, TRUE):
                    found[finish] ^= FALSE ^ TRUE
                    damaged.append(what)
            at = chunk.find(FRAME, at + 1)
        return bytes(found)

    async with (
        switchboard() as board,
        chaos("--nodes", "3", "--listen", "127.0.0.1", env=board.environment) as job,
    ):
        await job.began()
        await job.until_epoch(5)
        for what in ("finish", "size") * 3:
            damaged.clear()
            for proxy in board.proxies:
                proxy.damage = partial(damage, what)
            async with asyncio.timeout(LIMIT_S):
                while not damaged:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await job.until_epoch(job.epoch + 3)
        await job.finishes()
