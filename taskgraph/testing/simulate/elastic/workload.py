"""The elastic job of a seed: a loop whose totals show which computations they were made of.

Each computation of a part has a number, its *instance*. A part adds its values, and its instance and its rows in arrays
of their own. So a total says which instance of each part it counts, and from their values follow its bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg
from taskgraph.elastic_jobs.job import _NoTask
from taskgraph.elastic_jobs.node import ElasticNode
from taskgraph.elastic_jobs.rows import Rows
from taskgraph.jobs import ElasticCall, Job
from taskgraph.protocol.elastic.tree import Span, halves
from taskgraph.testing.simulate.elastic.threads import process_name, sleep

__all__ = ["PLACE", "Recorder", "Workload", "next_weights", "tree_sum"]

Values = NDArray[np.float32]
PLACE = "file:///simulated"

_WIDTH = 3
_MOST_S = 12.0
"""Virtual seconds that all parts take at most, one after another, on a worker that is not slow."""


class Recorder(Protocol):
    """Called by the job's code with what it does on a worker. `position`: the number of totals before."""

    def on_part(self, node: str, position: int, part: int, values: Values) -> int:
        """Called when a worker has computed a part. Returns the number of this computation, its instance."""

    def on_total(self, node: str, position: int, total: Mapping[str, Any], parts: int) -> None:
        """Called when a worker's code has got a total of this many parts."""

    def on_boundary(self, node: str, position: int, history: bytes, state: bytes) -> None:
        """Called before each round of a worker, and at the end.

        Args:
            history: a digest of all totals before.
            state: a digest of all that later steps rest on.
        """


def tree_sum(values: Mapping[int, Values], span: Span) -> Values:
    """Adds the values of a span's parts in the order of the tree, so that all bits are those of a job's total."""
    if span.end - span.first == 1:
        return values[span.first]
    first, second = halves(span)
    return tree_sum(values, first) + tree_sum(values, second)


