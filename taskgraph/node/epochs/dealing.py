"""The dealers of the maps of one attempt, on the task that deals: task 0, or the service of a named queue.

Asks are no requests with effects, so they are in no sum: what counts is what the results' channels bring. An ask may
wait here for long; a newer one of the same task ends that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskgraph.errors import Refused
from taskgraph.graph.values import decode, encode
from taskgraph.observe.queues import SLOW, QueueStatus, Rate
from taskgraph.protocol.messages import Answer, Reason, Request
from taskgraph.queues.dealer import Dealer
from taskgraph.queues.plan import plan_of_count
from taskgraph.queues.service import QueueTask

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.protocol.messages import Stamp

__all__ = ["Dealers", "deal", "queue_statuses"]

_WAIT_S: Final = 1.0
"""A task that waits for a piece is answered after this time at the latest."""


class DealingAttempt(Protocol):
    """What dealing uses of the attempt of the task that deals pieces."""

    stamp: Stamp
    replica: Replica
    term: int
    cancelled: bool
    dealers: Dealers | None


class Dealers:
    """The dealers of one attempt, by the tag of their map."""

    def __init__(self, attempt: DealingAttempt) -> None:
        self._attempt = attempt
        self._dealers: dict[str, tuple[Dealer, int, int | None]] = {}
        self._newest: dict[tuple[str, int], Request] = {}  # of a map and a task: its ask that is not answered
        self._waiting: list[asyncio.Future[None]] = []

    async def answer_when_free(self, message: Request) -> dict[str, Any]:
        """Takes what a task has finished, and answers its ask for pieces.

        Waits while no piece is free and some are not finished. A newer ask of the task ends the wait.
        """
        attempt, loop = self._attempt, asyncio.get_running_loop()
        ask = decode(message.value)
        known, task = self._dealers.get(ask["map"]), attempt.replica.user_task
        if isinstance(task, QueueTask) and ask["digest"] != task.digest:
            return {"refused": _other_pieces_text(task.name)}
        if known is None:
            if self._dealers and isinstance(task, QueueTask):
                return {"refused": f"map({next(iter(self._dealers))!r}) computes this queue in this epoch already"}
            known = self._dealers[ask["map"]] = self._new_dealer(ask), ask["count"], ask["upto"]
        dealer, count, upto = known
        if (count, upto) != (ask["count"], ask["upto"]):
            return {"refused": _differs_text(ask, count, upto)}
        rate, rows = attempt.replica.queue_rates.setdefault(ask["map"], Rate()), dealer.rows
        of = ask["map"], message.sender
        news = len(ask["finished"]) or ask["failed"] or ask["whole"] or ask["late"] or of in self._newest
        self._newest[of] = message
        try:
            while True:
                found = dealer.answer(message.sender, message.sender_term, ask, loop.time())
                if news:
                    rate.add(loop.time(), dealer.rows - rows)
                    self._wake()
                    news = False
                if found is not None:
                    return found
                late = dealer.ledger.next_slow_at(loop.time())
                await self._wait_for_change(_WAIT_S if late is None else min(_WAIT_S, late - loop.time() + 0.001))
                if attempt.cancelled:
                    raise Refused(Reason.ATTEMPT_GONE, "the attempt is over")
                if self._newest.get(of) is not message:
                    return {"term": attempt.term, "again": True}
        finally:
            if self._newest.get(of) is message:
                del self._newest[of]

    def _new_dealer(self, ask: dict[str, Any]) -> Dealer:
        """Makes the dealer of the map that an ask names."""
        attempt = self._attempt
        task, job = attempt.replica.user_task, attempt.replica.job
        if isinstance(task, QueueTask):
            plan = task.plan(ask["upto"], job.seed)
        else:
            plan = plan_of_count(ask["count"], ask["upto"])
        return Dealer(plan, attempt.term, job.tasks)

    def statuses(self, now: float) -> Iterator[QueueStatus]:
        """Yields for each map of this attempt how many of its pieces are open, dealt and done."""
        for tag, (dealer, count, _) in self._dealers.items():
            counts, rate = dealer.counts(), self._attempt.replica.queue_rates[tag].at(now)
            left, aside = dealer.ledger.unfinished, sum(one.set_aside for one in counts)
            slow = tuple(dealer.slow(now)[:SLOW])
            yield QueueStatus(tag, "map", max(count, 0), 1, left, aside, tuple(counts), slow, rate)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def _wait_for_change(self, within_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        await asyncio.wait([woken], timeout=within_s)


def _differs_text(ask: dict[str, Any], count: int, upto: int | None) -> str:
    return (
        f"map({ask['map']!r}) has {ask['count']} pieces and upto={ask['upto']}, but {count} pieces and upto={upto} on "
        f"another task: all tasks give the same pieces and upto"
    )


def _other_pieces_text(queue: str) -> str:
    return (
        f"queue {queue!r} has other pieces on this node than it began with: give all nodes the same source (the same "
        f"files), and leave it as it is until the job has ended, also one that is resumed"
    )


def queue_statuses(replica: Replica, dealers: Dealers | None, now: float) -> list[QueueStatus]:
    """Returns the progress of the queue that a task keeps, its uncommitted map included; or of the maps that it deals.

    Args:
        dealers: of the attempt that runs; None: it deals nothing.
    """
    maps = list(dealers.statuses(now)) if dealers is not None else []
    task = replica.user_task
    if not isinstance(task, QueueTask) or task.pieces is None:
        return maps
    ledger = task.ledger(replica.job.seed)
    found = QueueStatus.of(task.name, "queue", ledger, now)
    for live in maps:  # the map of this queue, which is not committed
        found = found.advanced(live)
    return [found]


async def deal(attempt: DealingAttempt, message: Request) -> Answer:
    """Answers a task's request for pieces, and takes what it has finished; waits while no piece is free. The first
    request makes the attempt's dealers.
    """
    if attempt.dealers is None:
        attempt.dealers = Dealers(attempt)
    found = await attempt.dealers.answer_when_free(message)
    return Answer(attempt.stamp, attempt.term, True, encode(found, what="pieces"))
