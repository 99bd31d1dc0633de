"""Tells the leader what a primary reports: the latest report of each epoch, once to every leader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
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
    """One primary's reports, of the epoch at work and of those it is ahead with.

    A report is sent from where it is made, where that takes no waiting. `run` does everything else: a leader that is
    lost, new, not known yet or refuses, and a node that is paused.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reports: dict[int, _Told] = {}  # epoch -> the latest
        self._look = asyncio.Event()

    def set(self, report: Report) -> None:
        """This is what the leader has to know of the report's epoch."""
        epoch = report.stamp.epoch
        if (before := self._reports.get(epoch)) is not None:
            before.forget()
        told = self._reports[epoch] = _Told(report)
        if not self._begin(told):
            self._look.set()

    def forget(self, before: int | None = None) -> None:
        """There is nothing to tell any more of epochs before that one; None: of any."""
        for epoch in [epoch for epoch in self._reports if before is None or epoch < before]:
            self._reports.pop(epoch).forget()

    def _begin(self, told: _Told) -> bool:
        leader = self._node.keeper.view.primaries.get(0)
        if leader is None or self._node.paused:
            return False
        since = self._node.tracing.on and clock()
        reply = self._node.router.begin(0, told.report, quiet=True)
        if reply is None:
            return False
        told.leader, told.reply = leader.mod_revision, reply
        reply.add_done_callback(partial(self._answered, told))
        self._trace(told.report, since)
        return True

    def _answered(self, told: _Told, reply: asyncio.Future[Reply]) -> None:
        """The leader has it where nothing is heard. What is heard may be that it does not."""
        if told.reply is reply:
            told.reply = None
            if reply.cancelled() or reply.exception() is not None:
                told.leader = 0
                self._look.set()

    def _trace(self, report: Report, since: int) -> None:
        if since:
            kind = "done" if report.done else "idle"
            self._node.tracing.add(kind, since, report.task, report.stamp, report.term, peer=0)

    async def run(self) -> None:
        """Tells the leader what could not be told at once, and every new leader all of it again."""
        while True:
            self._look.clear()
            leader = self._node.keeper.view.primaries.get(0)
            revision = leader.mod_revision if leader is not None else 0
            told = next((told for told in self._reports.values() if told.leader != revision), None)
            if told is None or leader is None:
                await self._until_news(leader)
                continue
            await self._node.while_paused()
            since = self._node.tracing.on and clock()
            report = told.report
            await self._node.router.to_primary(0, partial(_same, report), timeout_s=self._node.settings.call_s)
            self._trace(report, since)
            told.leader = revision

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


@dataclass(slots=True)
class _Told:
    """A report, and the revision of the leader that has it, or to which it is on its way; 0: nobody."""

    report: Report
    leader: int = 0
    reply: asyncio.Future[Reply] | None = None

    def forget(self) -> None:
        """Nobody needs to hear what becomes of it."""
        reply, self.reply = self.reply, None
        if reply is not None:
            reply.cancel()


def _same(report: Report) -> Report:
    return report


def _other_leader(known: Versioned[PrimaryRecord] | None, view: JobView) -> bool:
    return view.primaries.get(0) is not known
