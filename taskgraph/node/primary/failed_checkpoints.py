"""What nodes say of checkpoints that cannot be written: each one, and how many failed in a row."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["FailedCheckpoints", "since_text", "unwritten_text"]


def unwritten_text(place: str, error: Exception) -> str:
    """Says that a file or a checkpoint cannot be written, why, and what to do."""
    text = f"cannot be written to {place}: {error}; the job goes on with the one before, if any"
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{text}: make room there for the next one" if is_full else text


def since_text(node: NodeCore) -> str:
    """Says since when no checkpoint is complete."""
    pointer = node.keeper.view.checkpoint
    return f"since that of {node.spec.unit} {pointer.record.epoch}" if pointer is not None else "yet"


class FailedCheckpoints:
    """Counts checkpoints that failed since one was complete."""

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._count = 0

    def note_complete(self) -> None:
        self._count = 0

    def note_failed(self, last: str, epoch: int | None = None) -> None:
        """Counts one, of which `last` says more; emits an event at the second, fourth, eighth ... in a row."""
        self._count = count = self._count + 1
        if count < 2 or count & (count - 1):
            return  # it may go on for hours
        text = f"no checkpoint is complete {since_text(self._node)}: {count} in a row failed, the last of them, {last}"
        self._node.events.emit("no checkpoint", text, epoch=epoch)
