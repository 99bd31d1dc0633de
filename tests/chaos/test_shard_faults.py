"""Pieces of an elastic job on real nodes and a real etcd: each counts once, with the senior worker and etcd among what
fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from chaos_kit import LIMIT_S, Chaos, chaos, frozen, kill
from etcds_kit import etcds

from taskgraph.protocol.view import JobView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def workers(view: JobView) -> list[str]:
    """Node ids, the most senior worker first."""
    return [] if view.workers is None else [worker for worker, _ in view.workers.record.workers]


class Sharded(Chaos):
    """A job that counts how often each piece counted; it ends when the file `finish` is there."""

    driver = Path(__file__).parents[1] / "integration" / "drivers" / "sharded.py"
    name = "sharded"

    async def of(self, count: int) -> None:
        await self.until(f"{count} workers", lambda view: len(workers(view)) == count)

    def senior(self) -> Any:
        return self.view.nodes[workers(self.view)[0]].record

    async def ends(self) -> None:
        (self.cli.root / "finish").touch()
        done = await self.done(LIMIT_S)
        assert done.code == 0, done.err
        value = json.loads(done.out.splitlines()[-1])["values"]["0"]
        assert value == [2 * self.options["pieces"], 1], "a piece twice in a pass, or missing"


async def test_senior_worker_dies_while_etcd_is_away(tmp_path: Path) -> None:
    async with (
        etcds(tmp_path) as etcd,
        chaos("--nodes", "4", kind=Sharded, etcd=etcd.endpoints, pieces=400, pace_s=0.02) as job,
    ):
        await asyncio.wait_for(job.followed.wait(), LIMIT_S)
        await job.of(4)
        await etcd.kill(0)
        await asyncio.sleep(1.0)
        await etcd.start(0)
        kill(job.senior())
        await job.of(3)
        with etcd.frozen(0):
            kill(job.senior())
            await asyncio.sleep(6.0)  # three TTLs: every node pauses, and no living one is taken for dead
        await job.of(2)
        relief = await job.reinforce(2)
        await job.of(4)
        with frozen(job.senior()):
            await job.of(3)
        await job.of(4)
        await job.ends()
        await relief.done()
