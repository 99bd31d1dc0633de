"""The state of one other node, which a primary tends: from the first offer to the node's release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from taskgraph.protocol.messages import Reply

__all__ = ["Tender"]

Key = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class Tender:
    """What a primary knows of one other node that has, or is to have, a replica of its task.

    Attributes:
        offered: offers under way that were made outside the tender.
        caught_up_by: deadline until which an epoch waits for this candidate, once it holds something.
        idle: the tender has nothing to do until something changes.
        refused: why the node could not take the last offer, in its words; "": it could.
        wait: done when the tender has something to do, by `due`.
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
        """Returns a future that is done when `due` is true; cancel it when it is not needed."""
        self.wait, self.due = asyncio.get_running_loop().create_future(), due
        self.look()
        return self.wait

    def look(self) -> None:
        """Wakes the coroutine that waits, if its condition holds."""
        if self.wait is not None and not self.wait.done() and self.due():
            self.wait.set_result(None)

    def withdraw(self) -> None:
        """Ignores answers to offers made outside the tender."""
        offered, self.offered = self.offered, {}
        for reply in offered.values():
            reply.cancel()
