"""The pieces that one worker has: between the rounds, on the event loop, and user code, in its thread.

    rounds ──dealt──► queue ──next()──► at work ──done, failed──► finished ──news──► rounds

User code takes the next piece without a round trip while the queue has one. The queue is kept short (`wanted_length`):
what waits here cannot be computed elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from taskgraph.protocol.dealing import Ticket

__all__ = ["FinishedPiece", "PieceQueue", "wanted_length"]

_ROUNDS: Final = 2
"""The rounds for which the queue has work: a round may take twice as long as those before."""
_GROWTH: Final = 8
"""The queue grows by this factor at most, over what was finished: the first pieces may be shorter than the others."""
_MOST: Final = 4096
"""Pieces in the queue at most: their numbers are a message of some 10 kB."""
_WEIGHT: Final = 0.03
"""Weight of the newest duration in the typical one, after the first 33: pieces may become slower or faster."""
_OVERDUE: Final = 3.0
"""If a piece takes longer than this factor of the typical duration, and some rounds, its worker gets no queue."""


class FinishedPiece(NamedTuple):
    """A piece that user code has finished.

    Attributes:
        rows: the number of its rows.
        effects: what `PieceEffects.end_piece` returned for it, which counts with the piece.
        error: the traceback of an error of user code; "": there was none.
    """

    ticket: Ticket
    rows: int = 0
    effects: Any = None
    error: str = ""


class PieceQueue:
    """The pieces of one worker: its queue, the piece at work, and finished pieces that no round has taken yet.

    Args:
        clock: seconds, in user code's thread and on the loop.
        wait: waits for a future in user code's thread.
        changed: called in user code's thread when the rounds have something to do.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wait: Callable[[concurrent.futures.Future[None]], None],
        changed: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._changed = changed
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._at_work: tuple[Ticket, float] | None = None  # since when
        self._finished: list[FinishedPiece] = []
        self._waiting: concurrent.futures.Future[None] | None = None
        self._end: BaseException | bool = False  # True: all pieces are done
        self.typical_s: float | None = None
        self.count = 0

    # -- in the thread of user code ---------------------------------------------------------------

    def next(self) -> Ticket | None:
        """Waits for this worker's next piece, which is at work then. None: all pieces are done, on all workers.

        Raises:
            Exception: the error that has ended the rounds.
        """
        while True:
            with self._lock:
                if isinstance(self._end, BaseException):
                    raise self._end
                if self._queue:
                    ticket = self._queue.popleft()
                    self._at_work = ticket, self._clock()
                    return ticket
                if self._end:
                    return None
                waiting = self._waiting = concurrent.futures.Future()
            self._changed()
            self._wait(waiting)

    def finish(self, finished: FinishedPiece) -> None:
        """Ends the piece at work, finished or failed, and keeps it for the next round."""
        with self._lock:
            assert self._at_work is not None
            took_s = self._clock() - self._at_work[1]
            typical = self.typical_s
            self.count += 1
            weight = max(_WEIGHT, 1 / self.count)
            self.typical_s = took_s if typical is None else typical + weight * (took_s - typical)
            self._at_work = None
            self._finished.append(finished)
            first, due = len(self._finished) == 1, not self._queue
        if first or due:
            self._changed()

    # -- on the event loop ------------------------------------------------------------------------

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Puts pieces that a round dealt to this worker into its queue."""
        with self._lock:
            self._queue.extend(tickets)
        self._wake_user_code()

    def drop(self, ended: set[tuple[int, int]]) -> None:
        """Removes pieces, given by pass and number, from the queue: they need not be computed any longer."""
        with self._lock:
            if any(ticket[:2] in ended for ticket in self._queue):
                self._queue = deque(ticket for ticket in self._queue if ticket[:2] not in ended)

    def end_pieces(self, error: BaseException | None = None) -> None:
        """Makes `next` return None once the queue is empty, since all pieces are done; or raise `error`."""
        with self._lock:
            if not isinstance(self._end, BaseException):
                self._end = True if error is None else error
        self._wake_user_code()

    def _wake_user_code(self) -> None:
        """Wakes user code that waits in `next`, if there is a piece for it, or no more pieces come."""
        with self._lock:
            if not (self._queue or self._end):
                return
            waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def take_finished(self) -> list[FinishedPiece]:
        """Removes and returns the pieces that user code has finished since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    @property
    def has_pieces(self) -> bool:
        return bool(self._queue)

    @property
    def is_starving(self) -> bool:
        """True while user code waits for a piece."""
        return self._waiting is not None

    def wanted_or_surplus(self, round_s: float) -> tuple[int, list[Ticket]]:
        """Returns how many more pieces the queue needs. If the piece at work is overdue, takes out the queued ones.

        The caller gives the pieces that were taken out back to the ledger.

        Args:
            round_s: time between two rounds.
        """
        with self._lock:
            running_s = 0.0 if self._at_work is None else self._clock() - self._at_work[1]
            want = wanted_length(self.typical_s, running_s if self._at_work is not None else None, self.count, round_s)
            if want >= 0:
                return max(0, want - len(self._queue)), []
            back, self._queue = list(self._queue), deque()
            return 0, back

    def give_back(self, within_s: float) -> list[Ticket]:
        """Removes and returns the queued pieces that user code will not begin within some time: others get them."""
        with self._lock:
            if self._at_work is None or self.typical_s is None:
                return []
            left_s = within_s - max(0.0, self._at_work[1] + self.typical_s - self._clock())
            keep = 0 if left_s <= 0 else 1 + int(left_s / max(self.typical_s, 1e-9))
            given = list(self._queue)[keep:]
            self._queue = deque(list(self._queue)[:keep])
        return given

    def is_idle_within(self, within_s: float) -> bool:
        """True if user code will have finished all its pieces within some time."""
        with self._lock:
            if self._at_work is None or self.typical_s is None:
                return not self._queue
            busy_s = self._at_work[1] + (1 + len(self._queue)) * self.typical_s - self._clock()
            return busy_s < within_s

    def due_in(self, round_s: float) -> float:
        """Returns in how many seconds this worker should ask for a piece; inf: it has queued ones, or cannot tell."""
        at_work, typical = self._at_work, self.typical_s
        if at_work is None or typical is None or self._queue:
            return math.inf
        return max(0.0, at_work[1] + typical - _ROUNDS * round_s - self._clock())


def wanted_length(typical_s: float | None, running_s: float | None, count: int, round_s: float) -> int:
    """Returns how many pieces a worker's queue should have; -1: none, and those in it are to be given back.

    Args:
        typical_s: the typical duration of a piece; None: none was finished.
        running_s: for how long the piece at work has run; None: there is none.
        count: how many pieces were finished.
        round_s: time between two rounds.
    """
    ahead_s = _ROUNDS * round_s
    if typical_s is None:
        return 1 if running_s is None else 0
    if running_s is not None and running_s > _OVERDUE * typical_s + 2 * ahead_s:
        return -1
    if typical_s > round_s:
        return 1 if running_s is None or running_s > typical_s - ahead_s else 0
    return min(math.ceil(ahead_s / max(typical_s, 1e-9)), _GROWTH * count, _MOST)
