"""The data of `run.steps`: rows that are read when a part asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.elastic_jobs.seeding import seed_generators
from taskgraph.errors import StepError

__all__ = ["Data", "LoaderArguments", "Readable", "SourceRows", "data_of", "loader_arguments"]


class Readable(Protocol):
    """What `part.data` reads the data of a part from."""

    def read(self, rows: NDArray[np.int64], seed: Callable[[int], int]) -> Any:
        """Returns the data of these rows; the generators are seeded with `seed(row)` before each one."""

    def joined(self, other: Any) -> Readable:
        """Returns this part's data, followed by that of another part."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source that one part has read. A `Readable`."""

    rows: list[Any]

    def read(self, rows: NDArray[np.int64], seed: Callable[[int], int]) -> Any:
        return [*self.rows]

    def joined(self, other: Any) -> SourceRows:
        return SourceRows([*self.rows, *other.rows])


@dataclass(frozen=True)
class Data:
    """Rows that can be read by number. A `Readable`.

    Attributes:
        source: `source[row]` is a row.
        rows: how many it has.
        collate: makes a batch of a list of rows; None: `source` is an array, which is indexed with all of them.
    """

    source: Any
    rows: int
    collate: Callable[[list[Any]], Any] | None

    def read(self, rows: NDArray[np.int64], seed: Callable[[int], int]) -> Any:
        """Reads rows. The generators are seeded with `seed(row)` before each one, and before the batch is made."""
        if self.collate is None:
            return self.source[rows]
        read = []
        for row in rows.tolist():
            seed_generators(seed(row))
            read.append(self.source[row])
        seed_generators(seed(-1 - int(rows[0])))
        return self.collate(read)

    def joined(self, other: Any) -> Data:
        return self


class LoaderArguments(NamedTuple):
    """The arguments of a DataLoader that decide the rows of steps."""

    batch: int
    shuffle: bool
    drop_last: bool


def loader_arguments(data: Any) -> LoaderArguments | None:
    """Returns the arguments of a PyTorch DataLoader; None: `data` is no DataLoader.

    Raises:
        StepError: it has a sampler or dataset of its own that chooses rows, so that `run.steps` could not.
    """
    torch = pytorch()
    if torch is None or not isinstance(data, torch.utils.data.DataLoader):
        return None
    kinds = torch.utils.data
    if isinstance(data.dataset, kinds.IterableDataset):
        raise StepError(
            "run.steps(loader): its dataset is an IterableDataset, whose rows have no numbers: make one with "
            "__getitem__ and __len__"
        )
    drawn = type(data.sampler) is kinds.RandomSampler and not data.sampler.replacement
    drawn = drawn and data.sampler.num_samples == len(data.dataset)
    if data.batch_size is None or type(data.batch_sampler) is not kinds.BatchSampler:
        choice = "batch_sampler" if data.batch_sampler is not None else "batch_size=None"
    elif not drawn and type(data.sampler) is not kinds.SequentialSampler:
        choice = "sampler"
    else:
        return LoaderArguments(data.batch_size, drawn, data.drop_last)
    raise StepError(
        f"run.steps(loader): run.steps chooses the rows, and not the loader's {choice}: in place of a "
        f"DistributedSampler give the loader shuffle=True\nfor some of the rows give it Subset(dataset, rows), or say "
        f"run.steps(rows=...) and read them in each part; for weights, draw rows in each part with "
        f"np.random.default_rng(part.seed)"
    )


def data_of(data: Any) -> Data:
    """Returns an array, a dataset, or the dataset of a DataLoader, as rows that are read by number.

    Raises:
        StepError: it has no length, or its rows have no numbers.
    """
    if isinstance(data, str | bytes):
        raise StepError(
            f"run.steps({data!r}): name files as tg.lines(url), tg.csv(url), tg.parquet(url) or tg.files(url)"
        )
    if isinstance(data, type):
        raise StepError(f"run.steps(data) takes an object, not the class {data.__name__}: write {data.__name__}()")
    torch = pytorch()
    if torch is not None and isinstance(data, torch.utils.data.DataLoader):
        return Data(data.dataset, len(data.dataset), data.collate_fn)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise StepError(
            f"run.steps(data): a {type(data).__name__} has no len(data) and data[row]: give an array, a dataset with "
            f"both, or rows=..."
        )
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        raise StepError(
            f"run.steps(data): a {type(data).__name__} is read by column: give run.steps(rows=len(data), ...), and "
            f"take data.iloc[part.rows]"
        )
    if isinstance(data, np.ndarray) or (torch is not None and isinstance(data, torch.Tensor)):
        return Data(data, len(data), None)
    if torch is not None:
        return Data(data, len(data), torch.utils.data.default_collate)
    return Data(data, len(data), _stacked)


def _stacked(rows: Sequence[Any]) -> Any:
    """Stacks arrays and numbers along a new first axis, through dicts, lists and tuples."""
    first = rows[0]
    if isinstance(first, dict):
        return {name: _stacked([row[name] for row in rows]) for name in first}
    if type(first) in (list, tuple):
        return type(first)(_stacked(items) for items in zip(*rows, strict=True))
    if isinstance(first, str | bytes):
        return list(rows)
    return np.stack([np.asarray(row) for row in rows])
