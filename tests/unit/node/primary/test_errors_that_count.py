"""Errors of user code while the job moves on: they fail the job, or the code is called again; none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import Counting, Stage, blindable, crashes, eyes, holder, job, play

import taskgraph as tg
from taskgraph.errors import JobFailed
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.replica import Replica

__all__ = ["blindable"]


class Restored(Counting, state=["total"]):
    """`restore` fails `failing` times, from epoch 1 on."""

    failing: float = 0

    def snapshot(self) -> Any:
        return {"total": self.total}

    def restore(self, state: Any) -> None:
        if state["total"] > 0 and self.failing > 0:
            type(self).failing -= 1
            raise OSError("the file that goes with it cannot be read")
        self.total = state["total"]


async def _die(cluster: InProcessCluster, node: str) -> None:
    cluster.crash(node)
    await asyncio.Event().wait()


@pytest.fixture
def restored() -> type[Restored]:
    class Fresh(Restored, state=["total"]):
        pass

    return Fresh


def test_successor_is_restored_despite_restart(restored: type[Restored], monkeypatch: pytest.MonkeyPatch) -> None:
    restored.failing = 1
    restore = Replica.restore
    clusters: list[InProcessCluster] = []

    async def while_it_starts_again(self: Replica, value: Any) -> None:
        if clusters and crashes(clusters[0]) and restored.failing and self.task == 1:
            node = holder(clusters[0], 0)
            at = node.keeper.view.stamp
            assert at is not None
            node.roles.primaries[0].ask_restart(at, "a test asks for it")
            mine = holder(clusters[0], 1)
            await mine.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.attempt > at.attempt)
        await restore(self, value)

    monkeypatch.setattr(Replica, "restore", while_it_starts_again)

    async def scenario(cluster: InProcessCluster) -> dict[int, Any]:
        clusters.append(cluster)
        return dict((await cluster.result()).values)

    assert play(job(restored, epochs=6), scenario, nodes=3, stages={("sync", 1, 3): _die}) == {0: 6, 1: 6}
    assert restored.failing == 0, "it came to pass"


def test_error_in_last_on_commit_fails_job() -> None:
    class Saving(Counting, state=["total"]):
        def on_commit(self, epoch: int, state: Any) -> None:
            if epoch == 3:
                raise OSError("no space for the model")

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=r"'on_commit': OSError: no space for the model"):
            await cluster.result()

    play(job(Saving, epochs=4), scenario, nodes=2)


def test_error_in_late_on_event_fails_job() -> None:
    class Hearing(Counting, state=["total"]):
        async def on_event(self, event: tg.Event) -> None:
            if isinstance(event, tg.NeighborRestarted):
                await asyncio.sleep(0.3)
                raise ValueError("the event is not understood")

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await asyncio.sleep(0.02)
            await super().count(epoch, ins, outs)

    stages: dict[tuple[str, int, int], Stage] = {("processor", 1, 5): _die}

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=r"'on_event': ValueError: the event is not understood"):
            await cluster.result()

    play(job(Hearing, epochs=200, settings=tg.Settings()), scenario, nodes=3, stages=stages)


class Stateless(tg.Task):
    """A takeover needs only its builder, which raises once `raises` is set."""

    raises: bool
    built: int

    def __init__(self) -> None:
        type(self).built += 1
        if self.raises:
            raise OSError("no such file here")

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.nothing)

    async def nothing(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    def result(self) -> int:
        return self.task_id


@pytest.fixture
def stateless() -> type[Stateless]:
    class Fresh(Stateless):
        raises, built = False, 0

    return Fresh


async def succeeded(cluster: InProcessCluster, task: type[Stateless]) -> Node:
    """The node that begins the task anew after the last commit; its builder raises."""
    await cluster.nodes[0].keeper.wait_until(lambda view: view.finished)
    task.raises, task.built = True, 0
    lost = holder(cluster, 0)
    heir = next(node for node in cluster.nodes if node is not lost)
    await heir.keeper.wait_until(lambda view: view.finished)
    cluster.crash(lost.id)
    return heir


@pytest.mark.usefixtures("blindable")
def test_error_in_successors_builder_fails_job(stateless: type[Stateless]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        heir = await succeeded(cluster, stateless)
        eyes(heir).refuse(cluster.keys.status)  # it does not count yet
        await asyncio.sleep(1)
        assert 2 <= stateless.built <= 21
        eyes(heir).refuse("")
        with pytest.raises(JobFailed, match=r"^task 0, 'task builder': OSError: no such file here"):
            await cluster.result()

    play(job(stateless, tasks=1, backups=0), scenario, nodes=2)
