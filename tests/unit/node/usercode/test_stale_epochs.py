"""Code that uses an `epoch` after its end fails the job by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.epoch import AttemptEnded
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
def test_stale_epoch_is_named(where: str, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Fresh(Keeping, state=["total"]):
        at = where

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=OVER) as failed:
            await cluster.result()
        assert f"{where!r}: it uses" in str(failed.value)

    settings = tg.Settings(strict=strict, epochs_ahead=0)
    play(job(Fresh, settings=settings), scenario, nodes=3)
    assert not [record for record in caplog.records if "cannot go on" in record.getMessage()], "no node ends for it"


USES: dict[str, Callable[[tg.Epoch], object]] = {
    "report": lambda epoch: epoch.report(loss=1.0),
    "finish": lambda epoch: epoch.finish(),
    "hold": lambda epoch: epoch.hold("too late"),
}


@pytest.mark.parametrize("use", USES)
def test_stale_epoch_in_the_next_epoch_is_named(use: str) -> None:
    used = asyncio.Event()

    class Fresh(Counting, state=["total"]):
        kept: Any = None

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 0:
                await used.wait()  # the epoch is not committed before
            elif self.kept is not None:
                used.set()
                USES[use](self.kept)
            self.kept = epoch

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=r"task 1, epoch 1, 'count': it uses an `epoch` that is over"):
            await cluster.result()

    play(job(Fresh, settings=tg.Settings(epochs_ahead=4)), scenario, nodes=2)


@pytest.mark.parametrize(
    "use", [lambda epoch: epoch.flag(0), lambda epoch: epoch.request(0, "get")], ids=["flag", "request"]
)
def test_message_after_the_job_is_logged(use: Callable[[tg.Epoch], object], caplog: pytest.LogCaptureFixture) -> None:
    kept: list[tg.Epoch] = []

    class Fresh(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.keep, outbound={"kept": self.task_id})
            epoch.processor(self.count, inbound={"kept": self.task_id})

        async def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            kept.append(epoch)
            outs.put("kept", None)

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        with pytest.raises((AttemptEnded, tg.GraphError)):
            use(kept[-1])
        await asyncio.sleep(0)
        assert "comes too late" in caplog.text and "after the job ended" in caplog.text

    play(job(Fresh), scenario, nodes=2)


def test_stale_epoch_in_user_thread_is_named() -> None:
    assert "keep the epoch open with epoch.hold" in str(AttemptEnded())
    assert "epoch.hold" not in str(AttemptEnded(held=True)), "it did what is asked for"
