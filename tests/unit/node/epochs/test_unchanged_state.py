"""An epoch that cannot have changed the state uses the snapshot before."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from cluster_kit import holder, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

EPOCHS = 12


class Counting(tg.Task, state=["total"]):
    """Its state changes in every third epoch, in a sync point without the mark."""

    taken: dict[int, list[int]]
    total: int
    latest = -1

    def setup(self) -> None:
        self.total = 0

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        me = self.task_id
        epoch.processor(self.send, outbound={"x": me})
        if epoch.number % 3 == 2:
            epoch.processor(self.add, inbound={"x": me})
        else:
            epoch.processor(functools.partial(self.look, epoch.number), inbound={"x": me}, name="look")

    @tg.stateless
    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.number)

    @tg.stateless
    async def look(self, number: int, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert ins["x"] == number

    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]

    def snapshot(self) -> Any:
        self.taken[self.task_id].append(self.total)
        return super().snapshot()

    def restore(self, state: Any) -> None:
        super().restore(state)

    def result(self) -> int:
        return self.total


@pytest.fixture
def counting() -> type[Counting]:
    class Fresh(Counting, state=["total"]):
        taken = {0: [], 1: []}  # noqa: RUF012

    return Fresh


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": EPOCHS, "builder": builder, "backups": 1, **options})


async def result(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


TOTAL = 2 + 5 + 8 + 11
NEW = [0, 0, 2, 7, 15, 26]  # boundary 0; the first epoch of the attempt; and where it changed


@pytest.mark.parametrize("in_flight", [1, 4])
def test_unchanged_state_is_not_snapshotted_again(counting: type[Counting], in_flight: int) -> None:
    settings = tg.Settings(epochs_in_flight=in_flight)
    found = play(job(lambda _: counting(), settings=settings), result, nodes=2)
    assert found.values == {0: TOTAL, 1: TOTAL}
    assert counting.taken == {0: NEW, 1: NEW}


@pytest.mark.parametrize("hook", ["on_event", "on_flag", "on_commit", "handler"])
def test_other_hooks_need_every_snapshot(counting: type[Counting], hook: str) -> None:
    hooks: dict[str, Any] = {
        "on_event": lambda self, event: None,
        "on_flag": lambda self, epoch, sender, meta: None,
        "on_commit": lambda self, number, state: None,
        "handler": tg.handles("ask")(lambda self, epoch, sender, payload: None),
    }
    hooked = type("Hooked", (counting,), {hook: hooks[hook]})
    found = play(job(lambda _: hooked()), result, nodes=2)
    assert found.values == {0: TOTAL, 1: TOTAL}
    assert [len(taken) for taken in counting.taken.values()] == [EPOCHS + 1] * 2


@pytest.mark.parametrize("epoch", range(1, 8))
def test_takeover_has_the_unchanged_state(counting: type[Counting], epoch: int) -> None:

    crashed: list[str] = []

    async def crash(cluster: InProcessCluster, node: str) -> None:
        if not crashed:
            crashed.append(node)
            cluster.crash(holder(cluster, 1).id)
            await asyncio.Event().wait()

    found = play(job(lambda _: counting()), result, nodes=3, stages={("done", 1, epoch): crash})
    assert found.values == {0: TOTAL, 1: TOTAL} and found.failovers >= 1


def test_a_restart_begins_with_the_restored_state(counting: type[Counting]) -> None:

    class Erratic(counting, state=["total"]):  # type: ignore[misc, valid-type]
        asked = False

        async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().add(epoch, ins, outs)
            if self.task_id == 1 and epoch.number == 5 and not type(self).asked:
                type(self).asked = True
                self.total += 1000  # of an attempt that never commits

    asked: list[str] = []

    async def restart(cluster: InProcessCluster, node: str) -> None:
        if not asked:
            asked.append(node)
            primary = holder(cluster, 1).roles.primaries[1]
            assert primary.attempt is not None
            primary.ask_restart(primary.attempt.stamp, "the test says so")
            await asyncio.Event().wait()

    found = play(job(lambda _: Erratic()), result, nodes=2, stages={("done", 1, 5): restart})
    assert asked and Erratic.asked and found.values == {0: TOTAL, 1: TOTAL}
