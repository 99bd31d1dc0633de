"""Which rows each step and each part has: a pure function of the arguments of `run.steps` and the step's number."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.errors import StepError
from taskgraph.sources.reading import pass_order

__all__ = ["Rows", "check_numbers", "check_same"]


@dataclass(frozen=True)
class Rows:
    """The rows of a run's steps.

    Args:
        rows: how many there are.
        batch: rows of a step.
        parts: parts of a step of `batch` rows; a smaller step has fewer parts, of nearly the full size.
        passes: how often all rows are read; None: without an end.
        shuffle: draw the order of each pass from `seed`; otherwise it is that of the rows.
        drop_last: without the smaller step that ends a pass.

    Raises:
        StepError: a number does not fit; the message says which, and what fits.
    """

    rows: int
    batch: int
    parts: int
    passes: int | None
    seed: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        check_numbers(self, ("rows", "batch", "parts", "passes", "seed"))
        if self.batch > self.rows:
            raise StepError(
                f"run.steps(rows={self.rows}, batch={self.batch}): a batch has more rows than there are: make it "
                f"{self.rows} at most"
            )

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments that say which rows a step has: the same on all workers, and in a run that is resumed."""
        return {name: int(getattr(self, name)) for name in ("rows", "batch", "parts", "seed", "shuffle", "drop_last")}

    @property
    def per_pass(self) -> int:
        """The number of steps of a pass."""
        return self.rows // self.batch if self.drop_last else -(-self.rows // self.batch)

    @property
    def steps(self) -> int | None:
        """The number of all steps; None: without an end."""
        return None if self.passes is None else self.passes * self.per_pass

    def of_step(self, number: int) -> NDArray[np.int64]:
        """Returns the rows of a step, shape (rows of the step,), int64, in the order of the parts."""
        pass_number, index = divmod(number, self.per_pass)
        first = index * self.batch
        return _order(self, pass_number)[first : first + self.batch]

    def of_parts(self, number: int) -> list[NDArray[np.int64]]:
        """Returns the rows of each part of a step. No part is empty; sizes differ by one row at most."""
        rows = self.of_step(number)
        parts = min(self.parts, -(-len(rows) * self.parts // self.batch))
        size, larger = divmod(len(rows), parts)
        ends = [number * size + min(number, larger) for number in range(parts + 1)]
        return [rows[first:end] for first, end in itertools.pairwise(ends)]


def check_numbers(arguments: Any, names: Sequence[str]) -> None:
    """Raises StepError if arguments of `run.steps` are no whole numbers, or do not fit each other."""
    for name in names:
        value = getattr(arguments, name)
        if not isinstance(value, int | np.integer) and not (name == "passes" and value is None):
            raise StepError(f"run.steps({name}={value!r}): must be a whole number")
        if value is not None and name not in ("passes", "seed") and value < 1:
            raise StepError(f"run.steps({name}={value}): must be at least 1")
    if arguments.passes is not None and arguments.passes < 1:
        raise StepError(f"run.steps(passes={arguments.passes}): must be at least 1, or None (until `break`)")
    if arguments.parts > arguments.batch:
        raise StepError(
            f"run.steps(batch={arguments.batch}, parts={arguments.parts}): a part would have no row: make parts "
            f"{arguments.batch} at most"
        )


def check_same(arguments: Mapping[str, int], before: Mapping[str, int]) -> None:
    """Raises StepError if the worker or the checkpoint that the state is copied from got other arguments."""
    for name, value in arguments.items():
        if before.get(name, value) != value:
            raise StepError(
                f"run.steps({name}={value}), and the state was made with {name}={before[name]}: give the same "
                f"arguments on all workers, and to a run that is resumed (only passes may change)"
            )


@lru_cache(maxsize=2)
def _order(rows: Rows, pass_number: int) -> NDArray[np.int64]:
    """Returns the order of the rows in a pass, read-only."""
    return pass_order(rows.rows, pass_number, rows.seed, rows.shuffle)
