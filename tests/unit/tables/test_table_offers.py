"""Only changed rows go to backups."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.node.router import Router
from taskgraph.protocol.messages import Call, Offer, Offers, Reply

ROWS, CHANGED, WIDTH, EPOCHS = 100_000, 1_000, 16, 6
ROW_BYTES = 8 + 4 * WIDTH


class Filler(tg.Task):
    """Touches all rows in the first epoch, and some in each other one."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("rows")
        rng = np.random.default_rng(epoch.number)
        ids = rng.choice(ROWS, CHANGED, replace=False) if epoch.number else np.arange(ROWS)
        table.push(ids, np.ones((len(ids), WIDTH), np.float32))
        if epoch.last:
            epoch.report(total=float(table.pull(np.arange(ROWS))[:, 0].astype(np.float64).sum()))


def job() -> tg.Job:
    table = tg.Table(WIDTH, init="zeros", lr=-1.0, servers=1)
    return tg.Job(tasks=1, epochs=EPOCHS, builder=Filler, tables={"rows": table})


TOTAL = ROWS + (EPOCHS - 2) * CHANGED


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Boundary -> bytes of its offers to members, of the table's server."""
    sizes: dict[int, int] = {}
    begin_at = Router.begin_at

    def begun(self: Router, node: str, message: Call) -> asyncio.Future[Reply] | None:
        if isinstance(message, Offer | Offers) and message.task == 1:
            sizes[message.stamp.epoch] = sizes.get(message.stamp.epoch, 0) + message.value.size_bytes
        return begin_at(self, node, message)

    monkeypatch.setattr(Router, "begin_at", begun)
    return sizes


def test_offer_has_the_changed_rows_only(sent: dict[int, int]) -> None:
    assert tg.testing.run(job()).reports[-1].numbers["total"] == TOTAL
    later = [size for boundary, size in sent.items() if boundary > 2]
    assert len(later) >= EPOCHS - 3
    assert max(later) < 1.2 * CHANGED * ROW_BYTES, "some 1 % of the table"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [{(1, 3): "done", (1, 4): "snapshot"}, {(1, 4): "processor", (0, 5): "done"}])
def test_backup_takes_over_with_all_rows(kills: dict[tuple[int, int], str]) -> None:
    assert tg.testing.run(job(), kills=kills).reports[-1].numbers["total"] == TOTAL


@pytest.mark.slow
def test_node_processes_have_the_same_rows() -> None:
    result = tg.run(driver_job(), nodes=2)
    assert result.reports[-1].numbers["total"] == TOTAL


@tg.job
def driver_job() -> tg.Job:
    return job()
