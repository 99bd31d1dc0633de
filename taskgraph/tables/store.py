"""`RowStore`: the rows of one server, as a log of segments that never change.

A segment has the rows that one push changed: their ids (ascending, each once), their values, and their slots. The
newest segment with an id has its row. Each segment is one block of bytes, so a snapshot is the list of the blocks,
without a copy, and a backup that has the blocks of the snapshot before needs the new ones only.

Segments are merged now and then, by a rule that depends on their sizes alone, so all replays make the same segments:

1. A segment of less than 64 KiB is merged with the next one: a snapshot sends so small a block again in any case.
2. If the log has more than twice the rows that live, all segments become one.
3. If the last 16 segments are of about the same size (within a factor of 16), they become one.

So the log is at most twice as large as the rows, has some 16 segments for each factor of 16 in size, and a changed row
is written three times on average, one of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.tables.layout import SegmentLayout, viewed_block
from taskgraph.tables.merging import server_of, sum_by_id
from taskgraph.tables.options import TableOptions
from taskgraph.tables.rows import Ids

__all__ = ["RowStore", "Segment", "rows_of_server", "store_of"]

Array = NDArray[Any]
Segment = Mapping[str, Array]
"""Arrays by name: "ids" of shape (n,), "rows" of shape (n, width), and the optimizer's slots. In a store, all of them
are parts of one block."""

_LEVEL_BITS = 4
_FANOUT = 1 << _LEVEL_BITS
"""Segments of about one size before they are merged. More: fewer rows are written again, and a pull looks into more."""
_SMALLEST_BYTES = INLINE_BYTES
"""Blocks from this size on are sent once; a value's smaller arrays are part of it, and sent each time."""


class RowStore:
    """The rows that somebody has pushed to; others are made when they are pulled, and not kept."""

    def __init__(self, table: TableOptions, seed: int = 0, segments: Iterable[Segment] = ()) -> None:
        """Makes a store that has the segments of another one, in their order.

        Args:
            seed: the table's, see `rows.table_seed`.
        """
        self.table = table
        self.seed = seed
        self._layout = SegmentLayout.of(table)
        self._segments: list[Segment] = []
        self._ids: Ids = np.zeros(0, np.int64)
        """All ids of the store, ascending."""
        self._segment_of: Ids = np.zeros(0, np.int64)
        self._offset: Ids = np.zeros(0, np.int64)
        """Where the row of each of `_ids` is: the number of the segment, and the place in it."""
        for segment in segments:
            self._append(segment)

    def __len__(self) -> int:
        """Returns the number of rows that somebody has pushed to."""
        return len(self._ids)

    @property
    def ids(self) -> Ids:
        """The ids that somebody has pushed to, ascending."""
        return self._ids

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The log, oldest first. Its arrays are read-only, and never change."""
        return tuple(self._segments)

    @property
    def blocks(self) -> list[NDArray[np.uint8]]:
        """The log as blocks of bytes, oldest first, for a snapshot; they never change. See `SegmentLayout.unpack`."""
        return [viewed_block(segment) for segment in self._segments]

    def fork(self) -> RowStore:
        """Returns a copy with the same rows; later pushes to either do not reach the other."""
        copy = RowStore(self.table, self.seed)
        copy._segments = list(self._segments)
        copy._ids, copy._segment_of, copy._offset = self._ids, self._segment_of.copy(), self._offset.copy()
        return copy

    def pull(self, ids: Ids) -> Array:
        """Returns the rows of ids, of shape (n, width), in the order given; an id may be there more than once."""
        return self._gather(ids, ("rows",))["rows"]

    def push(self, ids: Ids, gradients: Array, lr: float) -> None:
        """Changes rows by the optimizer, each once, from the sum of its gradients in the order given.

        Args:
            ids: of shape (n,), with duplicates.
            gradients: of shape (n, width), of the table's dtype.
            lr: the learning rate.
        """
        if not len(ids):
            return
        unique, sums = sum_by_id(ids, gradients)
        before = self._gather(unique, ("rows", *self.table.rule.slots))
        rows, slots = self.table.rule.change(before["rows"], before, sums, lr)
        self._append({"ids": unique, "rows": rows, **slots})
        self._compact()

    def live_rows(self) -> Segment:
        """Returns all rows of the store as one segment, ids ascending."""
        return self._merged(0)

    def _append(self, segment: Segment) -> None:
        """Adds a segment to the log, as one block."""
        self._point_to(segment, len(self._segments))
        self._segments.append(self._layout.pack(segment))

    def _point_to(self, segment: Segment, number: int) -> None:
        """Notes in the index that a segment, which is `number` in the log, has the rows of its ids."""
        ids = segment["ids"]
        place, known = self._find(ids)
        if not known.all():
            added = place[~known]
            self._ids = np.insert(self._ids, added, ids[~known])
            self._segment_of = np.insert(self._segment_of, added, 0)
            self._offset = np.insert(self._offset, added, 0)
            place = np.searchsorted(self._ids, ids)
        self._segment_of[place] = number
        self._offset[place] = np.arange(len(ids))

    def _find(self, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Returns where ids are in the index, or would be inserted, and which are there."""
        place = np.searchsorted(self._ids, ids)
        if not len(self._ids):
            return place, np.zeros(len(ids), np.bool_)
        return place, self._ids[np.minimum(place, len(self._ids) - 1)] == ids

    def _gather(self, ids: Ids, names: Sequence[str]) -> dict[str, Array]:
        """Returns name -> array with a copied row for each id, for these names; rows without a push are made."""
        table = self.table
        place, known = self._find(ids)
        found = {name: self._layout.empty(name, len(ids)) for name in names}
        where = self._segment_of[place[known]]
        offset = self._offset[place[known]]
        targets = np.flatnonzero(known)
        for number in np.flatnonzero(np.bincount(where)):
            here = where == number
            for name in names:
                found[name][targets[here]] = self._segments[number][name][offset[here]]
        new = np.flatnonzero(~known)
        if len(new):
            first = {
                "rows": table.make_rows(ids[new], self.seed),
                **table.rule.first_slots(len(new), table.width, table.numpy_dtype),
            }
            for name in names:
                found[name][new] = first[name]
        return found

    def _merged(self, begin: int) -> Segment:
        """Returns the segments from `begin` on as one, with the newest row of each id."""
        segments = self._segments[begin:]
        ids = _union([segment["ids"] for segment in segments])
        # The newest segment with an id is one of these, so the index points into them.
        return {"ids": ids, **self._gather(ids, ("rows", *self.table.rule.slots))}

    def _compact(self) -> None:
        """Merges segments, by the rules of the module, until there is nothing to merge."""
        while (begin := _first_to_merge(self._sizes(), len(self._ids) * self._layout.row_bytes)) is not None:
            merged = self._merged(begin)
            del self._segments[begin:]
            self._append(merged)

    def _sizes(self) -> list[int]:
        """Returns the bytes of each segment."""
        return [viewed_block(segment).nbytes for segment in self._segments]


