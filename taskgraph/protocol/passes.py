"""One pass of a work queue: the order of its pieces, and the places in it that are dealt, open again or set aside.

See `protocol.dealing` for the states of a piece.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from taskgraph.errors import JobError

__all__ = ["DealtPiece", "Pass", "PassCounts", "QueueOptions", "Ticket", "piece_order"]


class Ticket(NamedTuple):
    """A piece that is dealt to a holder.

    Attributes:
        pass_number: from 0.
        piece: 0 to pieces - 1.
        attempt: from 0: how often an error of user code has ended the piece in this pass.
    """

    pass_number: int
    piece: int
    attempt: int


class PassCounts(NamedTuple):
    """The numbers of pieces of one pass by state, and of rows of its done pieces. `dealt` includes finished ones."""

    pass_number: int
    done: int
    dealt: int
    open: int
    set_aside: int
    rows: int


@dataclass(slots=True)
class DealtPiece:
    """A piece that is dealt: its place in the order, and since when each holder has it."""

    place: int
    holders: dict[str, float]


class QueueOptions(NamedTuple):
    """The arguments of a work queue's ledger, explained at `protocol.dealing.QueueLedger`."""

    pieces: int
    passes: int | None
    seed: int
    shuffle: bool
    overlap: bool
    attempts: int
    on_error: str
    straggler: float

    def check(self) -> None:
        """Raises JobError if an argument is out of its range."""
        if self.pieces < 0:
            raise JobError(f"a queue cannot have {self.pieces} pieces")
        if self.passes is not None and not _is_count(self.passes):
            raise JobError(f"passes={self.passes!r}: a queue has one pass at least, or passes=None for endless ones")
        if not _is_count(self.attempts):
            raise JobError(f"attempts={self.attempts!r}: a piece is tried once at least")
        if self.on_error not in ("fail", "set aside"):
            raise JobError(f'on_error={self.on_error!r}: after too many errors it is "fail" or "set aside"')
        if self.straggler and not self.straggler >= 1:
            raise JobError(f"straggler={self.straggler}: a multiple of the median, 1 at least, or 0 for never")


