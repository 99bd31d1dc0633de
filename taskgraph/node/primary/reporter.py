"""Sends a primary's reports to the leader: the latest of each epoch, once to every leader.

If tasks work ahead of the commit, reports are gathered into one message that arrives shortly before the leader's next
commit. A report whose commit a task waits for is sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.node.primary.send_deadline import SendDeadline
from taskgraph.observe.trace import clock
from taskgraph.protocol.messages import Reply, Report, Reports

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices
    from taskgraph.protocol.records import PrimaryRecord
    from taskgraph.protocol.view import JobView, Versioned

__all__ = ["Reporter"]

_DEADLINE_SHARE = 0.75
"""Deadline for gathered reports, as a share of the commit interval: they arrive before the next commit."""
_OVERDUE_SHARE = 0.5
"""How long the first report waits if the next commit is overdue, as a share of the interval."""


class Reporter:
    """One primary's reports of the epoch at work and of later ones.

    A report is sent where it is made, if that needs no waiting. `run` sends it otherwise: if the leader died, changed,
    is unknown or refuses, or the node is paused.

    Args:
        leads: True for task 0, whose primary leads: its reports go to the leader on this node, one by one.
    """

    def __init__(self, node: NodeServices, *, leads: bool = False) -> None:
        self._node = node
        self._leads = leads
        self._loop = asyncio.get_running_loop()
        self._batch_size = 1
        self._deadline = SendDeadline(node, _DEADLINE_SHARE)
        self._reports: dict[int, _SentReport] = {}  # epoch -> the latest
        self._gathered: list[_SentReport] = []  # sent when there are enough, or by the timer
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self.set_ahead(node.settings.epochs_ahead)

    def set_ahead(self, ahead: int) -> None:
        """Sets how many reports are gathered for a message: half of the epochs that the task may be ahead."""
        self._deadline.ahead = ahead
        self._batch_size = 1 if self._leads or not self._node.settings.gather_s else max(1, ahead // 2)

    def send_or_gather(self, report: Report) -> None:
        """Sends a report, or gathers it for a later message. It replaces an earlier report of the same epoch."""
        epoch, gathered, view = report.stamp.epoch, self._gathered, self._node.keeper.view
        if (before := self._reports.get(epoch)) is not None:
            before.forget()
        at, leader = view.stamp, view.primaries.get(0)
        sent = self._reports[epoch] = _SentReport()
        sent.report = report
        if self._leads and not gathered and leader is not None and self._give_to_own_leader(report):
            sent.leader = leader.mod_revision
            return
        gathered.append(sent)
        # Gathered if neither the task nor the job waits for this epoch's commit.
        waited_for = not report.ahead or report.finish
        enough = len(gathered) >= self._batch_size
        if waited_for or enough or at is None or (report.stamp <= at and not self._deadline.has_time_left(view)):
            self._send()
            return
        sent.leader = leader.mod_revision if leader is not None else 0
        if self._timer is None:
            self._set_gathering_timer()

    def _set_gathering_timer(self) -> None:
        """Sets the timer for gathered reports."""
        self._timer = self._loop.call_at(self._deadline.at(_OVERDUE_SHARE), self._send)

    def forget(self, before: int | None = None) -> None:
        """Drops reports of epochs before `before`; None: all."""
        reports = self._reports
        if before is None:
            self._deadline.forget()
        else:
            self._deadline.note_commit()
        for epoch in tuple(reports):
            if before is None or epoch < before:
                sent = reports.pop(epoch)
                if (batch := sent.batch) is not None:  # inlined `_SentReport.forget`
                    sent.batch = None
                    batch.open -= 1
                    if not batch.open:
                        batch.reply.cancel()
        if self._gathered:
            self._gathered = [sent for sent in self._gathered if sent.report.stamp.epoch in reports]
            self._stop_gathering_timer()
            if self._gathered:
                self._set_gathering_timer()

    def report_again(self, epoch: int) -> None:
        """Reports an epoch again, since the leader lacks it although no connection broke.

        Sends all other reports again, too: they may have been lost in the same message.
        """
        if epoch not in self._reports:
            return
        for sent in self._reports.values():
            if sent not in self._gathered:
                sent.forget()
                sent.leader = 0
        self._wake.set()

    def _give_to_own_leader(self, report: Report) -> bool:
        """Gives a report to the leader on this node. False: there is none, or the report has to be sent."""
        node = self._node
        role, since = node.leader, node.tracing.on and clock()
        if role is None or node.paused or role.take_report_now(report) is None:
            return False
        if since:
            self._trace(report, since)
        return True

    def _stop_gathering_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self) -> None:
        """Sends the gathered reports; `run` sends those that cannot be sent from here."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, []
        self._deadline.mark_sent()
        node, reply = self._node, None
        leader, since = node.keeper.view.primaries.get(0), node.tracing.on and clock()
        if leader is not None and not node.paused:
            reply = node.router.begin(0, _report_message(gathered), quiet=True)
        if leader is None or reply is None:
            for sent in gathered:
                sent.leader = 0
            self._wake.set()
            return
        batch = _Batch(gathered, reply, len(gathered))
        for sent in gathered:
            sent.leader, sent.batch = leader.mod_revision, batch
            if since:
                self._trace(sent.report, since)
        reply.add_done_callback(partial(self._on_answer, batch))

    def _on_answer(self, batch: _Batch, reply: asyncio.Future[Reply]) -> None:
        """Handles the reply or error of a message of reports: after an error, `run` sends these reports again."""
        lost = reply.cancelled() or reply.exception() is not None
        for sent in batch.reports:
            if sent.batch is batch:
                sent.batch = None
                if lost:
                    sent.leader = 0
                    self._wake.set()

    def _trace(self, report: Report, since: int) -> None:
        kind = "done" if report.done else "idle"
        if self._node.tracing.is_traced(report.stamp.epoch):
            self._node.tracing.keep(kind, "", 0, since, clock(), report.task, report.stamp, report.term, -1)

    async def run(self) -> None:
        """Sends what could not be sent at once, and all reports again to every new leader."""
        while True:
            self._wake.clear()
            leader = self._node.keeper.view.primaries.get(0)
            revision = leader.mod_revision if leader is not None else 0
            unsent = [sent for sent in self._reports.values() if sent.leader != revision]
            if not unsent or leader is None:
                await self._wait_for_work(leader)
                continue
            await self._node.wait_while_paused()
            since = self._node.tracing.on and clock()
            same = partial(_report_message, unsent)
            await self._node.router.to_primary(0, same, timeout_s=self._node.settings.call_s)
            for sent in unsent:
                sent.leader = revision
                if since:
                    self._trace(sent.report, since)

    async def _wait_for_work(self, leader: Versioned[PrimaryRecord] | None) -> None:
        """Waits until `run` has something to send, or the leader changed."""
        other = self._node.keeper.begin_wait(partial(_is_other_leader, leader), structure=True)
        other.add_done_callback(self._wake_unless_cancelled)
        try:
            await self._wake.wait()
        finally:
            other.cancel()

    def _wake_unless_cancelled(self, other: asyncio.Future[None]) -> None:
        if not other.cancelled():
            self._wake.set()


class _SentReport:
    """A report, and the revision of the leader that has it or is receiving it; 0: none."""

    report: Report
    leader = 0
    batch: _Batch | None = None

    def forget(self) -> None:
        """Stops waiting for the outcome of this report; cancels its message once no report in it needs one."""
        batch, self.batch = self.batch, None
        if batch is not None:
            batch.open -= 1
            if not batch.open:
                batch.reply.cancel()


@dataclass(slots=True, eq=False)
class _Batch:
    """Reports that travel in one message.

    Attributes:
        open: the number of reports whose outcome still matters.
    """

    reports: list[_SentReport]
    reply: asyncio.Future[Reply]
    open: int


def _report_message(sent: Sequence[_SentReport]) -> Report | Reports:
    return sent[0].report if len(sent) == 1 else Reports(tuple([one.report for one in sent]))


def _is_other_leader(known: Versioned[PrimaryRecord] | None, view: JobView) -> bool:
    return view.primaries.get(0) is not known
