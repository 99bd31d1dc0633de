"""Shared state on several nodes: who has it, and how a new primary gets it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

SIZE = 10_000
TASKS = 3


class Descent(tg.Task, shared=["theta"]):
    """Its state is all shared."""

    pace_s = 0.02

    def setup(self) -> None:
        self.x = np.random.default_rng(self.task_id).normal(size=SIZE)
        self.theta = np.zeros(SIZE)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"x": "all"})
        epoch.processor(self.add, inbound={"x": "all"})

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(self.pace_s)
        outs.put("x", (self.x - self.theta) / 10)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        got = ins.all("x")
        self.theta += sum(got[task] for task in sorted(got))

    def result(self) -> Any:
        return self.theta


class Counting(Descent, state=["count"]):
    """Has state of its own, too."""

    def setup(self) -> None:
        super().setup()
        self.count = 0

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().add(epoch, ins, outs)
        self.count += 1

    def result(self) -> Any:
        return [self.theta, self.count]


def descent(kind: type[Descent], **options: Any) -> tg.Job:
    return job(kind, **{"tasks": TASKS, "epochs": 12, **options})


def expected(epochs: int = 12) -> Any:
    xs = [np.random.default_rng(task).normal(size=SIZE) for task in range(TASKS)]
    theta = np.zeros(SIZE)
    for _ in range(epochs):
        theta += sum((x - theta) / 10 for x in xs)
    return theta


async def reaches(cluster: InProcessCluster, epoch: int, *, replicas: int = 1) -> None:
    """Returns when an epoch is at work, and each task has this many replicas in sync."""
    keeper = cluster.nodes[0].keeper
    await keeper.wait_until(
        lambda view: (
            view.stamp is not None
            and view.stamp.epoch >= epoch
            and all(len(view.in_sync(task)) >= replicas for task in range(TASKS))
        )
    )


def test_backups_of_other_tasks_have_the_rest_alone() -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await reaches(cluster, 4, replicas=2)
        backups: dict[int, list[int]] = {}
        for node in cluster.nodes:
            for task, replica in node.roles.replicas.items():
                if task not in node.roles.primaries:
                    for boundary in (replica.boundaries.committed, *replica.boundaries.pending):
                        assert boundary is not None and boundary.shared is None
                        backups.setdefault(task, []).append(boundary.value.size_bytes)
        assert backups.keys() == set(range(TASKS))
        assert min(backups[0]) > 8 * SIZE and max(backups[1] + backups[2]) < 1000
        return await cluster.result()

    result = play(descent(Counting), scenario, nodes=2)
    assert all(np.array_equal(theta, expected()) and count == 12 for theta, count in result.values.values())


@pytest.mark.parametrize("task", [1, 2])
def test_task_without_other_state_survives_the_loss_of_all_replicas(task: int) -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await reaches(cluster, 4)
        assert holder(cluster, task) is not holder(cluster, 0)
        cluster.crash(holder(cluster, task).id)
        return await cluster.result()

    result = play(descent(Descent, backups=0), scenario, nodes=3)
    assert result.restarts == 0 and np.array_equal(result.value, expected())


def test_lost_keeper_loses_the_state() -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await reaches(cluster, 4)
        cluster.crash(holder(cluster, 0).id)
        with pytest.raises(tg.JobFailed, match="task 0: every replica in sync is gone"):
            await cluster.result()

    play(descent(Descent, backups=0), scenario, nodes=3)


@pytest.mark.parametrize("kind", [Descent, Counting])
@pytest.mark.parametrize("task", [0, 1])
def test_a_roll_back_gives_it_to_all(tmp_path: Path, kind: type[Descent], task: int) -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.checkpoint is not None)
        await reaches(cluster, 5)
        cluster.crash(holder(cluster, task).id)
        return await cluster.result()

    kept = descent(kind, backups=0, checkpoint=tmp_path.as_uri(), checkpoint_every=2)
    result = play(kept, scenario, nodes=3)
    assert result.restarts == (1 if task == 0 or kind is Counting else 0)
    for value in result.values.values():
        assert np.array_equal(value if kind is Descent else value[0], expected())


@pytest.mark.parametrize("task", [0, 2])
def test_a_drained_node_hands_over(task: int) -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await reaches(cluster, 3, replicas=2)
        holder(cluster, task).drain("a test")
        return await cluster.result()

    result = play(descent(Counting), scenario, nodes=3)
    assert all(np.array_equal(theta, expected()) and count == 12 for theta, count in result.values.values())
    assert result.failovers == 0


def test_a_new_primary_waits_for_a_keeper_that_waits_itself() -> None:
    """Both are taken over at once, and the keeper is the later one."""

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await reaches(cluster, 4, replicas=2)
        first, third = holder(cluster, 0), holder(cluster, 2)
        cluster.crash(third.id)
        await asyncio.sleep(0.01)
        if first is not third:
            cluster.crash(first.id)
        return await cluster.result()

    result = play(descent(Counting, backups=2), scenario, nodes=4)
    assert all(np.array_equal(theta, expected()) for theta, _ in result.values.values())


def test_the_wait_for_the_keeper_is_named() -> None:
    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await reaches(cluster, 4, replicas=2)
        node = holder(cluster, 2)
        keeper = holder(cluster, 0)
        shared = keeper.roles.primaries[0].shared
        gate, give = asyncio.Event(), shared.answer_fetch

        async def late(stamp: Any) -> Any:
            await gate.wait()
            return await give(stamp)

        shared.answer_fetch = late  # type: ignore[method-assign]
        assert node is not keeper
        cluster.crash(node.id)
        await keeper.keeper.wait_until(lambda view: view.term(2) > 1)
        await asyncio.sleep(1.0)
        waits = [what for n in cluster.nodes for held in n.status().replicas for what in held.waits]
        assert any(what.startswith("the shared state of boundary") and what.endswith("from task 0") for what in waits)
        gate.set()
        return await cluster.result()

    result = play(descent(Descent), scenario, nodes=3)
    assert np.array_equal(result.value, expected())
