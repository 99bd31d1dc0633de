"""Pulls of one task: one call pulls the items of its epoch and of the next epochs."""

from __future__ import annotations

import asyncio

from taskgraph.node.router import Router
from taskgraph.protocol.messages import Encoded, Pull, Reply, Stamp

__all__ = ["LARGE_BYTES", "Pulls"]

Channel = tuple[str, int]
"""(tag, producer)."""

_EARLY_BYTES = 32 << 20
"""The most bytes of items that arrive before their epoch. Each producer bounds its items, but there may be many."""
_AT_ONCE = 16
"""The most epochs in one call. With four times as many, a call costs more than it saves."""
LARGE_BYTES = 4 << 10
"""Smaller items do not count for `_EARLY_BYTES`."""
_EARLY_CALLS = 256
"""The most calls of one task that wait at its producers in advance of the epoch at work."""


class Pulls:
    """One task's pulls in one term.

    Most tasks pull the same channels in every epoch. So a channel that two consecutive epochs pulled is pulled in
    advance: one frame asks the producer for the items of the next epochs, and the producer sends each item when it is
    put. These calls fail as others if the producer dies, and an item counts only if the attempt of its epoch takes it.

    Args:
        ahead: the number of epochs in one call; 1: only the epoch at work.
        epochs: the job's number of epochs, if it is known.
    """

    def __init__(self, router: Router, *, ahead: int, epochs: int | None) -> None:
        self._router = router
        self._ahead = min(ahead, _AT_ONCE)
        self._epochs = epochs
        self._attempt = -1
        self._latest: dict[Channel, int] = {}  # channel -> the last epoch that pulled it
        self.large: dict[Channel, int] = {}
        """Channel -> bytes of its last item, if large. While this is empty, `item_arrived` may skip small items."""
        self._early: dict[Channel, dict[int, asyncio.Future[Reply]]] = {}  # pulled in advance
        self._forgot_at = -1  # the epoch of the last `_forget_old`

    def begin(self, stamp: Stamp, sender: int, term: int, channel: Channel) -> asyncio.Future[Reply] | None:
        """Pulls one item, or returns the pull that was made in advance.

        Returns:
            A future like that of `Router.begin`; None: use `Router.to_primary`, since the pull has to wait.
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
            self._cancel_early_pulls(channel)
        tag, producer = channel
        if before == epoch - 1 and (count := self._epochs_per_call(epoch)) > 1:
            replies = self._router.begin_all(producer, Pull(stamp, sender, term, producer, tag, count))
            if replies:
                self._early[channel] = {epoch + after: reply for after, reply in enumerate(replies) if after}
                return replies[0]
        elif before is None and self._forgot_at < epoch:
            self._forget_old(epoch)
        return self._router.begin(producer, Pull(stamp, sender, term, producer, tag))

    def _epochs_per_call(self, epoch: int) -> int:
        """Returns for how many epochs, from `epoch` on, one call pulls a channel's items; 1 or less: pull one."""
        count = min(self._ahead, _EARLY_CALLS // len(self._latest))
        if self._epochs is not None:
            count = min(count, self._epochs - epoch)
        if count > 1 and self.large:
            count = min(count, _EARLY_BYTES // sum(self.large.values()))
        return count

    def item_arrived(self, tag: str, producer: int, value: Encoded) -> None:
        """Notes the size of an item: large ones reduce how many epochs are pulled in advance.

        Items of optional channels do not count: they are not pulled in advance.
        """
        if value.size_bytes > LARGE_BYTES:
            if (tag, producer) in self._latest:
                self.large[(tag, producer)] = value.size_bytes
        elif self.large:
            self.large.pop((tag, producer), None)

    def _forget_old(self, epoch: int) -> None:
        """Forgets channels that were not pulled in the last two epochs, since a tag may contain its epoch."""
        self._forgot_at = epoch
        for channel in [channel for channel, latest in self._latest.items() if latest < epoch - 1]:
            del self._latest[channel]
            if channel in self._early:
                self._cancel_early_pulls(channel)
        for channel in self.large.keys() - self._latest.keys():
            del self.large[channel]

    def _cancel_early_pulls(self, channel: Channel) -> None:
        """Cancels the pulls of a channel that were made in advance."""
        for reply in self._early.pop(channel).values():
            reply.cancel()

    def drop(self) -> None:
        """Cancels the pulls in advance, since the attempt is over."""
        for channel in tuple(self._early):
            self._cancel_early_pulls(channel)
        self._latest.clear()
        self.large.clear()
        self._forgot_at = -1
