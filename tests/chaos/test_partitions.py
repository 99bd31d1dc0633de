"""Hosts that cannot reach each other, or etcd, or only one way: silence on a network that drops without a word.

Needs root: the hosts are network namespaces of this one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos_kit import chaos
from etcds_kit import etcds
from netns_kit import both, network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ETCD = 9


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if why := why_not():
        pytest.skip(why)


async def test_partitions_between_nodes_and_etcd_and_between_nodes_both_ways_and_one(tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    async with (
        network(3, ETCD) as net,
        etcds(tmp_path, host=net.address(ETCD), prefix=net.command_on(ETCD)) as etcd,
        chaos(
            *("--nodes", "1", "--listen", net.address(1), "--insecure-listen", "--token-file", token),
            etcd=etcd.endpoints,
            python=net.on(1),
            ping_s=0.5,
        ) as job,
    ):
        await job.began()
        others = [
            await job.reinforce(
                1,
                *("--listen", net.address(host), "--insecure-listen"),
                *("--etcd", etcd.endpoints, "--token-file", token),
                python=net.on(host),
            )
            for host in (2, 3)
        ]
        await job.settled(nodes=3)

        term = job.view.term(0)
        leader = next(host for host in (1, 2, 3) if net.address(host) in " ".join(job.primary(0).endpoints))
        with net.cut(*both(leader, ETCD)):  # longer than its lease: others take over, and it cannot commit
            await job.until("a successor", lambda view: view.term(0) > term)
            await job.until_epoch(job.epoch + 3)
        await job.settled(nodes=3)

        for ways in (both(1, 2), ((2, 3),), ((3, 1), (2, 1))):
            with net.cut(*ways):  # nobody loses its lease: the epoch waits for the network
                await asyncio.sleep(2.5)
            await job.until_epoch(job.epoch + 3)

        for ways in (((2, ETCD),), ((ETCD, 3),)):  # requests do not arrive; answers do not come back
            with net.cut(*ways):
                await asyncio.sleep(3.0)
            await job.settled(nodes=3)
            await job.until_epoch(job.epoch + 3)

        await job.finishes(failovers=1)
        for other in others:
            await other.done()
