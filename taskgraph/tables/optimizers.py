"""Optimizers that change only the rows that gradients were pushed to.

Each takes rows, their slots and the sums of their gradients, and returns new rows and slots. A slot is an array beside
the rows, such as Adam's moments. All arithmetic is that of the table's dtype, element by element, so the result for a
row does not depend on which other rows are changed with it.

Equal, to the last bit, to an optimizer of a dense array that gets a gradient of zero for all other rows: `sgd` and
`adagrad`. A dense `momentum` or `adam` also changes rows without a gradient, as their moments decay; here such a row
rests, as in PyTorch's SparseAdam and TensorFlow's LazyAdam.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OPTIMIZERS", "Optimizer", "Slots"]

Array = NDArray[Any]
Slots = Mapping[str, Array]
"""The slots of some rows by name. "steps" has shape (n,), the others that of the rows, (n, width)."""

MOMENTUM = 0.9
BETA_1, BETA_2 = 0.9, 0.999
ADAM_EPSILON, ADAGRAD_EPSILON = 1e-8, 1e-10
"""The defaults of PyTorch's optimizers (`torch.optim`), as all constants here."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Changes rows, each by the sum of its gradients.

    Attributes:
        slots: names of its slots.
        change: (rows, slots, gradients, lr) -> (rows, slots): the changed ones, in new arrays. Rows and gradients are
            of shape (n, width), each row there once.
    """

    slots: tuple[str, ...]
    change: Callable[[Array, Slots, Array, float], tuple[Array, dict[str, Array]]]

    def first_slots(self, count: int, width: int, dtype: np.dtype[Any]) -> dict[str, Array]:
        """Makes the slots of `count` rows without a push: all zero."""
        return {
            name: np.zeros(count, np.int64) if name == "steps" else np.zeros((count, width), dtype)
            for name in self.slots
        }


def sgd(rows: Array, slots: Slots, gradients: Array, lr: float) -> tuple[Array, dict[str, Array]]:
    """Stochastic gradient descent: `w -= lr * g`. H. Robbins, S. Monro, "A stochastic approximation method" (1951)."""
    return rows - lr * gradients, {}


def momentum(rows: Array, slots: Slots, gradients: Array, lr: float) -> tuple[Array, dict[str, Array]]:
    """Heavy ball: `v = 0.9 v + g; w -= lr * v`. B. Polyak (1964), in the form of `torch.optim.SGD`.

    The velocity of a row decays once for each epoch or step in which somebody pushed to it.
    """
    velocity = MOMENTUM * slots["velocity"] + gradients
    return rows - lr * velocity, {"velocity": velocity}


def adagrad(rows: Array, slots: Slots, gradients: Array, lr: float) -> tuple[Array, dict[str, Array]]:
    """Adagrad: `s += g**2; w -= lr * g / (sqrt(s) + 1e-10)`.

    J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization" (JMLR
    2011), as `torch.optim.Adagrad` without decays.
    """
    squares = slots["squares"] + gradients * gradients
    return rows - lr * gradients / (np.sqrt(squares) + ADAGRAD_EPSILON), {"squares": squares}


def adam(rows: Array, slots: Slots, gradients: Array, lr: float) -> tuple[Array, dict[str, Array]]:
    """Adam: moments `m = 0.9 m + 0.1 g`, `v = 0.999 v + 0.001 g**2`, each divided by its bias.

    D. Kingma, J. Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1. The steps that the bias
    correction needs are counted for each row: a row that is changed for the first time makes a first step.
    """
    steps = slots["steps"] + 1
    first = BETA_1 * slots["first"] + (1 - BETA_1) * gradients
    second = BETA_2 * slots["second"] + (1 - BETA_2) * (gradients * gradients)
    bias_1, bias_2 = (_bias(beta, steps, rows.dtype) for beta in (BETA_1, BETA_2))
    changed = rows - lr * (first / bias_1) / (np.sqrt(second / bias_2) + ADAM_EPSILON)
    return changed, {"first": first, "second": second, "steps": steps}


def _bias(beta: float, steps: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
    """Returns `1 - beta**steps`, of shape (n, 1). Rows have few different counts, so Python's own power is used."""
    counts, place = np.unique(steps, return_inverse=True)
    biases = np.array([1.0 - beta ** int(count) for count in counts], np.float64)
    return biases[place].astype(dtype)[:, None]


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer((), sgd),
    "momentum": Optimizer(("velocity",), momentum),
    "adagrad": Optimizer(("squares",), adagrad),
    "adam": Optimizer(("first", "second", "steps"), adam),
}
