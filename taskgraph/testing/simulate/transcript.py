"""Records the events of one simulation in order, as text, and as a digest to compare replays."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

__all__ = ["Transcript"]


class Transcript:
    """A log of one simulation, with counts of its faults and protocol states. Lines are formatted only on demand."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lines: list[tuple[float, str, str, str]] = []
        self.faults: Counter[str] = Counter()
        self.states: Counter[str] = Counter()

    def add(self, who: str, what: str, detail: str = "") -> None:
        """Logs an event: who (a node, "net", "etcd", "fault", ...) did what."""
        self._lines.append((self._now(), who, what, detail))

    def add_fault(self, kind: str, detail: str = "") -> None:
        """Records a fault that took effect."""
        self.faults[kind] += 1
        self.add("fault", kind, detail)

    def count_state(self, kind: str) -> None:
        """Counts a state of the protocol that the simulation reached."""
        self.states[kind] += 1

    def text(self, *, messages: bool = True) -> str:
        """Returns the log, one event in a line; `messages` includes messages between nodes."""
        lines = []
        for at, who, what, detail in self._lines:
            if messages or who != "net":
                lines.append(f"{at - 1.0:10.4f}  {who:<9} {what:<16} {detail}".rstrip())
        return "\n".join(lines)

    def digest(self) -> str:
        """Returns a digest that is equal for two runs with the same events at the same times."""
        return hashlib.blake2b(self.text().encode(), digest_size=16).hexdigest()
