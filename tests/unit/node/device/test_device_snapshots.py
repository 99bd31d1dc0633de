"""Snapshots are copied from the device in the background, before their epoch is reported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from softdevice import SoftDevice

import taskgraph as tg
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import JobFailed
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.messages import Encoded

SIZE = 10_000


@pytest.fixture(params=[(None, False), (1, False), (2, True)], ids=["late", "1", "2, races"])
def soft(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[SoftDevice]:
    device = SoftDevice(request.param[0], races=request.param[1])
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (device.xp, device))
    hold = Boundaries.store

    def held(boundaries: Boundaries, boundary: Boundary, *, committed: bool) -> bool:
        assert type(boundary.value) is Encoded, "a replica holds what is on the host"
        assert all(isinstance(buffer, memoryview) for buffer in boundary.value.buffers)
        assert boundary.shared is None or type(boundary.shared) is Encoded
        return hold(boundaries, boundary, committed=committed)

    monkeypatch.setattr(Boundaries, "store", held)
    yield device
    assert not device.waits_on_loops and not device.calls_on_loops


class Grows(tg.Task, state=["row", "count"]):
    """Changes its state in place in every epoch, right after the last snapshot."""

    def setup(self) -> None:
        self.row = self.xp.arange(float(SIZE)) + 1.0 * self.task_id
        self.count = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"n": "right"})
        epoch.processor(self.grow, inbound={"n": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("n", epoch.number)

    def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.row *= 2.0
        self.row += float(ins["n"])
        self.count += 1
        epoch.report(count=self.count)

    def result(self) -> Any:
        return self.row


class Shares(Grows, shared=["theta"]):
    """Each task also changes the same array in place."""

    def setup(self) -> None:
        super().setup()
        self.theta = self.xp.ones(SIZE)

    def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().grow(epoch, ins, outs)
        assert type(self.theta) is type(self.row), "also after a takeover it is on the device"
        self.theta *= 2.0
        self.theta += float(epoch.number)

    def result(self) -> Any:
        return [self.row, self.theta]


class Small(Grows):
    """Has a small state after every other epoch."""

    def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.count += 1 + int(float(self.row.max())) % 7
        self.row = self.xp.full(SIZE if epoch.number % 2 else 10, 1.0 * self.count)

    def result(self) -> Any:
        return self.count


def grown(task: int, epochs: int) -> np.ndarray:
    row = np.arange(float(SIZE)) + 1.0 * task
    for number in range(epochs):
        row = row * 2.0 + float(number)
    return row


KILLS = [
    {},
    {(0, 2): "done", (1, 4): "snapshot"},
    {(2, 1): "compose", (0, 3): "commit"},
    {(1, 1): "sync", (2, 3): "done"},
]


@pytest.mark.parametrize(("order", "kills"), [*enumerate(KILLS)])
@pytest.mark.parametrize("strict", [False, True])
def test_boundary_is_the_state_at_the_end(
    soft: SoftDevice, order: int, kills: dict[tuple[int, int], str], strict: bool
) -> None:
    job = tg.Job(tasks=3, epochs=6, builder=Grows, topology=tg.ring(), backups=1)
    result = tg.testing.run(job, kills=kills, strict=strict, order=order)
    for task in range(3):
        assert np.array_equal(result.values[task], grown(task, 6))
    assert result.failovers or not kills
    told = {report.epoch: [numbers["count"] for numbers in report.by_task.values()] for report in result.reports}
    assert told == {number: [number + 1.0] * 3 for number in range(6)}


@pytest.mark.parametrize(
    ("kills", "strict"), [({(0, 2): "done", (1, 4): "snapshot"}, False), ({(2, 1): "compose"}, True)]
)
def test_shared_state_of_the_device(soft: SoftDevice, kills: dict[tuple[int, int], str], strict: bool) -> None:
    job = tg.Job(tasks=3, epochs=6, builder=Shares, topology=tg.ring(), backups=1)
    theta = np.ones(SIZE)
    for number in range(6):
        theta = theta * 2.0 + float(number)
    result = tg.testing.run(job, kills=kills, strict=strict, order=1)
    for task in range(3):
        assert np.array_equal(result.values[task][0], grown(task, 6))
        assert np.array_equal(result.values[task][1], theta)


def test_and_a_takeover_finds_either(soft: SoftDevice) -> None:
    job = tg.Job(tasks=3, epochs=8, builder=Small, topology=tg.ring())
    calm = tg.testing.run(job, strict=False)
    killed = tg.testing.run(job, kills={(0, 3): "done", (1, 4): "sync", (2, 6): "done"}, strict=False, order=2)
    assert killed.failovers
    assert calm.values == killed.values


def test_failed_copy_fails_the_job(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        raise ArithmeticError("the device is gone")

    monkeypatch.setattr(DeviceBuffer, "copy_to_host", host)
    with pytest.raises(JobFailed, match=r"snapshot to the host.*ArithmeticError: the device is gone"):
        tg.run(tg.Job(tasks=2, epochs=4, builder=Grows, topology=tg.ring()), nodes=0)


OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


def test_dead_node_leaves_no_snapshot_in_flight(soft: SoftDevice, caplog: pytest.LogCaptureFixture) -> None:
    kills = {(1, 0): "compose", (0, 2): "snapshot", (2, 2): "compose", (2, 3): "compose"}
    for order in range(5):
        job = tg.Job(tasks=3, epochs=6, builder=Grows, topology=tg.ring(), backups=1 + order % 2)
        tg.testing.run(job, kills=kills, strict=False, order=order)
        gc.collect()
    assert "was destroyed but it is pending" not in caplog.text
