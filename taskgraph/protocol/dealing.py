"""The ledger of a work queue: which pieces are open, dealt, done and set aside.

A queue has `pieces` pieces and some passes. In each pass every piece is counted exactly once: it is done, or it is set
aside. The states of a piece in a pass:

              deal, claim          finish             count
    open ───────────────────► dealt ─────► finished ─────────► done
      ▲                         │             │      (or at once)
      ├──── lose, give_back ────┼──── lose ───┘
      └──── fail ───────────────┴──── fail, put_aside ───────► set aside
            (below the cap)          (at the cap)

`finished` is for holders that keep a result until others have it: if the holder is lost, so is the result.

1. Only a holder to whom the piece is dealt at the moment can count or fail it. All other results are late: they are
   dropped. So a piece is counted once, in whatever order results, errors and losses come.
2. The loss of a holder opens its pieces at once. Only errors count as attempts.
3. Pieces that came back are dealt first, in the order of the pass.
4. Pass e + 1 opens when every piece of pass e is done or set aside. With `overlap` it opens when pass e has no open
   piece left; at most two passes are open at a time. A piece set aside in one pass is tried again in the next.
5. If nothing is open, a piece that was dealt more than `straggler` times the median duration ago is dealt to a further
   holder. The first result counts, and the other one is late.

A pass deals its pieces in a fixed order, by *place*. All places before the *cursor* have been dealt, so those that are
neither dealt, open again nor set aside are done. Nothing else is kept for a piece that is done: the state is as large
as what is under way, whatever the number of pieces.

The ledger has no clock and draws nothing. Equal events give equal ledgers, on all nodes. The caller's duties: pass all
events in one order; read a clock that only grows and is the same for all who feed this ledger; keep the results of
pieces in the same decision that counts them; choose how many pieces to deal at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from taskgraph.protocol.passes import Pass, PassCounts, QueueOptions, Ticket, piece_order

__all__ = ["ErrorOutcome", "PassCounts", "QueueLedger", "SetAsidePiece", "SlowPiece", "Ticket", "piece_order"]

_DURATIONS: Final = 64
"""The median is that of the newest durations: pieces may become slower or faster in the course of a run."""
_KEPT_ERRORS: Final = 1000
"""Pieces set aside that are listed by name; further ones are only counted."""
_ERROR_CHARACTERS: Final = 4000
_ENDED_PASSES: Final = 16
"""Passes that ended and are still shown."""


class ErrorOutcome(StrEnum):
    """What becomes of a piece in which user code raised an error."""

    AGAIN = "again"
    SET_ASIDE = "set aside"
    FAIL_JOB = "fail the job"
    LATE = "late"
    """The piece is no longer the holder's: nothing follows."""


class SlowPiece(NamedTuple):
    """A piece that its newest holder has had for longer than `straggler` times the median: `seconds`."""

    pass_number: int
    piece: int
    holder: str
    seconds: float


class SetAsidePiece(NamedTuple):
    """A piece that was set aside, the holder whose error was one too many, and the end of its traceback."""

    pass_number: int
    piece: int
    holder: str
    text: str


