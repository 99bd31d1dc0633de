"""How far the queues and maps of a job are, as a node's status carries it to `taskgraph shards`."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Final

from taskgraph.protocol.dealing import PassCounts, QueueLedger, SlowPiece

__all__ = ["SLOW", "QueueStatus", "Rate"]

_RATE_S: Final = 10.0
"""Seconds over which the rate is taken."""
_SAMPLE_S: Final = 0.1
"""Rows that come within this time are one sample."""
SLOW: Final = 10
"""Slow pieces that are named."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue or map, as the node that deals its pieces knows it. In an elastic job each worker reports the same.

    Attributes:
        name: the name of the queue, or the tag of the map.
        kind: "queue", "map" or "shards".
        pieces: how many pieces a pass has.
        passes: how many passes; None: endless.
        left: pieces that are neither done nor set aside: of all passes, or of the open ones if passes are endless.
        set_aside: pieces set aside, in all passes.
        counts: of the passes that have begun, in order; of passes that ended, the newest.
        slow: pieces that take too long, the longest first; ten at most.
        rows_per_s: rows of the pieces that were counted in the last seconds.
    """

    name: str
    kind: str
    pieces: int
    passes: int | None
    left: int
    set_aside: int
    counts: tuple[PassCounts, ...]
    slow: tuple[SlowPiece, ...]
    rows_per_s: float

    @classmethod
    def of(cls, name: str, kind: str, ledger: QueueLedger, now: float, rows_per_s: float = 0.0) -> QueueStatus:
        """Returns the status of a ledger.

        Args:
            now: the time by the clock that feeds the ledger.
        """
        return cls(
            name=name,
            kind=kind,
            pieces=ledger.pieces,
            passes=ledger.passes,
            left=ledger.left,
            set_aside=ledger.set_aside_count,
            counts=tuple(ledger.counts()),
            slow=tuple(ledger.slow(now)[:SLOW]),
            rows_per_s=rows_per_s,
        )

    def advanced(self, live: QueueStatus) -> QueueStatus:
        """Returns this status, which is of the last commit, advanced by `live`, that of the epoch at work."""
        by_pass = {counts.pass_number: counts for counts in self.counts}
        for now in live.counts:
            before = by_pass.get(now.pass_number, PassCounts(now.pass_number, 0, 0, self.pieces, 0, 0))
            by_pass[now.pass_number] = before._replace(
                done=before.done + now.done,
                dealt=before.dealt + now.dealt,
                open=before.open - now.done - now.dealt - now.set_aside,
                set_aside=before.set_aside + now.set_aside,
            )
        ended = sum(now.done + now.set_aside for now in live.counts)
        return dataclasses.replace(
            self,
            counts=tuple(by_pass[number] for number in sorted(by_pass)),
            left=self.left - ended,
            set_aside=self.set_aside + live.set_aside,
            slow=live.slow,
            rows_per_s=live.rows_per_s,
        )


class Rate:
    """Rows per second over the last ten seconds, or since the first rows if that is less."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples: deque[tuple[float, int]] = deque()  # time, and the rows that were done then

    def add(self, now: float, rows: int) -> None:
        """Notes that `rows` further rows were done."""
        if not rows:
            return
        if self._began is None:
            self._began = now
        if self._samples and now - self._samples[-1][0] < _SAMPLE_S:
            at, before = self._samples.pop()
            self._samples.append((at, before + rows))
        else:
            self._samples.append((now, rows))
        while now - self._samples[0][0] > _RATE_S:
            self._samples.popleft()

    def at(self, now: float) -> float:
        """Returns the rate at this time."""
        if self._began is None:
            return 0.0
        recent = sum(rows for at, rows in self._samples if now - at <= _RATE_S)
        return recent / max(_SAMPLE_S, min(_RATE_S, now - self._began))
