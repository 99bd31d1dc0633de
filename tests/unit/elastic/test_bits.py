"""Elastic jobs on nodes of one process: the value has the same bits, whoever joins, leaves, dies, or resumes it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.checkpoint import places
from taskgraph.elastic_jobs.job import elastic
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import WorkersRecord


@elastic
def fit(run: Any, passes: int = 20, pause_s: float = 0.001, batch: int = 50, more: bool = False) -> Any:
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    y = x @ np.array([1.0, 2.0, 3.0], np.float32)
    s = run.state(w=np.zeros(3, np.float32), **({"more": 1} if more else {}))
    for step in run.steps(rows=100, batch=batch, parts=7, passes=passes):
        for part in step:
            errors = x[part.rows] @ s.w - y[part.rows]
            part.add(gradient=x[part.rows].T @ errors, loss=float(errors @ errors))
            time.sleep(pause_s)
        s.w -= np.float32(0.001) * step["gradient"]
        step.report(loss=step["loss"])
    return s.w


async def run(nodes: int, events: str = "") -> bytes:
    """Runs the job. Each letter is an event, 20 ms apart: `+` a node starts, `k` and `K` the oldest and newest die, `x`
    and `X` they are taken for lost, `d` the oldest drains, `.` nothing."""
    cluster = InProcessCluster(fit(), endless_leases=True)
    try:
        await cluster.start(nodes)
        for node in cluster.living:
            await node.keeper.wait_until(lambda view: view.workers is not None)
        for event in events:
            await asyncio.sleep(0.02)
            if event == "+":
                cluster.add()
            elif event in "kK":
                cluster.crash(cluster.living[0 if event == "k" else -1].id)
            elif event in "xX":
                exclude(cluster, 0 if event == "x" else -1)
            elif event == "d":
                cluster.living[0].drain("a test")
        result = await cluster.result(20)
        assert [report.epoch for report in result.reports] == list(range(40))
        value: Any = result.values[0]
        return bytes(value.tobytes())
    finally:
        await cluster.stop()


def exclude(cluster: InProcessCluster, worker: int) -> None:
    """Puts a view without a living worker, as one would that has lost it."""
    (known,) = cluster.store.select(cluster.keys.workers, prefix=False)
    view = View.of(WorkersRecord.from_bytes(known.value)).without({cluster.living[worker].id})
    cluster.store.execute(Txn(success=(Put(cluster.keys.workers, view.record("a test").to_bytes()),)))


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    return asyncio.run(run(1))


@pytest.mark.parametrize(
    ("nodes", "events"),
    [
        (2, ""),
        (3, ""),
        (4, "..K"),
        (3, ".k.k"),
        (1, ".+.+"),
        (2, "+..k..+"),
        (3, "+.kk+"),
        (3, ".d..+..d"),
        (3, ".x..X"),
    ],
)
def test_same_bits(nodes: int, events: str, undisturbed: bytes) -> None:
    assert asyncio.run(run(nodes, events)) == undisturbed


async def run_part(job: Any, nodes: int, until: int, **how: bool) -> tuple[int, bytes | None]:
    """Runs a job until there is a checkpoint of so many sums, or to its end. Returns that number, and the value."""
    cluster = InProcessCluster(job, endless_leases=True)
    try:
        await cluster.start(nodes, **how)
        if not until:
            value: Any = (await cluster.result(20)).values[0]
            return 0, bytes(value.tobytes())
        view = cluster.living[0].keeper
        await view.wait_until(lambda v: (v.checkpoint and v.checkpoint.record.epoch >= until) or v.finished)
        assert view.view.checkpoint is not None and not view.view.finished
        return view.view.checkpoint.record.epoch, None
    finally:
        await cluster.stop()


def test_resumed_on_another_number_of_workers(tmp_path: Path, undisturbed: bytes) -> None:
    made = fit(pause_s=0.005)  # a checkpoint is complete long before the job ends
    assert made.elastic is not None
    often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
    job = dataclasses.replace(made, checkpoint=tmp_path.as_uri(), _elastic=often)
    first, _ = asyncio.run(run_part(job, 3, 5))
    second, _ = asyncio.run(run_part(job, 1, first + 5, resume=True))
    assert second > first
    assert asyncio.run(run_part(job, 2, 0, resume=True)) == (0, undisturbed)


async def drain_all(job: Any) -> None:
    """Runs a job on two workers, asks both to leave, and waits until they have left."""
    cluster = InProcessCluster(job, endless_leases=True)
    try:
        await cluster.start(2)
        for node in cluster.living:
            await node.keeper.wait_until(lambda view: view.workers is not None)
        for node in cluster.living:
            node.drain("a test")
        async with asyncio.timeout(20):
            while cluster.living:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
    finally:
        await cluster.stop()


def test_all_workers_leave_with_a_checkpoint(tmp_path: Path, undisturbed: bytes) -> None:
    """It is not due, and no other worker could take the state over."""
    job = dataclasses.replace(fit(pause_s=0.005), checkpoint=tmp_path.as_uri())
    asyncio.run(drain_all(job))
    assert list(tmp_path.rglob("manifest.json"))
    assert asyncio.run(run_part(job, 3, 0, resume=True)) == (0, undisturbed)


def test_resumed_with_other_arguments(tmp_path: Path) -> None:
    def kept(**arguments: Any) -> Any:
        made = fit(pause_s=0.005, **arguments)
        assert made.elastic is not None
        often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
        return dataclasses.replace(made, checkpoint=tmp_path.as_uri(), _elastic=often)

    asyncio.run(run_part(kept(), 1, 5))
    with pytest.raises(
        tg.JobFailed, match=r"run\.steps\(batch=25\), and the state was made with batch=50: give the same"
    ):
        asyncio.run(run_part(kept(batch=25), 2, 0, resume=True))
    with pytest.raises(
        tg.JobFailed, match=r"run\.state names more, w here, and w where it is copied from: name the same"
    ):
        asyncio.run(run_part(kept(more=True), 2, 0, resume=True))
    asyncio.run(run_part(kept(passes=25), 2, 0, resume=True))  # passes may change
    with pytest.raises(
        tg.JobFailed, match=r"is of step \d+, and .* ends before: give all workers the same passes, a res"
    ):
        asyncio.run(run_part(kept(passes=1), 2, 0, resume=True))


async def lose_all_workers(stage: str) -> bytes:
    """Kills all workers when a newcomer is `registered`, has `copied` the state, or has `entered`."""
    cluster = InProcessCluster(fit(), endless_leases=True)
    try:
        await cluster.start(2)
        first = [node.id for node in cluster.living]
        for node in cluster.living:
            await node.keeper.wait_until(lambda view: view.workers is not None)
        added = cluster.add()
        newcomer: Any = next(node for node in cluster.living if node.id == added)
        await newcomer.keeper.wait_until(lambda view: newcomer.id in view.nodes)
        while stage == "copied" and not newcomer.call.begun:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.001)
        if stage == "entered":
            await newcomer.keeper.wait_until(lambda view: newcomer.id in dict(view.workers.record.workers))
        for node_id in first:
            cluster.crash(node_id)
        value: Any = (await cluster.result(20)).values[0]
        return bytes(value.tobytes())
    finally:
        await cluster.stop()


@pytest.mark.parametrize("stage", ["copied", "entered"])
def test_newcomer_goes_on_alone(stage: str, undisturbed: bytes) -> None:
    assert asyncio.run(lose_all_workers(stage)) == undisturbed


def test_no_worker_with_the_state_is_left() -> None:
    with pytest.raises(tg.JobFailed, match="no worker is left that holds the state, and there is no checkpoint"):
        asyncio.run(lose_all_workers("registered"))


async def lose_all_behind_the_checkpoint(job: Any, text: str) -> None:
    """Cuts a newcomer off that has copied the state, and ends the others after a later checkpoint.

    Then waits for an event with this text.
    """
    seen = asyncio.Event()
    cluster = InProcessCluster(job, endless_leases=True, on_event=lambda event: text in event.text and seen.set())
    try:
        await cluster.start(1)
        (first,) = cluster.living
        await first.keeper.wait_until(lambda view: view.workers is not None)
        added = cluster.add()
        newcomer: Any = next(node for node in cluster.living if node.id == added)
        while not newcomer.has_begun():  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.001)
        cluster.network.cut(first.id, added)
        behind = newcomer.engine.core.position
        await first.keeper.wait_until(lambda view: view.checkpoint and view.checkpoint.record.epoch > behind + 1)
        cluster.crash(first.id)
        async with asyncio.timeout(20):
            await seen.wait()
    finally:
        await cluster.stop()


def test_newcomer_behind_the_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    made = fit(pause_s=0.005)
    assert made.elastic is not None
    often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
    soon = dataclasses.replace(made.settings, lease_ttl_s=1.0)  # how long silence is borne
    job = dataclasses.replace(made, checkpoint=tmp_path.as_uri(), settings=soon, _elastic=often)
    asyncio.run(lose_all_behind_the_checkpoint(job, "goes on from the checkpoint of sum"))


async def run_on_a_full_disk(job: Any, failures: int, free: Callable[[], None]) -> list[Event]:
    """Runs a job until so many of its checkpoints have failed, and then, on a `free` disk, until one is complete."""
    events: list[Event] = []
    cluster = InProcessCluster(job, endless_leases=True, on_event=events.append)
    try:
        await cluster.start(2)
        async with asyncio.timeout(20):
            while sum(event.kind == "checkpoint failed" for event in events) < failures:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            free()
            while all(event.kind != "checkpoint" for event in events):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.005)
        return events
    finally:
        await cluster.stop()


@pytest.mark.parametrize("full", ["write", "stage"])
def test_full_disk(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills up with the file, or with the manifest beside it."""

    def refuse(descriptor: int, data: memoryview) -> None:
        if full == "write" or data[:1] == b"{":  # a manifest is JSON
            raise OSError(errno.ENOSPC, "No space left on device")
        write(descriptor, data)

    def free() -> None:
        left.extend(tmp_path.rglob("s0001-*"))
        monkeypatch.setattr(places, "_write_all", write)

    left: list[Path] = []
    write = places._write_all
    monkeypatch.setattr(places, "_write_all", refuse)
    made = fit(pause_s=0.005, passes=200)
    assert made.elastic is not None
    often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
    job = dataclasses.replace(made, checkpoint=tmp_path.as_uri(), _elastic=often)
    events = asyncio.run(run_on_a_full_disk(job, 5, free))
    failed = [event for event in events if event.kind == "checkpoint failed"]
    assert re.fullmatch(
        rf"checkpoint after step \d+: cannot be written to {tmp_path}/fit/s0001-\S+: \[Errno 28\] No space left on "
        r"device; the job goes on with the one before, if any: make room there for the next one",
        failed[0].text,
    )
    assert [event.transient for event in failed] == [False] + [True] * (len(failed) - 1)
    rows = [event.text for event in events if event.kind == "no checkpoint"]
    assert [row.partition(", the last")[0] for row in rows[:2]] == [
        "no checkpoint is complete yet: 2 in a row failed",
        "no checkpoint is complete yet: 4 in a row failed",
    ]
    assert len(left) <= 1, "files of failed checkpoints stay"


async def begin_with_two(job: Any) -> tuple[list[tuple[str, ...]], bytes]:
    """Starts one node, and then another. Returns what the first one waited for alone, and the value."""
    cluster = InProcessCluster(job, endless_leases=True)
    try:
        await cluster.start(1)
        await cluster.living[0].keeper.wait_until(lambda view: view.nodes)
        waits = [node.status().waits for node in cluster.living]
        cluster.add()
        value: Any = (await cluster.result(20)).values[0]
        return waits, bytes(value.tobytes())
    finally:
        await cluster.stop()


def test_first_worker_waits_for_others(undisturbed: bytes) -> None:
    job = dataclasses.replace(fit(), min_nodes=2)
    waits, value = asyncio.run(begin_with_two(job))
    assert waits == [("the job waits for workers: 1 of at least 2 are here (min_workers)",)] and value == undisturbed
