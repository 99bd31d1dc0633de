"""Each task's code runs with a stream of its own as the current one, in threads and on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.device import shared
from taskgraph.graph.values import decode, encode
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.node.usercode.actor import Actor
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import PooledThreads
from taskgraph.testing.softdevice import SoftArray, SoftDevice, SoftStream


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
    seen = [await actor.call("compute", soft.current) for actor in (one, other, one, other)]
    assert seen[0] is seen[2] and seen[1] is seen[3]
    assert len({soft.default, *seen}) == 3
    assert await threads.run(soft.current) is soft.default, "a thread is given back as it was"


async def test_a_thread_is_given_back_as_it_was_after_an_error(threads: PooledThreads, soft: SoftDevice) -> None:
    def fails() -> None:
        soft.use(soft.stream())
        raise ValueError("x")

    with pytest.raises(UserCodeError):
        await actor_of(threads, soft).call("compute", fails)
    assert await threads.run(soft.current) is soft.default


async def test_so_does_each_step_of_a_coroutine(threads: PooledThreads, soft: SoftDevice) -> None:
    seen: dict[int, list[SoftStream]] = {0: [], 1: []}

    async def compute(task: int) -> None:
        for _ in range(3):
            seen[task].append(soft.current())
            await asyncio.sleep(0)
        seen[task].append(soft.current())

    async def look_on() -> None:
        for _ in range(6):
            await asyncio.sleep(0)
            assert soft.current() is soft.default

    calls = [actor_of(threads, soft, task).call("compute", compute, task) for task in seen]
    await asyncio.gather(*calls, look_on())
    assert [len(set(streams)) for streams in seen.values()] == [1, 1]
    assert len({soft.default, seen[0][0], seen[1][0]}) == 3


async def test_a_function_and_a_coroutine_of_a_task_share_its_stream(threads: PooledThreads, soft: SoftDevice) -> None:
    actor = actor_of(threads, soft)

    async def compute() -> SoftStream:
        return soft.current()

    assert await actor.call("one", compute) is await actor.call("other", soft.current)


async def test_what_a_coroutine_left_as_current_ends_with_its_step(threads: PooledThreads, soft: SoftDevice) -> None:
    async def compute() -> list[SoftStream]:
        seen = [soft.current()]
        soft.use(soft.stream())
        await asyncio.sleep(0)
        return [*seen, soft.current()]

    async def look_on() -> None:
        await asyncio.sleep(0)
        assert soft.current() is soft.default

    (before, after), _ = await asyncio.gather(actor_of(threads, soft).call("compute", compute), look_on())
    assert before is after


async def test_a_coroutine_is_told_of_its_end_on_its_stream(threads: PooledThreads, soft: SoftDevice) -> None:
    seen: list[SoftStream] = []

    async def compute() -> None:
        seen.append(soft.current())
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(soft.current())

    call = asyncio.ensure_future(actor_of(threads, soft).call("compute", compute))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen[0] is seen[1] is not soft.default
    assert soft.current() is soft.default


async def test_a_value_that_is_put_waits_for_its_own_tasks_work_only(threads: PooledThreads, soft: SoftDevice) -> None:
    one, other = actor_of(threads, soft), actor_of(threads, soft, 1)
    array: SoftArray = await one.call("compute", lambda: soft.xp.arange(10_000.0) * 2.0)
    stream: SoftStream = await one.call("compute", soft.current)
    assert stream.done == 0

    def put() -> float:
        return float(decode(encode(soft.xp.arange(10_000.0) * 3.0))[1])

    assert await other.call("compute", put) == 3
    assert stream.done == 0
    assert (await one.call("compute", array.get))[1] == 2


async def test_without_a_device_there_is_none(threads: PooledThreads) -> None:
    actor = actor_of(threads, None)
    assert await actor.call("compute", lambda: 1) == 1
    assert actor._streams is None


class Mixes(tg.Task, state=["row"]):
    """Computes of both kinds, some of which run before the epoch before was snapshotted."""

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
def test_a_job_whose_tasks_compute_on_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, seed: int | None, strict: bool
) -> None:
    soft = SoftDevice(seed, races=seed == 3)
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (soft.xp, soft))
    job = tg.Job(tasks=3, epochs=4, builder=Mixes, topology=tg.ring())
    result = tg.testing.run(job, strict=strict, order=seed or 0)
    for task, row in enumerate(expected(3, 4)):
        assert np.array_equal(result.values[task], row)
    assert not soft.waits_on_loops and not soft.calls_on_loops
    assert len(soft.streams) > 3


class Flagged(tg.Task, state=["total"]):
    def setup(self) -> None:
        self.total = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag("right", self.xp.arange(10_000.0) + epoch.number)
        epoch.processor(self.add)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: SoftArray) -> None:
        epoch.scratch.sum = meta.sum()

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += float(epoch.scratch.sum)

    def result(self) -> float:
        return self.total


def test_what_is_replayed_is_on_the_stream_of_who_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = SoftDevice()
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (soft.xp, soft))
    result = tg.testing.run(tg.Job(tasks=2, epochs=3, builder=Flagged, topology=tg.ring()))
    assert result.values == dict.fromkeys(range(2), 3 * sum(range(10_000)) + 10_000.0 * 3)
    assert not soft.waits_on_loops and not soft.calls_on_loops


class Captures(tg.Task, state=["row"]):
    """Computes capture graphs on the task's stream for a moment, and what they were given goes meanwhile, or later."""

    def __init__(self, soft: SoftDevice, size: int) -> None:
        self.soft, self.size = soft, size
        self.seen: object = None

    def setup(self) -> None:
        self.row = self.xp.arange(float(self.size)) + self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def captured(self) -> None:
        with self.soft.captures():
            time.sleep(0.002)
            self.seen = None
            time.sleep(0.002)

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.captured()
        outs.put("row", self.row)

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        other = ins["row"]
        self.captured()
        self.row = (self.row + other) * 0.5
        self.seen = other if epoch.number % 2 else None

    def result(self) -> SoftArray:
        return self.row


