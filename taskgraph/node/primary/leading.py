"""What the primaries of a node ask of the leader's role, where it is on their own node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from taskgraph.node.reports import Rows
from taskgraph.protocol.messages import Accepted, Report, Reports, Stamp

__all__ = ["Leading"]


class Leading(Protocol):
    """`LeaderRole`, which is made of a primary, as primaries see it."""

    def gather_by(self, ahead: int) -> None:
        """Task 0 may be so many epochs ahead of the last commit."""

    def report_now(self, told: Report | Reports) -> Accepted | None:
        """Takes a report; None where it has to be asked for in the usual way."""

    def lacks_own(self) -> bool:
        """Whether it lacks nothing but the report of task 0."""

    def rows_now(self, stamp: Stamp, own: Mapping[str, float]) -> Rows | None:
        """What tasks reported in the epoch before `stamp`'s; None where it has to be waited for."""

    async def rows_before(self, stamp: Stamp, own: Mapping[str, float]) -> Rows:
        """The same, when it is known."""
