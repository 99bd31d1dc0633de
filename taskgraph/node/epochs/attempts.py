"""A primary's attempts: the one at work, those it is done with and that are not committed, and who waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from taskgraph.errors import Refused
from taskgraph.node.epochs.sharing import EPOCH_BYTES
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Reply, Stamp, stamp_of
from taskgraph.transport.api import PendingReply

if TYPE_CHECKING:
    from taskgraph.coordination.viewkeeper import ViewKeeper
    from taskgraph.node.epochs.attempt import Attempt

__all__ = ["Attempts"]


class Attempts:
    """The attempts of one task in one term that may still count.

    An attempt stays until a later epoch was read, or another attempt began: whoever is behind, or takes over, pulls
    what it put.
    """

    def __init__(self, keeper: ViewKeeper, task: int, term: int) -> None:
        self._keeper = keeper
        self._task = task
        self._term = term
        self._begun: dict[Stamp, Attempt] = {}
        self._waiting: list[asyncio.Future[None]] = []  # for an attempt to begin
        self._parked: dict[Stamp, list[tuple[Pull, PendingReply]]] = {}  # by the attempt that has to begin first
        self._ended = False
        self.latest: Stamp | None = None
        """Of the one that began last; it may be over."""

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._begun.values())

    def of(self, stamp: Stamp) -> Attempt | None:
        """The one at `stamp`, where it began and is not over."""
        return self._begun.get(stamp)

    def held_bytes(self, before: int) -> int:
        """What the epochs before that one hold: items for others, items of others, and their boundaries."""
        found = 0
        for attempt in self._begun.values():
            if attempt.number < before:
                found += EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + attempt.snapshot_bytes
        return found

    def boundary_bytes(self, before: int) -> int:
        """Their boundaries alone."""
        return sum(attempt.snapshot_bytes for attempt in self if attempt.number < before)

    # -- as the primary goes on -------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        self._begun[attempt.stamp] = attempt
        self.latest = attempt.stamp
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def composed(self, attempt: Attempt) -> None:
        """It can say what it offers: what was pulled of it before is answered; what was of earlier ones is refused."""
        parked = self._parked
        if not parked:
            return
        at, primaries, promise = attempt.stamp, self._keeper.view.primaries, attempt.out.promise
        for pull, coming in parked.pop(at, ()):
            if not coming.done:
                sender = primaries.get(pull.sender)
                if sender is None or sender.record.term != pull.sender_term or promise(pull, coming) is not None:
                    self._refuse(coming)
        if parked and min(parked) < at:
            # What is in flight is not composed yet.
            for stamp in [stamp for stamp in self._parked if stamp < at and stamp not in self._begun]:
                for _, coming in self._parked.pop(stamp):
                    if not coming.done:
                        self._refuse(coming)

    def _refuse(self, coming: PendingReply) -> None:
        """It comes again, patiently, and hears what is the matter."""
        coming.settle(Refusal(Reason.STALE, f"task {self._task} is at {self.latest}"))

    def drop_before(self, epoch: int) -> None:
        """`epoch` was read as committed: nobody needs what is of earlier ones."""
        for stamp in tuple(self._begun):
            if stamp.epoch < epoch:
                attempt = self._begun.pop(stamp)
                attempt.committed = True
                attempt.drop()

    def drop(self) -> None:
        """All of them are over."""
        for attempt in self._begun.values():
            attempt.drop()
        self._begun.clear()

    def end(self) -> None:
        """So is the term: nobody needs to wait for another attempt."""
        self._ended = True
        self.drop()
        for parked in self._parked.values():
            for _, coming in parked:
                coming.settle(Refusal(Reason.NOT_PRIMARY, self._stepped_down))
        self._parked.clear()
        self._wake()

    # -- asked by other tasks ---------------------------------------------------------------------

    def item(self, pull: Pull) -> Item | PendingReply | Refusal | None:
        """The item where it exists, a promise of it where it is still to be made, None where neither can be said."""
        attempt = self._begun.get(pull.stamp)
        if attempt is not None and attempt.graph is not None:
            return attempt.out.ask(pull)
        if self._ended or (attempt is None and self.latest is not None and self.latest >= pull.stamp):
            return None
        coming = PendingReply()
        self._parked.setdefault(pull.stamp, []).append((pull, coming))
        return coming

    def lacks(self, pull: Pull) -> bool:
        """Whether whoever asks for this has to wait."""
        attempt = self._begun.get(pull.stamp)
        return attempt is None or attempt.graph is None or attempt.out.lacks(pull.tag, pull.sender)

    def items(self, pull: Pull) -> list[Reply | PendingReply | None]:
        """`item` for each of the epochs of a pull, most of which are yet to come."""
        found: list[Reply | PendingReply | None] = []
        (attempt, epoch), parked, latest = pull.stamp, self._parked, self.latest
        for nth in range(pull.count):
            stamp = stamp_of((attempt, epoch + nth))
            if self._ended or (latest is not None and latest >= stamp):
                found.append(self.item(pull.each(nth)))
                continue
            coming = PendingReply()
            found.append(coming)
            if stamp in parked:
                parked[stamp].append((pull, coming))
            else:
                parked[stamp] = [(pull, coming)]
        return found

    async def at(self, stamp: Stamp) -> Attempt:
        """The attempt at `stamp`, as soon as it began.

        Raises:
            Refused: it is over, or the primary stepped down.
        """
        while self.latest is None or self.latest < stamp:
            if self._ended:
                raise Refused(Reason.NOT_PRIMARY, self._stepped_down)
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(begun)
            await begun
        attempt = self._begun.get(stamp)
        if attempt is None:
            raise Refused(Reason.STALE, f"task {self._task} is at {self.latest}, not {stamp}")
        return attempt

    @property
    def _stepped_down(self) -> str:
        return f"the primary of task {self._task} in term {self._term} stepped down"
