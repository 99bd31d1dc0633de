"""Items that stay on the device: kills, restarts, several consumers, and views that are kept."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.device import buffers
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import JobFailed
from taskgraph.launch import inprocess
from taskgraph.node import roles

SIZE = 10_000
GIVEN_BACK_S = 30.0
RUNS = [(None, False), (1, False), (2, True)]


@pytest.fixture(params=RUNS, ids=["late", "1", "2, races"])
def soft(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[SoftDevice]:
    seed, races = request.param
    device = SoftDevice(seed, races=races)
    give(monkeypatch, device)
    yield device
    assert not device.waits_on_loops and not device.calls_on_loops
    # What goes on an event loop is given back in a thread, which the job's end does not wait for. Neither does it wait
    # for a thread of its own to drop the last call that it made.
    deadline = time.monotonic() + GIVEN_BACK_S
    while kept_of(device) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not kept_of(device)


def kept_of(device: SoftDevice) -> list[object]:
    gc.collect()
    return [memory for memory in tuple(buffers._kept) if memory.device is device]


def give(monkeypatch: pytest.MonkeyPatch, device: SoftDevice) -> None:
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (device.xp, device))


def to_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the sizes of items that are copied to the host."""
    sizes: list[int] = []
    copy = DeviceBuffer.copy_to_host

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        sizes.append(buffer.nbytes)
        return copy(buffer, *args)

    monkeypatch.setattr(DeviceBuffer, "copy_to_host", host)
    return sizes


