"""When gathered offers and reports must be sent, to count in the next commit; `commit_interval.py` has the interval."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices
    from taskgraph.protocol.view import JobView

__all__ = ["SendDeadline"]


class SendDeadline:
    """The time by which gathered offers or reports must be sent: some time before the leader commits again.

    Args:
        share: the share of the interval between commits after which the deadline comes.

    Attributes:
        ahead: how many epochs the task may be ahead of the last commit.
    """

    def __init__(self, node: NodeServices, share: float) -> None:
        self._node = node
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._at = 0.0  # the deadline by the last commit
        self._generation = 0  # the revision of `generation` then: a takeover makes the deadline void
        self._sent = False  # True if something was sent since that commit
        self.ahead = node.settings.epochs_ahead

    def note_commit(self) -> None:
        """Sets the next deadline, since a commit was read."""
        self._at, self._sent = self._loop.time() + self._share * self._seconds(), False
        self._generation = self._node.keeper.view.generation_revision

    def forget(self) -> None:
        """Drops the deadline, since the time of the last commit is unknown."""
        self._at, self._sent = 0.0, False

    def mark_sent(self) -> None:
        """Notes that all gathered messages were sent."""
        self._sent = True

    def has_time_left(self, view: JobView) -> bool:
        """True until the deadline; False also if a takeover came since it was set."""
        return self._loop.time() < self._at and view.generation_revision == self._generation

    def at(self, overdue: float) -> float:
        """Returns the deadline for messages gathered from now on, in the loop's time.

        Args:
            overdue: how long to wait if the next commit is overdue, as a share of the interval.
        """
        now = self._loop.time()
        if self._sent:
            return now + self._seconds()
        return self._at if self._at > now else now + overdue * self._seconds()

    def _seconds(self) -> float:
        """Returns the time between two commits."""
        return self._node.commit_interval.seconds(self.ahead)
