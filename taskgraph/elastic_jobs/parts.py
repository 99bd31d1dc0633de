"""Parts of a step, and the rounds in which they are summed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.elastic_jobs.seeding import derived_seed, seed_generators
from taskgraph.elastic_jobs.state import leaves
from taskgraph.elastic_jobs.tables import Pushes
from taskgraph.errors import JobError, StepError
from taskgraph.graph.sum_layouts import Layout, difference
from taskgraph.graph.sums import Sums
from taskgraph.graph.values import encode

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.data import Readable
    from taskgraph.elastic_jobs.gradients import Gradients
    from taskgraph.elastic_jobs.modules import Modules
    from taskgraph.graph.blocks import Allocate
    from taskgraph.protocol.messages import Encoded

__all__ = ["CARRIED", "KINDS", "PUSHED", "Part", "RoundId", "RoundOfParts", "capture_modules", "check_alike"]

KINDS = {"mean": "gradients", "sum": "summed gradients"}
"""`reduce` of `part.backward` -> the name of the gradients in the sums."""
CARRIED: Final = ""
"""The name under which a part carries what is not the user's, beside what the user collected."""
PUSHED: Final = "pushed"
"""What a part carries if it pushed to tables."""


class RoundId(NamedTuple):
    """Identifies a round of a step.

    Attributes:
        seed: of the run.
        step: number, from 0.
        round: number, from 1.
    """

    seed: int
    step: int
    round: int


def capture_modules(state: Any) -> Modules | None:
    """Returns the state's modules, with copies of their buffers and modes; None: PyTorch is not imported."""
    if pytorch() is None:
        return None
    from taskgraph.elastic_jobs.modules import Modules

    modules = Modules(leaves(state), zeros=False)
    modules.begin()
    return modules


class RoundOfParts:
    """One pass over the parts of a step, on one worker: what all parts have in common.

    Args:
        state: what `run.state` got.
        zeros: `unused="zero"` of `run.steps`.
        allocate: returns memory for large sums.
    """

    def __init__(self, round_id: RoundId, state: Any, zeros: bool, allocate: Allocate) -> None:
        self.id = round_id
        self.gradients: Gradients | None = None
        self.allocate = allocate
        self._modules: Modules | None = None
        self._first: tuple[int, Layout] | None = None
        self._collected: set[str] = set()
        if pytorch() is not None:
            from taskgraph.elastic_jobs.gradients import Gradients
            from taskgraph.elastic_jobs.modules import Modules

            found = list(leaves(state))
            self.gradients, self._modules = Gradients(found, zeros, allocate), Modules(found, zeros)
            self.gradients.begin_part_loop()
            self._modules.begin()

    def close(self, part: Part) -> Sums:
        """Ends a part after its loop body, and returns the sums that it contributes.

        Raises:
            StepError: it contributes nothing, or something unlike the first part.
        """
        where = f"part {part.number} of step {self.id.step}"
        if self.gradients is not None:
            self._check_parameters(where)
        if part.calls == 0:
            raise StepError(
                f"{where} ended without part.add(...), part.backward(...) or part.collect(...): give what it "
                f"contributes, or call part.add() if that is nothing"
            )
        if (left := part.pushes.table_with_gradient) is not None:
            raise StepError(f"{where} left a gradient of table {left!r}: call part.backward(loss), not loss.backward()")
        changes = {} if self._modules is None else self._modules.take()
        if packed := part.pushes.packed():
            part.carried[PUSHED] = packed
        sums = part.sums(changes)
        if self._first is None:
            self._first, self._collected = (part.number, sums.layout), part.collected.keys() | set()
        self._check_alike(where, sums, part.collected)
        part.closed = True
        return sums

    def _check_parameters(self, where: str) -> None:
        """Raises StepError if a part has changed a parameter, or left a gradient."""
        assert self.gradients is not None
        if (changed := self.gradients.find_changed()) is not None:
            raise StepError(
                f"{where} changed the parameter {changed}: parts have to start from the same parameters; call "
                f"optimizer.step() after `for part in step`"
            )
        if (left := self.gradients.find_set_gradient()) is not None:
            raise StepError(
                f"{where} left a gradient in {left}.grad, which no total gets: call part.backward(loss) in place of "
                f"loss.backward()"
            )

    def _check_alike(self, where: str, sums: Sums, collected: Mapping[str, Any]) -> None:
        """Raises StepError if a part contributes other names, shapes or dtypes than the first one."""
        assert self._first is not None
        first, of_first = self._first
        if collected.keys() != self._collected:
            raise StepError(
                f"{where} collected {_names(collected)}, and part {first} {_names(self._collected)}: collect the same "
                f"names in all parts"
            )
        found = difference(sums.layout, of_first)
        if found is None:
            return
        path, here, there = found
        raise StepError(
            f"{where} has {here} as {title(path)}, and part {first} has {there}: {_advice(path, here, there)}"
        )

    def finish(self, total: Mapping[str, Any], parts: int) -> None:
        """Puts the total's gradients into `p.grad`, and adds its changes to the buffers of modules."""
        for kind in KINDS.values():
            if kind in total:
                assert self.gradients is not None
                self.gradients.put(total, kind)
        if self._modules is not None:
            self._modules.put(total.get("buffers", {}), parts)


