"""k-means on whatever there is: written once in the array API, with CuPy on a node that has a GPU and numpy elsewhere.

Points are drawn around a number of centers. Every task holds a share of them, on its device where it has one. In each
epoch task 0 hands the centroids down a tree; every task assigns its points to the nearest one, and what is needed for
the next centroids (sums, numbers, and the sum of squared distances) is added up the tree. It ends when no centroid
moves: each is then the mean of the points that are nearest to it, and close to one of the centers.

    pip install 'taskgraph-aio[embedded,cuda12]'           # or without cuda12: the same on CPUs
    taskgraph run examples/gpu_kmeans.py --nodes 4         # several GPUs: as many nodes
    taskgraph run examples/gpu_kmeans.py --nodes 4 -o points=100000000 -o tasks=31
    taskgraph run examples/gpu_kmeans.py --nodes 4 -o epochs=5000 -o tolerance=-1      # time to kill something
    taskgraph run examples/gpu_kmeans.py --nodes 4 -o requires_gpu=true                # on nodes with a GPU only

On one kind of node the result is the same to the last bit on any number of them, and whatever is killed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

#: Of numpy on a node without a device, of CuPy on one with it.
Array = Any


def draw(points: int, centers: int, dimensions: int, task_id: int, tasks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A task's share of the points, and around which center each was drawn: so close that some points mix."""
    middle = np.random.default_rng(0).uniform(0.0, 10.0, size=(centers, dimensions))
    rows = tg.shard(points, task_id, tasks)
    random = np.random.default_rng([1, task_id])
    around = random.integers(centers, size=rows.stop - rows.start)
    return middle[around] + random.normal(size=(len(around), dimensions)), around


class Means(tg.Task, state=["centroids"]):
    """Holds a share of the points. Task 0 keeps the centroids."""

    def __init__(self, points: int, centers: int, dimensions: int, tolerance: float) -> None:
        self.shape = points, centers, dimensions
        self.tolerance = tolerance

    def setup(self) -> None:
        mine, _ = draw(*self.shape, self.task_id, self.tasks)
        self.points = self.xp.asarray(mine)
        self.squares = self.xp.sum(self.points * self.points, axis=1)
        self.centroids = self.spread_out() if self.task_id == 0 else None

    def spread_out(self) -> Array:
        """Points to begin with: each the farthest from all before it, so that no two are of one center."""
        xp, (_, centers, _) = self.xp, self.shape
        chosen = [self.points[0, :]]
        while len(chosen) < centers:
            nearest = xp.min(self.distances(xp.stack(chosen)), axis=1)
            chosen.append(self.points[int(xp.argmax(nearest)), :])
        return xp.stack(chosen)

    def distances(self, centroids: Array) -> Array:
        """Squared, of every point to every centroid: most of the work, and it is one product of matrices."""
        products = self.points @ centroids.T
        return self.squares[:, None] - 2.0 * products + self.xp.sum(centroids * centroids, axis=1)[None, :]

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.broadcast("centroids", self.publish)
        epoch.reduce("sums", self.sums, self.step, inbound=("centroids",))

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs) -> Array:
        return self.centroids

    def sums(self, epoch: tg.Epoch, ins: tg.Inputs) -> tuple[Array, Array, Array]:
        """Over the task's points, by nearest centroid: their sum and number; and all squared distances."""
        xp = self.xp
        centroids = xp.asarray(ins["centroids"])  # a task on a node of the other kind sent numpy's
        distances = self.distances(centroids)
        nearest = xp.argmin(distances, axis=1)
        own = xp.where(nearest[None, :] == xp.arange(centroids.shape[0])[:, None], xp.asarray(1.0), 0.0)
        return own @ self.points, xp.sum(own, axis=1), xp.sum(xp.min(distances, axis=1))

    def step(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # a sync point of task 0, where state may change
        xp, before = self.xp, self.xp.asarray(self.centroids)  # a predecessor on such a node kept them as numpy's
        sums, numbers, squares = (xp.asarray(array) for array in ins["sums"])
        numbers = numbers[:, None]
        centroids = xp.where(numbers > 0.0, sums / xp.maximum(numbers, 1.0), before)
        moved = float(xp.max(xp.abs(centroids - before)))
        self.centroids = centroids
        epoch.report(moved=moved, mean_square=float(squares) / self.shape[0])
        if moved <= self.tolerance:
            epoch.finish()

    def result(self) -> Array:
        return self.centroids


@tg.job
def gpu_kmeans(
    tasks: int = 7,
    points: int = 200_000,
    centers: int = 8,
    dimensions: int = 4,
    epochs: int = 100,
    tolerance: float = 0.0,
    backups: int = 1,
    requires_gpu: bool = False,
) -> tg.Job:
    """Options: `epochs` at most; it ends before when no centroid moves by more than `tolerance`."""
    if min(centers, dimensions) < 1:
        raise ValueError("centers and dimensions must be 1 at least: there would be nothing to find")
    if points < tasks:
        raise ValueError(
            f"{points} points for {tasks} tasks: each task needs a point: take more points, or fewer tasks"
        )
    shape = points, centers, dimensions
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Means(*shape, tolerance),
        requires_gpu=requires_gpu,
    )


if __name__ == "__main__":
    tg.main(gpu_kmeans)
