"""A table as user code sees it in an epoch: asks the servers of the rows, and sends them what is pushed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from taskgraph.epoch import Epoch, PureEpoch, Reply, ask_service
from taskgraph.errors import TableError
from taskgraph.tables.interface import EpochTable
from taskgraph.tables.merging import as_gradients, as_ids, server_of
from taskgraph.tables.options import TableOptions, as_rate
from taskgraph.tables.rows import Ids
from taskgraph.tables.saved import check_saving, write_table

if TYPE_CHECKING:
    from taskgraph.jobs import Job

__all__ = ["HeldPush", "open_table", "send_held"]

Array = NDArray[Any]

_COMPUTE, _PIECE = 0, 1
"""Kinds of pushes, the first part of their order."""

_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class HeldPush:
    """A push of a piece, which is sent once the piece is counted."""

    table: str
    ids: Ids
    gradients: Array


class _OpenTable(EpochTable):
    """A table of a job, in one epoch."""

    def __init__(self, epoch: Epoch, name: str, table: TableOptions, servers: Sequence[int]) -> None:
        self._epoch = epoch
        self._name = name
        self._table = table
        self._servers = servers
        self._pushes = 0

    def pull(self, ids: ArrayLike | None = None) -> Array:
        if _on_loop():
            raise TableError(f"table {self._name!r}: pull() would block the event loop: write `await table.apull(ids)`")
        asked = self._ask_rows(ids)
        return asked.join([reply.wait() for reply in asked.replies])

    async def apull(self, ids: ArrayLike | None = None) -> Array:
        asked = self._ask_rows(ids)
        return asked.join([await reply for reply in asked.replies])

    def push(self, ids: ArrayLike | None, gradients: ArrayLike) -> None:
        what = self._checked_place("push")
        found = self._ids(ids, what)
        given = as_gradients(gradients, found, self._table.width, self._table.numpy_dtype, what)
        held = self._epoch._held_pushes
        if held is not None:
            held.append(HeldPush(self._name, found.copy(), given.copy()))
            return
        order = [_COMPUTE, self._epoch._where, self._pushes]
        self._pushes += 1
        replies = self.send(order, found, given)
        if self._table.staleness and not _on_loop():
            for reply in replies:
                reply.wait()

    def save(self, url: str) -> None:
        self._checked_place("save")
        check_saving(url)
        ids: list[Ids] = []
        rows: list[Array] = []
        asked, at = self._servers, 0
        while asked:
            replies = [ask_service(self._epoch, server, "rows", [at, _ROWS_AT_A_TIME]) for server in asked]
            answers = [reply.wait() for reply in replies]
            ids += [answer[0] for answer in answers]
            rows += [answer[1] for answer in answers]
            asked = [one for one, answer in zip(asked, answers, strict=True) if len(answer[0]) == _ROWS_AT_A_TIME]
            at += _ROWS_AT_A_TIME
        write_table(url, np.concatenate(ids), np.concatenate(rows))

    @property
    def lr(self) -> float:
        self._checked_place("lr")
        return cast(float, ask_service(self._epoch, self._servers[0], "lr").wait())

    @lr.setter
    def lr(self, value: float) -> None:
        if self._epoch._held_pushes is not None:
            raise TableError(f"{self._checked_place('lr')}: it is set outside pieces, which may be computed twice")
        rate = as_rate(value, f"{self._checked_place('lr')} = ...: it")
        for server in self._servers:
            ask_service(self._epoch, server, "set lr", rate)

    def send(self, order: list[Any], ids: Ids, gradients: Array) -> list[Reply]:
        """Sends a push to the servers of its rows. `order`: its place among the epoch's pushes, see `server.py`."""
        replies = []
        for server, mine in self._shares(ids):
            payload = [order, ids[mine], gradients[mine]]
            replies.append(ask_service(self._epoch, server, "push", payload))
        return replies

    def _ask_rows(self, ids: ArrayLike | None) -> _PendingPull:
        """Asks the servers for the rows of ids, each once."""
        what = self._checked_place("pull")
        unique, place = np.unique(self._ids(ids, what), return_inverse=True)
        shares = self._shares(unique)
        replies = [ask_service(self._epoch, server, "pull", unique[mine]) for server, mine in shares]
        rows = np.empty((len(unique), self._table.width), self._table.numpy_dtype)
        return _PendingPull(rows, place, [mine for _, mine in shares], replies)

    def _ids(self, ids: ArrayLike | None, what: str) -> Ids:
        """Returns ids as an array; all of a table with `rows` for None. Raises TableError if they are wrong."""
        rows = self._table.rows
        if ids is None and rows is None:
            raise TableError(f"{what} needs ids: only a table with rows=... knows all of its own")
        return as_ids(range(rows) if ids is None and rows is not None else ids, what, rows)

    def _shares(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Returns (server, places in `ids` of the rows that it has) for each server that has some."""
        owner = server_of(ids, len(self._servers))
        places = [np.flatnonzero(owner == number) for number in range(len(self._servers))]
        return [(server, mine) for server, mine in zip(self._servers, places, strict=True) if len(mine)]

    def _checked_place(self, call: str) -> str:
        """Returns table, call and place, for messages. Raises TableError if no message can be sent there."""
        epoch = self._epoch
        what = f"{epoch._place()}: table {self._name!r}, {call}"
        if isinstance(epoch, PureEpoch):
            raise epoch.refusal("use a table")
        if epoch._sync or epoch._work.composing is not None:
            here = "a sync point runs when the epoch is quiet" if epoch._sync else "compose() cannot wait for an answer"
            raise TableError(
                f"{what}: {here}: use tables in the `value` of a collective, another compute with an outbound channel, "
                f"or on_flag: flag yourself in compose for that, epoch.flag(self.task_id)"
            )
        return what


@dataclass(frozen=True, slots=True)
class _PendingPull:
    """A pull that waits for its replies.

    Attributes:
        rows: to be filled, each once.
        place: where in `rows` each id asked for is.
        shares: of each server asked, the places of its rows.
    """

    rows: Array
    place: Ids
    shares: list[Ids]
    replies: list[Reply]

    def join(self, answers: Sequence[Array]) -> Array:
        """Puts the answers of the servers together, and returns the rows in the order of the ids asked for."""
        for mine, answer in zip(self.shares, answers, strict=True):
            self.rows[mine] = answer
        return self.rows[self.place]


def open_table(epoch: Epoch, name: str, job: Job) -> EpochTable:
    """Returns a table of the job, for one epoch. Raises TableError if the job has none of this name."""
    if name not in job.tables:
        known = ", ".join(map(repr, job.tables)) or "none"
        raise TableError(
            f"{epoch._place()}: table({name!r}): the job's tables are: {known}; name it in "
            f"tg.Job(tables={{{name!r}: tg.Table(...)}})"
        )
    return _OpenTable(epoch, name, job.tables[name], job.service(f"table {name}"))


def send_held(epoch: Epoch, pushes: Sequence[HeldPush], piece: tuple[str, int, int]) -> list[Reply]:
    """Sends the pushes of a piece that has been counted. Tables with staleness have applied them when all answered.

    Args:
        epoch: of the map.
        piece: the tag of its map, its pass, and its number.
    """
    replies = []
    for number, push in enumerate(pushes):
        replies += cast(_OpenTable, epoch.table(push.table)).send([_PIECE, *piece, number], push.ids, push.gradients)
    return replies


def _on_loop() -> bool:
    """True if this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