class Part:
    """A fixed share of a step's rows.

    Attributes:
        number: from 0.
        rows: its rows, int64, shape (size,); of a source shape (size, 2): numbers of the piece, and of the row in it.
            Never empty.
        size: the number of its rows.
        seed: of run, step and part; the same in all rounds. `random`, `numpy.random` and PyTorch are seeded from it and
            the round when the part begins.
    """

    def __init__(self, of: RoundOfParts, number: int, rows: NDArray[np.int64], data: Readable | None) -> None:
        round_id = of.id
        self.number = number
        self.rows = rows.copy()  # PyTorch warns of arrays that cannot be written
        self.size = len(rows)
        self.seed = derived_seed(round_id.seed, round_id.step, number, 2)
        self.calls = 0
        self.closed = False  # its sums are taken
        self.collected: dict[str, Any] = {}
        self.carried: dict[str, Any] = {}  # reaches all workers with the sums
        self.pushes = Pushes()
        self._round = of
        self._data = data
        self._read: Any = None
        self._added: dict[str, Any] = {}
        self._trained: _LossAndGradients | None = None

    def seed_generators(self) -> None:
        """Seeds the generators for this part and round."""
        seed_generators(derived_seed(self.seed, self._round.id.round))

    def joined(self, before: Part) -> Part:
        """Returns a part like this one, with the rows of another one before its own."""
        data = None if before._data is None else before._data.joined(self._data)
        return Part(self._round, self.number, np.concatenate([before.rows, self.rows]), data)

    @property
    def data(self) -> Any:
        """The part's rows of the data that `run.steps` got; the same in all rounds of a step.

        Each row is read with generators seeded from run, step and row. Of a source it is the list of the rows.
        """
        if self._data is None:
            raise StepError("part.data is there if run.steps(data, ...) got a Dataset, a DataLoader or a source")
        if self._read is None:
            round_id = self._round.id
            self._read = (self._data.read(self.rows, lambda row: derived_seed(round_id.seed, round_id.step, row, 4)),)
            seed_generators(derived_seed(self.seed, round_id.round, 5))
        return self._read[0]

    def add(self, **trees: Any) -> None:
        """Adds to the totals of the round, `step[name]`; 16-bit floats in float32. `add()`: nothing to add.

        Raises:
            StepError: the part has added such a name already, or has ended.
        """
        self._check_open("add")
        twice = self._added.keys() & trees.keys()
        if twice:
            raise StepError(f"part {self.number} added {min(twice)!r} twice: add the sum of both")
        self.calls += 1
        self._added.update(trees)

    def collect(self, **trees: Any) -> None:
        """Sends trees to all workers, where `step.all(name)` has those of all parts; they are not summed.

        Raises:
            StepError: the part has collected such a name already, or has ended.
            ValueNotEncodable: a value cannot travel.
        """
        self._check_open("collect")
        twice = self.collected.keys() & trees.keys()
        if twice:
            raise StepError(f"part {self.number} collected {min(twice)!r} twice: collect a list of both")
        self.calls += 1
        self.collected.update(trees)

    def backward(
        self, loss: Any, *, weight: Any = None, reduce: str = "mean", inputs: Iterable[Any] | Any | None = None
    ) -> None:
        """Takes the gradients of a PyTorch loss.

        After the round `p.grad` is sum(weight * gradient) / sum(weight) over all parts, for each parameter that
        `run.state` names. Several losses of one part are added; their gradients, too.

        Args:
            loss: a tensor with one element: the mean over the part, or its sum with `reduce="sum"`.
            weight: what the mean counts; the part's size, unless given (number of tokens, ...). 1 for a sum.
            reduce: "mean", or "sum" for sum(weight * gradient).
            inputs: as in `torch.Tensor.backward`: only these get gradients.

        Raises:
            StepError: `loss` is no such tensor, no parameter got a gradient, weight or reduce do not fit, or the part
                has ended.
        """
        self._check_open("backward")
        gradients = self._round.gradients
        if gradients is None or not hasattr(loss, "backward"):
            raise StepError(f"part.backward takes a PyTorch tensor, not {type(loss).__name__}: others go to part.add")
        if loss.numel() != 1:
            raise StepError(f"part.backward takes the mean over the part, not a loss of shape {tuple(loss.shape)}")
        counted = self._checked_weight(weight, reduce)
        if (left := gradients.find_set_gradient()) is not None:
            raise StepError(f"{left}.grad is set before part.backward(loss), which calls loss.backward() itself")
        loss.backward(inputs=inputs if inputs is None or hasattr(inputs, "backward") else list(inputs))
        taken = gradients.take()
        embedded = self.pushes.take_embedded(counted, mean=reduce == "mean")
        if not taken and not embedded:
            if (hooked := gradients.find_hooked()) is not None:
                raise StepError(
                    f"part.backward: no parameter has a gradient left: {hooked} has a hook "
                    f"(register_post_accumulate_grad_hook) that may clear it: do without it, and update parameters "
                    f"after `for part in step`"
                )
            raise StepError(
                "part.backward: no parameter got a gradient: name the module, or its parameters, in run.state(...)"
            )
        self.calls += 1
        if self._trained is None:
            self._trained = _LossAndGradients(counted, reduce)
        self._trained.take(float(loss.detach()), taken)

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise StepError(
                f"part.{method} of part {self.number}, which has ended: call it before `for part in step` goes on to "
                f"the next part"
            )

    def _checked_weight(self, weight: Any, reduce: str) -> float:
        """Returns the weight of a loss. Raises StepError if it, or `reduce`, does not fit."""
        counted = float(weight if weight is not None else 1 if reduce == "sum" else self.size)
        if not (math.isfinite(counted) and counted >= 0):
            raise StepError(f"part.backward(weight={counted}): must be 0 or more")
        if reduce not in KINDS:
            raise StepError(f'part.backward(reduce={reduce!r}): must be "mean" or "sum"')
        before = self._trained
        if before is not None and (before.weight, before.reduce) != (counted, reduce):
            raise StepError(
                f"part {self.number} calls part.backward with weight={counted:g} and reduce={reduce!r} after "
                f"weight={before.weight:g} and reduce={before.reduce!r}: add the losses up, or take a further round"
            )
        return counted

    def sums(self, changes: Mapping[str, Any]) -> Sums:
        """Returns the sums that the part contributes; `changes`: buffer of a module -> how the part changed it."""
        tree: dict[str, Any] = {"add": self._added}
        if changes:
            tree["buffers"] = dict(changes)
        if self._trained is not None:
            assert self._round.gradients is not None
            tree["loss"], tree["weight"] = self._trained.loss * self._trained.weight, self._trained.weight
            trained = self._trained
            tree |= self._round.gradients.sums(trained.taken, trained.weight, KINDS[trained.reduce])
        collected = {self.number: self._encoded()} if self.collected or self.carried else None
        try:
            return Sums.of(tree, collected, self._round.allocate)
        except JobError as error:  # its text begins with the place in the tree
            raise StepError(re.sub(r"^\['add'\]\['(\w+)'\]", r"part.add(\1=...)", str(error))) from None

    def _encoded(self) -> Encoded:
        """Encodes what the part collected, with what goes along: its pushes to tables, where its lane stands."""
        pytorch()
        whole = {**self.collected, CARRIED: self.carried} if self.carried else self.collected
        return encode(whole, what=f"part.collect of part {self.number}")