@dataclass
class Workload:
    """The job of one seed.

    Attributes:
        passes: how often the job goes through all rows.
        rounds: how many totals a step has.
        erratic: each computation of a part gives other values.
        compute_s: how long a part takes on average, in virtual time.
        slow: node -> factor of that duration on the node.
        checkpoint_every_s: time between two checkpoints; None: there are none.
    """

    seed: int
    rows: int
    batch: int
    parts: int
    passes: int
    rounds: int
    erratic: bool
    compute_s: float
    slow: dict[str, float] = field(default_factory=dict)
    checkpoint_every_s: float | None = None

    @classmethod
    def draw(cls, rng: random.Random) -> Workload:
        batch = rng.choice((4, 6, 8))
        drawn = cls(
            seed=rng.getrandbits(30),
            rows=batch * rng.choice((1, 2, 3)) + rng.choice((0, 0, 1, 3)),
            batch=batch,
            parts=rng.choice((1, 2, 3, 4, 4)),
            passes=rng.choice((1, 2, 3, 4)),
            rounds=rng.choice((1, 1, 1, 2)),
            erratic=rng.random() < 0.5,
            compute_s=rng.choice((0.001, 0.01, 0.05, 0.2, 0.5)),
        )
        drawn.compute_s = min(drawn.compute_s, _MOST_S / (drawn.positions * drawn.parts))
        return drawn

    @property
    def text(self) -> str:
        """Describes the job, for the seed's description."""
        kind = "erratic " if self.erratic else ""
        rounds = " in 2 rounds" if self.rounds > 1 else ""
        keeps = "" if self.checkpoint_every_s is None else f", a checkpoint every {self.checkpoint_every_s} s"
        return f"{self.plan.steps} {kind}steps of {self.parts} parts{rounds}{keeps}"

    @property
    def plan(self) -> Rows:
        return Rows(self.rows, self.batch, self.parts, self.passes, self.seed, shuffle=True, drop_last=False)

    @property
    def positions(self) -> int:
        """The number of totals of the whole job."""
        assert self.plan.steps is not None
        return self.plan.steps * self.rounds

    def job(self, recorder: Recorder, settings: tg.Settings) -> Job:
        every_s = self.checkpoint_every_s
        arguments = {"workload": self, "recorder": recorder}
        return Job(
            tasks=1,
            builder=_NoTask,
            backups=0,
            settings=settings,
            seed=self.seed,
            name="job",
            checkpoint=None if every_s is None else PLACE,
            _elastic=ElasticCall(_train, arguments, lambda: ElasticNode, every_s or 60.0),
        )

    def values(self, position: int, part: int, rows: NDArray[np.int64], weights: Values) -> Values:
        """Computes a part: values of such different sizes that their sum depends on the order."""
        rng = np.random.Generator(np.random.Philox([self.seed, position * 64 + part]))
        sizes = np.exp(rng.uniform(-9.0, 9.0, _WIDTH)) * rng.normal(size=_WIDTH)
        return np.asarray(sizes * (1.0 + 0.01 * rows.sum()) + np.tanh(weights), np.float32)

    def expected(self) -> Values:
        """Computes the value of a run without faults, if the job is not erratic."""
        plan, weights = self.plan, self.first_weights()
        for position in range(self.positions):
            rows = plan.of_parts(position // self.rounds)
            values = {part: self.values(position, part, rows[part], weights) for part in range(len(rows))}
            weights = next_weights(weights, tree_sum(values, Span(0, len(rows))))
        return weights

    @staticmethod
    def first_weights() -> Values:
        return np.zeros(_WIDTH, np.float32)

    def duration_s(self, node: str, rng: random.Random) -> float:
        """Draws how long a part takes on a node."""
        return self.compute_s * self.slow.get(node, 1.0) * rng.uniform(0.5, 1.5)


def next_weights(weights: Values, total: Values) -> Values:
    """Returns the weights after a round, from those before it and the round's total."""
    return np.float32(0.9) * weights - np.float32(0.001) * total


def _train(run: Any, workload: Workload, recorder: Recorder) -> Values:
    """The job's function: calls `_take_steps` with the turn of its own process."""
    with (
        run.progress.turn.taken()
    ):  # of its own: user code draws from no generator of the process, so workers may interleave
        value = _take_steps(run, workload, recorder)
        run.progress.end()
        return value


def _take_steps(run: Any, workload: Workload, recorder: Recorder) -> Values:
    """Takes all steps of the job on one worker. Returns the last weights."""
    node = process_name()
    rng = random.Random(f"{node} of {workload.seed}")
    state = run.state(weights=workload.first_weights(), history=b"")
    steps = run.steps(
        rows=workload.rows, batch=workload.batch, parts=workload.parts, passes=workload.passes, seed=workload.seed
    )
    for step in steps:
        for _ in range(workload.rounds):
            position = run.progress.position
            recorder.on_boundary(node, position, state.history, state.weights.tobytes())
            parts = 0
            for part in step:
                values = workload.values(position, part.number, part.rows, state.weights)
                sleep(workload.duration_s(node, rng))
                if workload.erratic:
                    values = values + np.float32(rng.random())
                instance = recorder.on_part(node, position, part.number, values)
                instances, rows = np.zeros(workload.parts, np.int64), np.zeros(workload.rows, np.int64)
                instances[part.number] = instance
                rows[part.rows] = 1
                part.add(values=values, instances=instances, rows=rows, parts=1)
            total = {name: step[name] for name in ("values", "instances", "rows", "parts")}
            parts = len(workload.plan.of_parts(step.number))
            recorder.on_total(node, position, total, parts)
            state.weights[:] = next_weights(state.weights, total["values"])
            state.history = hashlib.blake2b(
                state.history + total["instances"].tobytes() + total["values"].tobytes(), digest_size=16
            ).digest()
        step.report(instance=float(total["instances"][0]))
    recorder.on_boundary(node, run.progress.position, state.history, state.weights.tobytes())
    value: Values = state.weights
    return value
