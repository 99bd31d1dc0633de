"""Pauses between retries."""

from __future__ import annotations

import asyncio

__all__ = ["Backoff"]

_FIRST_S = 0.001
_LAST_S = 0.05


class Backoff:
    """Pauses that double with every retry, from 1 ms (since mostly a view lags by a millisecond) to 50 ms."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def reset(self) -> None:
        """Begins with a short pause again, since a try succeeded."""
        self._next_s = _FIRST_S

    def next_pause_s(self) -> float:
        """Returns the length of the next pause, in seconds, and doubles it."""
        pause_s, self._next_s = self._next_s, min(_LAST_S, 2 * self._next_s)
        return pause_s

    async def pause(self) -> None:
        """Sleeps for the next pause."""
        await asyncio.sleep(self.next_pause_s())
