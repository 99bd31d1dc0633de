"""How long a leader waits for more epochs to commit together. Pure: times are given."""

from __future__ import annotations

from typing import Final

__all__ = ["Gathering"]

_EPOCHS: Final = 4
"""So many make a commit cheap enough: what it costs is shared by them."""
_LONGEST: Final = 3
"""Times `gather_s`, where epochs take long: what a failure undoes, and how late `status` is, stay bounded."""


class Gathering:
    """Times in seconds, of one clock.

    A commit costs etcd and every node the same, of however many epochs it is. Where many nodes share few cores, epochs
    are longer because of that, and `gather_s` does not hold two of them: so it is counted in epochs there, within
    limits. A pause of one epoch (a takeover, a slow compute) changes nothing: of the last two commits the quicker one
    counts.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._committed_at: float | None = None
        self._each_s = 0.0
        self._again_at = 0.0
        self.generation = 0

    def committed(self, now: float, epochs: int, generation: int) -> None:
        """So many epochs were committed, in a view with that revision of `generation`."""
        wait_s = self._gather_s
        if self._committed_at is not None:
            each_s = (now - self._committed_at) / epochs
            quicker_s, self._each_s = min(each_s, self._each_s), each_s
            longest_s = _LONGEST * self._gather_s
            if wait_s < 2 * quicker_s <= longest_s:  # beyond that no second one would come
                wait_s = min(_EPOCHS * quicker_s, longest_s)
        self._committed_at, self.generation = now, generation
        self._again_at = now + wait_s

    def left_s(self, now: float) -> float:
        """How long more to wait, while `generation` is what it was: after a takeover nobody waits."""
        return self._again_at - now
