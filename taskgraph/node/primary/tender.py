"""One other node of a task, as its primary tends it: what is under way to it, and what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from taskgraph.protocol.messages import Reply

__all__ = ["Tender"]

Key = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class Tender:
    """What goes on about one other node, from an invitation to its release.

    Attributes:
        offered: offers under way that were made beside the tender, by what they offer.
        caught_up_by: of a candidate that holds something: until when an epoch waits for it.
        idle: there is nothing to do but to wait for something.
        refused: why it cannot take what it was offered last, as it says; "" where it could.
        wait: done when there is something to do, as `due` tells.
    """

    node: str
    invitation: int
    offered: dict[Key, asyncio.Future[Reply]] = field(default_factory=dict)
    caught_up_by: float = 0.0
    idle: bool = False
    refused: str = ""
    wait: asyncio.Future[None] | None = None
    due: Callable[[], bool] = bool

    def until(self, due: Callable[[], bool]) -> asyncio.Future[None]:
        """What it waits for from now on; cancel it when it is not needed."""
        self.wait, self.due = asyncio.get_running_loop().create_future(), due
        self.look()
        return self.wait

    def look(self) -> None:
        """Something changed: perhaps what it waits for."""
        if self.wait is not None and not self.wait.done() and self.due():
            self.wait.set_result(None)

    def withdraw(self) -> None:
        """Nothing counts that is answered to what was offered beside it."""
        offered, self.offered = self.offered, {}
        for reply in offered.values():
            reply.cancel()