class QueueLedger:
    """What has become of each piece of a queue. See the module for states and rules.

    Args:
        pieces: how many there are in a pass.
        passes: how many passes; None: endless.
        seed: of the order, if it is shuffled.
        shuffle: each pass has an order of its own.
        overlap: the next pass opens as soon as this one has no open piece.
        attempts: how many errors in one piece are too many.
        on_error: "fail" or "set aside": what happens after too many errors.
        straggler: see rule 5; 0: no piece is dealt twice.

    Raises:
        JobError: an argument is out of its range; the message says which.
    """

    __slots__ = ("_aside", "_durations", "_ended", "_next_pass", "_open", "_options", "_set_aside", "done", "rows")

    def __init__(
        self,
        pieces: int,
        *,
        passes: int | None = 1,
        seed: int = 0,
        shuffle: bool = False,
        overlap: bool = False,
        attempts: int = 3,
        on_error: str = "fail",
        straggler: float = 3.0,
    ) -> None:
        self._options = QueueOptions(pieces, passes, seed, shuffle, overlap, attempts, on_error, straggler)
        self._options.check()
        self._next_pass = 0
        self._open: list[Pass] = []
        self._ended: deque[PassCounts] = deque(maxlen=_ENDED_PASSES)
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._aside: list[SetAsidePiece] = []
        self._set_aside = 0
        self.done = 0
        """Pieces done, in all passes."""
        self.rows = 0
        """Rows of these pieces."""
        self._open_passes()

    # -- events -----------------------------------------------------------------------------------

    def deal(self, holder: str, most: int, now: float) -> list[Ticket]:
        """Deals up to `most` pieces to a holder: open ones, else a single one that another holder has had too long."""
        dealt: list[Ticket] = []
        while len(dealt) < most:
            current = next((one for one in self._open if one.open), None)
            if current is None:
                break
            dealt += current.deal(holder, most - len(dealt), now)
            self._open_passes()
        if not dealt and most > 0 and (slow := self._slowest(holder, now)) is not None:
            at, piece = slow
            at.dealt[piece].holders[holder] = now
            dealt.append(at.ticket(piece))
        return dealt

    def claim(self, holder: str, pass_number: int, pieces: Collection[int], now: float) -> list[Ticket]:
        """Deals pieces to a holder that has their results already, except finished, done and set-aside ones.

        Returns those dealt; [] if the pass is not open.
        """
        at = self._pass(pass_number)
        claimed = at.claim(holder, pieces, now) if at else []
        self._open_passes()
        return claimed

    def count(self, holder: str, ticket: Ticket, now: float, rows: int = 0) -> bool:
        """Counts a piece that the holder has, or finished, as done. Returns False if the result is late: drop it."""
        at = self._pass(ticket.pass_number)
        taken = at.take(holder, ticket.piece) if at else None
        if at is None or taken is None:
            return False
        if (since := taken[1]) is not None:
            self._durations.append(now - since)
        at.rows += rows
        self.done += 1
        self.rows += rows
        self._end_passes()
        return True

    def finish(self, holder: str, ticket: Ticket, now: float) -> bool:
        """Notes that the holder keeps the result of a piece. No other holder gets the piece meanwhile.

        Returns False if the result is late: drop it.
        """
        at = self._pass(ticket.pass_number)
        taken = at.take(holder, ticket.piece) if at else None
        if at is None or taken is None:
            return False
        place, since = taken
        if since is not None:
            self._durations.append(now - since)
        at.finished[ticket.piece] = place, holder
        return True

    def fail(self, holder: str, ticket: Ticket, text: str) -> ErrorOutcome:
        """Counts an error of user code in a piece that was dealt to the holder. Returns what becomes of the piece.

        Args:
            ticket: as it was dealt: the same error twice counts once.
            text: the traceback.
        """
        at = self._pass(ticket.pass_number)
        if at is None or not self.is_dealt_to(holder, ticket):
            return ErrorOutcome.LATE
        if ticket.attempt != at.errors.get(ticket.piece, 0):
            at.give_back(holder, ticket.piece)
            return ErrorOutcome.LATE
        errors = at.errors[ticket.piece] = ticket.attempt + 1
        if errors < self._options.attempts:
            at.give_back(holder, ticket.piece)
            return ErrorOutcome.AGAIN
        if self._options.on_error == "fail":
            at.give_back(holder, ticket.piece)
            return ErrorOutcome.FAIL_JOB
        self.put_aside(holder, ticket, text)
        return ErrorOutcome.SET_ASIDE

    def put_aside(self, holder: str, ticket: Ticket, text: str) -> bool:
        """Sets a piece aside, whatever its number of errors. Returns False if the holder does not have it."""
        at = self._pass(ticket.pass_number)
        taken = at.take(holder, ticket.piece) if at else None
        if at is None or taken is None:
            return False
        at.aside.add(taken[0])
        self._set_aside += 1
        if len(self._aside) < _KEPT_ERRORS:
            self._aside.append(SetAsidePiece(ticket.pass_number, ticket.piece, holder, text[-_ERROR_CHARACTERS:]))
        self._end_passes()
        return True

    def give_back(self, holder: str, tickets: Iterable[Ticket]) -> None:
        """Takes pieces, or their results, from the holder: they are open again, unless another holder has them."""
        for ticket in tickets:
            if (at := self._pass(ticket.pass_number)) is not None:
                at.give_back(holder, ticket.piece)

    def lose(self, holder: str) -> None:
        """Takes all pieces, and all results that it keeps, from a lost holder: they are open again, unless another
        holder has them."""
        for at in self._open:
            held = [piece for piece, dealing in at.dealt.items() if holder in dealing.holders]
            held += [piece for piece, (_, keeper) in at.finished.items() if keeper == holder]
            for piece in held:
                at.give_back(holder, piece)

    # -- what there is ----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True once each piece of each pass is done or set aside."""
        return not self._open

    @property
    def left(self) -> int:
        """Pieces that are neither done nor set aside, in all passes; if passes are endless, in the open ones."""
        under_way = sum(one.open + len(one.dealt) + len(one.finished) for one in self._open)
        passes = self._options.passes
        return under_way + (0 if passes is None else (passes - self._next_pass) * self._options.pieces)

    @property
    def pieces(self) -> int:
        """How many pieces there are in a pass."""
        return self._options.pieces

    @property
    def options(self) -> QueueOptions:
        """The arguments that this ledger was made with."""
        return self._options

    @property
    def passes(self) -> int | None:
        """How many passes there are; None: endless ones."""
        return self._options.passes

    @property
    def typical_s(self) -> float | None:
        """The median of the newest durations, from dealing to the result (`finish` or `count`); None: there is none."""
        return sorted(self._durations)[len(self._durations) // 2] if self._durations else None

    @property
    def set_aside(self) -> tuple[SetAsidePiece, ...]:
        """The first thousand pieces that were set aside, in order. `set_aside_count` says how many there are."""
        return tuple(self._aside)

    @property
    def set_aside_count(self) -> int:
        return self._set_aside

    def counts(self) -> list[PassCounts]:
        """Returns the counts of the passes that have begun, in order; of passes that ended, the last 16."""
        return [*self._ended, *(one.counts() for one in self._open)]

    def dealt(self) -> dict[str, list[Ticket]]:
        """Returns the pieces that each holder has, and has not finished."""
        found: dict[str, list[Ticket]] = {}
        for at in self._open:
            for piece, dealing in at.dealt.items():
                for holder in dealing.holders:
                    found.setdefault(holder, []).append(at.ticket(piece))
        return found

    def errors_of(self, pass_number: int, piece: int) -> int:
        """Returns how often user code has raised in a piece of an open pass."""
        at = self._pass(pass_number)
        return at.errors.get(piece, 0) if at else 0

    def is_dealt_to(self, holder: str, ticket: Ticket) -> bool:
        """True if the piece is dealt to the holder, and not finished."""
        at = self._pass(ticket.pass_number)
        dealing = at.dealt.get(ticket.piece) if at else None
        return dealing is not None and holder in dealing.holders

    def finished(self, holder: str) -> list[Ticket]:
        """Returns the pieces whose results a holder keeps, by pass and number."""
        return [
            at.ticket(piece)
            for at in self._open
            for piece, (_, keeper) in sorted(at.finished.items())
            if keeper == holder
        ]

    @property
    def unfinished(self) -> int:
        """Pieces of the open passes that are open or dealt; finished ones are not counted."""
        return sum(one.open + len(one.dealt) for one in self._open)

    @property
    def open(self) -> int:
        """Pieces of the open passes without a holder."""
        return sum(one.open for one in self._open)

    @property
    def open_in_pass(self) -> int:
        """Pieces of the first open pass without a holder."""
        return self._open[0].open if self._open else 0

    def next_slow_at(self, now: float) -> float | None:
        """Returns the time, from `now` on, at which the next dealt piece becomes slow (see `slow`); None: none will."""
        if (limit := self._slow_after_s()) is None:
            return None
        since = (max(dealing.holders.values()) for at in self._open for dealing in at.dealt.values())
        return min((one + limit for one in since if one + limit >= now), default=None)

    def slow(self, now: float) -> list[SlowPiece]:
        """Returns the dealt pieces whose newest holder takes more than `straggler` times the median, longest first."""
        limit = self._slow_after_s()
        if limit is None:
            return []
        found: list[SlowPiece] = []
        for at in self._open:
            for piece, dealing in at.dealt.items():
                holder, since = max(dealing.holders.items(), key=lambda held: (held[1], held[0]))
                if now - since > limit:
                    found.append(SlowPiece(at.number, piece, holder, now - since))
        return sorted(found, key=lambda one: (-one.seconds, one.pass_number, one.piece))

    # -- as a value -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the ledger as plain data, for `of`. Its size grows only with the number of pieces under way."""
        return {
            "options": list(self._options),
            "next_pass": self._next_pass,
            "open": [one.state() for one in self._open],
            "ended": [list(counts) for counts in self._ended],
            "durations": list(self._durations),
            "aside": [list(one) for one in self._aside],
            "counted": [self.done, self.rows, self._set_aside],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> QueueLedger:
        """Makes the ledger whose `state` this was."""
        made = cls(0)
        made._options = QueueOptions(*state["options"])
        made._next_pass = state["next_pass"]
        made._open = [Pass.of(made._options, one) for one in state["open"]]
        made._ended.extend(PassCounts(*counts) for counts in state["ended"])
        made._durations.extend(state["durations"])
        made._aside = [SetAsidePiece(*one) for one in state["aside"]]
        made.done, made.rows, made._set_aside = state["counted"]
        return made

    # -- passes -----------------------------------------------------------------------------------

    def _pass(self, number: int) -> Pass | None:
        """Returns the pass of this number if it is open."""
        return next((one for one in self._open if one.number == number), None)

    def _open_passes(self) -> None:
        """Opens the next pass if none is open, or with `overlap` if the only open pass has no open piece left."""
        options = self._options
        if not options.pieces or (options.passes is not None and self._next_pass >= options.passes):
            return
        if not self._open or (options.overlap and len(self._open) == 1 and not self._open[0].open):
            self._open.append(Pass(options, self._next_pass))
            self._next_pass += 1

    def _end_passes(self) -> None:
        """Ends, in order, open passes of which every piece is done or set aside; each end may open the next pass."""
        while self._open and _is_over(self._open[0]):
            self._ended.append(self._open.pop(0).counts())
            self._open_passes()

    # -- stragglers -------------------------------------------------------------------------------

    def _slow_after_s(self) -> float | None:
        """Returns the seconds after which a dealt piece is slow; None: no piece is done yet, or `straggler` is 0."""
        typical = self.typical_s
        return None if typical is None or not self._options.straggler else typical * self._options.straggler

    def _slowest(self, holder: str, now: float) -> tuple[Pass, int] | None:
        """Returns the slow piece that was dealt first, of those that this holder does not have; None: there is none."""
        limit = self._slow_after_s()
        if limit is None:
            return None
        late = [
            (since, at.number, dealing.place, piece, at)
            for at in self._open
            for piece, dealing in at.dealt.items()
            if holder not in dealing.holders and now - (since := max(dealing.holders.values())) > limit
        ]
        if not late:
            return None
        *_, piece, at = min(late, key=lambda one: one[:3])
        return at, piece


def _is_over(one: Pass) -> bool:
    return not one.open and not one.dealt and not one.finished
