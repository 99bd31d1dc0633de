"""How far the queues and maps of a job are, as a node's status carries it to `taskgraph shards`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from taskgraph.protocol.dealing import Ledger, PassCounts, Slow

__all__ = ["QueueStatus", "Rate"]

_RATE_S: Final = 10.0
"""The rate is that of the last so many seconds."""
_SLOW: Final = 10
"""Slow pieces that are named."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue or map, as the node knows it that deals its pieces; workers that all have the ledger tell the same.

    Attributes:
        name: of the queue; of a map its tag.
        kind: "queue", "map" or "shards".
        pieces: how many there are in a pass.
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
    slow: tuple[Slow, ...]
    rows_per_s: float

    @classmethod
    def of(cls, name: str, kind: str, ledger: Ledger, now: float, rows_per_s: float = 0.0) -> QueueStatus:
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
            slow=tuple(ledger.slow(now)[:_SLOW]),
            rows_per_s=rows_per_s,
        )


class Rate:
    """Rows per second over the last seconds, from a count that only grows."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, rows: int) -> float:
        """Notes the count at this time, and returns the rate."""
        self._samples.append((now, rows))
        while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_S:
            self._samples.popleft()
        began, first = self._samples[0]
        return (rows - first) / (now - began) if now > began else 0.0
