"""Ends this node if it cannot set up a backup that the job can do without; see `protocol.setups`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import TaskGraphError, error_text
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.setups import can_job_continue

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["FailedSetUps", "SetUpFailed"]


class SetUpFailed(TaskGraphError):
    """The node ends, since it cannot set up a replica, and other nodes can."""


class FailedSetUps:
    """One node's handling of failed set-ups. A node that shares its process does not end: the others would fail, too.

    Args:
        busy: returns True if the node is primary of a task, or about to be, even if the view does not show that.
    """

    def __init__(self, node: NodeCore, busy: Callable[[], bool]) -> None:
        self._node = node
        self._busy = busy
        self.alone = node.own_process
        self._error: SetUpFailed | None = None

    def end_node_if_unneeded(self, error: UserCodeError | TaskGraphError, task: int) -> bool:
        """Begins to end this node for a failed set-up, if the job can do without the node. False: the job must fail."""
        if self._error is not None:
            return True
        node = self._node
        if not self.alone or self._busy() or not isinstance(error, UserCodeError):
            return False
        settings = node.settings
        view, least = node.keeper.view, settings.min_in_sync
        if not can_job_continue(view, node.id, task, suspects=node.suspects, min_in_sync=least):
            return False
        self._error = SetUpFailed(
            f"{node.name}{node.place_text} cannot hold a backup of task {task}: {error.where!r} raised "
            f"{error_text(error.error)}; it ends, and the job goes on without it"
        )
        node.log.warning("task %d cannot be set up, %r raised:\n%s", task, error.where, error.traceback_text)
        node.end_with(self._error)
        return True
