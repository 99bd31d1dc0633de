"""The steps of a run, and their rounds. All of it is used in the thread of user code."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from taskgraph.elastic_jobs.differing import digests_of_arguments, error_of_wrong_call, is_checked
from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.elastic_jobs.parts import CARRIED, KINDS, PUSHED, Part, RoundId, RoundOfParts, check_alike, title
from taskgraph.elastic_jobs.progress import SUMMED, RunProgress
from taskgraph.elastic_jobs.state import check_parameters, large_sizes
from taskgraph.errors import StepError
from taskgraph.graph.reported import plain_numbers
from taskgraph.graph.values import decode

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.gradients import Gradients
    from taskgraph.elastic_jobs.run_rows import RunRows
    from taskgraph.elastic_jobs.tables import Tables
    from taskgraph.elastic_jobs.tracing import SpanStart
    from taskgraph.graph.sums import Sums

__all__ = ["FEW_STEPS", "UNCHANGED", "Step", "StepOptions", "Steps"]

FEW_STEPS: Final = 3
"""If this many steps change nothing, the update is probably called at the wrong place."""
_EARLY: Final = 9
"""Before this many steps and the next one the state is compared, so it is known which of them changed it."""
UNCHANGED: Final = (
    f"the first {FEW_STEPS} steps changed nothing in run.state: call optimizer.step() in each step, after "
    f"`for part in step`, without zero_grad() in between; in place of gradients of several steps, give run.steps a "
    f"larger batch, in more parts"
)
_ALONE = 10
"""The most steps without any total before the first one that has a total."""
_NOW_AND_THEN: Final = (
    "some of the first steps changed nothing in run.state, and their gradients are gone: call optimizer.step() in "
    "every step; in place of gradients of several steps, give run.steps a larger batch, in more parts"
)


@dataclass(frozen=True)
class StepOptions:
    """Arguments of `run.steps` that do not decide which rows a step has.

    Attributes:
        zeros: a gradient that only some parts have counts as 0 in the others.
        nonfinite: what a total with nan or inf gives: "event", "error" or "ignore".
    """

    zeros: bool = False
    nonfinite: str = "event"


class RunForSteps(Protocol):
    """What `Steps` uses of `run.Run`."""

    progress: RunProgress
    named: Any
    tables: Tables


class Steps:
    """The steps of a run, in order."""

    def __init__(self, run: RunForSteps, feed: RunRows, options: StepOptions) -> None:
        self.run = run
        self.options = options
        self.feed = feed
        self.finite = True  # the last total
        self._step: Step | None = None
        self.trained = False  # a part has called `part.backward`
        self._early: list[dict[str, bytes]] = []  # the digests of the state before step 0, 1, ...

    @property
    def per_pass(self) -> int:
        """The number of steps of a pass. Raises StepError if the run reads a source: then it is not known."""
        return self.feed.per_pass

    def __len__(self) -> int:
        return len(self.feed)

    def __iter__(self) -> Iterator[Step]:
        progress, state = self.run.progress, self.run.named
        if progress.in_steps:
            raise StepError("the steps of a run are taken once: tell phases by step.number, and passes by passes=...")
        check_parameters(state)
        progress.steps_arguments = self.feed.arguments
        number, watch, trace, copied = 0, progress.watch, progress.node.trace, progress.begin(state)
        first = progress.position
        if copied is not None:
            number = copied
            if watch is not None:
                watch.on_copied_state(number)
        while self.feed.has_step(number):
            progress.cross_boundary(number, state)
            self._step = Step(self, number)
            if is_checked(number) and not progress.node.is_behind(progress.position):
                found, self._step.state_tag = self._digest_state(number)
                self._emit_unchanged(number, found)
                progress.node.note_large(large_sizes(state))
            self._step.begin_code_span()
            try:
                yield self._step
            except GeneratorExit:  # user code has left the loop
                _, progress.end_tag = self._digest_state(number + 1)
                raise
            self._step.end()
            number += 1
            if copied is None and progress.position == first and (number == _ALONE or not self.feed.has_step(number)):
                raise StepError(
                    f"{_steps_text(number)} no `for part in step:`, nor any run.map or run.once, so each worker "
                    f"computes all of it: let parts compute and add up (part.backward, part.add)"
                )
        if copied is not None and self._step is None:
            raise StepError(
                f"the state copied here, or resumed from, is of step {number}, and run.steps(passes=...) ends before: "
                f"give all workers the same passes, a resumed run more, or begin it anew with --fresh"
            )
        _, progress.end_tag = self._digest_state(number)
        trace.end_step()
        if watch is not None:
            watch.at_last_boundary(number, state)

    def _digest_state(self, number: int) -> tuple[dict[str, bytes], bytes]:
        """Returns the digests of the state before a step, and a digest of all for a tag: workers compare their tags."""
        progress = self.run.progress
        mark = progress.node.trace.begin()
        found = progress.digests(self.run.named)
        progress.node.trace.keep(mark, "loop", "digest of the state")
        everything = {**found, **digests_of_arguments(self.feed.arguments)}
        progress.node.note_digests(number, everything)
        return found, hashlib.blake2b(repr(sorted(everything.items())).encode(), digest_size=16).digest()

    def _emit_unchanged(self, number: int, found: dict[str, bytes]) -> None:
        """Emits an event, on the most senior worker, if the first steps left the state as it was; or of a job that
        trains, if they did so now and then."""
        node, early = self.run.progress.node, self._early
        if not found or number != len(early) or node.workers[:1] != (node.name,):
            return
        early.append(found)
        if number == FEW_STEPS and found == early[0]:
            node.emit("unchanged", UNCHANGED)
        elif number == _EARLY and self.trained:
            changed = [before != after for before, after in itertools.pairwise(early)]
            if list(itertools.pairwise(changed)).count((True, False)) > 1:
                node.emit("unchanged", _NOW_AND_THEN)

    @property
    def in_part_loop(self) -> bool:
        """True while user code takes the parts of a step."""
        return self._step is not None and self._step.in_part_loop

    def check_part_loop_ended(self) -> None:
        """Raises StepError if user code is in a part loop, or has left one early."""
        if self._step is not None:
            self._step.check_part_loop_ended()


class Step:
    """One global batch.

    Attributes:
        number: from 0.
        round: the number of passes over its parts that have begun.
        state_tag: a digest of the state before this step, for the tag of its first round; b"": it is not checked.
    """

    def __init__(self, steps: Steps, number: int) -> None:
        self.number = number
        self.round = 0
        self._steps = steps
        self._rows = steps.feed.step(number)
        self._total: dict[str, Any] | None = None
        self._collected: list[dict[str, Any]] = []
        self._gradients: Gradients | None = None
        self._over = True
        self._code: SpanStart | None = None
        self.state_tag = b""

    @property
    def pass_number(self) -> int:
        """The number of the pass, from 0."""
        return self._rows.pass_number

    @property
    def ends_pass(self) -> bool:
        """True for the last step of a pass; of a source it is known after the first round."""
        return self._rows.ends_pass

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of the step, int64, shape (size,), in the order of the parts.

        Of a source they are numbers of the piece, and of the row in it, shape (size, 2).

        Raises:
            StepError: of a source they are known only after the first round.
        """
        return self._rows.rows

    @property
    def size(self) -> int:
        """The number of the step's rows; of a source it is known after the first round."""
        return self._rows.size

    def __iter__(self) -> Iterator[Part]:
        """Yields this worker's parts, until the total of the round is there.

        Iterating again is a further round over the same parts, with a total of its own.

        Raises:
            StepError: a part contributes nothing, or something unlike the others; or a loop was left early.
        """
        self.check_part_loop_ended()
        self._end_code_span()
        self.round += 1
        self._over, self._total = False, None
        steps, trace = self._steps, self._steps.run.progress.node.trace
        progress, rows = steps.run.progress, self._rows
        watch = progress.watch
        call = f"step {self.number}" if self.round == 1 else f"round {self.round} of step {self.number}"
        state = self.state_tag if self.round == 1 else b""
        round_id = RoundId(progress.node.spec.seed, self.number, self.round)
        current = RoundOfParts(round_id, steps.run.named, steps.options.zeros, progress.node.allocate)
        self._gradients, tables = current.gradients, steps.run.tables
        tables.in_parts = True
        done: tuple[int, Sums] | None = None
        while isinstance(answer := progress.ask(rows.parts, call, done, detail=state, repeatable=True), int):
            part = rows.part(current, answer)
            if watch is not None:
                for trial in watch.trials(round_id, part, steps.feed):
                    trial.seed_generators()
                    tables.pushes = trial.pushes
                    yield trial
                    watch.after_trial(trial, current.close(trial))
                watch.before_part(round_id, part)
            mark = trace.begin()
            part.seed_generators()
            tables.pushes = part.pushes
            yield part
            tables.pushes = None
            trace.keep(mark, "part", f"part {answer}")
            mark = trace.begin()
            done = answer, current.close(part)
            trace.keep(mark, "part", f"takes what part {answer} gave")
            if watch is not None:
                watch.after_part(round_id, part, done[1])
        if watch is not None:
            watch.at_total(round_id, rows.parts)
        mark = trace.begin()
        check_alike(answer)
        if "add" not in answer.layout[1]:  # what parts contribute has it always
            raise error_of_wrong_call(progress.node.name, call)
        total = answer.tree(KINDS.values(), progress.node.allocate)
        self._emit_or_raise_nonfinite(answer, total)
        current.finish(total, rows.parts)
        pytorch()
        self._collected = [decode(tree, writable=True) for tree in answer.collected.values()]
        carried = [tree.pop(CARRIED, {}) for tree in self._collected]
        self._rows.take_carried(carried)
        tables.in_parts = False
        tables.apply([each.get(PUSHED, ()) for each in carried], total.get("weight", 0.0))
        steps.trained |= "weight" in total
        self._total, self._over = total, True
        progress.seed(SUMMED)
        trace.keep(mark, "total", "puts the total in place")
        self.begin_code_span()

    @property
    def in_part_loop(self) -> bool:
        """True while user code takes parts."""
        return not self._over

    def end(self) -> None:
        """Ends the step when user code asks for the next one: checks that its part loop has ended; clears gradients."""
        self.check_part_loop_ended()
        self._end_code_span()
        self._rows.end()
        if self._gradients is not None:
            self._gradients.clear()

    def begin_code_span(self) -> None:
        """Begins a span of user code outside the part loop, for `taskgraph trace`."""
        self._code = self._steps.run.progress.node.trace.begin()

    def _end_code_span(self) -> None:
        """Ends the span that `begin_code_span` began."""
        self._steps.run.progress.node.trace.keep(self._code, "loop", "your code")

    def _emit_or_raise_nonfinite(self, sums: Sums, total: dict[str, Any]) -> None:
        """Emits an event (one for several totals in a row) or raises StepError if a total has nan or inf."""
        how = self._steps.options.nonfinite
        if how == "ignore":
            return
        before, self._steps.finite = self._steps.finite, sums.all_finite
        node = self._steps.run.progress.node
        if self._steps.finite or (how == "event" and not (before and node.workers[:1] == (node.name,))):
            return  # the most senior worker emits it
        path = next(_nonfinite(total, ()))
        text = f"{title(path)} has nan or inf in the total of step {self.number}"
        if how == "error":
            raise StepError(
                f'{text}: look at the loss and the rows of this step, or go on with run.steps(nonfinite="event")'
            )
        node.emit("nonfinite", text)

    def check_part_loop_ended(self) -> None:
        """Raises StepError if user code is in the part loop, or has left it early."""
        if not self._over:
            raise StepError(
                f"step {self.number} was left before its total was there: `for part in step` must run to its end, "
                f"without `break`, `return` or an exception; call what needs the total after it"
            )

    @property
    def loss(self) -> float:
        """sum(weight * loss) / sum(weight) over the losses that parts gave to `backward` in the last round.

        With `reduce="sum"` it is sum(weight * loss).
        """
        total = self._total_for("step.loss")
        if "loss" not in total:
            raise StepError("step.loss: no part called part.backward in the last round")
        if KINDS["sum"] in total:
            return float(total["loss"])
        return float(total["loss"] / total["weight"]) if total["weight"] else math.nan

    def __getitem__(self, name: str) -> Any:
        """The total of what the parts added under a name in the last round."""
        added = self._total_for(f"step[{name!r}]")["add"]
        if name not in added:
            raise self._missing("added", name, added)
        return added[name]

    def all(self, name: str) -> list[Any]:
        """Returns what the parts collected under a name in the last round, in the order of the parts."""
        self._total_for(f"step.all({name!r})")
        if not self._collected or not all(name in trees for trees in self._collected):
            raise self._missing("collected", name, sorted({name for trees in self._collected for name in trees}))
        return [trees[name] for trees in self._collected]

    def _missing(self, verb: str, name: str, present: Iterable[str]) -> StepError:
        """Returns the error for a name that no part of the last round added or collected."""
        names = ", ".join(map(repr, present)) or "nothing"
        if self.round == 1:
            return StepError(f"no part {verb} {name!r}: there is {names}")
        return StepError(
            f"no part {verb} {name!r} in round {self.round} of step {self.number}: there is {names}; "
            f"each round has its own totals: read those of a round before the next one begins"
        )

    def _total_for(self, what: str) -> dict[str, Any]:
        """Returns the total of the last round. Raises StepError, for the call `what`, if there is none yet."""
        if not self._over or self._total is None:
            raise StepError(f"{what} is there after `for part in step`, which runs to its end, without `break`")
        return self._total

    def report(self, **numbers: Any) -> None:
        """Reports numbers of this step; they count once its totals are stable."""
        self.check_part_loop_ended()
        progress = self._steps.run.progress
        given = plain_numbers(numbers, lambda: f"step {self.number}")
        if progress.watch is not None:
            progress.watch.on_report(progress.position, self.number, given)
        progress.node.report(progress.position, self.number, given)


def _steps_text(steps: int) -> str:
    return "the only step had" if steps == 1 else f"the first {steps} steps had"


def _nonfinite(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the paths of the numbers and arrays of a tree that have nan or inf."""
    if isinstance(tree, dict):
        for name, item in tree.items():
            yield from _nonfinite(item, (*path, name))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _nonfinite(item, (*path, str(index)))
    elif not np.isfinite(np.asarray(tree)).all():
        yield path
