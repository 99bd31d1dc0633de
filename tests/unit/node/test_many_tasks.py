"""Beginning a job costs about as much per task with many tasks as with few."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cluster_kit import Counting, job, play

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.primary import Primary
from taskgraph.node.replica import Replica

EPOCHS = 3


def calls_of_a_job(tasks: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of methods that serve all replicas, or all primaries, in a job on two nodes."""
    calls: Counter[str] = Counter()

    def count(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def counted(self: Any, *args: Any) -> Any:
            calls[name] += 1
            return original(self, *args)

        monkeypatch.setattr(cls, name, counted)

    count(Replica, "follow")
    count(Primary, "adapt_share")

    async def scenario(cluster: InProcessCluster) -> int:
        return len((await cluster.result()).values)

    assert play(job(Counting, tasks=tasks, epochs=EPOCHS, topology={}), scenario, nodes=2) == tasks
    return calls


def test_work_per_task_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for tasks in (10, 40):
        with monkeypatch.context() as patch:
            calls.append(calls_of_a_job(tasks, patch))
    few, many = calls
    for name in ("follow", "share"):
        assert many[name] <= 4 * 1.25 * few[name] + 10, name
