"""Asks all tasks for their ledgers when the sums of what was sent and received differ.

Unequal sums alone prove nothing: a report may be on its way, or a takeover about to come. The job fails only if the
ledgers of two tasks disagree, both of the reported attempts, with no takeover since. A primary that is alive but cannot
be reached is named, and asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from taskgraph.errors import TransportError
from taskgraph.protocol.messages import Audit, LedgerEntry, LedgerPage, Report, Stamp
from taskgraph.protocol.records import name_of
from taskgraph.protocol.sums import ITEM, REQUEST, encode_sum, entry_hash, explain, total

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["AuditFindings", "audit"]


class AuditFindings:
    """What the tasks' ledgers show about unequal sums.

    Args:
        reports: the tasks' latest reports.
        pages: the ledgers of the tasks that answered.

    Attributes:
        unanswered: tasks that did not answer.
        behind: tasks whose ledger changed since their last report.
        entries: number of entries in all ledgers.
    """

    def __init__(self, reports: Mapping[int, Report], pages: Mapping[int, tuple[LedgerEntry, ...]]) -> None:
        self.unanswered = tuple(task for task in sorted(reports) if task not in pages)
        self.behind = tuple(
            task
            for task in sorted(pages)
            if not reports[task].done and _sums(pages[task]) != _reported_sums(reports[task])
        )
        self.entries = sum(map(len, pages.values()))
        self._pages = pages
        self._moved = frozenset(self.behind)

    @cached_property
    def disagreements(self) -> list[str]:
        """A line for each edge (kind, sender, receiver, name) whose two ledgers are both here, and differ.

        For a task that is `behind` only items count.
        """
        # An idle task's messages were acknowledged, so ledgers that are read later include them. Only a task whose
        # ledger moved since its report may differ from one that was asked earlier: for those, only items count.
        moved = self._moved
        return explain(self._pages, counts=lambda edge, *_: edge[0] == ITEM or moved.isdisjoint(edge[1:3]))

    @cached_property
    def differing(self) -> list[str]:
        """A line for each edge on which the ledgers differ, also if a task is `behind`: an entry then counts as lacking
        only where it cannot still come.
        """

        def counts(edge: tuple[str, int, int, str], sent: bool, received: bool) -> bool:
            kind, sender, receiver, _ = edge
            if sent and received:
                return True
            if sent:
                return receiver not in self._moved
            # A request counts with its answer. All other messages are counted by their sender before they can arrive.
            return kind != REQUEST or sender not in self._moved

        return explain(self._pages, counts=counts)

    def waits(self, node: NodeCore) -> Iterable[str]:
        """Yields a text for each task that is `unanswered` or `behind`: what the leader waits for."""
        why = "what was sent and what was received differ"
        for task in self.unanswered:
            holder = node.keeper.view.primary_node(task)
            on = f"its primary on {name_of(holder)} does not answer" if holder else "it has no primary"
            yield f"the leader waits for the ledger of task {task} ({on}): {why}"
        for task in self.behind:
            yield f"the leader waits for a report of task {task}, which moved on since its last one: {why}"


def _sums(page: Iterable[LedgerEntry]) -> tuple[bytes, bytes]:
    """Returns the two sums of a ledger, encoded: of what the task sent, and of what it received."""
    sides: dict[bool, list[int]] = {True: [], False: []}
    for e in page:
        sides[e.sent].append(entry_hash(e.kind, e.sender, e.receiver, e.name, e.digest))
    return encode_sum(total(sides[True])), encode_sum(total(sides[False]))


def _reported_sums(report: Report) -> tuple[bytes, bytes]:
    return report.sent, report.received


async def audit(node: NodeCore, stamp: Stamp, reports: Mapping[int, Report]) -> AuditFindings:
    """Asks all tasks for their ledgers, at once, and returns what these show. A task that does not answer in its
    reported term is `unanswered`.
    """
    pages: dict[int, tuple[LedgerEntry, ...]] = {}

    async def ask(task: int) -> None:
        holder = node.keeper.view.primary_node(task)
        if holder is None:
            return
        try:
            reply = await node.router.to_node(holder, Audit(stamp, task), timeout_s=node.settings.call_s)
        except TransportError as error:
            node.log.info("task %d did not show its ledger: %s", task, error)
            return
        if isinstance(reply, LedgerPage) and reply.term == reports[task].term:
            pages[task] = reply.entries

    async with asyncio.TaskGroup() as group:
        for task in sorted(reports):
            group.create_task(ask(task), name=f"audit task {task}")
    return AuditFindings(reports, pages)
