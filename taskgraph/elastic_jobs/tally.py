"""What has become of the pieces that the workers of a view deal among themselves: a pure function of all totals.

The workers hold equal copies of a ledger (`protocol.dealing`). Each round is a position of the protocol in which every
worker of the view contributes its news. All apply the contributions in the same order, so their copies stay equal:

    1. Results count, errors count as attempts, and pieces that are given back are open. The results of a worker that
       is lost count, too, if its contribution is in the total.
    2. The newest view that a contribution names says who holds pieces. The pieces of all others are open at once.
    3. Open pieces are dealt to those that want some; the last ones in proportion to what each wants.

A holder is one entry of a worker into the view (`n2.7`): a worker that was excluded and entered again holds nothing of
before. The ledger's clock is the sum of the time between rounds, as the slowest worker measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taskgraph.protocol.dealing import ErrorOutcome, QueueLedger, Ticket

__all__ = ["PieceFailedTooOften", "RoundOutcome", "Tally", "WorkerNews", "holder_of", "share_of_round", "worker_of"]


def share_of_round(bound: int, index: int, workers: int, position: int) -> int:
    """Returns how many finished pieces one worker may contribute to a round in which at most `bound` pieces count.

    A worker contributes to a round after it has applied the one before. So what it has lacks one round at most, and
    that has no more than `bound` pieces. If there are more workers than that, they take turns.

    Args:
        index: its place among the workers of the view.
        position: of the round.
    """
    if bound >= workers:
        return bound // workers
    return 1 if (index + position) % workers < bound else 0


def holder_of(worker: str, since: int) -> str:
    """Returns the name under which a worker holds pieces: `n2.7` if it entered by view 7."""
    return f"{worker}.{since}"


def worker_of(holder: str) -> str:
    """Returns the worker of a holder: the inverse of `holder_of`."""
    return holder.rpartition(".")[0]


class PieceFailedTooOften(Exception):
    """Raised on every worker when a piece has failed as often as it may, so that the job fails.

    Attributes:
        piece: its number among the pieces of `run.shards`.
        worker: the name of the worker that had it last.
        text: the traceback.
    """

    def __init__(self, piece: int, worker: str, text: str) -> None:
        super().__init__(piece, worker, text)
        self.piece = piece
        self.worker = worker
        self.text = text


@dataclass(slots=True)
class WorkerNews:
    """What one worker contributes to a round.

    Attributes:
        holder: see the module.
        view: number and holders of the view that the worker has read, if the others may not know it.
        done: tickets of the pieces that it has finished, and the rows that each had.
        effects: index in `done` -> what `PieceEffects.end_piece` returned for the piece.
        failed: tickets of pieces in which user code raised, and the tracebacks.
        back: tickets of pieces that it gives back.
        wants: how many pieces it wants.
        elapsed_s: time since its contribution before.
    """

    holder: str
    view: tuple[int, tuple[str, ...]] | None = None
    done: list[tuple[Ticket, int]] = field(default_factory=list)
    effects: dict[int, Any] = field(default_factory=dict)
    failed: list[tuple[Ticket, str]] = field(default_factory=list)
    back: list[Ticket] = field(default_factory=list)
    wants: int = 0
    elapsed_s: float = 0.0

    def value(self) -> dict[str, Any]:
        """Returns a value that travels, without what is empty."""
        found: dict[str, Any] = {"holder": self.holder}
        if self.view is not None:
            found["view"] = (self.view[0], list(self.view[1]))
        if self.done:
            found["done"] = [number for ticket, rows in self.done for number in (*ticket, rows)]
        if self.effects:
            found["gifts"] = self.effects
        if self.failed:
            found["failed"] = [[*ticket, text] for ticket, text in self.failed]
        if self.back:
            found["back"] = [list(ticket) for ticket in self.back]
        if self.wants:
            found["wants"] = self.wants
        if self.elapsed_s:
            found["elapsed_s"] = self.elapsed_s
        return found

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> WorkerNews:
        """Makes the news whose `value` this was."""
        done, view = value.get("done", ()), value.get("view")
        return cls(
            holder=value["holder"],
            view=None if view is None else (view[0], tuple(view[1])),
            done=[(Ticket(*done[at : at + 3]), done[at + 3]) for at in range(0, len(done), 4)],
            effects=value.get("gifts", {}),
            failed=[(Ticket(*given[:3]), given[3]) for given in value.get("failed", ())],
            back=[Ticket(*given) for given in value.get("back", ())],
            wants=value.get("wants", 0),
            elapsed_s=value.get("elapsed_s", 0.0),
        )


@dataclass(slots=True)
class RoundOutcome:
    """What follows from the contributions to one round, alike on all workers.

    Attributes:
        dealt: holder -> the pieces dealt to it.
        counted: the pieces that count now, in order: holder, ticket, and effects or None.
        ended: pass and number of each piece that need not be computed again: counted or set aside.
        starving: a holder wanted pieces, and got none.
        failed: a piece that fails the job; None: none does.
    """

    dealt: dict[str, list[Ticket]] = field(default_factory=dict)
    counted: list[tuple[str, Ticket, Any]] = field(default_factory=list)
    ended: set[tuple[int, int]] = field(default_factory=set)
    starving: bool = False
    failed: PieceFailedTooOften | None = None


class Tally:
    """The ledger, and who holds its pieces.

    Attributes:
        ledger: the pieces.
        view: number and holders of the newest view that a contribution named; -1 and (): none yet.
        now: the ledger's clock: seconds of all rounds.
    """

    def __init__(self, ledger: QueueLedger) -> None:
        self.ledger = ledger
        self.view: tuple[int, tuple[str, ...]] = (-1, ())
        self.now = 0.0

    @property
    def slots(self) -> int:
        """The number of contributions to the next round: one for each worker of the view, as far as it is known."""
        return max(1, len(self.view[1]))

    def apply(self, news: Sequence[WorkerNews]) -> RoundOutcome:
        """Applies the contributions to a round, in an order that is equal on all workers: counts pieces, then deals."""
        ledger, outcome = self.ledger, RoundOutcome()
        self.now += max((each.elapsed_s for each in news), default=0.0)
        for each in news:
            self._count(each, outcome)
        for each in news:
            ledger.give_back(each.holder, each.back)
        newest = max((each.view for each in news if each.view is not None), default=self.view)
        if newest > self.view:
            for holder in sorted({*ledger.dealt()} - {*newest[1]}):
                ledger.lose(holder)
            self.view = newest
        if outcome.failed is None:
            wanting = [each for each in news if each.wants > 0 and each.holder in self.view[1]]
            outcome.dealt = self._deal(wanting)
            outcome.starving = len(outcome.dealt) < len(wanting)
        return outcome

    def _count(self, news: WorkerNews, outcome: RoundOutcome) -> None:
        """Counts the finished and failed pieces in one worker's news, and adds what followed to `outcome`."""
        for at, (ticket, rows) in enumerate(news.done):
            if self.ledger.count(news.holder, ticket, self.now, rows):
                outcome.counted.append((news.holder, ticket, news.effects.get(at)))
                outcome.ended.add(ticket[:2])
        for ticket, text in news.failed:
            verdict = self.ledger.fail(news.holder, ticket, text)
            if verdict == ErrorOutcome.SET_ASIDE:
                outcome.ended.add(ticket[:2])
            elif verdict == ErrorOutcome.FAIL_JOB and outcome.failed is None:
                outcome.failed = PieceFailedTooOften(ticket.piece, worker_of(news.holder), text)

    def _deal(self, wanting: Sequence[WorkerNews]) -> dict[str, list[Ticket]]:
        """Deals open pieces. If there are fewer than wanted, all get the same share of what they want, one at least."""
        wanted, there, dealt = sum(each.wants for each in wanting), self.ledger.open, dict[str, list[Ticket]]()
        for each in wanting:
            share = each.wants if wanted <= there else max(1, each.wants * there // wanted)
            if tickets := self.ledger.deal(each.holder, share, self.now):
                dealt[each.holder] = tickets
        return dealt

    # -- as a value -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the tally as a value that travels; it grows with the pieces under way, not with all pieces."""
        return {"ledger": self.ledger.state(), "view": [self.view[0], list(self.view[1])], "now": self.now}

    @classmethod
    def of(cls, state: Mapping[str, Any], *, same_run: bool = True) -> Tally:
        """Makes the tally whose `state` this was.

        Args:
            same_run: False: the state is of a checkpoint of an earlier run. The views of this one are counted anew, and
                no worker holds a piece.
        """
        made = cls(QueueLedger.of(state["ledger"]))
        made.now = state["now"]
        if same_run:
            made.view = state["view"][0], tuple(state["view"][1])
        else:
            for holder in made.ledger.dealt():
                made.ledger.lose(holder)
        return made
