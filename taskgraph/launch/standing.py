"""Nodes of this host whose event loop stands still: in a coroutine of the user's that never awaits, or beside a plain
function that keeps the interpreter's lock.

Such a node answers no call, renews no lease and cannot say so itself. Others take it for dead and take its tasks over,
and their loops stop in the same place. The launcher reads from outside what the loop runs, and reports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from taskgraph.node.usercode import lastwords
from taskgraph.protocol.records import JobStatus, RunningCode, StatusRecord
from taskgraph.system import host

__all__ = ["StalledLoop", "is_stopped", "stall_text", "with_stalls"]

STANDS_S = 3.0
"""No coroutine of a healthy program holds the loop for as long, and the lease ends soon after."""


class StalledLoop:
    """Finds calls in which the event loop of one process stands still, from what it ran when it was last looked at.

    Args:
        folder: where the process keeps its last words.

    Attributes:
        reported: the call that the loop is in was returned by `find_stalled_call`.
        in_thread: a thread runs that call.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder
        self._pid = pid
        self._order: int | None = None
        self._since = 0.0
        self.reported = False
        self.in_thread = False

    def find_stalled_call(self, now: float) -> tuple[RunningCode, float] | None:
        """Returns a call that has held the loop for `STANDS_S` or more, and for how long; each once. None: none new."""
        runs = lastwords.read_loop_call(self._folder)
        if runs is None or is_stopped(self._pid):  # a process that a signal halted stands still wherever it is
            self._order, self.reported = None, False
        elif runs.order != self._order:
            self._order, self._since, self.reported = runs.order, now, False
        elif not self.reported and now - self._since >= STANDS_S:
            self.reported, self.in_thread = True, runs.in_thread
            return runs.ran, now - self._since
        return None


def stall_text(name: str, ran: RunningCode, for_s: float, *, in_thread: bool = False) -> str:
    """Says that a node's event loop stands still, in which code, and what to do."""
    if in_thread:
        return (
            f"{ran} has held up all of {name} for {for_s:.0f} s, and others take that for dead: it keeps the "
            f"interpreter's lock in one call; split that call, or run it in a process of its own"
        )
    return (
        f"the event loop of {name} has been in {ran} for {for_s:.0f} s: an `async def` that never awaits holds up its "
        f"whole node, and others take that for dead; as a plain `def` it runs in a thread"
    )


def with_stalls(status: StatusRecord, stands: Iterable[str]) -> StatusRecord:
    """Adds to the status of a failed job the texts on what held up its nodes, which cannot say so themselves."""
    lines = tuple(stands)
    if status.state != JobStatus.FAILED or not lines:
        return status
    return structs.replace(status, reason="\n".join((status.reason, *lines)))


def is_stopped(pid: int) -> bool:
    """True if a signal or a debugger has halted this process."""
    return host.state(pid) in ("T", "t")
