"""What a primary knows of the replica on one other node, from the first offer to the node's release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from taskgraph.protocol.messages import Reply

__all__ = ["PeerReplica"]

Key = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class PeerReplica:
    """What a primary knows of one other node that has, or is to have, a replica of its task.

    Attributes:
        invitation: counts the primary's invitations; a release ends only what was acknowledged up to its own.
        offered: offers under way that the node's manager did not send.
        caught_up_by: until when an epoch waits for this candidate to become a member; 0: it has stored no boundary yet.
        idle: the manager has nothing to do until something changes.
        refused: the node's reason for refusing the last offer; "": it accepted.
        wait: a future that is done when `due` is true: the manager has something to do.
    """

    node: str
    invitation: int
    offered: dict[Key, asyncio.Future[Reply]] = field(default_factory=dict)
    caught_up_by: float = 0.0
    idle: bool = False
    refused: str = ""
    wait: asyncio.Future[None] | None = None
    due: Callable[[], bool] = bool

    def wait_until(self, due: Callable[[], bool]) -> asyncio.Future[None]:
        """Returns a future that is done when `due` is true; cancel it when it is not needed."""
        self.wait, self.due = asyncio.get_running_loop().create_future(), due
        self.wake_if_due()
        return self.wait

    def wake_if_due(self) -> None:
        """Wakes the manager if the condition that it waits for holds."""
        if self.wait is not None and not self.wait.done() and self.due():
            self.wait.set_result(None)

    def ignore_answers(self) -> None:
        """Ignores answers still to come to offers that the manager did not send."""
        offered, self.offered = self.offered, {}
        for reply in offered.values():
            reply.cancel()
