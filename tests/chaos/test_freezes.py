"""Nodes that stand still for longer than their lease: others go on without them, and zombies are refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from chaos_kit import chaos, frozen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_zombie_wakes_up_in_the_middle_of_its_sentence_and_two_at_once() -> None:
    """Stopped just before it commits, or reports: what it says when it wakes is of a term that is over."""
    async with chaos("--nodes", "5", backups=2) as job:
        await job.began()
        for stage in ("commit", "done"):
            zombie, term = job.primary(0), job.view.term(0)
            job.inject(f"stop,{stage},task=0")
            try:
                await job.injected()
                await job.until("a successor", lambda view, term=term: view.term(0) > term)
                await job.until_epoch(job.epoch + 2)
            finally:
                os.kill(zombie.pid, signal.SIGCONT)
            await job.settled(nodes=5)  # it is one of them again
            assert zombie.pid in {node.pid for node in job.nodes()}, "it stepped down, and did not have to end"
        first, second, *_ = job.leads()
        terms = {task: job.view.term(task) for task in (first, second)}
        with frozen(job.primary(first), job.primary(second)):
            await job.until("successors", lambda view: all(view.term(task) > term for task, term in terms.items()))
        await job.settled(nodes=5)
        await job.finishes(failovers=4)


async def test_user_code_that_blocks_the_event_loop_loses_its_node_the_lease_and_the_job_nothing(
    tmp_path: Path,
) -> None:
    block = tmp_path / "block"
    async with chaos("--nodes", "4", block=block) as job:
        await job.began()
        (tmp_path / "now").write_text("4")
        (tmp_path / "now").rename(block)
        await job.until("a successor", lambda view: view.term(0) > 1)
        await job.finishes(failovers=1)
