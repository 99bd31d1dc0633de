"""`EpochTable`: a table as user code sees it in an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from numpy.typing import ArrayLike, NDArray

__all__ = ["EpochTable"]

Array = NDArray[Any]


class EpochTable(ABC):
    """A table in an epoch, as `epoch.table(name)` returns it.

    It is used in the `value` of collectives, in pieces of `epoch.map`, in other computes with outbound channels, in
    `on_flag` and in handlers.
    """

    @abstractmethod
    def pull(self, ids: ArrayLike | None = None) -> Array:
        """Returns the rows of ids as of the epoch's beginning. In an `async def`, use `await table.apull(ids)`.

        Args:
            ids: int64, of shape (n,), in any order, also more than once. None: all rows of a table that has `rows`.

        Returns:
            An array of the table's dtype, of shape (n, width), which is the caller's own.

        Raises:
            TableError: wrong ids, or a place where no message can be sent.
        """

    @abstractmethod
    async def apull(self, ids: ArrayLike | None = None) -> Array:
        """Returns the rows of ids, as `pull` does; for coroutines."""

    @abstractmethod
    def push(self, ids: ArrayLike | None, gradients: ArrayLike) -> None:
        """Adds gradients to those of this epoch. At its end, each row is changed once, by the sum of its gradients.

        A push counts when the epoch commits; in a piece of `epoch.map`, when the piece is counted. It does not wait; in
        a table with staleness, outside coroutines and pieces, it waits until the servers have applied it.

        Args:
            ids: int64, of shape (n,); gradients of the same id are added up. None: all rows of a table that has `rows`.
            gradients: floats, of shape (n, width), which become the table's dtype. They may be infinite or nan, and
                then so are the rows.

        Raises:
            TableError: wrong ids, another shape, no floats, or a place where no message can be sent.
        """

    @abstractmethod
    def save(self, url: str) -> None:
        """Writes the rows as of the epoch's beginning that somebody has pushed to, as a Parquet file: `tg.read_table`.

        It asks all servers for all rows, and has them in memory: let one task do it. If the epoch begins again, it
        writes again. The file is there whole or not at all. A coroutine cannot call it. Needs the extra `parquet`.

        Args:
            url: a path, or with the extra `checkpoint` a URL that fsspec knows.

        Raises:
            TableError: the URL names no place, or pyarrow is not installed.
            OSError: the file cannot be written.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate as of the epoch's beginning.

        Set it in one task, or alike in several: this epoch's pushes are applied with it, and those of later epochs.
        Reading it waits for an answer, so a coroutine cannot.
        """

    @lr.setter
    @abstractmethod
    def lr(self, value: float) -> None: ...
