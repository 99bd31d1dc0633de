"""Elastic jobs of real nodes on a real etcd, with faults at named moments: the same bits, and each row once a pass."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from chaos_kit import LIMIT_S, Chaos, chaos, kill
from etcds_kit import etcds
from netns_kit import both, network, why_not

import taskgraph as tg
from taskgraph.driver.loading import load_driver
from taskgraph.protocol.records import NodeRecord
from taskgraph.protocol.view import JobView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ETCD = 9
ROWS, BATCH = 120, 40


def workers(view: JobView) -> list[str]:
    """Node ids, the most senior worker first."""
    return [] if view.workers is None else [worker for worker, _ in view.workers.record.workers]


class Elastic(Chaos):
    """A job whose workers count the rows that its steps have read."""

    driver = Path(__file__).parent / "drivers" / "elastic_ledger.py"
    name = "ledger"

    def worker(self, index: int) -> NodeRecord:
        return self.view.nodes[workers(self.view)[index]].record

    async def of(self, count: int) -> None:
        await self.until(f"{count} workers", lambda view: len(workers(view)) == count)

    async def began(self) -> None:
        await asyncio.wait_for(self.followed.wait(), LIMIT_S)
        await self.until("the first view", lambda view: view.workers is not None)

    async def ends(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Ends the job at its next step, and judges its value."""
        (self.cli.root / "finish").touch()
        done = await self.done(limit_s)
        assert done.code == 0, done.err
        value: dict[str, Any] = json.loads(done.out.splitlines()[-1])["values"]["0"]
        await asyncio.to_thread(judge, value)
        return value


def judge(value: dict[str, Any]) -> None:
    steps = value["steps"]
    assert sum(value["read"]) == steps * BATCH
    passes = steps * BATCH // ROWS
    assert set(value["read"]) <= {passes, passes + 1}, "a row twice in a pass, or missing"
    job: Any = load_driver(str(Elastic.driver))
    calm = json.loads(tg.run(job(steps=steps), nodes=0, timeout_s=LIMIT_S).to_json())["values"]["0"]
    assert value["w"] == calm["w"], "not the bits of the run without failures"


async def test_worker_dies_at_each_named_moment() -> None:
    async with chaos("--nodes", "5", kind=Elastic, pace_s=0.005) as job:
        await job.began()
        for left, stage in ((4, "part"), (3, "sent")):
            job.inject(f"kill,{stage}")
            await job.injected()
            await job.of(left)
        relief = await job.reinforce(2)
        await job.of(5)
        job.inject("kill,report")
        kill(job.worker(0))
        await job.injected()
        await job.of(3)
        job.inject("kill,total")
        await job.ends()
        await job.injected()
        await relief.done()


async def test_most_senior_worker_dies_while_its_etcd_restarts(tmp_path: Path) -> None:
    async with (
        etcds(tmp_path) as etcd,
        chaos("--nodes", "4", kind=Elastic, etcd=etcd.endpoints, pace_s=0.005) as job,
    ):
        await job.began()
        await etcd.kill(0)
        await asyncio.sleep(1.0)
        await etcd.start(0)
        await job.of(4)
        with etcd.frozen(0):
            kill(job.worker(0))
            await asyncio.sleep(8.0)  # four TTLs: every node pauses, and no living one is taken for dead
        await job.of(3)
        await job.ends()


async def test_partitions_and_half_a_message(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    token = str(tmp_path / "token")
    async with (
        network(3, ETCD) as net,
        etcds(tmp_path, host=net.address(ETCD), prefix=net.command_on(ETCD)) as etcd,
        chaos(
            *("--nodes", "1", "--listen", net.address(1), "--insecure-listen", "--token-file", token),
            kind=Elastic,
            etcd=etcd.endpoints,
            python=net.on(1),
            pace_s=0.005,
            ballast=1_000_000,
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
        await job.of(3)
        with net.cut(*both(1, ETCD)):  # for longer than its lease: the others go on
            await job.of(2)
        await job.of(3)
        with net.cut(*both(2, 3)):  # both keep their leases
            await job.of(2)
        await job.of(3)
        last = job.worker(2)
        with net.cut(*((host, other) for host in (1, 2, 3) for other in (1, 2, 3) if host != other)):
            await asyncio.sleep(0.5)  # sums of 4 MB are under way, and stay so
            kill(last)
        await job.of(2)
        await job.ends()
        for other in others:
            await other.done()


async def test_all_workers_die_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    kept = {"LEDGER_CHECKPOINT": f"file://{tmp_path}/checkpoints"}
    async with chaos("--nodes", "3", kind=Elastic, pace_s=0.005, env=kept) as job:
        await job.began()
        await job.until("two checkpoints", lambda view: bool(view.checkpoint and view.checkpoint.record.before))
        kill(*job.nodes())
        assert (await job.done()).code == 1
    async with chaos("--nodes", "2", "--resume", kind=Elastic, pace_s=0.005, env=kept) as job:
        await job.began()
        value = await job.ends()
        assert value["steps"] > 1
