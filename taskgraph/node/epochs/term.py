"""What an attempt asks of its task's primary: `primary/primary.py: Primary`, which is made of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from taskgraph.errors import GraphError
from taskgraph.node.core import NodeCore
from taskgraph.node.epochs.pulls import Pulls
from taskgraph.node.replica import Replica
from taskgraph.protocol.messages import Call, Reply, Stamp

if TYPE_CHECKING:
    from taskgraph.node.epochs.attempt import Attempt
    from taskgraph.node.epochs.attempts import Attempts
    from taskgraph.node.epochs.unheld import Unheld

__all__ = ["Term"]


class Term(Protocol):
    """A task's primary in one term.

    Attributes:
        loop: the event loop of the node, and
        thread: the one that it runs in.
    """

    @property
    def node(self) -> NodeCore: ...
    @property
    def replica(self) -> Replica: ...
    @property
    def task(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def attempts(self) -> Attempts: ...
    @property
    def pulls(self) -> Pulls: ...
    @property
    def unheld(self) -> Unheld: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def thread(self) -> int: ...

    def finishing(self) -> None:
        """The job ends with the epoch of an attempt."""

    def report_idle(self, attempt: Attempt, version: int) -> None:
        """Tells the leader that the epoch of an attempt is quiet here, at that version."""

    async def call(
        self, stamp: Stamp, to: int, message: Callable[[], Call], what: str, lost: str, *, pulls: bool = False
    ) -> Reply:
        """Makes a call of an attempt to the primary of a task, again where a pause may help.

        Where it is refused for good, the attempt cannot be completed: the epoch restarts, which cancels whoever waits.

        Args:
            what: the call, in words.
            lost: the same where it is refused for good.
            pulls: it is this node that has no memory, if one has none.

        Raises:
            Refused: the task does not offer that.
            TaskGraphError: it would be refused again.
        """

    def missed(self, attempt: Attempt, error: GraphError) -> None:
        """A message that an attempt sent which had finished: the job fails, though that is committed perhaps."""
