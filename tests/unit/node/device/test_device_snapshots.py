"""Snapshots leave the device in the background; who is told of an epoch has the boundary on the host."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.device import buffers
from taskgraph.device.buffers import DeviceBuffer
from taskgraph.errors import JobFailed
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.node.epochs import sharing
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.softdevice import SoftDevice

SIZE = 10_000


@pytest.fixture(params=[(None, False), (None, True), (1, False), (2, True)], ids=["late", "races", "1", "2, races"])
def soft(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[SoftDevice]:
    device = SoftDevice(request.param[0], races=request.param[1])
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (device.xp, device))
    hold = Boundaries.hold

    def held(boundaries: Boundaries, boundary: Boundary, *, committed: bool) -> bool:
        assert type(boundary.value) is Encoded, "a replica holds what is on the host"
        assert all(isinstance(buffer, memoryview) for buffer in boundary.value.buffers)
        return hold(boundaries, boundary, committed=committed)

    monkeypatch.setattr(Boundaries, "hold", held)
    yield device
    assert not device.waits_on_loops and not device.calls_on_loops


class Grows(tg.Task, state=["row", "count"]):
    """Its state changes in place, in every epoch, right after the snapshot before."""

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


class Small(Grows):
    """Its state is small after every other epoch: it is on the host at once then."""

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


@pytest.mark.parametrize(
    "kills",
    [{}, {(0, 2): "done", (1, 4): "snapshot"}, {(2, 1): "compose", (0, 3): "commit"}, {(1, 1): "sync", (2, 3): "done"}],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_boundary_is_the_state_at_its_epochs_end(
    soft: SoftDevice, kills: dict[tuple[int, int], str], strict: bool
) -> None:
    job = tg.Job(tasks=3, epochs=6, builder=Grows, topology=tg.ring(), backups=1)
    for order in range(3):
        result = tg.testing.run(job, kills=kills, strict=strict, order=order)
        for task in range(3):
            assert np.array_equal(result.values[task], grown(task, 6))
        assert result.failovers or not kills
        told = {report.epoch: [numbers["count"] for numbers in report.by_task.values()] for report in result.reports}
        assert told == {number: [number + 1.0] * 3 for number in range(6)}


def test_small_ones_do_not_overtake_large_ones(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, hold = DeviceBuffer.host, Boundaries.hold
    order: dict[int, list[int]] = {}

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        time.sleep(0.02)  # far longer than an epoch
        return copy(buffer, *args)

    def held(boundaries: Boundaries, boundary: Boundary, *, committed: bool) -> bool:
        order.setdefault(id(boundaries), []).append(boundary.stamp.epoch)
        return hold(boundaries, boundary, committed=committed)

    monkeypatch.setattr(DeviceBuffer, "host", host)
    monkeypatch.setattr(Boundaries, "hold", held)
    tg.run(tg.Job(tasks=2, epochs=8, builder=Small, topology=tg.ring(), backups=0), nodes=0)
    assert list(order.values()) == [list(range(9))] * 2


def test_and_a_takeover_finds_either(soft: SoftDevice) -> None:
    job = tg.Job(tasks=3, epochs=8, builder=Small, topology=tg.ring())
    calm = tg.testing.run(job, strict=False)
    killed = tg.testing.run(job, kills={(0, 3): "done", (1, 4): "sync", (2, 6): "done"}, strict=False, order=2)
    assert killed.failovers
    assert calm.values == killed.values


class Tells(Grows):
    began = threading.Event()

    def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().grow(epoch, ins, outs)
        if epoch.number == 1:
            Tells.began.set()


@pytest.mark.parametrize("ahead_bytes", [sharing.AHEAD_BYTES, 10_000])
def test_the_next_epoch_computes_meanwhile_however_large_it_is(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int
) -> None:
    monkeypatch.setattr(sharing, "AHEAD_BYTES", ahead_bytes)
    copy = DeviceBuffer.host
    Tells.began.clear()

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        assert Tells.began.wait(20), "the first snapshot is copied before anything else happens"
        return copy(buffer, *args)

    monkeypatch.setattr(DeviceBuffer, "host", host)
    result = tg.run(tg.Job(tasks=2, epochs=4, builder=Tells, topology=tg.ring()), nodes=0)
    for task in range(2):
        assert np.array_equal(result.values[task], grown(task, 4))


class Alone(tg.Task, state=["row"]):
    def setup(self) -> None:
        self.row = self.xp.arange(float(SIZE))

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.grow)

    def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.row *= 2.0


def test_of_a_large_state_there_is_one_copy_on_the_device_however_long_it_takes_to_the_host(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "AHEAD_BYTES", 10_000)
    copy, made, live, most = DeviceBuffer.host, buffers.Private.__init__, weakref.WeakSet[Any](), []

    def private(self: buffers.Private, *args: Any) -> None:
        made(self, *args)
        live.add(self._lease)
        gc.collect()
        most.append(len(live))

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        time.sleep(0.02)  # longer than an epoch
        return copy(buffer, *args)

    monkeypatch.setattr(buffers.Private, "__init__", private)
    monkeypatch.setattr(DeviceBuffer, "host", host)
    tg.run(tg.Job(tasks=1, epochs=8, builder=Alone, backups=0), nodes=0)
    assert len(most) >= 8 and max(most) == 1


def test_an_epoch_is_not_done_before_its_boundary_is_on_the_host(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, committed, copied = DeviceBuffer.host, [], []

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        found = copy(buffer, *args)
        copied.append(len(committed))
        return found

    class Commits(Grows):
        def on_commit(self, number: int, state: dict[str, Any]) -> None:
            committed.append(number)
            assert len(copied) >= len(committed)

    monkeypatch.setattr(DeviceBuffer, "host", host)
    tg.run(tg.Job(tasks=2, epochs=4, builder=Commits, topology=tg.ring()), nodes=0)
    assert len(copied) == 8 and len(committed) >= 8


def test_a_copy_that_fails_fails_the_job_with_its_reason(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        raise ArithmeticError("the device is gone")

    monkeypatch.setattr(DeviceBuffer, "host", host)
    with pytest.raises(JobFailed, match=r"snapshot to the host.*ArithmeticError: the device is gone"):
        tg.run(tg.Job(tasks=2, epochs=4, builder=Grows, topology=tg.ring()), nodes=0)


OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


def test_of_an_error_of_the_device_what_computes_is_told_first(
    soft: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal access is told of to whoever uses the device next: it may be the copy of the snapshot before."""
    copy, computes, met = DeviceBuffer.host, threading.Event(), threading.Event()

    def host(buffer: DeviceBuffer, *args: Any) -> memoryview:
        if not computes.wait(0.05):
            return copy(buffer, *args)
        met.set()
        raise OutOfMemoryError("of the copy")

    class Spoils(Grows):
        def grow(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 0 and epoch.number == 2:
                computes.set()
                assert met.wait(10)
                time.sleep(0.02)
                raise OutOfMemoryError("of the compute")
            super().grow(epoch, ins, outs)

    monkeypatch.setattr(DeviceBuffer, "host", host)
    with pytest.raises(JobFailed, match=r"task 0, epoch 2, 'grow': OutOfMemoryError: of the compute"):
        tg.run(tg.Job(tasks=2, epochs=4, builder=Spoils, topology=tg.ring()), nodes=0)


def test_a_node_that_dies_leaves_no_snapshot_on_its_way(soft: SoftDevice, caplog: pytest.LogCaptureFixture) -> None:
    """Its end is told again, while what it works on is still ending."""
    kills = {(1, 0): "compose", (0, 2): "snapshot", (2, 2): "compose", (2, 3): "compose"}
    for order in range(5):
        for backups in (1, 2):
            job = tg.Job(tasks=3, epochs=6, builder=Grows, topology=tg.ring(), backups=backups)
            tg.testing.run(job, kills=kills, strict=False, order=order)
            gc.collect()
    assert "was destroyed but it is pending" not in caplog.text
