"""Placement."""

from __future__ import annotations

import pytest
from cluster_kit import Counting, blindable, job, play

from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["blindable"]


def named(node: int) -> str:
    return f"n{node}-local"


def test_containers_of_machine_are_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container has a host name of its own, but the machine takes all along."""
    machines = {named(node): f"m{node % 2}" for node in range(1, 5)}
    add = InProcessCluster.add

    def contained(cluster: InProcessCluster) -> str:
        node = add(cluster)
        cluster.node(node).machine = machines[node]
        return node

    async def scenario(cluster: InProcessCluster) -> list[list[str]]:
        await cluster.result()
        view = cluster.nodes[0].keeper.view
        return [sorted(machines[node] for node in view.in_sync(task)) for task in range(8)]

    monkeypatch.setattr(InProcessCluster, "add", contained)
    assert play(job(Counting, tasks=8), scenario, nodes=4) == [["m0", "m1"]] * 8
