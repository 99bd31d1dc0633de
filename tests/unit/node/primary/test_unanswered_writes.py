"""An etcd that answers no write, but everything else: full, or too slow."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play, told

from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["blindable", "gated"]

LASTS_S = 60.0


@pytest.mark.usefixtures("blindable")
def test_a_leader_whose_commits_are_not_answered_says_so_and_asks_at_intervals(
    gated: type[Gated], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        leader = holder(cluster, 0)
        eyes(leader).lose(leader.keeper.view.keys.epoch)
        gated.gate.set()
        await asyncio.sleep(LASTS_S)
        assert not ended.done() and not leader.paused
        (line,) = leader.status().waits
        assert line.startswith("a write has waited for etcd for ") and line.endswith(" s: held back by the test")
        (waits,) = told(cluster, "waits")
        assert waits.startswith("epoch 1 waits: a write has waited for etcd")
        assert LASTS_S < eyes(leader).losses < 30 * LASTS_S
        assert 2 <= sum("outcome is unknown" in record.message for record in caplog.records) <= LASTS_S / 5
        eyes(leader).lose("")
        assert (await ended).values == {0: 3, 1: 3}
        assert not leader.status().waits

    play(job(gated), scenario, nodes=2)
