"""Deals the pieces of one epoch to the tasks that ask. Pure: the caller has the clock and the messages.

An *ask* says what its sender has finished since the last one (or all of it: `whole`), and how many pieces it wants to
have. The answer says which pieces it has now. Both may come twice, or be lost: the next ask gets the same answer.
A task whose piece takes long asks only for the end, and gives its other pieces back.

    a task asks in a new term     its predecessor died: the pieces and results of that one are open again
    the dealer is another one     it answers `again`, and the task sends all that it has
    all pieces are finished       the answer says which results each task sends on: those, and no others

A result that comes late, since another task had its piece, too, is in no answer, and so goes nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taskgraph.protocol.dealing import ErrorOutcome, PassCounts, QueueLedger, SlowPiece, Ticket
from taskgraph.queues.plan import EpochPlan

__all__ = ["AsideError", "Dealer"]

_SHARES: Final = 2
"""A task gets at most the open pieces, divided by this times the number of tasks, at a time. So the chunks become
smaller towards the end, and no task is far behind the others then (guided self-scheduling, Polychronopoulos & Kuck
1987)."""

AsideError = tuple[str, str]
"""The traceback of a piece that was set aside, and the node that tried it last."""


class _FatalPiece(NamedTuple):
    """A piece for which the job fails."""

    place: int
    text: str
    node: str


class Dealer:
    """The dealer of one epoch's pieces, which it knows by their place in the plan.

    Args:
        term: of the task that deals.
        tasks: how many tasks compute pieces.

    Attributes:
        ledger: of the pieces; the holders are task ids.
        rows: the number of rows of finished pieces. Those of a task that died are computed again, and count twice.
    """

    def __init__(self, plan: EpochPlan, term: int, tasks: int) -> None:
        self._plan = plan
        self._term = term
        self._tasks = tasks
        self._terms: dict[int, int] = {}
        self._mine: dict[int, list[int]] = {}
        self._aside: dict[int, tuple[int | None, AsideError]] = {}  # piece -> the task that sends it on
        self._failure: _FatalPiece | None = None
        self.rows = 0
        self.ledger = QueueLedger(
            len(plan.pieces), attempts=plan.attempts, on_error=plan.on_error, straggler=plan.straggler
        )

    def answer(self, task: int, term: int, ask: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """Returns the answer to an ask; None: no piece is free and some are unfinished; call again after a change."""
        self._note_term(task, term)
        if not ask["whole"] and ask["known"] != self._term:
            return {"term": self._term, "again": True}
        self._take_finished(task, ask["finished"], now)
        for index, attempt, text, node in ask["failed"]:
            self._take_error(task, Ticket(0, index, attempt), text, node)
        if self._failure is not None:
            place, text, node = self._failure
            return {"term": self._term, "failed": [*self._plan.pieces[place], text, node]}
        if not self.ledger.unfinished:
            return self._last_answer(task)
        if ask["late"]:
            self._give_back_all_but(task, ask["late"])
            return None
        mine = self._top_up(task, ask["most"], now)
        if not mine and ask["waits"]:
            return None
        return {"term": self._term, "pieces": self._rows(mine, attempts=True)}

    def counts(self) -> list[PassCounts]:
        """Returns how far the epoch's pieces are, for each pass that they are of."""
        state: dict[int, str] = {place: "dealt" for held in self.ledger.dealt().values() for place in _places(held)}
        for task in self._terms:
            state |= dict.fromkeys(_places(self.ledger.finished(str(task))), "done")
        state |= dict.fromkeys(self._aside, "aside")
        found: dict[int, Counter[str]] = {}
        for place, (pass_number, _) in enumerate(self._plan.pieces):
            found.setdefault(pass_number, Counter())[state.get(place, "open")] += 1
        return [PassCounts(e, of["done"], of["dealt"], of["open"], of["aside"], 0) for e, of in sorted(found.items())]

    def slow(self, now: float) -> list[SlowPiece]:
        """Returns the pieces that take too long, the longest first."""
        return [
            SlowPiece(*self._plan.pieces[one.piece], f"task {one.holder}", one.seconds) for one in self.ledger.slow(now)
        ]

    def _note_term(self, task: int, term: int) -> None:
        """Notes the term of a task that asks. A new term opens the pieces of the primary before, also finished ones."""
        known = self._terms.get(task)
        self._terms[task] = term
        if known is None or known == term:
            return
        self.ledger.lose(str(task))
        self._mine.pop(task, None)
        for index, (owner, what) in self._aside.items():
            if owner == task:
                self._aside[index] = None, what

    def _take_finished(self, task: int, finished: NDArray[np.int64], now: float) -> None:
        """Notes the pieces that a task has finished as done: index and rows of each."""
        holder, given = str(task), dict(finished.tolist())
        strange = [index for index in given if not self.ledger.is_dealt_to(holder, Ticket(0, index, 0))]
        known = {*strange}.difference(ticket.piece for ticket in self.ledger.claim(holder, 0, strange, now))
        for index in given.keys() - known:
            self.ledger.finish(holder, Ticket(0, index, 0), now)
            self.rows += given[index]

    def _take_error(self, task: int, ticket: Ticket, text: str, node: str) -> None:
        """Notes an error of user code in a piece: it is dealt again, set aside, or fails the job."""
        verdict = self.ledger.fail(str(task), ticket, text)
        if verdict is ErrorOutcome.SET_ASIDE:
            self._aside[ticket.piece] = task, (text, node)
        elif verdict is ErrorOutcome.FAIL_JOB:
            self._failure = _FatalPiece(ticket.piece, text, node)

    def _top_up(self, task: int, most: int, now: float) -> list[int]:
        """Deals pieces to a task, so that it has up to `most`. Returns all pieces that it has then."""
        holder = str(task)
        mine = [index for index in self._mine.get(task, ()) if self.ledger.is_dealt_to(holder, Ticket(0, index, 0))]
        share = self.ledger.open // (_SHARES * self._tasks)
        if (wanted := min(most - len(mine), share if mine else max(1, share))) > 0:
            mine += [ticket.piece for ticket in self.ledger.deal(holder, wanted, now)]
        self._mine[task] = mine
        return mine

    def _give_back_all_but(self, task: int, places: Sequence[int]) -> None:
        """Makes a task's pieces free for other tasks, except those at these places."""
        held = self.ledger.dealt().get(str(task), ())
        self.ledger.give_back(str(task), [ticket for ticket in held if ticket.piece not in places])

    def _last_answer(self, task: int) -> dict[str, Any]:
        """Returns the answer once all pieces are finished: which results, and which set aside, the task is to put."""
        aside = []
        for index, (owner, what) in self._aside.items():
            if owner in (None, task):
                self._aside[index] = task, what
                aside.append([index, *self._plan.pieces[index], *what])
        return {
            "term": self._term,
            "over": True,
            "count": len(self._plan.pieces),
            "results": self._rows(ticket.piece for ticket in self.ledger.finished(str(task))),
            "aside": aside,
            "left": self._plan.left,
            "queue_over": self._plan.over,
        }

    def _rows(self, indexes: Iterable[int], *, attempts: bool = False) -> NDArray[np.int64]:
        """Returns a row for each piece: its place in the plan, its pass, its number, and maybe its attempt."""
        rows: list[Sequence[int]] = []
        for index in indexes:
            row = (index, *self._plan.pieces[index])
            rows.append((*row, self.ledger.errors_of(0, index)) if attempts else row)
        return np.array(rows, np.int64).reshape(len(rows), 4 if attempts else 3)


def _places(tickets: Iterable[Ticket]) -> list[int]:
    return [ticket.piece for ticket in tickets]
