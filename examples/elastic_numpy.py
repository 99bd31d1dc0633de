"""A mixture of Gaussians by expectation maximization: an elastic job in numpy alone.

Each step is one iteration over all points. A part of the step sums what its points say: how many belong to each
component, where, and how far apart. From the sums every worker makes the same new mixture. `run.once` draws the first
means on one worker, so that all begin with the same ones. The job ends when the likelihood hardly grows.

    taskgraph run examples/elastic_numpy.py --nodes 4
    taskgraph run examples/elastic_numpy.py --nodes 4 -o points=200000 -o tolerance=0 -o steps=2000  # time to kill
    python examples/elastic_numpy.py run --nodes 0

The result has the largest error of a mean, which the points were drawn around, and the checksum of all bits of the
mixture. It is the same on any number of workers, whatever is killed, and whoever joins.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

Array = NDArray[np.float64]
CENTERS = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [5.0, 5.0]])


def draw(points: int) -> Array:
    """Points in the plane, shape (points, 2): each center has as many, at a distance of 1 on average."""
    rng = np.random.default_rng(11)
    return CENTERS[np.arange(points) % len(CENTERS)] + rng.normal(0, 0.8, (points, 2))


def first_means(x: Array) -> Array:
    """Draws points that are far from one another (k-means++), shape (components, 2)."""
    means = x[:1]
    while len(means) < len(CENTERS):
        squares = ((x[:, None] - means) ** 2).sum(axis=2).min(axis=1)
        drawn = np.random.choice(len(x), p=squares / squares.sum())
        means = np.concatenate([means, x[[drawn]]])
    return means


def log_densities(x: Array, weights: Array, means: Array, variances: Array) -> Array:
    """Log of weight times density of each component at each point, shape (points, components)."""
    squares: Array = ((x[:, None] - means) ** 2 / variances).sum(axis=2)
    constant: Array = np.log(weights) - np.log(2 * np.pi * np.sqrt(variances.prod(axis=1)))
    return constant - squares / 2


@tg.elastic
def mixture(run: tg.Run, points: int = 20_000, tolerance: float = 1e-6, steps: int = 200) -> dict[str, Any]:
    """Fits four Gaussians to points in the plane.

    Args:
        points: how many are drawn
        tolerance: the job ends when the mean log likelihood of a point grows by less
        steps: at most
    """
    x = draw(points)
    count = len(CENTERS)
    s = run.state(
        weights=np.full(count, 1 / count),
        means=run.once(lambda: first_means(x)),
        variances=np.ones((count, 2)),
        likelihood=-np.inf,
    )
    for step in run.steps(rows=points, batch=points, passes=steps, shuffle=False):
        for part in step:
            own = x[part.rows]
            logs = log_densities(own, s.weights, s.means, s.variances)
            total = np.logaddexp.reduce(logs, axis=1, keepdims=True)
            share = np.exp(logs - total)
            part.add(count=share.sum(axis=0), sums=share.T @ own, squares=share.T @ own**2, likelihood=total.sum())
        per = step["count"][:, None]
        s.weights, s.means = step["count"] / points, step["sums"] / per
        s.variances = step["squares"] / per - s.means**2
        before, s.likelihood = s.likelihood, float(step["likelihood"]) / points
        step.report(likelihood=s.likelihood)
        if s.likelihood - before < tolerance:
            break  # all workers do: the likelihood is made of totals
    return {
        "largest error of a mean": error(s.means),
        "steps": step.number + 1,
        "checksum": checksum(s.weights, s.means, s.variances),
    }


def error(means: Array) -> float:
    """The largest distance from a center to the mean that is nearest to it."""
    distances: Array = np.linalg.norm(CENTERS[:, None] - means, axis=2)
    return float(distances.min(axis=1).max())


def checksum(*arrays: Array) -> str:
    """A checksum of all bits of some arrays."""
    return f"{zlib.crc32(b''.join(array.tobytes() for array in arrays)):08x}"


if __name__ == "__main__":
    tg.main(mixture)
