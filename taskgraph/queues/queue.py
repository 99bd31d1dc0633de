"""`WorkQueue`: a source whose pieces a job computes, each counted once in each pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from taskgraph.errors import JobError
from taskgraph.protocol.dealing import QueueLedger
from taskgraph.queues.service import QueueTask
from taskgraph.services import Service
from taskgraph.sources.reading import Source, as_source, pieces_digest, pieces_of

__all__ = ["WorkQueue", "service_title"]


def service_title(name: str) -> str:
    """Returns the title of the service that has the ledger of a queue."""
    return f"queue {name}"


class WorkQueue:
    """Pieces of a source, dealt to free tasks, and counted together with their results.

    Name it in the job, `tg.Job(queues={"rows": tg.WorkQueue(...)})`, and compute it with `epoch.map`. Its ledger is
    part of the job's state: after a failure it goes on from the last committed epoch.

    Args:
        source: `tg.files(...)`, `tg.lines(...)` or the like, or any object with `pieces()` and `read(piece)`: user code
            gets the list of a piece's rows. Or a range or a list of values: each is a piece, and user code gets it.
        passes: how often all pieces are computed; None: endless.
        shuffle: each pass has an order of its own, drawn with the job's seed.
        buffer: rows of a piece are shuffled within a buffer of this many rows; 0: they are not.
        overlap: pieces of the next pass are dealt as soon as this one has none left.
        attempts: how many exceptions of user code in one piece are too many. A death of a node never counts.
        on_error: "fail": too many exceptions fail the job, with `tg.PieceFailed`. "set aside": the result of the piece
            is a `tg.Failed`, and `JobResult.set_aside` has it.
        straggler: a piece that takes this many times the median is given to a second task, too; 0: never.

    Raises:
        JobError: an argument is wrong; the message says which.
    """

    def __init__(
        self,
        source: Source | Iterable[Any],
        *,
        passes: int | None = 1,
        shuffle: bool = False,
        buffer: int = 0,
        overlap: bool = False,
        attempts: int = 3,
        on_error: str = "fail",
        straggler: float = 3.0,
    ) -> None:
        if buffer < 0:
            raise JobError(f"WorkQueue(buffer={buffer}): a number of rows, or 0")
        self.source = as_source(source)
        self.buffer = buffer
        self._pieces: Sequence[Any] | None = None
        self._digest = ""
        self._finding = threading.Lock()
        self._options: dict[str, Any] = {
            "passes": passes,
            "shuffle": shuffle,
            "overlap": overlap,
            "attempts": attempts,
            "on_error": on_error,
            "straggler": straggler,
        }
        QueueLedger(0, **self._options)  # checks them

    @property
    def pieces(self) -> Sequence[Any]:
        """The pieces of the source. To find them may take long: not for the event loop."""
        with self._finding:
            if self._pieces is None:
                found = pieces_of(self.source)
                self._digest, self._pieces = pieces_digest(found), found
            return self._pieces

    @property
    def pieces_digest(self) -> str:
        """A digest of the pieces. It finds them, which may take long."""
        _ = self.pieces
        return self._digest

    def _count_and_digest(self) -> tuple[int, str]:
        """Returns how many pieces there are, and their digest. To find them may take long."""
        return len(self.pieces), self.pieces_digest

    def ledger(self, pieces: int, seed: int) -> QueueLedger:
        """Returns the ledger of this many pieces before the first one is dealt."""
        return QueueLedger(pieces, seed=seed, **self._options)

    def service(self, name: str, tasks: int) -> Service:
        """Returns the service that has the ledger of this queue, in a job that calls the queue `name`."""
        return Service(service_title(name), 1, lambda index: QueueTask(self._count_and_digest, self.ledger, name))
