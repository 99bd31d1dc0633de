"""The interface of `primary/primary.py: Primary` that its attempts use."""

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
    from taskgraph.node.epochs.unsaved import UnsavedStateCheck

__all__ = ["PrimaryInterface"]


class PrimaryInterface(Protocol):
    """A task's primary in one term.

    Attributes:
        loop: the event loop of the node.
        thread: identifier of the thread that the event loop runs in (`threading.get_ident`).
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
    def unsaved(self) -> UnsavedStateCheck: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def thread(self) -> int: ...

    def note_job_ends(self) -> None:
        """Notes that user code called `epoch.finish()`: no later epoch begins. May be called in any thread."""

    def report_idle(self, attempt: Attempt, version: int) -> None:
        """Reports to the leader that the task is idle in an attempt's epoch, at that version."""

    async def call(self, stamp: Stamp, to: int, message: Callable[[], Call], what: str, lost: str) -> Reply:
        """Calls the primary of a task for an attempt, and again while that primary is lost or replaced.

        If the call is refused for another reason, asks the leader to restart the epoch, and waits until the restart
        cancels the caller.

        Args:
            message: makes the message, anew for each try.
            what: names the call in texts.
            lost: says in texts what the attempt cannot do without a reply.

        Raises:
            Refused: the called task has no such channel or handler.
            TaskGraphError: a restart would not help, e.g. since the value cannot be copied.
        """

    def fail_for_late_message(self, attempt: Attempt, error: GraphError) -> None:
        """Fails the job, since user code sent a message after its attempt had finished, maybe after the commit."""
