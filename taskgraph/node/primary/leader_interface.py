"""The interface of the leader for the primaries of its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from taskgraph.node.reports import Rows
from taskgraph.protocol.messages import Accepted, Report, Reports, Stamp

__all__ = ["LeaderInterface"]


class LeaderInterface(Protocol):
    """The interface of `LeaderRole`, for primaries."""

    def set_ahead(self, ahead: int) -> None:
        """Sets how many epochs task 0 may be ahead of the last commit."""

    def take_report_now(self, message: Report | Reports) -> Accepted | None:
        """Takes a report at once; None: send it as a message."""

    def lacks_own_report(self) -> bool:
        """True if a commit lacks only the report of task 0, and a task waits for the commit."""

    def rows_now(self, stamp: Stamp, own: Mapping[str, float]) -> Rows | None:
        """Returns the numbers that all tasks reported in the epoch before `stamp`; None if some are missing."""

    async def rows_before(self, stamp: Stamp, own: Mapping[str, float]) -> Rows:
        """Returns the numbers that all tasks reported in the epoch before `stamp`, once all are here."""
