"""The clocks of several nodes as one: how far each is ahead of ours, by round trips, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ClockReading", "NodeClock"]


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A node's clock against ours, by one round trip.

    Attributes:
        at_ns: our clock, in the middle of it.
        offset_ns: what the node's clock is ahead of ours, if both ways took the same time.
        within_ns: how far off that may be: half of the round trip.
        host_key: of the node.
    """

    at_ns: int
    offset_ns: int
    within_ns: int
    host_key: str


class NodeClock:
    """Puts a node's times on our clock.

    Processes of one host share a clock: where the readings allow that, the offset is zero, exactly. Elsewhere it is
    that of the shortest round trip at the beginning and at the end, and between them a straight line: clocks drift.

    Args:
        readings: one or more, each the shortest of several.
        host_key: ours.
    """

    def __init__(self, readings: Sequence[ClockReading], host_key: str) -> None:
        self._first, self._last = readings[0], readings[-1]
        self.measured_ns = min(readings, key=lambda reading: reading.within_ns).offset_ns
        self.within_ns = max(reading.within_ns for reading in readings)
        self.shared = all(r.host_key == host_key and abs(r.offset_ns) <= r.within_ns for r in readings)
        """Whether it is our own clock; then `within_ns` only says how well that was checked."""

    def offset_ns(self, at_ns: int) -> int:
        """What the node's clock was ahead of ours when it said `at_ns`."""
        if self.shared:
            return 0
        first, last = self._first, self._last
        span = last.at_ns - first.at_ns
        if span <= 0:
            return first.offset_ns
        return first.offset_ns + (last.offset_ns - first.offset_ns) * (at_ns - first.offset_ns - first.at_ns) // span

    def ours(self, at_ns: int) -> int:
        """A time of the node on our clock."""
        return at_ns - self.offset_ns(at_ns)
