"""The events of one run in order, as text for a person, and as a digest to compare replays."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

__all__ = ["Transcript"]


class Transcript:
    """Lines are kept as tuples, and made into text only when somebody asks."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lines: list[tuple[float, str, str, str]] = []
        self.faults: Counter[str] = Counter()
        self.states: Counter[str] = Counter()

    def add(self, who: str, what: str, detail: str = "") -> None:
        self._lines.append((self._now(), who, what, detail))

    def fault(self, kind: str, detail: str = "") -> None:
        """A fault that came to pass."""
        self.faults[kind] += 1
        self.add("fault", kind, detail)

    def state(self, kind: str) -> None:
        """A state of the protocol that was reached."""
        self.states[kind] += 1

    def text(self, *, messages: bool = True) -> str:
        """Returns all entries, one line each; without messages it is what a person reads first."""
        lines = []
        for at, who, what, detail in self._lines:
            if messages or who != "net":
                lines.append(f"{at - 1.0:10.4f}  {who:<9} {what:<16} {detail}".rstrip())
        return "\n".join(lines)

    def digest(self) -> str:
        """Returns a digest that is equal for two runs with the same events at the same times."""
        return hashlib.blake2b(self.text().encode(), digest_size=16).hexdigest()
