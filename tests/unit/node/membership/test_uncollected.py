"""Results of a finished job that are not collected: its nodes leave, and it stays finished."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import Counting, blindable, eyes, job, play
from msgspec import structs

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.launch.kept import collected_record
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord

__all__ = ["blindable"]

pytestmark = pytest.mark.usefixtures("blindable")


def short(**options: Any) -> tg.Job:
    settings = tg.Settings(epochs_ahead=0, results_kept_s=5, call_s=2)
    return job(Counting, epochs=5, backups=0, settings=settings, **options)


def state_of(cluster: InProcessCluster) -> str:
    (kv,) = cluster.store.select(cluster.keys.status, prefix=False)
    return StatusRecord.from_bytes(kv.value).state


def why_none(cluster: InProcessCluster) -> str:
    """The error for a client that asks for the results."""
    found = [*cluster.store.select(cluster.keys.collected, prefix=False), None]
    finished = StatusRecord(state=JobStatus.FINISHED)
    with pytest.raises(tg.UnknownJob) as told:
        structs.replace(collected_record(found[0]), status=finished).require_result(cluster.spec.name)
    return str(told.value)


async def all_left(cluster: InProcessCluster) -> float:
    """Waits until all nodes have left; returns how long after the job's end."""
    node, loop = cluster.nodes[0], asyncio.get_running_loop()
    await node.keeper.wait_until(lambda view: view.finished)
    began, runs = loop.time(), [member.run for member in cluster._members.values()]
    await asyncio.wait(runs)
    assert [run.exception() for run in runs] == [None] * len(runs)
    return loop.time() - began


@pytest.mark.parametrize("every", [0, 2])
def test_job_stays_finished_while_nodes_leave(every: int, tmp_path: Path) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        late = cluster.nodes[1]
        eyes(late).blind(at=cluster.keys.status)
        leaving = asyncio.ensure_future(all_left(cluster))
        await cluster.nodes[0].keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(1)
        eyes(late).see()
        took_s = await leaving
        assert state_of(cluster) == JobStatus.FINISHED
        assert why_none(cluster).endswith(
            "its values are not kept: neither a launcher nor `taskgraph result` collected them within 5 s "
            "(settings.results_kept_s)"
        )
        assert 4.9 < took_s < 5.5, "all of them at once"

    keeps = {"checkpoint": f"file://{tmp_path}", "checkpoint_every": every} if every else {}
    play(short(**keeps), scenario, nodes=2)


def test_results_are_kept_for_living_launcher() -> None:
    """The launcher may be stopped, or its output unread."""

    async def scenario(cluster: InProcessCluster) -> None:
        for node in cluster.nodes:
            node._results_kept_s = None  # as of a node that is `keep_results`
        await cluster.nodes[0].keeper.wait_until(lambda view: view.finished)
        await asyncio.sleep(20)
        assert (await cluster.result()).values == {0: 5, 1: 5}
        cluster.store.execute(Txn(success=(Put(cluster.keys.collected, b"{}"),)))
        assert await all_left(cluster) < 1

    play(short(), scenario, nodes=2)
