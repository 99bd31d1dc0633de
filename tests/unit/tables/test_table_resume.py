"""A job goes on from its checkpoint with another number of servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg


class Learner(tg.Task, state=["seen"]):
    def setup(self) -> None:
        self.seen = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)
        epoch.processor(self.keep)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        time.sleep(0.02)  # checkpoints become complete meanwhile
        table = epoch.table("users")
        ids = np.random.default_rng([self.task_id, epoch.number]).integers(0, 400, 50)
        rows = table.pull(ids)
        table.push(ids, rows + 1)
        epoch.scratch.sum = float(rows.sum())

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen += epoch.scratch.sum

    def result(self) -> float:
        return self.seen


@tg.job
def learn(servers: int = 2, epochs: int = 9, place: str = "", optimizer: str = "adam", other: bool = False) -> tg.Job:
    more: dict[str, Any] = {"items": tg.Table(2)} if other else {}
    return tg.Job(
        tasks=2,
        epochs=epochs,
        builder=Learner,
        tables={"users": tg.Table(4, optimizer=optimizer, servers=servers), **more},  # type: ignore[arg-type]
        checkpoint=place or None,
        checkpoint_every=1,
    )


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rows_move_to_other_servers(tmp_path: Path, servers: int) -> None:
    expected = tg.run(learn(), nodes=0).values
    place = tmp_path.as_uri()
    tg.run(learn(epochs=6, place=place), nodes=0)
    resumed = tg.run(learn(servers=servers, place=place), nodes=0, resume=True)
    assert resumed.values == expected
    assert resumed.epochs == 9
    assert tg.run(learn(epochs=11, place=place), nodes=0, resume=True).epochs == 11, "and back again"


def test_other_tables_are_refused(tmp_path: Path) -> None:
    place = tmp_path.as_uri()
    tg.run(learn(epochs=6, place=place), nodes=0)
    with pytest.raises(tg.CheckpointError, match="here it is 2 tasks of table users, 2 tasks of table items"):
        tg.run(learn(place=place, other=True), nodes=0, resume=True)
    with pytest.raises(tg.JobFailed, match="use those that it was written with"):
        tg.run(learn(place=place, optimizer="sgd"), nodes=0, resume=True)


@pytest.mark.slow
def test_nodes_resume_with_other_servers(tmp_path: Path) -> None:
    place = tmp_path.as_uri()
    expected = tg.run(learn(), nodes=0).values
    tg.run(learn(epochs=6, place=place), nodes=2)
    assert tg.run(learn(servers=4, place=place), nodes=3, resume=True).values == expected
