"""The task that serves some rows of a table: its state is a store, which changes in its sync point alone.

A server is asked for:

    pull        ids -> their rows, as of the epoch's beginning. Pure.
    push        [order, ids, gradients]: kept in scratch until the sync point, which applies all of them at once
    lr          None -> the learning rate as of the epoch's beginning. Pure.
    set lr      the learning rate of this epoch's pushes, and of later ones
    rows        [first, count] -> some rows with their ids, by position, as of the epoch's beginning. Pure.

`order` says where a push stands among all of an epoch: pushes of computes by sender, by the compute's name, then as
they were sent; those of pieces after them, by the piece's number, not by its task. So no sum depends on arrival.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import Epoch, job_seed
from taskgraph.errors import TableError
from taskgraph.shape import handles
from taskgraph.tables.layout import SegmentLayout
from taskgraph.tables.options import TableOptions
from taskgraph.tables.rows import Ids, table_seed
from taskgraph.tables.store import RowStore
from taskgraph.task import Task

__all__ = ["ImmediateTableServer", "TableServer"]

Array = NDArray[Any]
Order = tuple[Any, ...]


class TableServer(Task):
    """One server of a table without staleness.

    Args:
        name: the table's.
        server, servers: which one this is, and how many there are.
    """

    def __init__(self, table: TableOptions, name: str, server: int, servers: int) -> None:
        self._table, self._name = table, name
        self._server, self._servers = server, servers

    def setup(self) -> None:
        self._store = RowStore(self._table)
        self._lr = self._table.lr

    def snapshot(self) -> dict[str, Any]:
        return {"table": self._table.stored, "lr": self._lr, "servers": self._servers, "blocks": self._store.blocks}

    def restore(self, state: dict[str, Any]) -> None:
        self._table.check_stored(state["table"], self._name)
        layout = SegmentLayout.of(self._table)
        self._lr = state["lr"]
        self._store = RowStore(self._table, segments=map(layout.unpack, state["blocks"]))

    def compose(self, epoch: Epoch) -> None:
        self._store.seed = table_seed(job_seed(epoch), self._name)
        epoch.scratch.pushes = {}
        epoch.scratch.lr = None
        epoch.processor(self.apply)

    @handles("pull", pure=True)
    def pull(self, epoch: Epoch, sender: int, payload: Ids) -> Array:
        return self._store.pull(payload)

    @handles("push")
    async def push(self, epoch: Epoch, sender: int, payload: list[Any]) -> None:
        """Keeps a push until the sync point, which applies all pushes in a fixed order."""
        order, ids, gradients = payload
        epoch.scratch.pushes[_sort_key(order, sender)] = ids, gradients

    @handles("lr", pure=True)
    async def read_lr(self, epoch: Epoch, sender: int, payload: None) -> float:
        return self._lr

    @handles("set lr")
    async def set_lr(self, epoch: Epoch, sender: int, payload: float) -> None:
        """Sets the learning rate from this epoch's sync point on. Raises TableError if tasks set different ones."""
        if epoch.scratch.lr is not None and epoch.scratch.lr != payload:
            raise TableError(
                f"table {self._name!r}, epoch {epoch.number}: lr is set to {epoch.scratch.lr} and to {payload}: let "
                f"one task set it, or all set it alike"
            )
        epoch.scratch.lr = payload

    @handles("rows", pure=True)
    def rows(self, epoch: Epoch, sender: int, payload: list[int]) -> list[Array]:
        """Returns the ids, ascending, and rows that were pushed to: from the `first` one on, `count` at most."""
        first, count = payload
        ids = self._store.ids[first : first + count]
        return [ids, self._store.pull(ids)]

    def apply(self, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
        """The sync point: one step of the optimizer for each row that was pushed to, by the sum of its gradients."""
        self._lr = self._lr if epoch.scratch.lr is None else epoch.scratch.lr
        pushes = [epoch.scratch.pushes[place] for place in sorted(epoch.scratch.pushes)]
        if pushes:
            ids, gradients = (np.concatenate(parts) for parts in zip(*pushes, strict=True))
            self._store.push(ids, gradients, self._lr)


class ImmediateTableServer(TableServer):
    """One server of a table with staleness: a push is applied when it arrives, and pulls of the same epoch see it.

    The state still changes in the sync point alone: until then scratch has a copy of the store.
    """

    def compose(self, epoch: Epoch) -> None:
        super().compose(epoch)
        epoch.scratch.store = self._store.fork()

    @handles("pull")
    def pull(self, epoch: Epoch, sender: int, payload: Ids) -> Array:
        return epoch.scratch.store.pull(payload)  # type: ignore[no-any-return]  # a namespace

    @handles("push")
    async def push(self, epoch: Epoch, sender: int, payload: list[Any]) -> None:
        _, ids, gradients = payload
        lr = self._lr if epoch.scratch.lr is None else epoch.scratch.lr
        epoch.scratch.store.push(ids, gradients, lr)

    def apply(self, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
        self._lr = self._lr if epoch.scratch.lr is None else epoch.scratch.lr
        self._store = epoch.scratch.store


def _sort_key(order: list[Any], sender: int) -> Order:
    """Returns the sort key of a push among those of its epoch; a piece's push has the same key from every sender."""
    kind, *rest = order
    return (kind, *rest) if kind else (kind, sender, *rest)
