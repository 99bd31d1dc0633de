"""A ring of tasks that average rows: on the device where there is one (`self.xp`), on the host elsewhere."""

import taskgraph as tg


class Relax(tg.Task, state=["row"]):
    def __init__(self, size):
        self.size = size

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
        return self.row


@tg.job
def relax(tasks: int = 4, epochs: int = 6, size: int = 1000):
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda task_id: Relax(size), topology=tg.ring())