def _first_to_merge(sizes: Sequence[int], live: int) -> int | None:
    """Returns the number of the segment from which on all become one; None: nothing is to be merged.

    Args:
        sizes: of all segments, bytes.
        live: bytes of the rows that live.
    """
    if len(sizes) > 1 and sum(sizes) > 2 * live:
        return 0
    if len(sizes) > 1 and sizes[-2] < _SMALLEST_BYTES:
        return len(sizes) - 2
    if len(sizes) < _FANOUT:
        return None
    levels = [(max(size // _SMALLEST_BYTES, 1).bit_length() - 1) // _LEVEL_BITS for size in sizes]
    begin = len(sizes)
    while begin and levels[begin - 1] <= levels[-1]:
        begin -= 1
    return begin if len(sizes) - begin >= _FANOUT else None


def _union(parts: Sequence[Ids]) -> Ids:
    """Returns the ids of all parts, each once, ascending. numpy's `unique` hashes them, and takes 50 times as long."""
    ids = np.sort(np.concatenate([np.zeros(0, np.int64), *parts]), kind="stable")
    first = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]


def rows_of_server(segment: Segment, server: int, servers: int) -> Segment:
    """Returns a segment with only the rows of one of the servers, as `server_of` spreads them."""
    mine = server_of(segment["ids"], servers) == server
    return {name: array[mine] for name, array in segment.items()}


def store_of(captured: Mapping[str, Any]) -> RowStore:
    """Makes a store of the rows in a server's snapshot. Needs no `Table` of the job.

    Args:
        captured: "table": `TableOptions.stored`; "blocks": `RowStore.blocks`.
    """
    width, dtype, optimizer = captured["table"]
    table = TableOptions(width, dtype=dtype, optimizer=optimizer)
    return RowStore(table, segments=map(SegmentLayout.of(table).unpack, captured["blocks"]))
