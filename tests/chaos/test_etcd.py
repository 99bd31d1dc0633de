"""etcd killed, frozen, and without a member: nothing commits meanwhile, nobody is lost, no item twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos_kit import chaos, kill
from etcds_kit import etcds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_etcd_is_killed_and_comes_back_and_is_frozen_while_a_primary_dies(tmp_path: Path) -> None:
    async with etcds(tmp_path) as etcd, chaos("--nodes", "3", etcd=etcd.endpoints) as job:
        await job.began()
        await etcd.kill(0)
        await asyncio.sleep(1.0)
        await etcd.start(0)
        await job.until_epoch(job.epoch + 3)
        with etcd.frozen(0):
            kill(job.primary(0))
            await asyncio.sleep(8.0)  # four TTLs: every node pauses, and none that lives is taken for dead
        await job.settled(nodes=2)
        await job.finishes(failovers=1)


async def test_a_cluster_of_three_loses_its_leader_a_member_and_for_a_moment_its_majority(tmp_path: Path) -> None:
    async with etcds(tmp_path, 3) as cluster, chaos("--nodes", "3", etcd=cluster.endpoints) as job:
        await job.began()
        leader = await cluster.leader()
        await cluster.kill(leader)
        await job.until_epoch(job.epoch + 3)
        await cluster.start(leader)
        next_leader = await cluster.leader()
        member = next(i for i in range(3) if i not in (leader, next_leader))
        with cluster.frozen(member):
            await job.until_epoch(job.epoch + 3)
            await cluster.kill(leader)  # one is left that runs: nothing can be written
            await asyncio.sleep(1.0)
        await job.until_epoch(job.epoch + 3)
        kill(job.primary(0))
        await job.finishes(failovers=1)
