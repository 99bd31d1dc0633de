"""What one task pulls: each item of its epoch, and in the same call those of the next epochs."""

from __future__ import annotations

import asyncio

from taskgraph.node.router import Router
from taskgraph.protocol.messages import Encoded, Pull, Reply, Stamp

__all__ = ["LARGE_BYTES", "Pulls"]

Channel = tuple[str, int]
"""(tag, producer)."""

_EARLY_BYTES = 32 << 20
"""What comes before its epoch may be that much: each producer bounds what it puts ahead of the commit, and a task may
have many producers."""
_AT_ONCE = 16
"""Of so many epochs an item is asked for at a time: of four times as many, each call costs more than it saves."""
LARGE_BYTES = 4 << 10
"""An item of more bytes counts for that: all together they may be large."""
_EARLY_CALLS = 256
"""So many calls of one task wait at its producers, besides those of the epoch at work."""


class Pulls:
    """One task's pulls in one term.

    Most tasks pull the same channels in every epoch. So what was pulled in two epochs running is asked for in advance:
    one frame tells its producer that the items of the next epochs are wanted, and each comes when it is put. That is
    all there is to it: they are calls like others, which fail when the producer is lost, and whose items count for
    nothing unless the attempt of their epoch takes them.

    Args:
        ahead: how many epochs may be asked for at a time; 1: no more than the one at work.
        epochs: of the job, where that is known.
    """

    def __init__(self, router: Router, *, ahead: int, epochs: int | None) -> None:
        self._router = router
        self._ahead = min(ahead, _AT_ONCE)
        self._epochs = epochs
        self._attempt = -1
        self._latest: dict[Channel, int] = {}  # the epoch it was pulled in last
        self.large: dict[Channel, int] = {}
        """The bytes of a channel's last item, where large. While there is none, `came` need not hear of small ones."""
        self._early: dict[Channel, dict[int, asyncio.Future[Reply]]] = {}  # asked for, and not wanted yet
        self._looked_at = -1  # the epoch in which it looked for channels to forget

    def begin(self, stamp: Stamp, sender: int, term: int, channel: Channel) -> asyncio.Future[Reply] | None:
        """Asks for one item, unless it was asked for; None where that takes more than one try.

        The future is the caller's: it ends as that of `Router.begin`.
        """
        if stamp.attempt != self._attempt:
            self.drop()
            self._attempt = stamp.attempt
        epoch = stamp.epoch
        before, self._latest[channel] = self._latest.get(channel), epoch
        early = self._early.get(channel)
        if early:
            reply = early.pop(epoch, None)
            if reply is not None and not (reply.done() and (reply.cancelled() or reply.exception() is not None)):
                return reply
            self._forget(channel)
        tag, producer = channel
        if before == epoch - 1 and (count := self._count(epoch)) > 1:
            replies = self._router.begin_all(producer, Pull(stamp, sender, term, producer, tag, count))
            if replies:
                self._early[channel] = {epoch + after: reply for after, reply in enumerate(replies) if after}
                return replies[0]
        elif before is None and self._looked_at < epoch:
            self._forget_old(epoch)
        return self._router.begin(producer, Pull(stamp, sender, term, producer, tag))

    def _count(self, epoch: int) -> int:
        """Of how many epochs to ask for an item at a time."""
        count = min(self._ahead, _EARLY_CALLS // len(self._latest))
        if self._epochs is not None:
            count = min(count, self._epochs - epoch)
        if count > 1 and self.large:
            count = min(count, _EARLY_BYTES // sum(self.large.values()))
        return count

    def came(self, tag: str, producer: int, value: Encoded) -> None:
        """This was the item of its epoch: how many more are asked for in advance depends on their size."""
        if value.size_bytes > LARGE_BYTES:
            self.large[(tag, producer)] = value.size_bytes
        elif self.large:
            self.large.pop((tag, producer), None)

    def _forget_old(self, epoch: int) -> None:
        """A tag may have the epoch in it, and so never come again: what was not pulled in this epoch or the one before
        is asked for in advance no more."""
        self._looked_at = epoch
        for channel in [channel for channel, latest in self._latest.items() if latest < epoch - 1]:
            del self._latest[channel]
            if channel in self._early:
                self._forget(channel)
        for channel in self.large.keys() - self._latest.keys():  # an item may come after its channel was forgotten
            del self.large[channel]

    def _forget(self, channel: Channel) -> None:
        for reply in self._early.pop(channel).values():
            reply.cancel()

    def drop(self) -> None:
        """The attempt is over: what was asked for in advance is not wanted any more."""
        for channel in tuple(self._early):
            self._forget(channel)
        self._latest.clear()
        self.large.clear()
        self._looked_at = -1
