"""Pauses between tries."""

from __future__ import annotations

import asyncio

__all__ = ["Backoff"]

_FIRST_S = 0.001
_LAST_S = 0.05


class Backoff:
    """Short pauses at first: what is in the way is nearly always a view, here or there, that lags by a millisecond.

    Doubled with every try up to 50 ms, so that what lasts is not asked for all the time.
    """

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def reset(self) -> None:
        """What was tried happened."""
        self._next_s = _FIRST_S

    def step(self) -> float:
        """The length of the next pause, seconds."""
        pause_s, self._next_s = self._next_s, min(_LAST_S, 2 * self._next_s)
        return pause_s

    async def pause(self) -> None:
        await asyncio.sleep(self.step())
