"""A leader that hears of files later than epochs go by: some boundaries are left out, and others become checkpoints."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import Counting, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.checkpoint_writer import CheckpointWriter

EPOCHS = 300
EPOCH_S = 0.01


class Paced(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(EPOCH_S)
        await super().count(epoch, ins, outs)


@pytest.mark.parametrize(
    ("late_s", "every"), [({1: 0.3}, 1), ({0: 0.17, 1: 0.3, 2: 0.41}, 1), ({0: 1.0}, 3)], ids=["one", "each", "by far"]
)
def test_checkpoints_become_complete_however_late_the_leader_hears_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: dict[int, float], every: int
) -> None:
    """It heard of them one by one, and looked at the newest four boundaries: with 0.3 s for each none was complete."""
    tell = CheckpointWriter._tell

    async def late(self: CheckpointWriter, *what: Any) -> bool:
        await asyncio.sleep(late_s.get(self._task, 0.0))
        return await tell(self, *what)

    monkeypatch.setattr(CheckpointWriter, "_tell", late)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of a thousand files

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result()).values == dict.fromkeys(range(3), EPOCHS)
        complete = [event.epoch for event in cluster.events if event.kind == "checkpoint"]
        longest = max(late_s.values()) / EPOCH_S
        gaps = [later - before for before, later in zip([0, *complete], [*complete, EPOCHS], strict=True)]
        assert max(gaps) < 2.5 * longest + 8 * every, complete
        assert not told(cluster, "no checkpoint"), "nothing failed"

    made = job(Paced, tasks=3, epochs=EPOCHS, checkpoint=f"file://{tmp_path}", checkpoint_every=every)
    play(made, scenario, nodes=3)
