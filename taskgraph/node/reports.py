"""The numbers that tasks report per epoch; the replicas of task 0 keep them until the job's result is made.

Numbers of epoch e reach the leader in the reports of e. Task 0's boundary e + 2 carries them, as added rows, so that
boundaries stay small. Until then every task has its own numbers in its boundary e + 1, and repeats them to a new
leader.

A job may report for days, so each epoch is packed when the next one comes, and nothing on the event loop goes through
all epochs. Full blocks are immutable bytes: they travel and are written unchanged, and are read only for the result.

When all blocks exceed `ReportLog.most_bytes`, two neighboring blocks are merged, and every second epoch of theirs is
dropped: the oldest two among the blocks that were thinned least often. So early epochs stay, less densely. The outcome
depends only on the reports: it is the same on all replicas and after failures.

A block is level and length of its text; the text, JSON, padded to 8 bytes: [[epochs, [[task, [name, ...]], ...]], ...];
then for each of these the epoch numbers, 8 bytes each, and the reported doubles of each epoch, little-endian. Blocks
are not compressed: equal rows must be equal bytes on all hosts, and zlib differs between hosts.
"""

from __future__ import annotations

import heapq
import json
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, Final

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.values import decode, encode, value_end
from taskgraph.protocol.messages import Encoded

__all__ = ["PlainRows", "ReportLog", "Rows", "add_reports", "reports_in", "to_plain"]

_BLOCK_BYTES: Final = 1 << 20
"""A block of this size is full. With 3,000 numbers an epoch names take 2 % of it; copying it takes 0.1 ms."""
_HEAD: Final = struct.Struct("<iI")
_OPEN: Final = -1
"""The level of the open block."""
_NEWEST: Final = -2
"""The level that stands for the newest epoch, which is in no block yet."""

Rows = Mapping[int, Mapping[str, float]]
"""task -> name -> number, of one epoch."""
PlainRows = dict[int, dict[str, float]]
"""`Rows` as plain dicts, to be encoded or shown."""
_Names = tuple[tuple[int, tuple[str, ...]], ...]
"""(task, names that it reported), sorted by task."""


class _Block:
    """Rows of some epochs, grouped by the reported names."""

    __slots__ = ("groups", "size")

    def __init__(self) -> None:
        self.groups: dict[_Names, tuple[array[int], array[float]]] = {}
        self.size = 0

    @classmethod
    def unpack(cls, data: bytes) -> _Block:
        """Reads a block. Raises DecodeError."""
        made = cls()
        try:
            at = _HEAD.size + _HEAD.unpack_from(data)[1]
            for count, rows in json.loads(data[_HEAD.size : at]):
                names = tuple([(task, tuple(row)) for task, row in rows])
                if type(count) is not int or count < 1 or not names or names in made.groups or not _are_names(names):
                    raise ValueError(f"{count!r} epochs of {rows!r:.100}")
                epochs, numbers = made._group(names)
                for column, size in ((epochs, 8 * count), (numbers, 8 * count * _width(names))):
                    if len(data) < at + size:
                        raise ValueError(f"{len(data)} bytes")
                    column.frombytes(data[at : at + size])
                    if sys.byteorder != "little":
                        column.byteswap()
                    at += size
                    made.size += size
            if at != len(data):
                raise ValueError(f"{len(data)} bytes, not {at}")
        except (ValueError, TypeError, struct.error, RecursionError) as error:
            raise DecodeError(f"these are no reports: {error!r}") from error
        return made

    def packed(self, level: int) -> bytes:
        """Returns the block as bytes, with its level: how often it was thinned, or `_OPEN`, or `_NEWEST`."""
        head = [[len(epochs), names] for names, (epochs, _) in self.groups.items()]
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        parts = [_HEAD.pack(level, len(text)), text]
        for columns in self.groups.values():
            parts += [_little_endian(column) for column in columns]
        return b"".join(parts)

    def _group(self, names: _Names) -> tuple[array[int], array[float]]:
        """Returns the columns of these names: epochs and numbers. Adds empty ones if there are none."""
        group = self.groups.get(names)
        if group is None:
            group = self.groups[names] = (array("q"), array("d"))
            self.size += len(json.dumps(names))
        return group

    def add(self, epoch: int, rows: Rows) -> None:
        """Adds the rows of an epoch, which is later than all epochs of this block."""
        tasks = sorted(rows)
        names = tuple([(task, tuple(rows[task])) for task in tasks])
        epochs, numbers = self._group(names)
        before = len(numbers)
        epochs.append(epoch)
        for task in tasks:
            numbers.extend(rows[task].values())
        self.size += 8 + 8 * (len(numbers) - before)

    def cut(self, epoch: int) -> None:
        """Removes the rows from `epoch` on."""
        groups, self.groups, self.size = self.groups, {}, 0
        for names, (epochs, numbers) in groups.items():
            if kept := bisect_left(epochs, epoch):
                mine = self._group(names)
                mine[0].extend(epochs[:kept])
                mine[1].extend(numbers[: kept * _width(names)])
                self.size += 8 * kept * (1 + _width(names))

    def merge_and_thin(self, newer: _Block) -> _Block:
        """Merges this block with the next one, and drops every second epoch of each group.

        Groups with one epoch count together, so that rare reports are not always dropped.
        """
        made = _Block()
        for block in (self, newer):
            for names, (epochs, numbers) in block.groups.items():
                mine = made._group(names)
                mine[0].extend(epochs)
                mine[1].extend(numbers)
        alone = sorted([epochs[0] for epochs, _ in made.groups.values() if len(epochs) == 1])
        left_out = set(alone[1::2])
        for names, (epochs, numbers) in list(made.groups.items()):
            if epochs[0] in left_out and len(epochs) == 1:
                del made.groups[names]
                continue
            kept = np.asarray(numbers).reshape(len(epochs), -1)[::2]
            made.groups[names] = (epochs[::2], array("d", kept.tobytes()))
        return made

    @property
    def first(self) -> int:
        """The earliest epoch in this block."""
        return min(epochs[0] for epochs, _ in self.groups.values())

    @property
    def last(self) -> int:
        """The latest epoch in this block."""
        return max(epochs[-1] for epochs, _ in self.groups.values())

    def rows_of(self, epoch: int) -> PlainRows:
        """Returns the rows of an epoch; {} if this block has none."""
        for names, (epochs, numbers) in self.groups.items():
            at = bisect_left(epochs, epoch)
            if at < len(epochs) and epochs[at] == epoch:
                return _row(names, numbers, at * _width(names))
        return {}

    def rows(self) -> Iterator[tuple[int, PlainRows]]:
        """Yields (epoch, rows) in the order of epochs."""

        def rows_of_group(names: _Names, epochs: array[int], numbers: array[float]) -> Iterator[tuple[int, PlainRows]]:
            width = _width(names)
            for at, epoch in enumerate(epochs):
                yield epoch, _row(names, numbers, at * width)

        return heapq.merge(
            *[rows_of_group(names, *columns) for names, columns in self.groups.items()], key=itemgetter(0)
        )


