"""SIGTERM to many nodes at once, and all nodes replaced by others: what is handed over is not computed again."""

from __future__ import annotations

import signal

import pytest
from chaos_kit import chaos, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_storm_of_sigterms_hands_over_to_whoever_comes() -> None:
    async with chaos("--nodes", "3") as job:
        await job.began()
        first = job.nodes()
        relief = await job.reinforce(3)
        await job.settled(nodes=6)
        kill(*first, number=signal.SIGTERM)
        await job.until("the first ones gone", lambda view: len(view.nodes) == 3)
        await job.settled(nodes=3)
        assert not {node.pid for node in first} & {node.pid for node in job.nodes()}
        # Told twice, a node ends at once: that is a failure like any other.
        leader = job.primary(0)
        kill(leader, number=signal.SIGTERM)
        kill(leader, number=signal.SIGTERM)
        await job.settled(nodes=2)
        await job.finishes()
        await relief.done()
