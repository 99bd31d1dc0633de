"""`TableOptions`: what a job or an elastic run says of a table."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from taskgraph.errors import CheckpointError, TableError
from taskgraph.options import check_fields
from taskgraph.tables.merging import as_ids
from taskgraph.tables.optimizers import OPTIMIZERS, Optimizer
from taskgraph.tables.rows import INITS, Ids, first_rows, table_seed

__all__ = ["TableOptions", "as_rate"]

_DTYPES = ("float32", "float64")
_MOST_WIDTH = 1 << 20
"""Numbers in a row: a mistyped width would use up the memory of every node."""
_MOST_SERVERS = 1000


@dataclass(frozen=True)
class TableOptions:
    """A table of parameters: rows of `width` numbers by int64 id, changed by gradients.

    Attributes:
        width: numbers in a row.
        init: first values: "normal" (mean 0, standard deviation `scale`), "uniform" (from -scale to scale) or "zeros".
            They depend on the job's seed, the table's name and the row's id alone.
        scale: see `init`.
        optimizer: "sgd", "momentum" (0.9), "adagrad" or "adam" (0.9, 0.999), with the defaults of PyTorch.
        lr: the learning rate at the beginning.
        dtype: "float32" or "float64", of rows and gradients.
        staleness: 0: a pull gives the rows as of the epoch's beginning. k: it lacks at most the last k pieces counted,
            and those at work.
        servers: over how many tasks the rows are spread; None: as many as the job has tasks, but 4 at most.
        backups: replicas of each server beside its primary. All tasks of a job have the same number, so the job's
            `backups` grows to it. None: as many as the job has. (In an elastic job each worker has all rows.)
        rows: the ids are 0 to rows - 1, as in a dense array; None: any int64 is an id.

    Raises:
        TableError: there is no such attribute, or a value does not fit; the message says which.
    """

    width: int
    _: KW_ONLY
    init: Literal["normal", "uniform", "zeros"] = "normal"
    scale: float = 0.01
    optimizer: Literal["sgd", "momentum", "adagrad", "adam"] = "sgd"
    lr: float = 0.1
    dtype: Literal["float32", "float64"] = "float32"
    staleness: int = 0
    servers: int | None = None
    backups: int | None = None
    rows: int | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        check_fields(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_int("width", 1, _MOST_WIDTH)
        self._check_int("staleness", 0)
        if self.backups is not None:
            self._check_int("backups", 0, 1000)
        if self.servers is not None:
            self._check_int("servers", 1, _MOST_SERVERS)
        if self.rows is not None:
            self._check_int("rows", 1)
        self._check_choice("init", INITS)
        self._check_choice("optimizer", tuple(OPTIMIZERS))
        self._check_choice("dtype", _DTYPES)
        object.__setattr__(self, "scale", as_rate(self.scale, "Table(scale=...)"))
        object.__setattr__(self, "lr", as_rate(self.lr, "Table(lr=...)"))

    def check_stored(self, given: Sequence[Any], name: str) -> None:
        """Raises CheckpointError unless `given` equals `stored`: rows of another layout would be read as numbers."""
        if list(given) != self.stored:
            raise CheckpointError(
                f"table {name!r} was written with (width, dtype, optimizer) {tuple(given)}, and the job has "
                f"{tuple(self.stored)}: use those that it was written with"
            )

    @property
    def stored(self) -> list[Any]:
        """[width, dtype, optimizer]: kept with rows that are written, and needed alike to read them."""
        return [self.width, self.dtype, self.optimizer]

    def _check_int(self, name: str, least: int, most: int | None = None) -> None:
        """Raises TableError unless an attribute is an int within these limits. numpy's ints become Python's."""
        value = getattr(self, name)
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if number < least or (most is not None and number > most):
            limit = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise TableError(f"Table({name}={value!r}): must be an int {limit}")
        object.__setattr__(self, name, number)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """Raises TableError unless an attribute is one of these words."""
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            raise TableError(f"Table({name}={value!r}): must be one of {', '.join(map(repr, choices))}")

    def first_rows(self, name: str, ids: ArrayLike, seed: int = 0) -> NDArray[Any]:
        """Returns the values that rows have before anybody pushes to them, of shape (n, width).

        Args:
            name: of the table.
            ids: int64, of shape (n,).
            seed: of the job.

        Raises:
            TableError: wrong ids.
        """
        found = as_ids(ids, f"table {name!r}, first_rows", self.rows)
        return self.make_rows(found, table_seed(seed, name))

    def make_rows(self, ids: Ids, seed: int) -> NDArray[Any]:
        """Makes first rows, as `first_rows`, from the table's own seed."""
        return first_rows(ids, self.width, seed=seed, init=self.init, scale=self.scale, dtype=self.numpy_dtype)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of rows and gradients."""
        return np.dtype(self.dtype)

    @property
    def rule(self) -> Optimizer:
        """The optimizer, which changes rows."""
        return OPTIMIZERS[self.optimizer]


def as_rate(value: Any, what: str) -> float:
    """Returns a finite number as a float. Raises TableError."""
    try:
        number = float(cast(float, value))
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise TableError(f"{what} must be a finite number, not {value!r}")
    return number