class ReportLog:
    """Reports of committed epochs, in order. Epochs without reports are left out."""

    most_bytes: ClassVar[int] = 64 << 20
    """The most bytes of all full blocks. The process that makes the result needs 8 to 35 times as much."""

    def __init__(self) -> None:
        self._full_blocks: list[bytes] = []
        self._open_block = _Block()
        self._newest = -1
        self._rows: Rows = {}  # in no block yet, since more rows may come

    def __bool__(self) -> bool:
        return self._newest >= 0

    @property
    def is_thinned(self) -> bool:
        """True if some epochs were dropped because there were too many."""
        return bool(self._full_blocks) and _level(self._full_blocks[0]) > 0

    def add(self, epoch: int, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Adds rows of the newest epoch or of a later one. Ignores rows of earlier epochs: they are here already."""
        if epoch < self._newest:
            return
        reported = {task: numbers for task, numbers in rows.items() if numbers}
        if not reported:
            return
        if epoch == self._newest:
            self._rows = {**self._rows, **reported}
            return
        if self._rows:
            self._open_block.add(self._newest, self._rows)
            if self._open_block.size >= _BLOCK_BYTES:
                self._full_blocks.append(self._open_block.packed(0))
                self._open_block = _Block()
                self._thin()
        self._newest, self._rows = epoch, reported

    def _thin(self) -> None:
        """Merges neighboring full blocks, and drops epochs of them, until all full blocks fit into `most_bytes`."""
        full = self._full_blocks
        while len(full) > 1 and sum(map(len, full)) > self.most_bytes:
            levels = [_level(block) for block in full]
            twins = [at for at in range(len(full) - 1) if levels[at] == levels[at + 1]]
            at = min(twins, key=levels.__getitem__, default=0)  # the oldest of several
            older, newer = map(_Block.unpack, full[at : at + 2])
            full[at : at + 2] = [older.merge_and_thin(newer).packed(max(levels[at : at + 2]) + 1)]

    def rows_of(self, epoch: int) -> Rows:
        """Returns the rows of one epoch, usually the newest; {} if it has none."""
        if epoch >= self._newest:
            return self._rows if epoch == self._newest else {}
        for block in chain([self._open_block], map(_Block.unpack, reversed(self._full_blocks))):
            if block.groups and block.first <= epoch:
                return block.rows_of(epoch)
        return {}

    def rows(self) -> Iterator[tuple[int, PlainRows]]:
        """Yields all rows, epoch after epoch."""
        for block in chain(map(_Block.unpack, self._full_blocks), [self._open_block]):
            yield from block.rows()
        if self._rows:
            yield self._newest, to_plain(self._rows)

    def cut(self, epoch: int) -> None:
        """Removes the rows from `epoch` on: those epochs were undone."""
        if self._newest < epoch:
            return
        self._newest, self._rows = -1, {}
        self._open_block.cut(epoch)
        while not self._open_block.groups and self._full_blocks:
            self._open_block = _Block.unpack(self._full_blocks.pop())
            self._open_block.cut(epoch)
        if self._open_block.groups:
            last = self._open_block.last
            self._newest, self._rows = last, self._open_block.rows_of(last)
            self._open_block.cut(last)

    def packed(self) -> list[bytes]:
        """Returns all blocks as bytes. Copies only the open one; later changes do not affect the result.

        Equal rows give equal bytes, in any order of arrival: two primaries, one of them stale, may write the same
        file of a checkpoint, and either may come last.
        """
        if not self:
            return []
        newest = _Block()
        newest.add(self._newest, self._rows)
        return [*self._full_blocks, self._open_block.packed(_OPEN), newest.packed(_NEWEST)]

    @classmethod
    def unpack(cls, blocks: Sequence[bytes]) -> ReportLog:
        """Reads packed blocks, each once. May be called in any thread.

        Raises:
            DecodeError: the bytes are no such blocks.
        """
        made = cls()
        for at, data in enumerate(blocks):
            level, block = _level(data), _Block.unpack(data)
            if at < len(blocks) - 2 and level >= 0 and block.groups:
                made._full_blocks.append(data)
            elif at == len(blocks) - 2 and level == _OPEN:
                made._open_block = block
            elif at == len(blocks) - 1 and level == _NEWEST and block.groups:
                made._newest, made._rows = next(block.rows())
            else:
                raise DecodeError(f"these are no reports: block {at} of {len(blocks)} is of level {level}")
        return made

    def fold(self, reports_in: Mapping[int, Mapping[int, Mapping[str, float]]] | ReportLog) -> None:
        """Takes over the reports in a boundary: added rows, or a whole log if it reaches as far as this one.

        There are no gaps: a replica has all rows up to its newest.
        """
        if not isinstance(reports_in, ReportLog):
            for epoch, by_task in reports_in.items():
                self.add(epoch, by_task)
        elif reports_in._newest >= self._newest:
            self._full_blocks, self._open_block = reports_in._full_blocks, reports_in._open_block
            self._newest, self._rows = reports_in._newest, reports_in._rows


def _are_names(names: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
    return all(type(task) is int and row and all(type(name) is str for name in row) for task, row in names)


def _width(names: _Names) -> int:
    """Counts the numbers that an epoch with these names has."""
    return sum([len(row) for _, row in names])


def _row(names: _Names, numbers: array[float], at: int) -> PlainRows:
    """Returns the rows of one epoch: its names with the numbers from `at` on."""
    rows = PlainRows()
    for task, row in names:
        rows[task] = dict(zip(row, numbers[at : at + len(row)], strict=True))
        at += len(row)
    return rows


def to_plain(rows: Rows) -> PlainRows:
    """Copies the rows of an epoch into plain dicts."""
    return {task: dict(numbers.items()) for task, numbers in rows.items()}


def _little_endian(column: array[Any]) -> bytes:
    if sys.byteorder != "little":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _level(block: bytes) -> int:
    """Returns the level of a packed block. Raises DecodeError if it is none."""
    try:
        return int(_HEAD.unpack_from(block)[0])
    except (TypeError, struct.error) as error:
        raise DecodeError(f"these are no reports: {error!r}") from error


def reports_in(value: Encoded) -> dict[int, Rows] | ReportLog:
    """Returns the reports in a boundary of task 0: a dict has only the rows that the boundary adds, by epoch; a
    `ReportLog` all, as a checkpoint's file has. May be called in any thread.

    Raises:
        DecodeError: the value is no such boundary.
    """
    try:
        log = decode(value)["log"]
        return log if isinstance(log, dict) else ReportLog.unpack(log)
    except (TypeError, KeyError) as error:
        raise DecodeError(f"this is no boundary of task 0: {error!r}") from error


def add_reports(value: Encoded, log: list[bytes] | dict[int, PlainRows]) -> Encoded:
    """Returns a boundary of task 0 with these reports added: a whole log, or rows. May be called in any thread."""
    raw: dict[str, Any] = decode(value)
    made = encode({**raw, "log": log}, what="snapshot of task 0", ordered=True)
    # Decoding on the host hides which arrays lived on a device: keep the trailer that says so.
    trailer = value.meta[value_end(value.meta) :]
    return Encoded(made.meta[: value_end(made.meta)] + trailer, made.buffers, made.digest)