def _is_count(number: Any) -> bool:
    """True for a whole number from 1 on."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


class Pass:
    """A pass at work.

    Attributes:
        order: the pieces by place.
        cursor: all places before it have been dealt.
        again: a heap of the places before the cursor that are open again.
        dealt: the pieces that are dealt and not finished, by number.
        finished: the pieces whose results a holder keeps, by number: (place, holder).
        aside: places of the pieces that were set aside.
        errors: piece -> errors of user code so far.
    """

    __slots__ = ("_places", "again", "aside", "cursor", "dealt", "errors", "finished", "number", "order", "rows")

    def __init__(self, options: QueueOptions, number: int) -> None:
        self.number = number
        self.order = piece_order(options.pieces, number, options.seed, options.shuffle)
        self._places: dict[int, int] | None = None
        self.cursor = self.rows = 0
        self.again: list[int] = []
        self.dealt: dict[int, DealtPiece] = {}
        self.finished: dict[int, tuple[int, str]] = {}
        self.aside: set[int] = set()
        self.errors: dict[int, int] = {}

    @property
    def open(self) -> int:
        return len(self.order) - self.cursor + len(self.again)

    def ticket(self, piece: int) -> Ticket:
        """Returns the ticket of a piece, whose attempt is the number of its errors so far."""
        return Ticket(self.number, piece, self.errors.get(piece, 0))

    def counts(self) -> PassCounts:
        dealt = len(self.dealt) + len(self.finished)
        done = self.cursor - len(self.again) - dealt - len(self.aside)
        return PassCounts(self.number, done, dealt, self.open, len(self.aside), self.rows)

    def deal(self, holder: str, most: int, now: float) -> Iterator[Ticket]:
        """Deals up to `most` open pieces to a holder, those that came back first."""
        for _ in range(min(most, self.open)):
            if self.again:
                place = heapq.heappop(self.again)
            else:
                place = self.cursor
                self.cursor += 1
            piece = self.order[place]
            self.dealt[piece] = DealtPiece(place, {holder: now})
            yield Ticket(self.number, piece, self.errors.get(piece, 0))

    def claim(self, holder: str, pieces: Collection[int], now: float) -> list[Ticket]:
        """Deals pieces to a holder, also those that others have, except finished, done and set-aside ones.

        Returns the pieces that it now has.
        """
        places = {self.place(piece) for piece in pieces if 0 <= piece < len(self.order)}
        if (end := max(places, default=-1) + 1) > self.cursor:  # what lies between is open, and before the cursor now
            self.again += range(self.cursor, end)
            self.cursor = end
        taken = places.intersection(self.again)
        self.again = sorted(set(self.again) - taken)  # sorted, so it is a heap
        for place in sorted(taken):
            self.dealt[self.order[place]] = DealtPiece(place, {})
        claimed = []
        for place in sorted(places):
            piece = self.order[place]
            if (dealing := self.dealt.get(piece)) is not None:
                dealing.holders[holder] = now
                claimed.append(self.ticket(piece))
        return claimed

    def place(self, piece: int) -> int:
        """Returns the place of a piece in the order."""
        if isinstance(self.order, range):
            return piece
        if self._places is None:
            self._places = dict(zip(self.order, range(len(self.order)), strict=True))
        return self._places[piece]

    def give_back(self, holder: str, piece: int) -> None:
        """Takes a piece, or its result, from the holder. The piece is open again if no other holder has it."""
        if (kept := self.finished.get(piece)) is not None and kept[1] == holder:
            del self.finished[piece]
            heapq.heappush(self.again, kept[0])
            return
        dealing = self.dealt.get(piece)
        if dealing is None or dealing.holders.pop(holder, None) is None or dealing.holders:
            return
        del self.dealt[piece]
        heapq.heappush(self.again, dealing.place)

    def take(self, holder: str, piece: int) -> tuple[int, float | None] | None:
        """Takes a piece, to be counted or set aside, from all its holders. Returns its place, and since when this one
        had it (None: it was finished).

        Returns None, and takes nothing, if this holder does not have the piece.
        """
        if (kept := self.finished.get(piece)) is not None:
            if kept[1] != holder:
                return None
            del self.finished[piece]
            return kept[0], None
        dealing = self.dealt.get(piece)
        if dealing is None or holder not in dealing.holders:
            return None
        del self.dealt[piece]
        return dealing.place, dealing.holders[holder]

    def state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "cursor": self.cursor,
            "rows": self.rows,
            "again": _ranges(self.again),
            "dealt": [[piece, one.place, dict(one.holders)] for piece, one in self.dealt.items()],
            "finished": [[piece, place, holder] for piece, (place, holder) in self.finished.items()],
            "aside": _ranges(self.aside),
            "errors": [list(pair) for pair in self.errors.items()],
        }

    @classmethod
    def of(cls, options: QueueOptions, state: Mapping[str, Any]) -> Pass:
        made = cls(options, state["number"])
        made.cursor, made.rows = state["cursor"], state["rows"]
        made.again = list(_places(state["again"]))  # sorted, so it is a heap
        made.dealt = {piece: DealtPiece(place, dict(holders)) for piece, place, holders in state["dealt"]}
        made.finished = {piece: (place, holder) for piece, place, holder in state["finished"]}
        made.aside = set(_places(state["aside"]))
        made.errors = dict(state["errors"])
        return made


def _ranges(places: Iterable[int]) -> list[int]:
    """Returns the first and the end of each run of places, one after the other."""
    found: list[int] = []
    for place in sorted(places):
        if found and found[-1] == place:
            found[-1] += 1
        else:
            found += (place, place + 1)
    return found


def _places(ranges: list[int]) -> Iterator[int]:
    """Yields the places of these runs, as `_ranges` made them."""
    for first, end in zip(ranges[::2], ranges[1::2], strict=True):
        yield from range(first, end)


@lru_cache(maxsize=8)
def piece_order(count: int, pass_number: int, seed: int, shuffle: bool) -> range | tuple[int, ...]:
    """Returns the pieces of a pass in the order in which they are dealt: the same on all nodes and Pythons.

    Sorts by one draw for each piece, since `random.random` is promised to be the same everywhere, and `shuffle` is not.
    """
    if not shuffle:
        return range(count)
    draw = random.Random(f"{seed},{pass_number}").random
    keys = [draw() for _ in range(count)]
    return tuple(sorted(range(count), key=keys.__getitem__))
