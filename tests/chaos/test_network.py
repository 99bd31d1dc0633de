"""Connections that are reset, stalled and slow: between nodes and etcd, and between nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos_kit import chaos, kill
from etcds_kit import etcds
from proxy_kit import proxy_to, switchboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


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
        await job.until_epoch(5)
        between = sorted(board.proxies, key=lambda proxy: proxy.passed)[-4:]  # the others are of control services
        assert between[0].passed > 300_000, "all that nodes say to each other passes here"
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
