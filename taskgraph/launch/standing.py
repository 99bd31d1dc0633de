"""Nodes of this host whose event loop stands still in a coroutine of the user's, which never awaits, or beside a plain
function that keeps the interpreter's lock.

Such a node answers nobody, renews no lease and cannot say so itself; others take it for dead, take its tasks over, and
come to a stand in the same place. Its launcher sees from outside what its loop runs, and says it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from taskgraph.node.usercode import lastwords
from taskgraph.protocol.records import Ran, State, StatusRecord
from taskgraph.system import host

__all__ = ["Standing", "standing_text", "stopped", "with_stands"]

STANDS_S = 3.0
"""No coroutine of a healthy program holds the loop for as long, and the lease ends soon after."""


class Standing:
    """Remembers what the loop of one process ran when it was looked at before.

    Args:
        folder: where its last words are.
        pid: its id.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder
        self._pid = pid
        self._order: int | None = None
        self._since = 0.0
        self.told = False
        """The call that it is in was told."""
        self.in_thread = False
        """Whether a thread runs the call that was told."""

    def look(self, now: float) -> tuple[Ran, float] | None:
        """A call that the loop has been in for `STANDS_S` and more, and for how long; each call once."""
        runs = lastwords.on_loop(self._folder)
        if runs is None or stopped(self._pid):  # what is stopped stands still wherever it was
            self._order, self.told = None, False
        elif runs.order != self._order:
            self._order, self._since, self.told = runs.order, now, False
        elif not self.told and now - self._since >= STANDS_S:
            self.told, self.in_thread = True, runs.in_thread
            return runs.ran, now - self._since
        return None


def standing_text(name: str, ran: Ran, for_s: float, *, in_thread: bool = False) -> str:
    if in_thread:
        return (
            f"{ran} has held up all of {name} for {for_s:.0f} s, and others take that for dead: it keeps the "
            f"interpreter's lock in one call; split that call, or run it in a process of its own"
        )
    return (
        f"the event loop of {name} has been in {ran} for {for_s:.0f} s: an `async def` that never awaits holds up its "
        f"whole node, and others take that for dead; as a plain `def` it runs in a thread"
    )


def with_stands(status: StatusRecord, stands: Iterable[str]) -> StatusRecord:
    """The status of a job that failed, and what held up its nodes: whom others took for dead cannot say why."""
    lines = tuple(stands)
    if status.state != State.FAILED or not lines:
        return status
    return dataclasses.replace(status, reason="\n".join((status.reason, *lines)))


def stopped(pid: int) -> bool:
    """Whether a signal halted that process, or a debugger."""
    return host.state(pid) in ("T", "t")