class Mean(tg.Task, state=["row"]):
    """A ring of rows: two consumers read each row while its producer goes on."""

    def setup(self) -> None:
        self.row = self.xp.arange(float(SIZE)) + 1.0 * self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        around = [*epoch.neighbors("left"), *epoch.neighbors("right")]
        epoch.processor(self.send, outbound={"row": around})
        epoch.processor(self.twice, inbound={"row": around}, outbound={"sum": "right"})
        epoch.processor(self.mean, inbound={"row": around, "sum": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        row = self.row * 2.0
        outs.put("row", row)
        row *= 7.0  # what was put does not hear of it

    def twice(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        left, right = ins.all("row").values()
        outs.put("sum", left + right)

    def mean(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        left, right = ins.all("row").values()
        assert type(left) is type(self.row)
        self.row = (left + right + self.row + ins["sum"]) / 10.0

    def result(self) -> Any:
        return self.row


def means(tasks: int, epochs: int) -> list[np.ndarray]:
    rows = [np.arange(float(SIZE)) + 1.0 * task for task in range(tasks)]
    for _ in range(epochs):
        sums = [rows[t - 1] * 2.0 + rows[(t + 1) % tasks] * 2.0 for t in range(tasks)]
        rows = [(rows[t - 1] * 2.0 + rows[(t + 1) % tasks] * 2.0 + rows[t] + sums[t - 1]) / 10.0 for t in range(tasks)]
    return rows


def check(result: tg.JobResult, tasks: int = 3, epochs: int = 5) -> None:
    for task, row in enumerate(means(tasks, epochs)):
        assert np.array_equal(result.values[task], row)


RING = tg.Job(tasks=3, epochs=5, builder=Mean, topology=tg.ring())


@pytest.mark.parametrize("strict", [False, True])
def test_items_stay_on_the_device(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    copied = to_host(monkeypatch)
    check(tg.testing.run(RING, strict=strict))
    assert len(copied) == RING.tasks * 5, "their snapshots, and nothing else"
    assert soft.reused > 10, "their memory goes back while the job runs"


def test_on_real_threads(soft: SoftDevice) -> None:
    check(tg.run(RING, nodes=0))


KILLS = [
    {(0, 1): "processor", (1, 3): "sync"},
    {(1, 1): "sync", (2, 2): "done"},
    {(2, 0): "snapshot", (0, 4): "commit"},
    {(0, 2): "committed", (1, 3): "processor"},
]


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_between_put_and_pull_anybody_may_die(soft: SoftDevice, request: pytest.FixtureRequest, number: int) -> None:
    """Each way to die on each device, every other one in strict mode."""
    strict = (RUNS.index(request.node.callspec.params["soft"]) + number) % 2 > 0
    result = tg.testing.run(RING, kills=KILLS[number], strict=strict, order=7)
    assert result.failovers
    check(result)


class Diverges(Mean):
    """Puts another value in each run: a takeover restarts the epoch while consumers have views."""

    runs = 0

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        Diverges.runs += 1
        outs.put("row", self.row * float(Diverges.runs))

    def twice(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        left, right = ins.all("row").values()
        kept.append((left, left + 0.0))
        outs.put("sum", left + right)


kept: list[tuple[SoftArray, SoftArray]] = []
"""Views, and what they had when they were given."""


def test_restart_with_live_views(soft: SoftDevice) -> None:
    kept.clear()
    job = tg.Job(tasks=3, epochs=5, builder=Diverges, topology=tg.ring())
    result = tg.testing.run(job, kills={(0, 1): "sync", (1, 3): "sync"}, strict=False, order=3)
    assert result.restarts
    assert len(kept) > 15
    soft.synchronize()
    for view, then in kept:
        assert np.array_equal(view.elements, then.elements)
    kept.clear()


# -- who has a device, and who has none -----------------------------------------------------------


class HostOrDevice(tg.Task, state=["row"]):
    """Works with and without a device."""

    def setup(self) -> None:
        self.row = self.xp.arange(float(SIZE)) + 1.0 * self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        others = [(self.task_id - 1) % 3, (self.task_id - 2) % 3]
        epoch.processor(self.send, outbound={"row": others})
        epoch.processor(self.look, inbound={"row": others}, outbound={"own": [self.task_id]})
        epoch.processor(self.mean, inbound={"row": others, "own": [self.task_id]})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.here(self.row))

    async def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        assert len(ins.all("row")) == 2  # on the event loop: nothing may wait here
        outs.put("own", None)

    def mean(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        one, other = map(self.here, ins.all("row").values())
        self.row = (one + other + self.here(self.row)) / 2.0

    def here(self, array: Any) -> Any:
        if self.xp is np:
            assert type(array) is np.ndarray
            return array
        return self.xp.asarray(array) if type(array) is np.ndarray else array

    def result(self) -> Any:
        return self.row


@pytest.mark.parametrize("kills", [{}, {(0, 1): "sync", (1, 3): "done"}])
def test_nodes_with_a_device_and_nodes_without(
    monkeypatch: pytest.MonkeyPatch, kills: dict[tuple[int, int], str]
) -> None:
    soft, made = SoftDevice(), []

    def array_module(devices: int) -> tuple[Any, SoftDevice | None]:
        made.append(len(made) % 3 == 0)
        return (np, None) if made[-1] else (soft.xp, soft)

    give(monkeypatch, soft)
    monkeypatch.setattr(roles, "array_module", array_module)

    copied = to_host(monkeypatch)
    job = tg.Job(tasks=3, epochs=5, builder=HostOrDevice, topology=tg.ring())
    result = tg.testing.run(job, kills=kills, strict=False)
    rows = [np.arange(float(SIZE)) + 1.0 * task for task in range(3)]
    for _ in range(5):
        rows = [(rows[t - 1] + rows[t - 2] + rows[t]) / 2.0 for t in range(3)]
    for task, row in enumerate(rows):
        assert np.array_equal(result.values[task], row)
    assert copied, "for those without one"
    assert set(made) == {False, True}
    assert not soft.waits_on_loops and not soft.calls_on_loops


# -- who writes to what it was given --------------------------------------------------------------


class Keeps(tg.Task, state=["before", "total"]):
    """Keeps the view of an item as its state."""

    def setup(self) -> None:
        self.before = self.xp.zeros(SIZE)
        self.total = self.xp.zeros(SIZE)
        self.all = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.take, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.xp.full(SIZE, 1.0 + epoch.number + 10 * self.task_id))

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total = self.total + self.before[::1]
        self.before = ins["row"]

    def result(self) -> Any:
        return self.total


class Writes(Keeps):
    """Task 1 writes to the row that it receives."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": [1, 2]})
        epoch.processor(self.take, inbound={"row": [0, 1, 2]} if self.task_id else {})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.xp.full(SIZE, 1.0))

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 1:
            row = ins.all("row")[2]
            row += 1


class WritesAsync(Writes):
    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 1:
            await asyncio.sleep(0)
            row = ins.all("row")[2]
            row += 1


class WritesLater(Writes):
    """Keeps the row, and writes to it in the next epoch."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": [1, 2]})
        epoch.processor(self.keep, inbound={"row": [0, 1, 2]} if self.task_id else {})
        epoch.processor(self.take)

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1:
            self.all = [*self.all[-1:], ins.all("row")[2]]

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number == 1:
            self.all[0] += 1


class WritesWhenFlagged(WritesLater):
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)
        if self.task_id == 0 and epoch.number == 1:
            epoch.flag([1])

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        self.all[0] += 1


@pytest.mark.parametrize(
    ("builder", "told"),
    [
        (Writes, "'take' wrote to what 'row' of task 2 brought to 'take' in epoch 1"),
        (WritesAsync, "'take' wrote to what 'row' of task 2 brought to 'take' in epoch 1"),
        (WritesLater, "'take' wrote to what 'row' of task 2 brought to 'keep' in epoch 0"),
        (WritesWhenFlagged, "'on_flag' wrote to what 'row' of task 2 brought to 'keep' in epoch 0"),
    ],
)
@pytest.mark.parametrize("order", range(3))
def test_write_to_a_device_item_is_named(
    soft: SoftDevice, builder: Callable[[], tg.Task], told: str, order: int
) -> None:
    job = tg.Job(tasks=3, epochs=3, builder=builder, topology=tg.ring())
    with pytest.raises(JobFailed) as failed:
        tg.testing.run(job, order=order)
    assert f"task 1, epoch 1: {told}: an array on a device is the memory that was put" in str(failed.value)
