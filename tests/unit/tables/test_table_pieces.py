"""Tables in the pieces of a map: a push counts with its piece."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import taskgraph as tg

PIECES, ROWS = 16, 50


def ids_of(piece: int) -> Any:
    return np.random.default_rng(piece).integers(0, ROWS, 12)


class Mapper(tg.Task, state=["found"]):
    """The first epoch pushes in pieces; the second one reads."""

    def setup(self) -> None:
        self.found: list[float] = []

    def compose(self, epoch: tg.Epoch) -> None:
        if epoch.last:
            epoch.flag(self.task_id)
            epoch.processor(self.keep)
        else:
            epoch.map("work", range(PIECES), self.piece)

    def piece(self, epoch: tg.Epoch, piece: int) -> None:
        table = epoch.table("rows")
        ids = ids_of(piece)
        rows = table.pull(ids)
        table.push(ids, (rows + np.float32(1 + 0.1 * piece)).astype(np.float32))
        if piece == 7 and epoch.number == 1:
            table.push([3], np.full((1, 2), 0.25, np.float32))

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        epoch.scratch.rows = epoch.table("rows").pull().tolist()

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.found = epoch.scratch.rows

    def result(self) -> list[float] | None:
        return self.found if self.task_id == 0 else None


def job(tasks: int = 3, staleness: int = 0) -> tg.Job:
    table = tg.Table(2, lr=0.01, rows=ROWS, servers=2, staleness=staleness)
    return tg.Job(tasks=tasks, epochs=3, builder=Mapper, tables={"rows": table})


def alone() -> list[float]:
    rows = tg.Table(2, lr=0.01, rows=ROWS).first_rows("rows", np.arange(ROWS))
    for epoch in range(2):
        sums = np.zeros_like(rows)
        for piece in range(PIECES):
            np.add.at(sums, ids_of(piece), (rows[ids_of(piece)] + np.float32(1 + 0.1 * piece)).astype(np.float32))
            if piece == 7 and epoch == 1:
                sums[3] += np.float32(0.25)
        rows = rows - 0.01 * sums
    return rows.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("tasks", "kills"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (3, {(1, 0): "processor", (0, 1): "done"}),
        pytest.param(2, {(2, 1): "processor", (1, 1): "processor"}, marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_who_computed_a_piece(tasks: int, kills: dict[tuple[int, int], str]) -> None:
    assert tg.testing.run(job(tasks), kills=kills, order=tasks).value == alone()


def test_pushes_of_pieces_count_once_with_staleness() -> None:
    found = tg.testing.run(job(staleness=2), kills={(3, 1): "processor"}).value
    np.testing.assert_allclose(found, alone(), rtol=0.2, atol=0.05)


class Failing(Mapper):
    """A piece fails after it has pulled and pushed."""

    def compose(self, epoch: tg.Epoch) -> None:
        if epoch.last:
            super().compose(epoch)
        else:
            epoch.map("work", "pieces", self.piece)

    def piece(self, epoch: tg.Epoch, piece: int) -> None:
        table = epoch.table("rows")
        table.push([piece], table.pull([piece]) - 1.0)
        if piece == 5:
            raise ValueError("it is set aside, and its push does not count")


def test_pieces_that_fail_push_nothing_and_are_not_taken_for_random_ones() -> None:
    queue = tg.WorkQueue(range(PIECES), on_error="set aside")
    table = tg.Table(1, init="zeros", lr=1.0, rows=PIECES, servers=2)
    job = tg.Job(tasks=3, epochs=2, builder=Failing, tables={"rows": table}, queues={"pieces": queue})
    assert tg.testing.run(job).value == [[0.0 if piece == 5 else 1.0] for piece in range(PIECES)]


class Wrong(Mapper):
    def piece(self, epoch: tg.Epoch, piece: int) -> None:
        epoch.table("rows").lr = 0.5


def test_rate_is_not_set_in_a_piece() -> None:
    wrong = tg.Job(tasks=1, epochs=2, builder=Wrong, tables={"rows": tg.Table(2, rows=ROWS)})
    with pytest.raises(tg.PieceFailed, match="it is set outside pieces"):
        tg.testing.run(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_random_kill_loses_or_doubles_a_push(seed: int) -> None:
    rng = random.Random(seed)
    stages = ("compose", "processor", "sync", "snapshot", "done")
    kills = {(rng.randrange(5), epoch): rng.choice(stages) for epoch in rng.sample(range(3), 2)}
    assert tg.testing.run(job(3), kills=kills, order=seed).value == alone()
