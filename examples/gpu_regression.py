"""Logistic regression by Newton's method, in the array API: CuPy on a node that has a GPU, numpy elsewhere.

Rows are drawn with known coefficients. Every task holds a share of them, on its device where it has one. In each epoch
task 0 hands the coefficients down a tree; gradient, curvature (a matrix) and loss over all rows are added up, and it
solves for the next coefficients. A handful of epochs finds the maximum of the likelihood. In the end it tells how far
that is from the coefficients the rows were drawn with, in standard errors.

    pip install 'taskgraph-aio[embedded,cuda12]'           # or without cuda12: the same on CPUs
    taskgraph run examples/gpu_regression.py --nodes 4     # several GPUs: as many nodes
    taskgraph run examples/gpu_regression.py --nodes 4 -o rows=20000000 -o columns=200
    taskgraph run examples/gpu_regression.py --nodes 4 -o epochs=5000 -o tolerance=0   # time to kill something

On one kind of node the result is the same to the last bit on any number of them, and whatever is killed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

#: Of numpy on a node without a device, of CuPy on one with it.
Array = Any


def true_coefficients(columns: int) -> NDArray[Any]:
    return np.linspace(-1.0, 1.0, columns)


def draw(rows: int, columns: int, task_id: int, tasks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A task's share of the rows: numbers, the first of them 1, and an outcome of 0 or 1."""
    mine = tg.shard(rows, task_id, tasks)
    random = np.random.default_rng([2, task_id])
    x = random.normal(size=(mine.stop - mine.start, columns))
    x[:, 0] = 1.0
    likely = 1.0 / (1.0 + np.exp(-(x @ true_coefficients(columns))))
    return x, np.where(random.random(len(x)) < likely, 1.0, 0.0)


class Regression(tg.Task, state=["weights", "curvature"]):
    """Holds a share of the rows. Task 0 keeps the coefficients, and solves for the next ones."""

    def __init__(self, rows: int, columns: int, tolerance: float) -> None:
        self.shape = rows, columns
        self.tolerance = tolerance

    def setup(self) -> None:
        x, y = draw(*self.shape, self.task_id, self.tasks)
        self.x, self.y = self.xp.asarray(x), self.xp.asarray(y)
        columns = self.shape[1]
        self.weights = self.xp.zeros(columns)
        self.curvature = self.xp.zeros((columns, columns))

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.broadcast("weights", self.publish)
        epoch.reduce("sums", self.sums, self.step, inbound=("weights",))

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs) -> Array:
        return self.weights

    def sums(self, epoch: tg.Epoch, ins: tg.Inputs) -> tuple[Array, Array, Array]:
        """Over the task's rows: gradient and second derivatives of the loss at `weights`, and the loss."""
        xp = self.xp
        score = self.x @ xp.asarray(ins["weights"])  # a task on a node of the other kind sent numpy's
        likely = 1.0 / (1.0 + xp.exp(-score))
        curved = self.x.T @ (self.x * (likely * (1.0 - likely))[:, None])
        # log(1 + exp(score)), without an overflow where the score is large
        losses = xp.maximum(score, 0.0) + xp.log1p(xp.exp(-xp.abs(score))) - self.y * score
        return self.x.T @ (likely - self.y), curved, xp.sum(losses)

    def step(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # a sync point of task 0, where state may change
        gradient, self.curvature, loss = (self.xp.asarray(array) for array in ins["sums"])
        weights = self.xp.asarray(self.weights)  # a predecessor on a node of the other kind kept them as numpy's
        slope = float(self.xp.max(self.xp.abs(gradient))) / self.shape[0]
        epoch.report(loss=float(loss) / self.shape[0], slope=slope)
        if slope <= self.tolerance:
            epoch.finish()
        else:
            # A right-hand side with two axes means the same to every version of every library.
            self.weights = weights - self.xp.linalg.solve(self.curvature, gradient[:, None])[:, 0]

    def result(self) -> dict[str, Any] | None:
        if self.task_id:
            return None
        true = self.xp.asarray(true_coefficients(self.shape[1]))
        weights, curvature = self.xp.asarray(self.weights), self.xp.asarray(self.curvature)
        inverse = self.xp.linalg.inv(curvature)
        errors = self.xp.sqrt(self.xp.sum(inverse * self.xp.eye(self.shape[1]), axis=1))
        return {
            "coefficients": weights,
            "standard errors": errors,
            "largest error, in standard errors": float(self.xp.max(self.xp.abs(weights - true) / errors)),
        }


@tg.job
def gpu_regression(
    tasks: int = 7,
    rows: int = 100_000,
    columns: int = 20,
    epochs: int = 50,
    tolerance: float = 1e-12,
    backups: int = 1,
    requires_gpu: bool = False,
) -> tg.Job:
    """Options: `epochs` at most; it ends before when no partial derivative of the mean loss exceeds `tolerance`."""
    if not 1 <= columns <= rows:
        raise ValueError(
            f"{rows} rows of {columns} columns: take 1 column at least, and as many rows as columns, or more"
        )
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Regression(rows, columns, tolerance),
        requires_gpu=requires_gpu,
    )


if __name__ == "__main__":
    tg.main(gpu_regression)
