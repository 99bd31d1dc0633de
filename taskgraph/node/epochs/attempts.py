"""A primary's attempts that are not committed, and the calls that wait for one to begin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from taskgraph.errors import Refused
from taskgraph.node.epochs.epoch_memory import EPOCH_BYTES
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Reply, Stamp, stamp_of
from taskgraph.transport.api import PendingReply

if TYPE_CHECKING:
    from taskgraph.coordination.viewkeeper import ViewKeeper
    from taskgraph.node.epochs.attempt import Attempt

__all__ = ["Attempts"]


class Attempts:
    """The uncommitted attempts of one task in one term.

    An attempt stays until the view shows a later epoch as committed, or another attempt begins. Until then slower
    tasks, and new primaries, may pull its items.
    """

    def __init__(self, keeper: ViewKeeper, task: int, term: int) -> None:
        self._keeper = keeper
        self._task = task
        self._term = term
        self._attempts: dict[Stamp, Attempt] = {}
        self._waiting: list[asyncio.Future[None]] = []  # for an attempt to begin
        self._parked: dict[Stamp, list[tuple[Pull, PendingReply]]] = {}  # pulls, by the attempt that must begin first
        self._ended = False
        self.latest: Stamp | None = None
        """The stamp of the attempt that began last; it may be over."""

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def of(self, stamp: Stamp) -> Attempt | None:
        """Returns the attempt at `stamp`; None: it has not begun, or is over."""
        return self._attempts.get(stamp)

    def uncommitted_bytes(self, before: int) -> int:
        """Returns the bytes that attempts of epochs before `before` take: their objects, items and boundaries."""
        found = 0
        for attempt in self._attempts.values():
            if attempt.number < before:
                found += EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + attempt.snapshot_bytes
        return found

    def boundary_bytes(self, before: int) -> int:
        """Returns the bytes of the boundaries that attempts of epochs before `before` made."""
        return sum(attempt.snapshot_bytes for attempt in self if attempt.number < before)

    # -- for the primary --------------------------------------------------------------------------

    def add(self, attempt: Attempt) -> None:
        """Adds an attempt that begins, and wakes the calls that wait for it."""
        self._attempts[attempt.stamp] = attempt
        self.latest = attempt.stamp
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def answer_waiting_pulls(self, attempt: Attempt) -> None:
        """Answers the pulls that waited for this attempt's graph; refuses those for earlier ones that never began."""
        parked = self._parked
        if not parked:
            return
        at, primaries, settle_when_put = attempt.stamp, self._keeper.view.primaries, attempt.out.settle_when_put
        for pull, reply in parked.pop(at, ()):
            if not reply.done:
                sender = primaries.get(pull.sender)
                if sender is None or sender.record.term != pull.sender_term or settle_when_put(pull, reply) is not None:
                    self._refuse_stale(reply)
        if parked and min(parked) < at:
            # Attempts that have begun, and are not composed, are in flight.
            for stamp in [stamp for stamp in self._parked if stamp < at and stamp not in self._attempts]:
                for _, reply in self._parked.pop(stamp):
                    if not reply.done:
                        self._refuse_stale(reply)

    def _refuse_stale(self, reply: PendingReply) -> None:
        """Refuses a pull as stale. Its sender retries, and then gets the exact reason."""
        reply.settle(Refusal(Reason.STALE, f"task {self._task} is at {self.latest}"))

    def drop_before(self, epoch: int) -> None:
        """Drops the attempts of epochs before `epoch`, which has committed."""
        for stamp in tuple(self._attempts):
            if stamp.epoch < epoch:
                attempt = self._attempts.pop(stamp)
                attempt.committed = True
                attempt.drop()

    def drop(self) -> None:
        """Frees the values of all attempts, since these are over."""
        for attempt in self._attempts.values():
            attempt.drop()
        self._attempts.clear()

    def refuse_waiting_calls(self) -> None:
        """Refuses all waiting calls, since the term is over."""
        self._ended = True
        self.drop()
        for parked in self._parked.values():
            for _, reply in parked:
                reply.settle(Refusal(Reason.NOT_PRIMARY, self._stepped_down_text))
        self._parked.clear()
        self._wake()

    # -- for other tasks --------------------------------------------------------------------------

    def answer_pull(self, pull: Pull) -> Item | PendingReply | Refusal | None:
        """Answers a pull: with the item, a pending reply or a refusal; None if the attempt is over."""
        attempt = self._attempts.get(pull.stamp)
        if attempt is not None and attempt.graph is not None:
            return attempt.out.answer(pull)
        if self._ended or (attempt is None and self.latest is not None and self.latest >= pull.stamp):
            return None
        reply = PendingReply()
        self._parked.setdefault(pull.stamp, []).append((pull, reply))
        return reply

    def lacks(self, pull: Pull) -> bool:
        """True if the pulled item has not been put, so that the sender of the pull has to wait."""
        attempt = self._attempts.get(pull.stamp)
        return attempt is None or attempt.graph is None or attempt.out.lacks(pull.tag, pull.sender)

    def answer_pulls(self, pull: Pull) -> list[Reply | PendingReply | None]:
        """Answers a pull for several epochs, most of which have not begun: for each as `answer_pull`."""
        found: list[Reply | PendingReply | None] = []
        (attempt, epoch), parked, latest = pull.stamp, self._parked, self.latest
        for nth in range(pull.count):
            stamp = stamp_of((attempt, epoch + nth))
            if self._ended or (latest is not None and latest >= stamp):
                found.append(self.answer_pull(pull.each(nth)))
                continue
            reply = PendingReply()
            found.append(reply)
            if stamp in parked:
                parked[stamp].append((pull, reply))
            else:
                parked[stamp] = [(pull, reply)]
        return found

    async def wait_for_attempt(self, stamp: Stamp) -> Attempt:
        """Waits for the attempt at `stamp` to begin, and returns it.

        Raises:
            Refused: the attempt is over, or the primary stepped down.
        """
        while self.latest is None or self.latest < stamp:
            if self._ended:
                raise Refused(Reason.NOT_PRIMARY, self._stepped_down_text)
            began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(began)
            await began
        attempt = self._attempts.get(stamp)
        if attempt is None:
            raise Refused(Reason.STALE, f"task {self._task} is at {self.latest}, not {stamp}")
        return attempt

    @property
    def _stepped_down_text(self) -> str:
        return f"the primary of task {self._task} in term {self._term} stepped down"