@pytest.mark.parametrize("size", [10_000, 200_000])
def test_graphs_are_captured_on_streams_that_nobody_else_touches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """What was read went back by the reader's and the owner's stream, in the middle of their captures."""
    soft = SoftDevice(3)
    shared.offer(soft)
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (soft.xp, soft))
    job = tg.Job(tasks=3, epochs=12, builder=lambda _: Captures(soft, size), topology=tg.ring(), backups=0)
    try:
        result = tg.run(job, nodes=0)
    finally:
        shared._offered.pop(soft)
    rows = [np.arange(float(size)) + task for task in range(3)]
    for _ in range(12):
        rows = [(rows[t] + rows[t - 1]) * 0.5 for t in range(3)]
    assert all(np.array_equal(result.values[t], row) for t, row in enumerate(rows))
    assert not soft.misuses


class Starts(tg.Task):
    """Code that starts more of its own: on which streams does that compute?"""

    def __init__(self, soft: SoftDevice, seen: dict[str, SoftStream]) -> None:
        self.soft, self.seen = soft, seen

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.gathers)
        epoch.processor(self.plain)

    async def gathers(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen["task"] = own = self.soft.current()

        async def child() -> None:
            self.seen["child"] = self.soft.current()
            with self.soft.on(own):
                self.seen["child within"] = self.soft.current()

        await asyncio.gather(child())
        self.seen["to_thread"] = await asyncio.to_thread(self.soft.current)

    def plain(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        with ThreadPoolExecutor(1) as pool:
            self.seen["pool"] = pool.submit(self.soft.current).result()


def test_what_a_task_starts_computes_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, seen = SoftDevice(), dict[str, SoftStream]()
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (soft.xp, soft))
    tg.run(tg.Job(tasks=1, epochs=1, builder=lambda _: Starts(soft, seen), backups=0), nodes=0)
    default = {name for name, stream in seen.items() if stream is soft.default}
    assert default == {"child", "to_thread", "pool"} and seen["child within"] is seen["task"]
