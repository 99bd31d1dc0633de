"""cupy inside processors. Runs where a CUDA device is; the same logic runs on numpy everywhere else."""

from __future__ import annotations

import numpy as np
import pytest

from taskgraph.graph.devices import device_count
from taskgraph.graph.values import decode, encode
from taskgraph.jobs import Job
from taskgraph.task import Task
from taskgraph.testing import run
from taskgraph.topology import ring

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


class Relax(Task, state=["row"]):
    """Every task holds a row on the device and averages it with its neighbors' rows."""

    def setup(self) -> None:
        self.row = self.xp.arange(self.task_id, self.task_id + 1000, dtype="f8")

    def compose(self, epoch):
        epoch.processor(self.send, outbound={"row": [*epoch.neighbors("left"), *epoch.neighbors("right")]})
        epoch.processor(self.mean, inbound={"row": [*epoch.neighbors("left"), *epoch.neighbors("right")]})

    def send(self, epoch, ins, outs):
        outs.put("row", self.row)

    def mean(self, epoch, ins, outs):
        left, right = ins.all("row").values()
        assert type(left) is self.xp.ndarray, "what was put from a device arrives on one"
        self.row = (left + right + self.row) / 3
        epoch.report(mean=float(self.row.mean()))

    def result(self):
        return self.row


def test_device_arrays_travel_and_survive_a_kill() -> None:
    job = Job(tasks=4, epochs=6, builder=Relax, topology=ring())
    calm = run(job)
    killed = run(job, kills={(0, 2): "sync", (2, 4): "done"})
    assert killed.failovers > 0
    for task, row in calm.values.items():
        assert type(row) is np.ndarray, "results are read on the host"
        assert np.array_equal(row, killed.values[task])


def test_the_digest_does_not_depend_on_where_an_array_lives() -> None:
    import cupy

    host = np.arange(12, dtype="f4").reshape(3, 4)
    for one in (host, host.T, host[:, ::2], host[0, 0].reshape(())):
        on_host, on_device = encode(one), encode(cupy.asarray(one))
        assert on_host.digest == on_device.digest
        assert np.array_equal(decode(on_device), one)
        back = decode(on_device, device="cuda")
        assert type(back) is cupy.ndarray
        assert np.array_equal(back.get(), one)


def test_later_changes_on_the_device_do_not_reach_what_was_put() -> None:
    import cupy

    array = cupy.ones(100_000)
    encoded = encode(array)
    array[:] = 7
    assert decode(encoded).max() == 1
