"""The code of each task runs with a stream of its own as the current one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.node.usercode.actor import Actor
from taskgraph.node.usercode.threads import PooledThreads


@pytest.fixture
async def threads() -> AsyncIterator[PooledThreads]:
    pool = PooledThreads("streams", limit=1)
    yield pool
    pool.close()


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


def actor_of(threads: PooledThreads, soft: SoftDevice | None, task: int = 0) -> Actor:
    return Actor(threads, task=task, cancel_s=1, device=soft)


async def test_a_function_runs_on_its_tasks_stream(threads: PooledThreads, soft: SoftDevice) -> None:
    one, other = actor_of(threads, soft), actor_of(threads, soft, 1)
    seen = [await actor.call("compute", soft.current_stream) for actor in (one, other, one, other)]
    assert seen[0] is seen[2] and seen[1] is seen[3]
    assert len({soft.default, *seen}) == 3
    assert await threads.run(soft.current_stream) is soft.default, "a thread is given back as it was"


class Mixes(tg.Task, state=["row"]):
    """Stateless and other computes, some of an epoch in flight."""

    def setup(self) -> None:
        self.weights = self.xp.arange(10_000.0) / 1000
        self.row = self.xp.arange(10_000.0) + self.task_id

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.weigh, outbound={"weights": "right"})
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.keep, inbound={"row": "left", "weights": "left"})

    @tg.stateless
    def weigh(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("weights", self.weights * (1.0 + epoch.number))
        epoch.scratch.mine = self.weights * 2.0

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)

    async def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        scaled = ins["row"] * ins["weights"]
        await asyncio.sleep(0)
        self.row = scaled + self.row * epoch.scratch.mine

    def result(self) -> SoftArray:
        return self.row


def expected(tasks: int, epochs: int) -> list[np.ndarray]:
    weights = np.arange(10_000.0) / 1000
    rows = [np.arange(10_000.0) + task for task in range(tasks)]
    for number in range(epochs):
        rows = [rows[t - 1] * (weights * (1.0 + number)) + rows[t] * (weights * 2.0) for t in range(tasks)]
    return rows


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("strict", [False, True])
def test_tasks_have_their_own_streams(monkeypatch: pytest.MonkeyPatch, seed: int | None, strict: bool) -> None:
    soft = SoftDevice(seed, races=seed == 3)
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (soft.xp, soft))
    job = tg.Job(tasks=3, epochs=4, builder=Mixes, topology=tg.ring())
    result = tg.testing.run(job, strict=strict, order=seed or 0)
    for task, row in enumerate(expected(3, 4)):
        assert np.array_equal(result.values[task], row)
    assert not soft.waits_on_loops and not soft.calls_on_loops
    assert len(soft.streams) > 3
