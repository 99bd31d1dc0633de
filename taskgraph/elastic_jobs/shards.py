"""`run.shards`: a loop whose pieces go to free workers. All of it is used in the thread of user code.

A piece counts when the loop body asks for the next one. Which worker has which piece depends on the time that pieces
take, so equal bits are not promised; each piece counts once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from taskgraph.driver.loading import note_piece
from taskgraph.elastic_jobs.dealing import Dealing, PieceEffects
from taskgraph.elastic_jobs.piece_queue import FinishedPiece
from taskgraph.elastic_jobs.progress import PIECE, SUMMED, RunProgress
from taskgraph.elastic_jobs.seeding import derived_seed, seed_generators
from taskgraph.elastic_jobs.state import capture, check_parameters
from taskgraph.elastic_jobs.tables import Pushes, Tables
from taskgraph.elastic_jobs.tally import PieceFailedTooOften, Tally, worker_of
from taskgraph.errors import PieceFailed, StepError
from taskgraph.graph.values import decode
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.dealing import QueueLedger, Ticket
from taskgraph.results import Failed
from taskgraph.sources.reading import Source, content_of

__all__ = ["Pieces", "SourcePieces"]

R = TypeVar("R")


def _keep_nothing() -> None:
    """Does nothing: results are not kept."""


class RunForShards(Protocol):
    """What `Pieces` and `SourcePieces` use of `run.Run`."""

    progress: RunProgress
    named: Any
    effects: PieceEffects | None
    tables: Tables


class Pieces:
    """The pieces of `run.shards` or of a map, as one worker's user code gets them.

    Args:
        ledger: all pieces, if this worker begins with no copied state.
        what: tells this loop from others; equal on all workers.
        numbers: of the pieces, for seeds and errors; None: those of the ledger.
        keep: called on the event loop before other workers hear of results.

    Attributes:
        at_work: the piece that user code computes; None: none.
    """

    def __init__(
        self,
        run: RunForShards,
        ledger: QueueLedger,
        what: str,
        numbers: Sequence[int] | NDArray[np.int64] | None = None,
        keep: Callable[[], None] = _keep_nothing,
    ) -> None:
        self.run = run
        self._numbers = range(ledger.pieces) if numbers is None else numbers
        self.at_work: Ticket | None = None
        progress, named = run.progress, run.named
        check_parameters(named)
        self._dealing = Dealing(progress, Tally(ledger), what, run.effects, keep)
        progress.carried["shards"] = self._dealing
        number = progress.begin(named)
        if number is not None and progress.watch is not None:
            progress.watch.on_copied_state(number)
        kept = capture(named, (), {}, {}, progress.node.allocate)
        self._dealing.begin(decode(kept)["state"])

    def next(self) -> Ticket | None:
        """Waits for the next piece, which is at work then. None: all passes are over, on all workers.

        Raises:
            PieceFailed: a piece raised too often, and that fails the job.
        """
        progress = self.run.progress
        try:
            self.at_work = ticket = self._dealing.queue.next()
        except PieceFailedTooOften as failure:
            raise self._piece_failed(failure) from None
        if ticket is None:
            progress.seed(SUMMED)
            return None
        if progress.watch is not None:
            progress.watch.at_shard_stage("part", self._dealing.tally.ledger.done)
        note_piece(True)
        number = int(self._numbers[ticket.piece])
        seed_generators(derived_seed(progress.node.spec.seed, PIECE, ticket.pass_number, number))
        return ticket

    def _piece_failed(self, failure: PieceFailedTooOften) -> PieceFailed:
        """Returns the error for a piece that raised too often, and so fails the job."""
        number = int(self._numbers[failure.piece])
        text = f"piece {number} raised on {failure.worker}, as often as its attempts allow"
        return PieceFailed(text, piece=number, node=failure.worker, traceback=failure.text)

    def finish(self, rows: int = 0) -> None:
        """Ends the piece at work, which is done; `rows`: how many it had."""
        self._finish(rows, None)

    def fail(self, error: BaseException) -> None:
        """Ends the piece at work, in which user code has raised this error."""
        self._finish(0, error)

    def _finish(self, rows: int, error: BaseException | None) -> None:
        """Ends the piece at work for the rounds, with its effects, or with the traceback of the error."""
        ticket, watch, effects = self.at_work, self.run.progress.watch, self.run.effects
        assert ticket is not None
        self.at_work = None
        note_piece(False)
        done = None if effects is None else effects.end_piece(ticket, counts=error is None)
        text = "" if error is None else UserCodeError("", error).traceback_text
        self._dealing.queue.finish(FinishedPiece(ticket, rows, done, text))
        if watch is not None:
            watch.at_shard_stage("sums", self._dealing.tally.ledger.done)

    @property
    def tally(self) -> Tally:
        """The pieces as all workers know them: changes on the event loop until `next` returns None, as all are done."""
        return self._dealing.tally


class SourcePieces(Generic[R]):
    """The iterator of `run.shards(source)`: of each piece dealt to this worker, its rows as a list, or the value of a
    source of values.

    Leave the loop only by its end: the other workers go on to it.
    """

    def __init__(
        self, run: RunForShards, source: Source, pieces: Sequence[Any], ledger: QueueLedger, what: str
    ) -> None:
        self._run = run
        self._source = source
        self._given = (ledger, what)
        self._of = pieces
        self._pieces: Pieces | None = None
        self._rows = 0
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        if self._pieces is None:
            self._pieces = Pieces(self._run, *self._given)
        pieces = self._pieces
        self._end_piece(pieces)
        while (ticket := pieces.next()) is not None:
            piece = self._of[ticket.piece]
            try:
                content = content_of(self._source, piece)
            except Exception as error:
                pieces.fail(error)
                continue
            self._run.tables.pushes = Pushes()
            self._rows = 1 if getattr(self._source, "whole", False) else len(content)
            return content  # type: ignore[no-any-return]
        raise StopIteration

    def _end_piece(self, pieces: Pieces) -> None:
        """Ends the piece at work, if there is one: it is done, or `fail` was called."""
        error, self._error = self._error, None
        if pieces.at_work is None:
            return
        if error is None:
            pieces.finish(self._rows)
        else:
            pieces.fail(error)

    def fail(self, error: BaseException) -> None:
        """Gives up on the piece at work: it is dealt again, or set aside, or fails the job.

        Call it in the body, in an `except`, and then `continue`.
        """
        if self._pieces is None or self._pieces.at_work is None:
            raise StepError("shards.fail(...) outside the loop body: no piece is at work")
        self._error = error

    @property
    def number(self) -> int:
        """The number of the piece at work; -1: no piece is at work."""
        ticket = None if self._pieces is None else self._pieces.at_work
        return -1 if ticket is None else ticket.piece

    @property
    def pass_number(self) -> int:
        """The pass of the piece at work, from 0; -1: no piece is."""
        ticket = None if self._pieces is None else self._pieces.at_work
        return -1 if ticket is None else ticket.pass_number

    @property
    def set_aside(self) -> list[Failed]:
        """The pieces that failed too often, and were set aside: of all workers, once the loop has ended."""
        if self._pieces is None:
            return []
        aside = self._pieces.tally.ledger.set_aside
        return [Failed(one.piece, worker_of(one.holder), one.text, one.pass_number) for one in aside]

    def check_ended(self) -> None:
        """Raises StepError if user code is in the loop body, or has left the loop early."""
        if self._pieces is not None and self._pieces.at_work is not None:
            raise StepError(
                "the loop over run.shards was left before its last piece: other workers go on to the end, so `break` "
                "and `return` do not fit there. What ends a pass early is a smaller source"
            )
