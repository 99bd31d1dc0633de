"""Epochs of one task that are in flight together, each of which comes to some point only after those before it."""

from __future__ import annotations

import asyncio

__all__ = ["Turns"]


class Turns:
    """Epochs pass in their order.

    Attributes:
        at: the one whose turn it is; all before it have passed. Where nobody is `waiting`, it may be set instead of a
            call of `passed`.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.waiting: dict[int, asyncio.Event] = {}

    async def wait(self, epoch: int) -> None:
        """Returns when all before `epoch` have passed."""
        if self.at < epoch:
            event = self.waiting.get(epoch)
            if event is None:
                event = self.waiting[epoch] = asyncio.Event()
            await event.wait()

    def passed(self, epoch: int) -> None:
        """`epoch`, whose turn it was, has passed."""
        assert epoch == self.at, f"epoch {epoch} passed at the turn of {self.at}"
        self.at = epoch + 1
        if self.waiting and (event := self.waiting.pop(self.at, None)) is not None:
            event.set()
