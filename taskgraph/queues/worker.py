"""What one task has of an epoch's pieces: those to compute, results, and when it asks for more. Pure.

The driver (`computing`) repeats: send `ask()` if `wants_to_ask`; give the answer to `take`; compute the next of `todo`.
It asks ahead, so that it has pieces to compute while the answer is on its way.

While one piece takes long, `ask(late=...)` gives the others back, and is answered once all pieces are finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from taskgraph.queues.pieces import PieceResult

__all__ = ["PieceToCompute", "TaskPieces"]

_CHUNK_S: Final = 0.04
"""Work that a task has at a time. An ask costs about a millisecond on both sides."""
_MOST: Final = 20_000
"""Pieces that a task has at a time, at most."""
_REPORT_S: Final = 0.1
"""After this time a task says what it has finished, also if it has pieces left: others may wait for that."""


class PieceToCompute(NamedTuple):
    """A piece to compute: its place in the plan, its pass, its number, and how often it has failed."""

    place: int
    pass_number: int
    piece: int
    attempt: int


class TaskPieces:
    """The pieces of one task in one attempt.

    Args:
        kept: results of an earlier attempt of this epoch; those that a later one may use are added.
        node: the name of this node, for errors.

    Attributes:
        results: what this task has computed, by the place in the plan.
        todo: pieces to compute, in order.
        last: the last answer, once all pieces are finished; None before.
    """

    def __init__(self, kept: dict[int, PieceResult], node: str) -> None:
        self.results = dict(kept)
        self._kept = kept
        self.todo: deque[PieceToCompute] = deque()
        self.last: Mapping[str, Any] | None = None
        self._node = node
        self._known = 0  # the dealer's term
        self._whole = True  # the next ask says all
        self._unsaid: list[int] = []
        self._failed: list[tuple[int, int, str, str]] = []
        self._asks = True
        self._asked_at = 0.0
        self._dry = False  # the last ask ahead brought nothing
        self._piece_s: float | None = None
        self._had = 0

    def wants_to_ask(self, now: float) -> bool:
        """True if the next ask is due."""
        if self._asks or not self.todo:
            return True
        if now - self._asked_at > _REPORT_S and (self._unsaid or self._failed):
            return True
        return not self._dry and 2 * len(self.todo) <= self._most_pieces

    def ask(self, now: float, *, late: PieceToCompute | None = None, idle: bool = False) -> dict[str, Any]:
        """Returns the next ask, for the dealer: what this task has finished or failed at, and how many pieces it wants.

        Args:
            late: the piece at work, which takes long: give the others back.
            idle: compute nothing at the moment.
        """
        if late is not None:
            self.todo.clear()
        finished = [(place, self.results[place].rows) for place in (self.results if self._whole else self._unsaid)]
        asked = {
            "known": self._known,
            "whole": self._whole,
            "finished": np.array(finished, np.int64).reshape(len(finished), 2),
            "failed": [list(one) for one in self._failed],
            "most": 0 if late is not None or idle else self._most_pieces,
            "late": [late.place] if late is not None else [],
            "waits": not self.todo,
        }
        self._unsaid, self._failed, self._asks = [], [], False
        self._had, self._asked_at = len(self.todo), now
        return asked

    def take(self, answer: Mapping[str, Any]) -> None:
        """Takes the dealer's answer to the last ask: pieces to compute, or the end, or a request to say all again."""
        self._known, self._whole = answer["term"], False
        if answer.get("again"):
            self._whole = self._asks = True
        elif answer.get("over"):
            self.last = answer
            self.todo.clear()
        else:
            mine = (PieceToCompute(*map(int, row)) for row in answer["pieces"])
            unsaid = {*self._unsaid, *(one[0] for one in self._failed)}
            self.todo = deque(one for one in mine if one.place not in unsaid)
            self._dry = len(self.todo) <= self._had

    def finish(self, place: int, result: PieceResult, took_s: float, *, kept: bool) -> None:
        """Notes a finished piece for the next ask. `kept`: an attempt that begins again may use the result."""
        self.results[place] = result
        if kept and not result.pushes:
            self._kept[place] = result
        self._unsaid.append(place)
        self._note_time(took_s)

    def fail(self, todo: PieceToCompute, text: str, took_s: float) -> None:
        """Notes that user code has raised in a piece; the next ask is due now, to tell the dealer."""
        self._failed.append((todo.place, todo.attempt, text, self._node))
        self._asks = True
        self._note_time(took_s)

    def _note_time(self, took_s: float) -> None:
        """Updates the typical time of a piece, in seconds."""
        before = self._piece_s
        self._piece_s = took_s if before is None else 0.8 * before + 0.2 * took_s

    @property
    def _most_pieces(self) -> int:
        """How many pieces this task asks to have at a time."""
        if self._piece_s is None:
            return 1
        return max(1, min(_MOST, int(_CHUNK_S / max(self._piece_s, 1e-9))))
