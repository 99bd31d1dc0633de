"""What the steps of a run read: rows by number (`NumberedRunRows`), or the lanes of a source (`lanes`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from taskgraph.elastic_jobs.data import Data
from taskgraph.elastic_jobs.parts import Part, RoundOfParts
from taskgraph.elastic_jobs.rows import Rows

__all__ = ["NumberedRunRows", "RunRows", "StepRows"]


class RunRows(Protocol):
    """The rows of all steps of `run.steps`: numbered (`NumberedRunRows`), or of a source (`lanes.SourceLanes`)."""

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of `run.steps` that all workers have to give alike."""

    @property
    def is_endless(self) -> bool:
        """True if only a `break` ends the run."""

    @property
    def is_uneven(self) -> bool:
        """True if parts may differ in size."""

    @property
    def per_pass(self) -> int:
        """The number of steps of a pass. Raises StepError if it is not known."""

    def __len__(self) -> int:
        """Returns the number of all steps. Raises TypeError if it is not known."""

    def has_step(self, number: int) -> bool:
        """True if there is a step of this number. Called once the one before has ended; may open a pass of a source."""

    def step(self, number: int) -> StepRows:
        """Begins a step, and returns its rows."""


class StepRows(Protocol):
    """The rows of one step of `run.steps`: numbered, or of a source. Of a source, `rows`, `size` and `ends_pass` raise
    StepError until the first round.
    """

    pass_number: int

    @property
    def ends_pass(self) -> bool:
        """True for the last step of a pass."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows, in the order of the parts."""

    @property
    def size(self) -> int:
        """The number of rows."""

    @property
    def parts(self) -> int:
        """The number of parts."""

    def part(self, of: RoundOfParts, number: int) -> Part:
        """Returns a part, with its rows."""

    def take_carried(self, carried: Sequence[Mapping[str, Any]]) -> None:
        """Takes, after a round, what its parts carried to all workers (`Part.carried`), in the order of the parts."""

    def end(self) -> None:
        """Ends the step. Raises StepError if its rows come from a source and no round has read them."""


class NumberedRunRows:
    """The steps of a run whose rows have numbers. A `RunRows`.

    Args:
        data: None: parts have no data.
    """

    def __init__(self, rows: Rows, data: Data | None) -> None:
        self.of = rows
        self.data = data

    @property
    def arguments(self) -> dict[str, int]:
        return self.of.arguments

    @property
    def is_endless(self) -> bool:
        return self.of.steps is None

    @property
    def is_uneven(self) -> bool:
        return len({len(part) for step in {0, self.per_pass - 1} for part in self.of.of_parts(step)}) > 1

    @property
    def per_pass(self) -> int:
        return self.of.per_pass

    def __len__(self) -> int:
        if self.of.steps is None:
            raise TypeError("the run has no last step: give run.steps(passes=...)")
        return self.of.steps

    def has_step(self, number: int) -> bool:
        return self.of.steps is None or number < self.of.steps

    def step(self, number: int) -> StepRows:
        return _NumberedStepRows(self, number)


class _NumberedStepRows:
    """One step of a `NumberedRunRows`. A `StepRows`."""

    def __init__(self, of: NumberedRunRows, number: int) -> None:
        self._of = of
        self._number = number
        self.pass_number = number // of.per_pass
        self._parts = of.of.of_parts(number)

    @property
    def ends_pass(self) -> bool:
        return (self._number + 1) % self._of.per_pass == 0

    @property
    def rows(self) -> NDArray[np.int64]:
        return self._of.of.of_step(self._number).copy()

    @property
    def size(self) -> int:
        return len(self._of.of.of_step(self._number))

    @property
    def parts(self) -> int:
        return len(self._parts)

    def part(self, of: RoundOfParts, number: int) -> Part:
        return Part(of, number, self._parts[number], self._of.data)

    def take_carried(self, carried: Sequence[Mapping[str, Any]]) -> None:
        pass

    def end(self) -> None:
        pass
