"""The program of the README: 15 tasks fit a line through data that each of them makes up.

taskgraph run examples/readme.py --nodes 4
taskgraph run examples/readme.py --nodes 4 -o tasks=31
"""

import numpy as np

import taskgraph as tg


class Fit(tg.Task, shared=["theta"]):  # shared: equal on all tasks; backups keep it, no failure can take it
    def setup(self):  # once per replica, in a thread: this task's shard
        self.x = np.random.default_rng(self.task_id).normal(size=(1000, 3))
        self.y = self.x @ [1.0, 2.0, 3.0]
        self.theta = np.zeros(3)

    def compose(self, epoch):  # what this epoch does: add up the gradients of all tasks
        epoch.allreduce("grad", self.gradient, self.update)

    def gradient(self, epoch, ins):
        return self.x.T @ (self.x @ self.theta - self.y)

    def update(self, epoch, ins):  # runs last, on all tasks: state changes here only
        self.theta -= ins["grad"] / (1000 * self.tasks)
        epoch.report(slope=abs(ins["grad"]).max())  # shown live, once per committed epoch

    def result(self):
        return self.theta


@tg.job
def fit(tasks: int = 15, epochs: int = 40):
    return tg.Job(tasks=tasks, epochs=epochs, builder=Fit)


if __name__ == "__main__":
    tg.main(fit)
