"""Nodes are killed, drained and frozen while several epochs of their tasks are in flight: not a bit differs."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from chaos_kit import chaos, frozen, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def said(folder: Path) -> set[str]:
    """By how many epochs some task was ahead of one that was not through; it is forgotten then."""
    words = list(folder.iterdir())
    for word in words:
        word.unlink()
    return {word.name.split()[2] for word in words}


def several(ahead: set[str]) -> bool:
    """Whether more than two epochs were in flight, as far as the cores allowed, and never more than may be."""
    return bool(ahead & {"2", "3"}) and ahead <= {"1", "2", "3"}


async def test_epochs_in_flight_end_with_their_node_and_are_worked_on_elsewhere(tmp_path: Path) -> None:
    chance = random.Random(1)
    async with chaos("--nodes", "5", flying=True, seen=tmp_path, ttl_s=1.5) as job:
        await job.began()
        stages = chance.sample(["compose", "processor", "sync", "snapshot", "done"], 2)
        for left, stage, task in zip((4, 3), stages, chance.sample(range(7), 2), strict=True):
            job.inject(f"kill,{stage},task={task}")
            await job.injected()
            await job.settled(nodes=left)
        relief = await job.reinforce(1)
        await job.settled(nodes=4)
        assert several(said(tmp_path))
        kill(job.primary(chance.randrange(7)), number=signal.SIGTERM)
        await job.settled(nodes=3)
        task = chance.choice(job.leads())
        term = job.view.term(task)
        with frozen(job.primary(task)):
            await job.until("a successor", lambda view: view.term(task) > term)
            await job.until_epoch(job.epoch + 5)
        await job.settled(nodes=3)
        await job.finishes(failovers=3)
        await relief.done()
        assert several(said(tmp_path)), "and later, too"