class _LossAndGradients:
    """The loss and the gradients that `part.backward` took, summed over its calls in one part."""

    def __init__(self, weight: float, reduce: str) -> None:
        self.weight = weight
        self.reduce = reduce
        self.loss = 0.0
        self.taken: dict[str, Any] = {}

    def take(self, loss: float, taken: Mapping[str, Any]) -> None:
        """Adds a loss and its gradients."""
        self.loss += loss
        for name, gradient in taken.items():
            self.taken[name] = self.taken[name] + gradient if name in self.taken else gradient


def title(path: tuple[str, ...]) -> str:
    """Returns words for a path in a part's sums, for messages: `part.add(hits=...)`, `the gradient of model.bias`."""
    kind, names = path[0] if path else "", ".".join(path[1:])
    if kind in KINDS.values():
        return f"the gradient of {names}"
    if kind == "buffers":
        return f"the change of the buffer {names}"
    return {"add": f"part.add({names}=...)" if names else "part.add()"}.get(kind, f"the {kind} of part.backward")


def check_alike(total: Sums) -> None:
    """Raises StepError if parts of different workers contributed unlike names, shapes or dtypes."""
    if total.has_unlike_layouts:
        path, first, second = total.layout[1]
        places = total.difference_text(first, second)
        raise StepError(f"{title(path)} is {places}: {_advice(path, first, second)}")


def _advice(path: tuple[str, ...], one: str, other: str) -> str:
    """Returns what to do if two parts have different things at a path in their sums."""
    if path[:1] in (("gradients",), ("buffers",)) and "nothing" in (one, other):
        return 'use all parameters in all parts, or count those as 0 with run.steps(unused="zero")'
    if "an int" in (one, other) and "a float" in (one, other):
        return "add a float in all parts: a sum begins with 0.0, not 0"
    return "add the same names with the same shapes and dtypes in all parts"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
