"""The steps of a run that reads a source: rows that cannot be read by number.

    the pieces of a pass, in seeded order ──dealt──► lane 0: pieces 0, L, 2L ...   lane 1: pieces 1, L + 1 ...   L parts
    part i of a step: the next rows of lane i ──► with its sums, the position in the lane behind them ──► all workers

So each worker knows before a step where every lane stands. The worker that computes a part reads from there: it goes on
with the open file if it had the lane in the step before. A position is always that of a row that exists. A pass begins
with a round in which each lane is opened, and the first row found; it ends when all lanes have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taskgraph.elastic_jobs.data import SourceRows
from taskgraph.elastic_jobs.parts import Part, RoundOfParts
from taskgraph.elastic_jobs.rows import check_numbers
from taskgraph.elastic_jobs.seeding import derived_seed
from taskgraph.errors import StepError
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded
from taskgraph.sources.reading import Source, pass_order, pieces_of, rows_of

__all__ = ["LaneOptions", "SourceLanes", "pack_pieces", "unpack_pieces"]

_CARRIED: Final = "lane"
"""What a part carries with its sums: spans of rows that it has read, and the position behind them."""
_END: Final = object()
"""In place of the next row: the lane has ended."""
Opening = Callable[[Callable[[int], Any], Sequence[int]], list[Any]]
"""Calls a function with each number on some worker; returns all results, on all workers."""


class LanePosition(NamedTuple):
    """The position of a row in a lane.

    Attributes:
        piece: the index of the row's piece among the pieces of the lane.
        offset: the number of the row in its piece.
    """

    piece: int
    offset: int


@dataclass(frozen=True)
class LaneOptions:
    """The arguments of `run.steps(source, ...)`.

    Raises:
        StepError: a number does not fit; the message says which.
    """

    batch: int
    parts: int
    passes: int | None
    seed: int
    shuffle: bool
    buffer: int

    def __post_init__(self) -> None:
        check_numbers(self, ("batch", "parts", "passes", "seed"))
        if not isinstance(self.buffer, int) or self.buffer < 0:
            raise StepError(f"run.steps(buffer={self.buffer!r}): must be a number of rows, or 0 for their own order")


def pack_pieces(source: Source) -> list[Any]:
    """Returns the pieces of a source as bytes: each copy of the state has them, and many tuples take long to encode."""
    whole = encode(list(pieces_of(source)), what="a list of pieces")
    return [
        whole.digest,
        np.frombuffer(whole.meta, np.uint8),
        [np.frombuffer(part, np.uint8) for part in whole.buffers],
    ]


def unpack_pieces(packed: Sequence[Any]) -> list[Any]:
    """Returns the pieces of a source from what `pack_pieces` returned."""
    digest, meta, buffers = packed
    found: list[Any] = decode(Encoded(meta.tobytes(), tuple(buffer.data for buffer in buffers), digest))
    return found


class SourceLanes:
    """The lanes of a source. A `run_rows.RunRows`; newcomers and checkpoints get where the lanes stand.

    Args:
        pieces: of the source, the same on all workers.
        opening: calls a function with each lane's number on some worker, when a pass opens.
    """

    def __init__(self, source: Source, pieces: Sequence[Any], options: LaneOptions, opening: Opening) -> None:
        if not len(pieces):
            raise StepError("run.steps(source): the source has no pieces")
        self.options = options
        self._source = source
        self._pieces = pieces
        self._opening = opening
        self.pass_number = -1
        self.at: list[LanePosition | None] = []
        self._readers: dict[tuple[int, int], _Reader] = {}

    @property
    def arguments(self) -> dict[str, int]:
        of = self.options
        return {name: int(getattr(of, name)) for name in ("batch", "parts", "seed", "shuffle", "buffer")}

    @property
    def is_endless(self) -> bool:
        return self.options.passes is None

    @property
    def is_uneven(self) -> bool:
        return True  # lanes end anywhere

    @property
    def per_pass(self) -> int:
        raise StepError("steps.per_pass: the rows of a source are counted as they are read; see step.ends_pass")

    def __len__(self) -> int:
        raise TypeError("the number of steps of a source is not known before all its rows are read")

    def has_step(self, number: int) -> bool:
        while not any(self.at):
            if self.options.passes is not None and self.pass_number + 1 >= self.options.passes:
                return False
            self._open()
        return True

    def step(self, number: int) -> LaneStep:
        return LaneStep(self, number)

    def _open(self) -> None:
        """Opens all lanes of the next pass, each on some worker."""
        self.pass_number += 1
        lanes = range(min(self.options.parts, len(self._pieces)))
        found = self._opening(lambda lane: self.reader(lane).begin(), lanes)
        self.at = [None if at is None else LanePosition(*at) for at in found]
        if not any(self.at):
            raise StepError(f"run.steps(source): the source has no rows in its {len(self._pieces)} pieces")

    def reader(self, lane: int) -> _Reader:
        """Returns the reader of a lane of this pass."""
        key = self.pass_number, lane
        if key not in self._readers:
            numbers = self._order(self.pass_number)[lane :: self.options.parts].tolist()
            self._readers[key] = _Reader(numbers, self._rows_of)
        return self._readers[key]

    def _rows_of(self, number: int) -> Iterator[Any]:
        """Returns an iterator over the rows of a piece of this pass."""
        seed = derived_seed(self.options.seed, self.pass_number, number)
        return rows_of(self._source, self._pieces[number], buffer=self.options.buffer, seed=seed)

    def _order(self, pass_number: int) -> NDArray[np.int64]:
        """Returns the numbers of the pieces in the order of a pass."""
        return _order(len(self._pieces), pass_number, self.options.seed, self.options.shuffle)

    def keep_readers(self, lanes: set[int]) -> None:
        """Closes the readers of all lanes but these: other workers read those now."""
        for key in [*self._readers]:
            if key[0] != self.pass_number or key[1] not in lanes:
                self._readers.pop(key).close()

    # -- in the state that newcomers and checkpoints get ------------------------------------------

    def captured(self) -> dict[str, Any]:
        return {"pass": self.pass_number, "at": [None if at is None else tuple(at) for at in self.at]}

    def digests(self) -> dict[str, bytes]:
        return {}  # totals decide where lanes stand, and tags have the totals

    def load(self, captured: Mapping[str, Any]) -> None:
        self.pass_number = captured["pass"]
        self.at = [None if at is None else LanePosition(*at) for at in captured["at"]]


class LaneStep:
    """One step of a run that reads a source. A `run_rows.StepRows`."""

    def __init__(self, of: SourceLanes, number: int) -> None:
        self._of = of
        self._number = number
        self.pass_number = of.pass_number
        self._lanes = [lane for lane, at in enumerate(of.at) if at is not None]
        self._begins = [*of.at]
        self._read: set[int] = set()
        self._rows: NDArray[np.int64] | None = None
        self._ends_pass = False

    @property
    def ends_pass(self) -> bool:
        self._known_rows("ends_pass")
        return self._ends_pass

    @property
    def rows(self) -> NDArray[np.int64]:
        return self._known_rows("rows").copy()

    @property
    def size(self) -> int:
        return len(self._known_rows("size"))

    def _known_rows(self, what: str) -> NDArray[np.int64]:
        """Returns the step's rows. Raises StepError, for the call `what`, before the first round has given them."""
        if self._rows is None:
            raise StepError(f"step.{what} of a source is known after `for part in step`")
        return self._rows

    @property
    def parts(self) -> int:
        return len(self._lanes)

    def part(self, of: RoundOfParts, number: int) -> Part:
        options, lane = self._of.options, self._lanes[number]
        size, larger = divmod(options.batch, options.parts)
        at = self._begins[lane]
        assert at is not None
        read = self._of.reader(lane).read(at, size + (lane < larger))
        self._read.add(lane)
        part = Part(of, number, _expanded(read.spans), SourceRows(read.rows))
        part.carried[_CARRIED] = {"spans": read.spans, "next": None if read.next is None else tuple(read.next)}
        return part

    def take_carried(self, carried: Sequence[Mapping[str, Any]]) -> None:
        if self._rows is not None:
            return  # a further round over the same parts
        read = [each[_CARRIED] for each in carried]
        self._rows = np.concatenate([_expanded(each["spans"]) for each in read])
        for lane, each in zip(self._lanes, read, strict=True):
            self._of.at[lane] = None if each["next"] is None else LanePosition(*each["next"])
        self._ends_pass = not any(self._of.at)

    def end(self) -> None:
        self._of.keep_readers(self._read)
        if self._rows is None:
            raise StepError(
                f"step {self._number} has read no rows: the rows of a source are read by `for part in step`, once in "
                f"each step at least"
            )


