"""Code that keeps an `epoch` and uses it when that is over: a mistake, told by name; no node ends for it."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.errors import JobFailed
from taskgraph.launch.inprocess import InProcessCluster

OVER = r"uses an `epoch` that is over"


class Keeping(Counting, state=["total"]):
    kept: Any = None
    at: str = ""

    def uses(self, where: str) -> None:
        if where == self.at and self.kept is not None:
            self.kept.report(loss=1.0)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.uses("count")
        await super().count(epoch, ins, outs)
        self.kept = epoch

    def on_commit(self, epoch: int, state: Any) -> None:
        self.uses("on_commit")

    def snapshot(self) -> Any:
        self.uses("snapshot")
        return {"total": self.total}

    def restore(self, state: Any) -> None:
        self.total = state["total"]

    def result(self) -> int:
        self.uses("result")
        return self.total


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", ["count", "on_commit", "result"])
def test_it_is_told_by_name(where: str, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Fresh(Keeping, state=["total"]):
        at = where

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=OVER) as failed:
            await cluster.result()
        assert f"{where!r}: it uses" in str(failed.value)

    settings = tg.Settings(strict=strict, epochs_ahead=0)
    play(job(Fresh, settings=settings), scenario, nodes=3)
    assert not [record for record in caplog.records if "cannot go on" in record.getMessage()], "no node ends for it"
