"""Loops of another shape: operations of the workers of a view, which are complete on all of them or on none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from elastic_cluster import pause, run_body

import taskgraph as tg
from taskgraph.elastic_jobs.job import elastic
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event

TURNS = 12


def mean_of_workers(run: Any) -> tuple[float, int]:
    """The loop of a data-parallel trainer that FTLib has: a step is tried again after a loss."""
    s = run.state(w=np.ones(3, np.float32), turn=0)
    while s.turn < TURNS:
        group = run.group()

        def gradients(group: tg.Group = group, s: Any = s) -> dict[str, Any]:
            for _ in range(6):
                pause()
            return {"w": s.w * np.float32(0.1) * (group.index + 1), "workers": 1}

        try:
            total = group.allreduce(gradients)
        except tg.ViewChanged:
            continue
        assert total["workers"] == len(group)
        s.w -= total["w"] / np.float32(len(group) * (len(group) + 1) / 2)
        s.turn += 1
        group.report(workers=len(group))
    return [float(value) for value in s.w], s.turn


@pytest.mark.parametrize("scenario", [(1, ""), (3, ""), (3, ".K"), (3, ".K.+"), (1, "+"), (2, "++")])
async def test_each_turn_counts_once(scenario: tuple[int, str]) -> None:
    events: list[Event] = []
    w, turns = await run_body(mean_of_workers, scenario, events.append)
    assert turns == TURNS and w == pytest.approx([0.9**TURNS] * 3, rel=1e-5)
    assert not [event for event in events if event.kind in ("differs", "values differ", "failed")]
    reported = [event for event in events if event.kind == "commit"]
    assert len(reported) >= TURNS - 1


@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "allgather", ""])
async def test_worker_that_calls_another_operation_again_fails_the_job(operation: str) -> None:
    """It enters anew, and gets the total of another call: an error within the package, or an early end of the job."""

    def body(run: Any) -> Any:
        s = run.state(turn=0)
        while s.turn < TURNS:
            group = run.group()
            with contextlib.suppress(tg.ViewChanged):
                if run.worker != "n2":
                    group.barrier()
                elif operation:
                    getattr(group, operation)(1)
                s.turn += 1

    where = rf"group\.{operation}, operation 1 of turn \d" if operation else "the end of the function"
    with pytest.raises(tg.JobFailed, match=rf"n2 is at {where}, and other workers (are|were) at [^:]*: decide"):
        await run_body(body, (3, ""))


_seen: dict[str, list[Any]] = {}


def loss_in_an_operation(run: Any) -> Any:
    s = run.state(turn=0, lost=())
    while s.turn < 3:
        group = run.group()

        def contribute(group: tg.Group = group, s: Any = s) -> int:
            if s.turn == 1 and run.worker == group.members[-1] and len(group) == 3:
                _blocked.set()
                _release.wait(20)
            return 1

        try:
            total = group.allreduce(contribute)
            _seen.setdefault(run.worker, []).append(total)
        except tg.ViewChanged as change:
            assert "call run.group(), and try again" in str(change)
            s.lost = (change.left, change.entered)
            _seen.setdefault(run.worker, []).append(change.left)
            continue
        s.turn += 1
    return s.lost, s.turn


_blocked, _release = threading.Event(), threading.Event()


@elastic
def loss(run: Any) -> Any:
    return loss_in_an_operation(run)


async def test_survivors_raise_alike() -> None:
    cluster = InProcessCluster(loss(), endless_leases=True, on_event=lambda _: None)
    try:
        await cluster.start(3)
        await asyncio.to_thread(_blocked.wait, 20)
        members = [node.name for node in cluster.living]
        cluster.crash(cluster.living[-1].id)
        _release.set()  # the workers of one process take turns
        (lost, turn) = (await cluster.result(30)).values[0]
    finally:
        await cluster.stop()
    assert turn == 3 and lost == ((members[-1],), ())
    survivors = [_seen[name] for name in members[:2]]
    assert survivors == [[3, (members[-1],), 2, 2]] * 2, "complete on all, or on none"


@elastic
def average(run: Any, turns: int = 12) -> list[float]:
    s = run.state(w=np.ones(2), turn=0)
    while s.turn < turns:
        group = run.group()
        try:
            total = group.allreduce(lambda: {"w": 0.1 * s.w, "count": 1})
        except tg.ViewChanged:
            continue
        s.w -= total["w"] / total["count"]
        s.turn += 1
    return [float(value) for value in s.w]


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("kills", [{}, {(0, 3): "begin"}, {(2, 5): "begin", (1, 8): "begin"}])
def test_group_in_the_test_runner(kills: dict[tuple[int, int], str], order: int) -> None:
    result = tg.testing.run(average(), nodes=3, kills=kills, order=order, strict=False)
    assert result.value == pytest.approx([0.9**12] * 2)


def all_operations(run: Any) -> Any:
    group = run.group()
    while True:
        try:
            first = group.broadcast(lambda: {"name": run.worker, "array": np.arange(3)})
            last = group.broadcast(lambda: run.worker, root=group.members[-1])
            names = group.allgather(run.worker)
            group.barrier()
            return first["name"], first["array"].tolist(), last, names, group.members
        except tg.ViewChanged:
            group = run.group()


async def test_operations() -> None:
    first, array, last, names, members = await run_body(all_operations, (3, ""))
    assert (first, array, last) == (members[0], [0, 1, 2], members[-1]) and tuple(names) == members


def unlike(run: Any) -> Any:
    group = run.group()
    return group.allreduce(lambda: {"w": np.zeros(2 + group.index)})


def unlike_parts(run: Any) -> Any:
    run.state(n=0)
    for step in run.steps(rows=4, batch=4, parts=4, passes=1):
        for part in step:
            part.add(w=np.zeros(2 if run.worker == run.workers[0] else 3))
    return 0


@pytest.mark.parametrize(("body", "name"), [(unlike, r"value\.w"), (unlike_parts, r"part\.add\(w=\.\.\.\)")])
async def test_trees_that_differ_between_workers(body: Any, name: str) -> None:
    with pytest.raises(tg.JobFailed, match=rf"^{name} is an array of float64 with shape \(2,\) in the parts of n1, an"):
        await run_body(body, (2, ""))


def stale_group(run: Any) -> Any:
    group = run.group()
    run.group()
    return group.barrier()


def nested(run: Any) -> Any:
    return run.group().allreduce(lambda: run.once(lambda: 1))


def both(run: Any) -> Any:
    run.group()
    return run.steps(rows=1, batch=1)


def unknown_root(run: Any) -> Any:
    return run.group().broadcast(1, root="n9")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (stale_group, "of an earlier turn"),
        (nested, "the function of group.allreduce called the run"),
        (both, "has called run.group"),
        (unknown_root, "the members are"),
    ],
)
async def test_mistakes_are_named(body: Any, words: str) -> None:
    with pytest.raises(tg.JobFailed, match=words):
        await run_body(body, (1, ""))


def not_caught(run: Any) -> Any:
    group = run.group()  # not anew in each turn: it would be without the worker that is lost between two
    for _ in range(100):
        group.barrier()
        time.sleep(0.002)
    return 0


async def test_view_changed_that_is_not_caught_fails_the_job() -> None:
    with pytest.raises(tg.JobFailed, match="n3 left: this operation is complete on no worker"):
        await run_body(not_caught, (3, ".K"))