class _ReadRows(NamedTuple):
    """What a part has read.

    Attributes:
        rows: the rows.
        spans: (piece, first row in it, number of rows) of consecutive rows; int64, shape (n, 3).
        next: the position of the row behind them; None: the lane has ended.
    """

    rows: list[Any]
    spans: NDArray[np.int64]
    next: LanePosition | None


class _Reader:
    """Reads one lane of one pass, from any of its rows.

    Args:
        pieces: the numbers of the lane's pieces, in its order.
        rows_of: returns an iterator over the rows of a piece.
    """

    def __init__(self, pieces: Sequence[int], rows_of: Callable[[int], Iterator[Any]]) -> None:
        self._pieces = pieces
        self._rows_of = rows_of
        self._at = LanePosition(0, 0)  # of the next row
        self._next: Any = _END
        self._piece: Iterator[Any] = iter(())  # the open piece
        self._rows = self._piece  # what follows the next row in it
        self._last: tuple[LanePosition, _ReadRows] | None = None

    def begin(self) -> tuple[int, int] | None:
        """Opens the lane. Returns the position of its first row; None: it has no rows."""
        self._seek(LanePosition(0, 0))
        return None if self._next is _END else (self._at.piece, self._at.offset)

    def read(self, at: LanePosition, count: int) -> _ReadRows:
        """Reads `count` rows at most from a position on. Raises StepError if the source has fewer rows than before."""
        if self._last is not None and self._last[0] == at:
            return self._last[1]
        if self._next is _END or self._at != at:
            self._seek(at)
        if self._next is _END or self._at != at:
            raise StepError(
                f"piece {self._pieces[at.piece]} of the source had more than {at.offset} rows when it was read first, "
                f"and has fewer now: read(piece) has to give the same rows each time, on every worker"
            )
        rows: list[Any] = []
        spans: list[tuple[int, int, int]] = []
        while self._next is not _END and len(rows) < count:
            taken = [self._next, *itertools.islice(self._rows, count - len(rows) - 1)]
            spans.append((self._pieces[self._at.piece], self._at.offset, len(taken)))
            rows += taken
            self._find(self._at._replace(offset=self._at.offset + len(taken)))
        read = _ReadRows(rows, np.array(spans, np.int64), None if self._next is _END else self._at)
        self._last = at, read
        return read

    def _seek(self, at: LanePosition) -> None:
        """Opens the piece at a position, and takes the row there."""
        self.close()
        self._open(at.piece)
        self._rows = itertools.islice(self._piece, at.offset, None)
        self._find(at)

    def _find(self, at: LanePosition) -> None:
        """Takes the next row: the one at this position in the open piece, else the first of later pieces."""
        while (row := next(self._rows, _END)) is _END and at.piece + 1 < len(self._pieces):
            at = LanePosition(at.piece + 1, 0)
            self._open(at.piece)
        self._at, self._next = at, row

    def _open(self, piece: int) -> None:
        """Begins to read a piece, the one of this index in the lane, from its first row."""
        self._piece = self._rows = self._rows_of(self._pieces[piece])

    def close(self) -> None:
        """Closes the open piece, and forgets the next row and the rows read last."""
        if (close := getattr(self._piece, "close", None)) is not None:
            close()
        self._piece = self._rows = iter(())
        self._next, self._last = _END, None


@lru_cache(maxsize=2)
def _order(count: int, pass_number: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    return pass_order(count, pass_number, seed, shuffle)


def _expanded(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns (piece, row in it) of each row of spans: int64, shape (rows, 2)."""
    return np.concatenate(
        [np.stack([np.full(count, piece), np.arange(first, first + count)], 1) for piece, first, count in spans]
    )
