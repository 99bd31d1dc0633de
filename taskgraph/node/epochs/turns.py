"""Keeps epochs in flight in their order at one point, such as the snapshot."""

from __future__ import annotations

import asyncio

__all__ = ["EpochTurns"]


class EpochTurns:
    """Lets epochs pass in their order.

    Attributes:
        at: the epoch whose turn it is. While `waiting` is empty, setting it does as much as a call of `end_turn`.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.waiting: dict[int, asyncio.Event] = {}

    async def wait(self, epoch: int) -> None:
        """Waits until `end_turn` was called for all epochs before `epoch`."""
        if self.at < epoch:
            event = self.waiting.get(epoch)
            if event is None:
                event = self.waiting[epoch] = asyncio.Event()
            await event.wait()

    def end_turn(self, epoch: int) -> None:
        """Ends the turn of `epoch`, which must be the current one, and wakes the next epoch."""
        assert epoch == self.at, f"epoch {epoch} passed at the turn of {self.at}"
        self.at = epoch + 1
        if self.waiting and (event := self.waiting.pop(self.at, None)) is not None:
            event.set()
