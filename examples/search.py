"""Which settings learn best? Successive halving: train many for a short time, drop the worse half, and train on.

A trial is a learning rate, a weight decay and a batch size of a logistic regression. How long one takes differs, so
no task has a share of them: `epoch.map` gives the next one to whichever task is free (dynamic sharding).

    taskgraph run examples/search.py --nodes 4
    taskgraph run examples/search.py --nodes 4 --replace -o trials=256 -o trainers=7
    python examples/search.py

Which trial wins does not depend on who trained it, or on how often: random numbers are of the trial, not of the task.
So the result is that of `alone()`, a loop without tasks, to the last bit, whatever is killed.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

POINTS, WIDTH = 2000, 20


class Trial(TypedDict):
    rate: float
    decay: float
    batch: int
    weights: NDArray[np.float64]
    loss: float


def data(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points in two classes, and which one each is in; a tenth of that is wrong."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(POINTS, WIDTH))
    right = x @ rng.normal(size=WIDTH) > 0
    return x, (right ^ (rng.random(POINTS) < 0.1)).astype(float)


def draw(number: int, seed: int) -> Trial:
    rng = np.random.default_rng((seed, number))
    rate, decay = (float(10 ** rng.uniform(low, high)) for low, high in ((-4, 1), (-6, 0)))
    return Trial(rate=rate, decay=decay, batch=int(2 ** rng.integers(3, 8)), weights=np.zeros(WIDTH), loss=np.inf)


def train(
    trial: Trial, number: int, rung: int, seed: int, x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """The weights after some more passes through the first half of the data, and their loss on the second half."""
    rng = np.random.default_rng((seed, number, rung))  # of the piece: whoever trains it draws the same
    weights, half = trial["weights"].copy(), POINTS // 2
    for _ in range(2**rung):
        order = rng.permutation(half)
        for begin in range(0, half, trial["batch"]):
            rows = order[begin : begin + trial["batch"]]
            wrong = sigmoid(x[rows] @ weights) - y[rows]
            weights -= trial["rate"] * (x[rows].T @ wrong / len(rows) + trial["decay"] * weights)
    chance = np.clip(sigmoid(x[half:] @ weights), 1e-12, 1 - 1e-12)
    loss = -np.mean(y[half:] * np.log(chance) + (1 - y[half:]) * np.log(1 - chance))
    return weights, float(loss)


def sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(z, -500, 500)))


def better_half(trials: dict[int, Trial]) -> dict[int, Trial]:
    ranked = sorted(trials, key=lambda number: (trials[number]["loss"], number))
    return {number: trials[number] for number in sorted(ranked[: (len(ranked) + 1) // 2])}


class Search(tg.Task, shared=["trials", "left", "rung"]):
    """The trials, and which of them are still to be trained before the worse half is dropped; the same on all tasks."""

    def __init__(self, trials: int, at_a_time: int, seed: int) -> None:
        self.count, self.at_a_time, self.seed = trials, at_a_time, seed

    def setup(self) -> None:
        self.x, self.y = data(self.seed)
        self.trials = {number: draw(number, self.seed) for number in range(self.count)}
        self.left = list(self.trials)
        self.rung = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("trained", self.left[: self.at_a_time], self.train, self.settle)

    def train(self, epoch: tg.Epoch, number: int) -> tuple[NDArray[np.float64], float]:
        return train(self.trials[number], number, self.rung, self.seed, self.x, self.y)

    def settle(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        trained = ins["trained"]
        for number, (weights, loss) in zip(self.left, trained, strict=False):
            self.trials[number] = {**self.trials[number], "weights": weights, "loss": loss}
        self.left = self.left[len(trained) :]
        epoch.report(trials=len(self.trials), best=min(trial["loss"] for trial in self.trials.values()))
        if self.left:
            return
        self.trials = better_half(self.trials)
        self.left = list(self.trials)
        self.rung += 1
        if len(self.trials) == 1:
            epoch.finish()

    def result(self) -> dict[str, Any]:
        ((number, trial),) = self.trials.items()
        return {"trial": number, **{name: value for name, value in trial.items() if name != "weights"}}


def alone(trials: int = 64, seed: int = 0) -> dict[int, Trial]:
    """The same without tasks: the trial that is left."""
    x, y = data(seed)
    left, rung = {number: draw(number, seed) for number in range(trials)}, 0
    while True:
        for number, trial in left.items():
            trial["weights"], trial["loss"] = train(trial, number, rung, seed, x, y)
        left, rung = better_half(left), rung + 1
        if len(left) == 1:
            return left


@tg.job
def search(trainers: int = 3, trials: int = 64, at_a_time: int = 12, seed: int = 0) -> tg.Job:
    """Successive halving.

    Args:
        trainers: tasks that train
        trials: how many settings are tried
        at_a_time: so many are trained in one epoch; what was not committed is trained again after a failure
        seed: of all that is drawn
    """
    if min(trainers, trials, at_a_time) < 1:
        raise ValueError("trainers, trials and at_a_time must be 1 at least: nothing would be trained")
    return tg.Job(tasks=trainers, builder=lambda task_id: Search(trials, at_a_time, seed))


if __name__ == "__main__":
    tg.main(search)
