"""When what is gathered for a commit has to go; how long that is, is worked out in `gathering.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices
    from taskgraph.protocol.view import JobView

__all__ = ["Due"]


class Due:
    """When what is gathered for the next commit has to go: some time before the leader commits again.

    Args:
        part: of the time from one commit to the next, after which it goes.

    Attributes:
        ahead: as many epochs as the task may be ahead of the last commit.
    """

    def __init__(self, node: NodeServices, part: float) -> None:
        self._node = node
        self._part = part
        self._loop = asyncio.get_running_loop()
        self._at = 0.0  # by the commit that was seen last
        self._of = 0  # the revision of `generation` then: after a takeover nothing is gathered for a commit
        self._went = False  # whether anything did since that commit
        self.ahead = node.settings.epochs_ahead

    def committed(self) -> None:
        """A commit was seen."""
        self._at, self._went = self._loop.time() + self._part * self._seconds(), False
        self._of = self._node.keeper.view.generation_revision

    def forget(self) -> None:
        """Nothing is known of a commit."""
        self._at, self._went = 0.0, False

    def went(self) -> None:
        """All that was gathered did."""
        self._went = True

    def early(self, view: JobView) -> bool:
        """Whether the leader waits for more, even where all have done the epoch at work."""
        return self._loop.time() < self._at and view.generation_revision == self._of

    def at(self, overdue: float) -> float:
        """When what is gathered from now on has to go, in the loop's time.

        Args:
            overdue: of the time between two commits, how long to wait where the next one is overdue.
        """
        now = self._loop.time()
        if self._went:
            return now + self._seconds()
        return self._at if self._at > now else now + overdue * self._seconds()

    def _seconds(self) -> float:
        return self._node.gathering.seconds(self.ahead)
