"""When a node pauses, and what it says then."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Counting, Gated, gated, job, play, told

import taskgraph as tg
from taskgraph.coordination.memory import MemoryLease
from taskgraph.launch.inprocess import InProcessCluster, arun_inprocess
from taskgraph.observe.events import Event
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


class Busy(Counting, state=["total"]):
    """Holds up the loop in every epoch."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        stand_still(60.0)
        await super().count(epoch, ins, outs)


def test_a_job_in_one_process_does_not_pause_because_it_is_busy() -> None:
    """It paused, and did its work again, which took as long: it never came to an end."""
    events: list[Event] = []
    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        result = runner.run(arun_inprocess(job(Busy, backups=0), on_event=events.append, timeout_s=3600))
    assert result.values == {0: 3, 1: 3}
    assert not [event.kind for event in events if event.kind in ("paused", "resumed")]
