"""A ring of tasks whose rows live on a device in software.

Each node's process has one of its own; with SOFT_DEVICE_SHARED in the environment all have the same. With
SOFT_DEVICE_REMOTE they are to each other as on different hosts.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import taskgraph as tg
from taskgraph.node import roles
from taskgraph.transport import endpoints

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "device"))
from softdevice import SoftDevice

SoftDevice.memory_bytes = 4 << 30  # as much as lets the memory of an epoch's items wait for the next one's
identity = os.environ.get("SOFT_DEVICE_SHARED", "").encode()
device = SoftDevice(seed=5, races=True, identity=identity.ljust(16) if identity else None)
roles.array_module = lambda devices: (device.xp, device)

if "SOFT_DEVICE_REMOTE" in os.environ:
    endpoints.can_dial = lambda endpoint: endpoint.startswith("tcp:")

SIZE = int(os.environ.get("SOFT_DEVICE_SIZE", "50000"))


class Rows(tg.Task, state=["row"]):
    """In its last epoch it stands still until the file `gate` exists."""

    def __init__(self, gate):
        self.gate = gate

    def setup(self):
        self.row = self.xp.arange(float(SIZE)) + 1.0 * self.task_id

    def compose(self, epoch):
        epoch.processor(self.send, outbound={"row": [*epoch.neighbors("left"), *epoch.neighbors("right")]})
        epoch.processor(self.mean, inbound={"row": [*epoch.neighbors("left"), *epoch.neighbors("right")]})

    def send(self, epoch, ins, outs):
        time.sleep(0.03)
        while epoch.last and not os.path.exists(self.gate) and not epoch.cancelled:
            time.sleep(0.01)
        outs.put("row", self.row)
        self.row_before = self.row * 3.0

    def mean(self, epoch, ins, outs):
        left, right = ins.all("row").values()
        assert type(left) is self.xp.ndarray
        self.row = (left + right + self.row_before) / 5.0
        epoch.report(
            waited_on_loops=len(device.waits_on_loops),
            opened=device.times_opened,
            registered=device.registrations,
            misuses=len(device.misuses),
        )

    def result(self):
        return float((self.row.get() * (1 + np.arange(SIZE) % 97)).sum())


@tg.job
def soft_rows(gate: str, tasks: int = 5, epochs: int = 150):
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Rows(gate), topology=tg.ring())
