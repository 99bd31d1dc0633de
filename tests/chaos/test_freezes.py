"""Nodes that stand still for longer than their lease: others go on without them, and zombies are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from chaos_kit import chaos, frozen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_zombie_wakes_up_in_the_middle_of_its_sentence_and_two_at_once() -> None:
    """Stopped just before it commits, or reports: what it says when it wakes is of a term that is over."""
    async with chaos("--nodes", "5", backups=2) as job:
        await job.began()
        for stage in ("commit", "done"):
            nodes, term = job.nodes(), job.view.term(0)
            job.inject(f"stop,{stage},task=0")
            try:
                await job.injected()
                await job.until("a successor", lambda view, term=term: view.term(0) > term)
                await job.until_epoch(job.epoch + 2)
            finally:
                for node in nodes:  # one of them stands still
                    os.kill(node.pid, signal.SIGCONT)
            await job.settled(nodes=5)  # it is one of them again
            assert {node.pid for node in nodes} == {node.pid for node in job.nodes()}, "it did not have to end"
        first, second, *_ = job.leads()
        terms = {task: job.view.term(task) for task in (first, second)}
        with frozen(job.primary(first), job.primary(second)):
            await job.until("successors", lambda view: all(view.term(task) > term for task, term in terms.items()))
        await job.settled(nodes=5)
        await job.finishes(failovers=4)


async def test_a_frozen_primary_is_succeeded_when_its_lease_ends_and_not_when_etcd_deletes_its_key() -> None:
    """etcd looks for leases that have ended twice a second: freezes here end at any time between two looks."""
    ahead = 0
    async with chaos("--nodes", "4", ttl_s=3.0) as job:
        await job.began()
        number = 0
        while number < 6 or ahead < 2:  # else etcd looked first, each time
            await asyncio.sleep(0.17 * (number % 6))
            task = number % 7
            number += 1
            victim, term, at = job.view.primaries[task].record.node, job.view.term(task), job.epoch
            lease = job.view.nodes[victim].record.lease
            with frozen(job.primary(task)):
                alive_at = await job.last_second_of(lease) + 1.0
                await job.until("a successor", lambda view, task=task, term=term: view.term(task) > term)
                assert time.monotonic() > alive_at, "its lease had not ended"
                ahead += victim in job.view.nodes
                await job.until_epoch(at + 2)
            await job.settled(nodes=4)
        await job.finishes(failovers=6)


async def test_user_code_that_blocks_the_event_loop_loses_its_node_the_lease_and_the_job_nothing(
    tmp_path: Path,
) -> None:
    block = tmp_path / "block"
    async with chaos("--nodes", "4", block=block) as job:
        await job.began()
        term = job.view.term(0)
        block.touch()
        try:
            await job.until("a successor", lambda view: view.term(0) > term)
        finally:
            for blocks in tmp_path.iterdir():  # noqa: ASYNC240
                blocks.unlink()
        await job.finishes(failovers=1)
