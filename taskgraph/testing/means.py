"""Finds means that user code adds up, and sums that it averages: two parts are computed once more as one joined part.

If a number is a mean over rows, the joined part has the weighted mean of the two parts' numbers; if a sum, their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from taskgraph.elastic_jobs.parts import Part, RoundId
from taskgraph.elastic_jobs.run_rows import RunRows
from taskgraph.errors import StepError
from taskgraph.graph.sums import Sums

__all__ = ["MeansCheck"]

_NEAR, _FAR = 0.05, 0.3
"""Relative: dropout and batch normalisation change a loss a little; a sum of two parts is twice their mean."""


class MeansCheck:
    """Checks the losses and sums of the first step, on a worker that computes all its parts in order.

    Its methods are called by those of the same names of a `taskgraph.elastic_jobs.watching.Watch`.
    """

    def __init__(self) -> None:
        self._last: tuple[Part, dict[str, Any]] | None = None
        self._tried: dict[str, Any] | None = None
        self._losses: list[tuple[float, float, float]] = []  # of the joined part; the two parts' mean; their sum
        self._kind = ""
        self._uneven = False

    def trials(self, round_id: RoundId, part: Part, feed: RunRows) -> Iterator[Part]:
        """Yields the joined part of this part and the one before, in the first step, for every second part.

        None in further rounds, in which parts may use what an earlier round collected, by their numbers.
        """
        if round_id.step > 0 or round_id.round > 1 or self._last is None or part.number % 2 == 0:
            return
        self._uneven = feed.is_uneven
        yield part.joined(self._last[0])

    def after_trial(self, part: Part, sums: Sums) -> None:
        self._tried = sums.tree()

    def after_part(self, round_id: RoundId, part: Part, sums: Sums) -> None:
        """Compares the last two parts with their joined part. Raises StepError if a mean was added."""
        if round_id.step > 0:
            return
        last, both = self._last, self._tried
        self._last, self._tried = (part, sums.tree()), None
        if last is None or both is None:
            return
        first, second = last[1], self._last[1]
        if "weight" in both and all("weight" in tree for tree in (first, second)):
            self._note_losses(first, second, both)
        if self._uneven:
            for name, of_both in both["add"].items():
                _check_sum(name, of_both, first["add"].get(name), second["add"].get(name), last[0].size, part.size)

    def at_total(self) -> None:
        """Ends a round. Raises StepError if part.backward got summed losses where it takes means, or the reverse."""
        losses, self._losses, self._last = self._losses, [], None
        if not losses:
            return
        found, mean, total = (sum(abs(loss[at]) for loss in losses) for at in (0, 1, 2))
        if not (np.isfinite([found, mean, total]).all() and found):
            return
        near_mean, near_sum = abs(mean - found) < _NEAR * found, abs(total - found) < _NEAR * found
        if self._kind == "gradients" and near_sum and abs(mean - found) > _FAR * found:
            raise StepError(
                "part.backward got a loss that is summed over the rows, and takes the mean over the part: the step "
                "would be too large\ngive it the mean (reduction='mean'), or call part.backward(loss, reduce='sum')"
            )
        if self._kind != "gradients" and near_mean and abs(total - found) > _FAR * found:
            raise StepError(
                "part.backward(loss, reduce='sum') got the mean over the part: the total would depend on the number "
                "of parts\ngive it the sum (reduction='sum'), or leave out reduce='sum'"
            )

    def _note_losses(self, first: Mapping[str, Any], second: Mapping[str, Any], both: Mapping[str, Any]) -> None:
        """Notes the mean losses of two parts and of their joined part, if they depend on the rows."""
        weights = [tree["weight"] for tree in (first, second, both)]
        if not all(weights):
            return
        one, two, found = (tree["loss"] / tree["weight"] for tree in (first, second, both))
        if one == two == found:
            return  # it does not depend on the rows
        mean = (one * weights[0] + two * weights[1]) / (weights[0] + weights[1])
        self._losses.append((found, mean, one + two))
        self._kind = next(name for name in both if name.endswith("gradients"))


def _check_sum(name: str, both: Any, first: Any, second: Any, size: int, other_size: int) -> None:
    """Raises StepError if the sum `name` is one of means over the rows. `size`, `other_size`: rows of the two parts."""
    try:
        one, two, found = (np.asarray(each) for each in (first, second, both))
        if found.dtype.kind not in "fc" or not np.isfinite(found).all() or np.array_equal(one, two):
            return
        mean = (size * one + other_size * two) / (size + other_size)
        near_mean, near_sum = np.allclose(found, mean, rtol=1e-3), np.allclose(found, one + two, rtol=0.1)
    except (TypeError, ValueError):  # a tree of several arrays; or an array of another library's
        return
    if near_mean and not near_sum:
        raise StepError(
            f"part.add({name}=...) got a mean over the part's rows, and parts differ in size: a sum of means is no "
            f"mean\nadd {name} * part.size, and divide step[{name!r}] by step.size"
        )
