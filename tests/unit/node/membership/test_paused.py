"""When a node pauses, and what it says then."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, gated, job, play, told

from taskgraph.coordination.memory import MemoryLease
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.testing.clock import FastForwardLoop

__all__ = ["gated"]


def stand_still(for_s: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FastForwardLoop)
    loop.stand_still(for_s)


def test_a_pause_says_why_the_lease_was_not_renewed(gated: type[Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLease, "trouble", lambda _: "can't start new thread")

    async def scenario(cluster: InProcessCluster) -> list[str]:
        await gated.reached.wait()
        stand_still(60.0)
        gated.gate.set()
        await cluster.result()
        return told(cluster, "paused")

    assert play(job(gated), scenario, nodes=1) == [
        "the lease could not be renewed in time (can't start new thread): serving stops, work is kept"
    ]
