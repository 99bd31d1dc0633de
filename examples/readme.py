"""The program of the README: 15 tasks fit a line through data that each of them makes up.

taskgraph run examples/readme.py --nodes 4
taskgraph run examples/readme.py --nodes 4 -o tasks=31
"""

import numpy as np

import taskgraph as tg


class Fit(tg.Task, state=["theta"]):  # state: what a backup keeps, what a failure cannot take
    def setup(self):  # once per replica, in a thread: this task's shard
        self.x = np.random.default_rng(self.task_id).normal(size=(1000, 3))
        self.y = self.x @ [1.0, 2.0, 3.0]
        self.theta = np.zeros(3)

    def compose(self, epoch):  # this epoch's processors and channels: tag -> link
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"theta": "children"})
            epoch.processor(self.update, inbound={"grad": "children"})  # no outbound: a sync point, runs last
        else:
            epoch.processor(self.relay, inbound={"theta": "parents"}, outbound={"theta": "children"})
            epoch.processor(self.add, inbound={"theta": "parents", "grad": "children"}, outbound={"grad": "parents"})

    def publish(self, epoch, ins, outs):
        outs.put("theta", self.theta)

    def relay(self, epoch, ins, outs):
        outs.put("theta", ins["theta"])

    def add(self, epoch, ins, outs):
        outs.put("grad", self.grad(ins["theta"], ins))

    def grad(self, theta, ins):
        return self.x.T @ (self.x @ theta - self.y) + sum(ins.all("grad").values())

    def update(self, epoch, ins, outs):
        grad = self.grad(self.theta, ins)
        self.theta -= grad / (1000 * self.tasks)
        epoch.report(slope=abs(grad).max())  # shown live, once per committed epoch

    def result(self):
        return self.theta if self.task_id == 0 else None


@tg.job
def fit(tasks: int = 15, epochs: int = 40):
    return tg.Job(tasks=tasks, epochs=epochs, builder=Fit, topology=tg.tree())


if __name__ == "__main__":
    tg.main(fit)
