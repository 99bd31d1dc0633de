"""Nodes of one job in this process, on a clock that leaps over waits, and what a test does to them meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node, Point
from taskgraph.testing.clock import FastForwardLoop
from taskgraph.testing.threads import LockStepThreads

R = TypeVar("R")
Stage = Callable[[InProcessCluster, str], Awaitable[None]]

#: Of the loop's clock, which leaps: only what hangs comes to it.
LIMIT_S = 600.0


def play(
    job: tg.Job,
    scenario: Callable[[InProcessCluster], Awaitable[R]],
    *,
    nodes: int,
    order: int = 0,
    stages: Mapping[tuple[str, int, int], Stage] | None = None,
) -> R:
    """Starts the job's nodes, and returns what `scenario` returns.

    Args:
        stages: (stage, task, epoch) -> what happens there, the first time that a primary comes to it.
    """
    left = dict(stages or {})

    def point(cluster: InProcessCluster, node: str) -> Point:
        async def at(stage: str, task: int, epoch: int) -> None:
            if (act := left.pop((stage, task, epoch), None)) is not None:
                await act(cluster, node)

        return at

    async def whole() -> R:
        rng = random.Random(order) if order else None
        cluster = InProcessCluster(job, rng=rng, threads=LockStepThreads, point=point)
        await cluster.start(nodes)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await scenario(cluster)
        except TimeoutError:
            raise AssertionError(f"it hangs; {cluster.waits()}") from None
        finally:
            await cluster.stop()

    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        return runner.run(whole())


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": 3, "builder": builder, "topology": tg.full(), "backups": 1, **options})


def holder(cluster: InProcessCluster, task: int) -> Node:
    """The node of a task's primary, as the node sees it that read the most."""
    found = max((node.keeper.view for node in cluster.nodes), key=lambda view: view.revision).primary_node(task)
    assert found is not None
    return cluster.node(found)


def told(cluster: InProcessCluster, kind: str) -> list[str]:
    """The texts of the events of one kind, in order."""
    return [event.text for event in cluster.events if event.kind == kind]
