"""A ring of tasks that average rows: on the device where there is one (`self.xp`), on the host elsewhere.

With RELAX_REMOTE in the environment nodes are to each other as on different hosts.
"""

import hashlib
import os

import numpy as np

import taskgraph as tg
from taskgraph.transport import endpoints

if "RELAX_REMOTE" in os.environ:
    endpoints.can_dial = lambda endpoint: endpoint.startswith("tcp:")


class Relax(tg.Task, state=["row"]):
    def __init__(self, size, hashed):
        self.size = size
        self.hashed = hashed

    def setup(self):
        self.row = self.xp.arange(self.task_id, self.task_id + self.size, dtype="f8")

    def compose(self, epoch):
        around = [*epoch.neighbors("left"), *epoch.neighbors("right")]
        epoch.processor(self.send, outbound={"row": around})
        epoch.processor(self.mean, inbound={"row": around})

    def send(self, epoch, ins, outs):
        outs.put("row", self.row)

    def mean(self, epoch, ins, outs):
        left, right = ins.all("row").values()
        assert type(left) is self.xp.ndarray, "what was put from a device arrives on one"
        self.row = (left + right + self.row) / 3
        epoch.report(mean=float(self.row.mean()))

    def result(self):
        if not self.hashed:
            return self.row
        row = self.row if isinstance(self.row, np.ndarray) else self.row.get()
        return hashlib.sha256(row.tobytes()).hexdigest()


class Turned(tg.Task, state=["x"]):
    """A state in Fortran's order. Its sum depends on that, and goes into the next state."""

    def setup(self):
        side = self.xp.arange(600.0)
        self.x = (self.xp.sin(side[:, None] * 7 + side) * 10.0 ** (side % 9)).T

    def compose(self, epoch):
        epoch.processor(self.add, outbound={"sum": "right"})
        epoch.processor(self.mix, inbound={"sum": "left"})

    def add(self, epoch, ins, outs):
        outs.put("sum", float(self.x.sum()))

    def mix(self, epoch, ins, outs):
        assert self.x.flags.f_contiguous and not self.x.flags.c_contiguous
        self.x *= 0.99  # in place: CuPy's products are in C's order
        self.x += ins["sum"] / self.x.size

    def result(self):
        return self.x


@tg.job
def turned(tasks: int = 3, epochs: int = 6):
    return tg.Job(tasks=tasks, epochs=epochs, builder=Turned, topology=tg.ring())


@tg.job
def relax(tasks: int = 4, epochs: int = 6, size: int = 1000, hashed: bool = False):
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda task_id: Relax(size, hashed), topology=tg.ring())
