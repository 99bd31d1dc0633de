"""Tells the leader what a primary reports: the latest report, once to every leader."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.observe.trace import clock
from taskgraph.protocol.messages import Reply, Report

if TYPE_CHECKING:
    from taskgraph.node.node import Node
    from taskgraph.protocol.records import PrimaryRecord
    from taskgraph.protocol.view import JobView, Versioned

__all__ = ["Reporter"]


class Reporter:
    """One primary's reports.

    A report is sent from where it is made, where that takes no waiting. `run` does everything else: a leader that is
    lost, new, not known yet or refuses, and a node that is paused.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._report: Report | None = None
        self._begun: tuple[Report, int] | None = (
            None  # what was sent last from here, and to the leader of which revision
        )
        self._told: tuple[Report, int] | None = None  # the last one that a leader has
        self._look = asyncio.Event()

    def set(self, report: Report | None) -> None:
        """This is what the leader has to know; None: nothing."""
        self._report = report
        if report is not None and not self._begin(report):
            self._look.set()

    def _begin(self, report: Report) -> bool:
        leader = self._node.keeper.view.primaries.get(0)
        if leader is None or self._node.paused:
            return False
        since = self._node.tracing.on and clock()
        reply = self._node.router.begin(0, report)
        if reply is None:
            return False
        self._begun = (report, leader.mod_revision)
        reply.add_done_callback(partial(self._answered, self._begun, since))
        return True

    def _answered(self, begun: tuple[Report, int], since: int, reply: asyncio.Future[Reply]) -> None:
        if not reply.cancelled() and reply.exception() is None:
            self._note_told(begun, since)
        elif self._begun is begun:
            self._begun = None
            self._look.set()

    def _note_told(self, told: tuple[Report, int], since: int) -> None:
        self._told = told
        if since:
            report = told[0]
            kind = "done" if report.done else "idle"
            self._node.tracing.add(kind, since, report.task, report.stamp, report.term, peer=0)

    async def run(self) -> None:
        """Tells the leader what could not be told at once, and every new leader again."""
        while True:
            self._look.clear()
            leader, report = self._node.keeper.view.primaries.get(0), self._report
            if report is None or leader is None or (report, leader.mod_revision) in (self._told, self._begun):
                await self._until_news(leader)
                continue
            await self._node.while_paused()
            since = self._node.tracing.on and clock()
            await self._node.router.to_primary(0, partial(_same, report), timeout_s=self._node.settings.call_s)
            self._note_told((report, leader.mod_revision), since)

    async def _until_news(self, leader: Versioned[PrimaryRecord] | None) -> None:
        """Returns when there is something to tell in `run`, or another leader."""
        other = self._node.keeper.when(partial(_other_leader, leader), structure=True)
        other.add_done_callback(self._look_again)
        try:
            await self._look.wait()
        finally:
            other.cancel()

    def _look_again(self, other: asyncio.Future[None]) -> None:
        if not other.cancelled():
            self._look.set()


def _same(report: Report) -> Report:
    return report


def _other_leader(known: Versioned[PrimaryRecord] | None, view: JobView) -> bool:
    return view.primaries.get(0) is not known
