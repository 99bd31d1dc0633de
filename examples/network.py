"""A small neural network learns to tell two spirals apart: data in shards, weights in parts, the sum of all gradients.

This is how networks are trained on many machines. Every task has a shard of the data, works out the gradient of its
own batch, and all step by the sum. No task is in the middle of it: each keeps one part of the weights, with what the
optimizer (Adam) remembers of it. An epoch is one step:

1. Each task gets the weights of all (an all-gather).
2. Each works out a gradient, and gets its part of the sum of all gradients (a reduce-scatter).
3. Each changes its part of the weights: the sync point.

So a task sends the weights once and a gradient once, however many tasks there are, and a backup holds a part only.

    taskgraph run examples/network.py --nodes 4
    taskgraph run examples/network.py --nodes 4 -o tasks=8 -o hidden=64
    python examples/network.py

The weights that come out are those of `alone`, which is a loop in one process, to the last bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

Array = NDArray[np.float64]
RATE, KEEP, KEEP_SQUARE = 0.01, 0.9, 0.999  # Adam's


def spirals(points: int) -> tuple[Array, Array]:
    """Points in the plane, and which of two spirals each is on: 0 or 1."""
    rng = np.random.default_rng(17)
    which = np.arange(points) % 2
    way = rng.uniform(0.5, 3, points)
    angle = np.pi * (way + which)
    at = np.stack([way * np.cos(angle), way * np.sin(angle)], axis=1)
    return at + rng.normal(0, 0.05, at.shape), which.astype(float)


def first_weights(hidden: int) -> Array:
    """Of two hidden layers, in one vector: any task can make it."""
    rng = np.random.default_rng(5)
    layers = (rng.normal(0, 1 / np.sqrt(rows), (rows + 1, cols)) for rows, cols in shapes(hidden))
    return np.concatenate([layer.ravel() for layer in layers])


def shapes(hidden: int) -> list[tuple[int, int]]:
    return [(2, hidden), (hidden, hidden), (hidden, 1)]


def layers_of(weights: Array, hidden: int) -> list[Array]:
    """Views of a vector; the last row of each layer is its bias."""
    sizes = [(rows + 1) * cols for rows, cols in shapes(hidden)]
    parts = np.split(weights, np.cumsum(sizes)[:-1])
    return [part.reshape(rows + 1, cols) for part, (rows, cols) in zip(parts, shapes(hidden), strict=True)]


def run(weights: Array, hidden: int, at: Array) -> list[Array]:
    """What each layer puts out, the points first; the last one is what speaks for spiral 1."""
    outputs = [at]
    for layer in layers_of(weights, hidden):
        outputs.append(outputs[-1] @ layer[:-1] + layer[-1])
        if len(outputs) < 4:
            np.tanh(outputs[-1], out=outputs[-1])
    return outputs


def gradient(weights: Array, hidden: int, at: Array, which: Array) -> tuple[float, Array]:
    """The logistic loss, summed over the points, and its gradient, by back-propagation."""
    *inputs, last = run(weights, hidden, at)
    score = last[:, 0]
    loss = np.logaddexp(0, score) - which * score
    error = (1 / (1 + np.exp(-score)) - which)[:, None]
    found = np.empty_like(weights)
    for layer, into, given in reversed(
        list(zip(layers_of(weights, hidden), layers_of(found, hidden), inputs, strict=True))
    ):
        into[:-1] = given.T @ error
        into[-1] = error.sum(axis=0)
        error = (error @ layer[:-1].T) * (1 - given**2)
    return float(loss.sum()), found


def batch(epoch: int, task_id: int, tasks: int, points: int, size: int) -> NDArray[np.intp]:
    """Which points a task takes in an epoch: the next ones of its shard, round and round."""
    shard = tg.shard(points, task_id, tasks)
    rows: NDArray[np.intp] = shard.start + np.arange(epoch * size, (epoch + 1) * size) % (shard.stop - shard.start)
    return rows


def adam(epoch: int, found: Array, weights: Array, mean: Array, square: Array) -> tuple[Array, Array, Array]:
    """A step against a gradient; `mean` is a running mean of gradients, and `square` one of their squares."""
    mean = KEEP * mean + (1 - KEEP) * found
    square = KEEP_SQUARE * square + (1 - KEEP_SQUARE) * found**2
    by = mean / (1 - KEEP ** (epoch + 1)) / (np.sqrt(square / (1 - KEEP_SQUARE ** (epoch + 1))) + 1e-8)
    return weights - RATE * by, mean, square


def right(weights: Array, hidden: int, points: int) -> float:
    """Which share of the points is told right."""
    at, which = spirals(points)
    return float(((run(weights, hidden, at)[-1][:, 0] > 0) == which).mean())


def add(arrays: list[Array]) -> Array:
    """The sum of arrays, in the order of a collective: halves, the first one the largest power of two."""
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << (len(arrays) - 1).bit_length() - 1
    return add(arrays[:half]) + add(arrays[half:])


def alone(tasks: int, epochs: int, hidden: int, points: int, size: int) -> Array:
    """The weights without any tasks: each batch by itself, since sums of floats depend on their order."""
    at, which = spirals(points)
    weights = first_weights(hidden)
    mean = square = np.zeros_like(weights)
    for epoch in range(epochs):
        rows = [batch(epoch, task, tasks, points, size) for task in range(tasks)]
        found = add([gradient(weights, hidden, at[of], which[of])[1] for of in rows])
        weights, mean, square = adam(epoch, found / (tasks * size), weights, mean, square)
    return weights


class Part(tg.Task, state=["weights", "mean", "square"]):
    """A part of the weights; and a shard of the points, of which a task takes some in each epoch."""

    def __init__(self, hidden: int, points: int, size: int) -> None:
        self.hidden, self.points, self.size = hidden, points, size

    def setup(self) -> None:
        self.at, self.which = spirals(self.points)
        weights = first_weights(self.hidden)
        self.weights = weights[tg.shard(len(weights), self.task_id, self.tasks)]
        self.mean = self.square = np.zeros_like(self.weights)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allgather("weights", self.publish)
        epoch.reduce_scatter("gradient", self.learn, self.step, inbound=("weights",))
        epoch.reduce("loss", self.loss, self.tell)

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs) -> Array:
        return self.weights

    def learn(self, epoch: tg.Epoch, ins: tg.Inputs) -> Array:
        weights = np.concatenate(list(ins.all("weights").values()))
        of = batch(epoch.number, self.task_id, self.tasks, self.points, self.size)
        epoch.scratch.loss, found = gradient(weights, self.hidden, self.at[of], self.which[of])
        return found

    def step(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        found = ins["gradient"] / (self.tasks * self.size)
        self.weights, self.mean, self.square = adam(epoch.number, found, self.weights, self.mean, self.square)

    def loss(self, epoch: tg.Epoch, ins: tg.Inputs) -> float:
        return float(epoch.scratch.loss)

    def tell(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # on task 0
        epoch.report(loss=ins["loss"] / (self.tasks * self.size))

    def result(self) -> Array:
        return self.weights


@tg.job
def network(tasks: int = 4, epochs: int = 400, hidden: int = 16, points: int = 2000, size: int = 50) -> tg.Job:
    """A network of two hidden layers learns to tell two spirals apart.

    Args:
        tasks: parts of the weights, and shards of the points
        epochs: steps of the optimizer
        hidden: neurons in each of the two layers
        points: how many, of all tasks
        size: points in a batch, of each task
    """
    if min(hidden, size) < 1:
        raise ValueError("hidden and size must be 1 at least: nothing would be learned")
    if points < tasks:
        raise ValueError(
            f"{points} points for {tasks} tasks: each task needs a point: take more points, or fewer tasks"
        )
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Part(hidden, points, size))


if __name__ == "__main__":
    tg.main(network)
